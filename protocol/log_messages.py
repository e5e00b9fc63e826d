"""Messages about the run's log, on ``LOG_PROTOCOL``: its checkpoint, tiles, cosignatures, alarms."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from barnraise.protocol.messages import Frame, Message

LOG_PROTOCOL = "/barnraise/1/log"
MAX_FILE = 16 * 1024 * 1024 - 1  # bytes: less than the largest bundle that the format allows is
MAX_EVIDENCE = 256 * 1024  # bytes: two of the longest notes, quoted
CHECKPOINT = "checkpoint"


class LogRequest(Message, frozen=True):
    """Send me the file at this path of the log: ``checkpoint``, or a tile's."""

    path: Annotated[str, Meta(min_length=1, max_length=64)]


class LogReply(Message, frozen=True):
    """``size`` raw bytes follow; -1: there is no such file here, or what was handed in was not taken."""

    size: Annotated[int, Meta(ge=-1, le=MAX_FILE)]


class Cosigned(Message, frozen=True):
    """The sender's cosignature of the log's checkpoint, as the signature line of a note."""

    line: Annotated[str, Meta(min_length=1, max_length=512)]


class SplitView(Message, frozen=True):
    """Evidence that the log signed two histories (``barnraise.protocol.evidence``), without a run spec."""

    evidence: Annotated[bytes, Meta(min_length=1, max_length=MAX_EVIDENCE)]


LOG_FRAMES: tuple[Frame, ...] = (
    Frame(90, LogRequest, 128, "plain"),
    Frame(91, LogReply, 16, "plain"),
    Frame(92, Cosigned, 2048, "plain"),
    Frame(93, SplitView, MAX_EVIDENCE + 64, "plain"),
)
