"""Streams in memory: pieces of bytes that take the time which the wires between two hosts cost.

There is no task per stream and no randomness: given the same scheduling, a run repeats exactly.
Errors are those of the real network (``PeerError``), after the same waits.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import trio

from barnraise.protocol.errors import PeerError
from barnraise.protocol.memory_alarm import Parked
from barnraise.protocol.memory_wires import DEAD_AFTER_S, Link, Wires

WRITE_TIMEOUT_S = 30.0
WINDOW = 256 * 1024  # as yamux begins
PIECE = 64 * 1024
_IN_A_ROW = 8  # reads that need not wait, before others get their turn all the same


class Traffic:
    """The bytes of one host: ``sent``, and those that have arrived, whether read or not."""

    def __init__(self) -> None:
        self.sent = 0
        self._arrived = 0
        self._coming: list[tuple[float, int]] = []  # a heap: when how many bytes arrive

    @property
    def arrived(self) -> int:
        """Bytes that have arrived since the start."""
        self._count()
        return self._arrived

    def expect(self, arrival: float, size: int) -> None:
        """``size`` bytes will arrive at this time."""
        self._count()  # so that the heap stays small, whether or not anybody looks
        heapq.heappush(self._coming, (arrival, size))

    def _count(self) -> None:
        now = trio.current_time()
        while self._coming and self._coming[0][0] <= now:
            self._arrived += heapq.heappop(self._coming)[1]


@dataclass(eq=False)
class Connection:
    """Two hosts that may exchange streams, until ``broken`` says why not."""

    wires: Wires
    ends: frozenset[str]
    broken: str = ""
    pipes: list[Pipe] = field(default_factory=list)

    def break_(self, reason: str) -> None:
        """Lose it; whoever waits hears of it now."""
        if not self.broken:
            self.broken = reason
            for pipe in self.pipes:
                pipe.wake()
            self.pipes = []  # a stream that somebody forgot keeps no others in memory

    def expire(self) -> None:
        """Lose it if its ends have not heard each other for too long."""
        if not self.wires.cut_since and not self.wires.islands:
            return
        if not self.broken and trio.current_time() >= self.wires.expiry(self.ends):
            self.break_(f"no sign of life for {DEAD_AFTER_S:.0f} s: the connection is lost")


class Pipe:
    """One direction of one stream: timed pieces in flight, then an end or a reset."""

    def __init__(
        self, connection: Connection, source: str, target: str, traffic: Traffic, protocol: str
    ) -> None:
        """``traffic``: the target's."""
        self._connection = connection
        self._wires = connection.wires
        self._protocol = protocol
        self.way = (source, target)
        self._link = self._wires.link(source, target)
        self._traffic = traffic
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._in_a_row = 0  # reads that found something at once
        self._end_at: float | None = None
        self.reset = False
        self._readers: list[Parked] = []
        self._writers: list[Parked] = []

    def wake(self) -> None:
        """Have everybody who waits look again now."""
        for parked in (*self._readers, *self._writers):
            parked.go()

    def finish(self) -> None:
        """Nothing more is written; what is under way arrives."""
        if self._end_at is None:
            self._end_at = max(trio.current_time(), self._link.free_at) + self._link.latency_s
            self._comes(self._end_at)
            for parked in tuple(self._writers):
                parked.go()

    def _comes(self, at: float) -> None:
        for parked in tuple(self._readers):
            self._wires.alarm.sooner(parked, at)

    def use(self, link: Link) -> None:
        """From now on it goes over ``link``."""
        self._link = link

    @property
    def over(self) -> bool:
        """Whether nothing more can happen here."""
        return self.reset or (self._end_at is not None and not self._pieces)

    def _check(self) -> None:
        self._connection.expire()
        if self._connection.broken:
            raise PeerError(self._connection.broken)
        if self.reset:
            raise PeerError("the stream was reset")

    async def _pause(self, until: float, waiting: list[Parked]) -> None:
        await self._wires.alarm.sleep(min(until, self._wires.expiry(self._connection.ends)), waiting)

    def write_now(self, data: bytes) -> bool:
        """Queue ``data`` if it may be written without waiting, whole; else, or if it broke, nothing."""
        if self.reset or self._end_at is not None or self._held >= WINDOW or len(data) > PIECE:
            return False
        self._connection.expire()
        if self._connection.broken:
            return False
        self._queue(bytes(data))
        return True

    def _queue(self, piece: bytes) -> None:
        begin = max(trio.current_time(), self._link.free_at)
        if self._link.bandwidth is not None:
            weigh = self._wires.weigh
            size = len(piece) if weigh is None else weigh(self._protocol, len(piece))
            begin += size / self._link.bandwidth
            self._link.free_at = begin
        arrival = begin + self._link.latency_s
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last[0] == arrival and len(last[1]) + len(piece) <= PIECE:
            self._pieces[-1] = arrival, last[1] + piece  # one read is enough for both
        else:
            self._pieces.append((arrival, piece))
        self._held += len(piece)
        self._traffic.expect(arrival, len(piece))
        self._comes(self._pieces[0][0])

    async def write(self, data: bytes) -> int:
        """Queue ``data`` piece by piece, as the reader's window allows."""
        await trio.lowlevel.checkpoint_if_cancelled()  # the window sees to it that others get their turn
        for start in range(0, len(data), PIECE):
            piece = bytes(data[start : start + PIECE])
            give_up = trio.current_time() + WRITE_TIMEOUT_S
            while True:
                self._check()
                if self._end_at is not None:
                    raise PeerError("the stream is closed for writing")
                if self._held < WINDOW:
                    break
                if trio.current_time() >= give_up:
                    self.reset = True
                    self.wake()
                    raise PeerError(f"the peer took nothing for {WRITE_TIMEOUT_S:.0f} s")
                await self._pause(give_up, self._writers)
            self._queue(piece)
        return len(data)

    @property
    def waiting(self) -> int:
        """Bytes that have arrived and were not read yet."""
        now = trio.current_time()
        return sum(len(piece) for arrival, piece in self._pieces if arrival <= now)

    async def read(self, limit: int) -> bytes:
        """1 to ``limit`` bytes that have arrived, or ``b""`` at the end.

        Raises:
            PeerError: reset, or the connection is lost.
        """
        waited = False
        while True:
            if not waited and self._due():
                self._in_a_row += 1
                if self._in_a_row < _IN_A_ROW:
                    await trio.lowlevel.checkpoint_if_cancelled()
                else:
                    self._in_a_row = 0
                    await trio.lowlevel.checkpoint()
                waited = True
            self._check()
            now = trio.current_time()
            cut = self._wires.since(self._connection.ends) is not None
            if not cut and self._pieces and self._pieces[0][0] <= now:
                arrival, piece = self._pieces.popleft()
                if len(piece) > limit:
                    self._pieces.appendleft((arrival, piece[limit:]))
                    piece = piece[:limit]
                self._held -= len(piece)
                for parked in tuple(self._writers):
                    parked.go()
                return piece
            if not cut and not self._pieces and self._end_at is not None and self._end_at <= now:
                return b""
            until = float("inf")
            if not cut:
                if self._pieces:
                    until = self._pieces[0][0]
                elif self._end_at is not None:
                    until = self._end_at
            await self._pause(until, self._readers)
            self._in_a_row, waited = 0, True

    def _due(self) -> bool:
        """Whether a reader need not wait: for bytes, for the end, or to hear that it broke."""
        if self.reset or self._connection.broken:
            return True
        at = self._pieces[0][0] if self._pieces else self._end_at
        return at is not None and at <= trio.current_time()


class MemoryStream:
    """One end of a stream in memory; see ``barnraise.protocol.network.Stream``."""

    def __init__(self, traffic: Traffic, peer_id: str, inbound: Pipe, outbound: Pipe) -> None:
        self._traffic = traffic
        self._peer_id = peer_id
        self._in = inbound
        self._out = outbound

    @property
    def peer_id(self) -> str:
        """The peer's id."""
        return self._peer_id

    @property
    def waiting(self) -> int:
        """Bytes that have arrived and were not read yet."""
        return self._in.waiting

    @property
    def room(self) -> int:
        """Bytes that may still arrive before something is read."""
        return max(0, WINDOW - self._in.waiting)

    async def read(self, limit: int) -> bytes:
        """1 to ``limit`` bytes, or ``b""`` at the end; ``PeerError`` if reset or cut off."""
        return await self._in.read(limit)

    async def write(self, data: bytes) -> None:
        """Send all of ``data``; ``PeerError`` if reset, cut off, or nobody reads for 30 s."""
        self._traffic.sent += await self._out.write(data)

    def write_now(self, data: bytes) -> bool:
        """Send all of ``data`` if that needs no waiting; false, and nothing sent, if it does or cannot be."""
        if not self._out.write_now(data):
            return False
        self._traffic.sent += len(data)
        return True

    async def close(self) -> None:
        """Close our side; the other may go on writing."""
        self._out.finish()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def reset(self) -> None:
        """Abandon both directions at once."""
        for pipe in (self._in, self._out):
            pipe.reset = True
            pipe.wake()
        await trio.lowlevel.checkpoint_if_cancelled()
