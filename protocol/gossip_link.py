"""One neighbour of the broadcast tree: its control streams, its outbox, what it moved.

Small messages of both directions travel on one long-lived stream; where both sides
dialled at once there are two, each read by the other side and ended together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import trio

from barnraise.protocol.errors import BarnraiseError, PeerError
from barnraise.protocol.messages import Message
from barnraise.protocol.meter import Meter
from barnraise.protocol.network import Stream
from barnraise.protocol.wire import frame

MAX_OUTBOX_BYTES = 16 * 1024 * 1024
WRITE_S = 30.0
_AT_ONCE = 64 * 1024
_MESSAGES_PER_S = 2000.0
_BURST = 4000.0
_RESET_S = 2.0


class Link:
    """A neighbour's streams. ``post`` never waits; a neighbour that does not read loses the link."""

    def __init__(self, peer_id: str, now: float) -> None:
        self.peer_id = peer_id
        self.since = now
        self.streams: list[Stream] = []
        self.ended = ""  # why
        self.bulk_streams = 0  # inbound
        self.sent = Meter()
        self.received = Meter()
        self._outbox: deque[bytes] = deque()
        self._waiting = 0
        self._busy = False  # a write is under way
        self._work = trio.Event()
        self._tokens, self._tokens_at = _BURST, now
        self._tasks: set[trio.CancelScope] = set()

    @contextmanager
    def task(self) -> Iterator[None]:
        """Around each task of ours for this link: it ends with the link."""
        scope = trio.CancelScope()
        self._tasks.add(scope)
        if self.ended:
            scope.cancel()
        try:
            with scope:
                yield
        finally:
            self._tasks.discard(scope)

    def stop(self, reason: str) -> None:
        """Cancel its tasks."""
        self.ended = self.ended or reason
        for scope in list(self._tasks):
            scope.cancel()

    def post(self, message: Message) -> bool:
        """Queue a message, or send it where nothing waits and the network can; False if the queue is full."""
        data = frame(message)
        if not self._outbox and not self._busy and not self.ended:
            write_now: Callable[[bytes], bool] | None = getattr(self.streams[0], "write_now", None)
            if write_now is not None and write_now(data):
                return True
        if self._waiting + len(data) > MAX_OUTBOX_BYTES:
            return False
        self._outbox.append(data)
        self._waiting += len(data)
        self._work.set()
        return True

    async def write(self) -> None:
        """Send what is posted, for ever.

        Raises:
            PeerError: the stream broke, or took nothing for 30 s.
        """
        with trio.CancelScope() as limit:
            while True:
                await self._work.wait()
                await self._send(limit)
        raise PeerError(self._unread())

    async def flush(self) -> None:
        """Send what is posted up to now; see ``write``."""
        with trio.CancelScope() as limit:
            await self._send(limit)
        if limit.cancelled_caught:
            raise PeerError(self._unread())

    def _unread(self) -> str:
        return f"{self.peer_id} took no messages for {WRITE_S:.0f} s"

    async def _send(self, limit: trio.CancelScope) -> None:
        """One scope for all writes, whose deadline moves: to make one for each costs more than the write."""
        self._work = trio.Event()
        while self._outbox:
            parts = [self._outbox.popleft()]
            size = len(parts[0])
            while self._outbox and size + len(self._outbox[0]) <= _AT_ONCE:
                parts.append(self._outbox.popleft())
                size += len(parts[-1])
            self._waiting -= size
            limit.deadline = trio.current_time() + WRITE_S
            self._busy = True
            await self.streams[0].write(b"".join(parts))
            self._busy = False
            limit.deadline = math.inf

    async def throttle(self) -> None:
        """Called for each message that came: a flood is read no faster than honest neighbours talk."""
        now = trio.current_time()
        self._tokens = min(_BURST, self._tokens + (now - self._tokens_at) * _MESSAGES_PER_S) - 1
        self._tokens_at = now
        if self._tokens < 0:
            await trio.sleep(-self._tokens / _MESSAGES_PER_S)

    async def close(self, *, abruptly: bool) -> None:
        """Close all streams within 2 s, whatever happens; ``abruptly``: and drop what is under way."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _RESET_S):
            for stream in self.streams:
                await (stream.reset() if abruptly else stream.close())


async def part(links: Iterable[Link]) -> None:
    """Send what is posted on each of ``links``, then close it. The caller sets the time limit."""

    async def one(link: Link) -> None:
        with suppress(BarnraiseError):
            await link.flush()
        await link.close(abruptly=False)

    async with trio.open_nursery() as nursery:
        for link in links:
            nursery.start_soon(one, link)
