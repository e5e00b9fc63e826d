"""The frames that a daemon and its child process send each other over pipes (``barnraise.protocol.child``).

A frame is one byte of kind, eight bytes of request number, four bytes of length (all
big-endian) and the body: a MessagePack struct, or text in UTF-8, or of a ``BEAT`` eight
bytes that count the steps of the request at work. A ``NOTE`` is a struct that nobody answers,
read beside the request at work.
"""

from __future__ import annotations

import enum
import struct

MAX_PIPE_FRAME = 1024 * 1024 * 1024
PIPE_HEADER = struct.Struct(">BQI")
BEAT_BODY = struct.Struct(">Q")
PIPE_BYTES = 1024 * 1024


class PipeFrame(enum.IntEnum):
    """Kinds of frames, as in the header's first byte."""

    REQUEST, CANCEL, EVENT = 1, 2, 3
    REPLY, ERROR, FATAL, MEMORY, BEAT = 4, 5, 6, 7, 8
    NOTE = 9
