"""How much a download asks of whom.

Without a cap each source has a few shards to send. Under one, what is asked for keeps
the line busy and no more: a sender that has nothing left to send lies idle while its
last shard is read at the pace of the cap, so the next is asked for as soon as what has
not *arrived* is less than a round trip takes; and as each further sender brings a window
at once, few are asked at a time, more only while those leave the cap unused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import trio

from barnraise.protocol.bandwidth import AHEAD_S, WINDOW, Pacer

PEER, MIRROR, ORIGIN = range(3)  # the order in which sources are asked
_REQUESTS = {PEER: 4, MIRROR: 4, ORIGIN: 1}  # under way at a time, without a cap
_MOST_REQUESTS = {PEER: 512, MIRROR: 4, ORIGIN: 512}  # under a cap, where shards are small
_CALM_S = 1.0  # the cap must be unused for so long before yet another source is asked


class Source(NamedTuple):
    """Somebody to ask. ``origin``: the coordinator. ``complete``: said to hold the whole version.

    ``peer_id`` is a mirror's base URL where ``Donor``s are made of URLs.
    """

    peer_id: str
    addresses: tuple[str, ...] = ()
    origin: bool = False
    complete: bool = True


class Donor(Protocol):
    """One source's shards; ``barnraise.protocol.shards.ShardClient`` is a peer's.

    Attributes:
        failures: how often it was unreachable, broke off or stalled, since it was made.
        received: bytes that were read of it since it was made.
        waiting: bytes that have arrived and were not read yet; 0 if unknown.
        foreseen: may be set where nothing more is to be asked for: what is read was counted for
            the cap before, and the cap need not slow it down.
        waits: may be set to say whether reading must wait for what was asked of others.
        room: bytes that may still arrive before something is read.
    """

    failures: int
    received: int
    foreseen: bool
    waits: Callable[[], bool]

    @property
    def waiting(self) -> int: ...
    @property
    def room(self) -> int: ...

    async def fetch(self, digest: bytes, size: int) -> bytes | None:
        """The verified shard, ``None`` if it is not there. May run in several tasks at once.

        Raises:
            BadShardError: something else was sent.
            PeerError: unreachable, gone or silent.
        """

    async def close(self) -> None:
        """Let go; a later ``fetch`` begins anew."""


@dataclass(eq=False)
class Asked:
    """A source during one download."""

    source: Source
    client: Donor
    rank: int
    complete: bool
    out: str = ""  # why it is not asked any more
    retry_at: float = 0.0
    misses: int = 0  # in a row
    requests: int = 0  # under way
    asked: int = 0  # bytes of those
    settled: int = 0  # of what it has sent, bytes that do not belong to those
    lacks: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # digest -> ask again at, wait

    @property
    def unread(self) -> int:
        """Bytes asked of it that were not read yet."""
        return max(0, self.asked - max(0, self.client.received - self.settled))

    @property
    def to_come(self) -> int:
        """Bytes asked of it that have not arrived."""
        return max(0, self.unread - self.client.waiting)

    @property
    def coming(self) -> int:
        """Bytes that it can send before it feels how slowly it is read."""
        return min(self.to_come, self.client.room)

    def expect(self, size: int) -> None:
        """A shard of ``size`` bytes is being asked for."""
        if not self.requests:
            self.settled = self.client.received
        self.requests += 1
        self.asked += size

    def done(self, size: int) -> None:
        """It is here, or will not come."""
        self.requests -= 1
        self.asked -= size
        self.settled = min(self.settled + size, self.client.received)


class Appetite:
    """What ``sources``, which may change, are asked for at a time; ``down`` is our own cap."""

    def __init__(self, down: Pacer | None, sources: Collection[Asked]) -> None:
        self._down = down
        self._sources = sources
        self._busy_at = -math.inf

    def waits(self, reading: Asked) -> bool:
        """Whether what is read of a source must wait for what was asked of others.

        It need not where its sender is not held back by our reading, so that reading brings
        nothing: but first a window's worth is to be kept unread, or shards come in bursts.
        """
        if self._down is None or reading.to_come >= reading.client.room:
            return True
        return sum(each.client.waiting for each in self._sources) < self._down.windows * WINDOW

    def _coming(self) -> int:
        return sum(each.coming for each in self._sources)

    @contextmanager
    def foreseen(self) -> Iterator[None]:
        """While it lasts, the cap counts what is asked for as soon as it cannot be held back any more."""
        if self._down is None:
            yield
            return
        self._down.foresee(self._coming)
        try:
            yield
        finally:
            self._down.forget(self._coming)

    def for_more(self, of: Asked, size: int) -> bool:
        """Whether to ask this source for one more shard, of ``size`` bytes, now."""
        rate = None if self._down is None else self._down.rate
        if self._down is None or rate is None:
            return of.requests < _REQUESTS[of.rank]
        now = trio.current_time()
        if self.capped:
            self._busy_at = now
        asked = sum(each.requests > 0 for each in self._sources)
        if not of.requests:
            few = self._down.windows
            if asked >= few and now - self._busy_at < _CALM_S:
                return False
        elif of.requests >= _MOST_REQUESTS[of.rank] or of.to_come >= rate * AHEAD_S / asked:
            return False
        if of.requests and of.to_come >= of.client.room:
            return True  # it cannot send before what it has sent is read
        lump = min(size, of.client.room)
        return self._down.debt(lump) <= 0 and self._down.allows_more(self._coming())

    @property
    def unread_s(self) -> float:
        """Seconds that all bytes under way take if nothing but our own cap slows them."""
        rate = None if self._down is None else self._down.rate
        return sum(each.unread for each in self._sources) / rate if rate else 0.0

    @property
    def capped(self) -> bool:
        """Whether it is our own cap that makes it slow: then more sources would not help."""
        if self._down is None or self._down.rate is None:
            return False
        full = any(each.requests and each.client.room < WINDOW // 8 for each in self._sources)
        return full or self._down.busy

    @property
    def look_s(self) -> float:
        """Seconds after which to look again, if nothing happens."""
        return 0.25 if self._down is None or self._down.rate is None else 0.05
