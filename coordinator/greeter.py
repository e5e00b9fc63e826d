"""Who comes in which version: tells those that are getting too old, and ends their sessions in time (R20)."""

from __future__ import annotations

from collections.abc import Callable

from barnraise.coordinator.hub import Hub
from barnraise.protocol.hello import Floor, answer_as, our_hello
from barnraise.protocol.messages import Hello
from barnraise.protocol.network import Stream

MOST_REMEMBERED = 32_768  # peers of an older minor; twice the sessions there may be


class Greeter:
    """Answers on ``HELLO_PROTOCOL``.

    A node below the floor that came during the grace period is served until that ends. Then its
    session ends, it comes again, and is refused with the words that say what to install. All that
    was acknowledged is in the journal, all that was not is on the node's disk.
    """

    def __init__(
        self, hub: Hub, now_ms: Callable[[], int], ours: Hello | None = None, floor: Floor | None = None
    ) -> None:
        """``ours``: what this coordinator speaks; None: what this installation does."""
        self._hub, self._now_ms = hub, now_ms
        self._ours, self._floor = ours or our_hello(), floor
        self._older: dict[str, int] = {}  # peers of our major and an older minor -> that, the oldest first

    async def answer(self, stream: Stream) -> None:
        """The handler. Raises what ``protocol.hello.answer_hello`` does."""
        theirs = await answer_as(stream, self._ours, self._floor, self._now_ms())
        self._older.pop(stream.peer_id, None)
        if theirs.major == self._ours.major and theirs.minor < max(self._ours.minor, self._least):
            self._older[stream.peer_id] = theirs.minor
            if len(self._older) > MOST_REMEMBERED:
                del self._older[next(iter(self._older))]

    def minor_of(self, peer_id: str) -> int:
        """The minor that is spoken with a peer: the older of its and ours; ours for who said none."""
        return min(self._older.get(peer_id, self._ours.minor), self._ours.minor)

    @property
    def _least(self) -> int:
        return 0 if self._floor is None else self._floor.minor

    def end_old(self) -> None:
        """Once the grace period is over, end the sessions of those below the floor."""
        if self._floor is None or self._now_ms() < self._floor.from_ms:
            return
        old = {peer for peer, minor in self._older.items() if minor < self._floor.minor}
        if not old:
            return
        for live in tuple(self._hub.sessions):
            if live.peer_id in old:
                live.session.close("its version is too old for this run")
        for peer in old:
            del self._older[peer]
