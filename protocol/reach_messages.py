"""Messages about being reachable: may others dial me? On ``REACH_PROTOCOL``, one question a stream."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from barnraise.protocol.messages import Address, Frame, Message, Text

REACH_PROTOCOL = "/barnraise/1/reach"
MAX_PORTS = 4

Port = Annotated[int, Meta(ge=1, le=65_535)]


class ReachRequest(Message, frozen=True):
    """Dial me back on these ports of the address that you see me at, and on no other address.

    ``way``: how the sender says that others have reached it otherwise (hearsay, for display).
    """

    ports: Annotated[tuple[Port, ...], Meta(max_length=MAX_PORTS)]
    way: Literal["", "hole-punched", "relayed"]


class PortReach(Message, frozen=True):
    """What dialling one port gave: the full address that answered, or why none did."""

    port: Port
    address: Annotated[str, Meta(max_length=256)]
    error: Text


class ReachReply(Message, frozen=True):
    """``observed``: where the sender sees the asker. ``relays``: whether it helps those it cannot dial.

    A refusal has no ``ports``, and says in ``message`` why and when to ask again.
    """

    observed: Address | None
    ports: Annotated[tuple[PortReach, ...], Meta(max_length=MAX_PORTS)]
    relays: bool
    message: Text
    retry_after_ms: Annotated[int, Meta(ge=0, le=3_600_000)]


REACH_FRAMES: tuple[Frame, ...] = (
    Frame(80, ReachRequest, 128, "plain"),
    Frame(81, ReachReply, 8 * 1024, "plain"),
)
