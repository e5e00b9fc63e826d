"""A swarm inside one process: the libp2p network's twin for tests and simulation.

Bytes cost what a link says they cost: latency in seconds, bandwidth in bytes per
second, in virtual time when trio's autojump clock runs. Links can be cut and mended,
hosts can crash, or be behind a router that lets nobody in. Errors are those of the
real network (``PeerError``), after the same waits. There is no task per stream and no
randomness here: given the same scheduling, a run repeats exactly.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.memory_alarm import Alarm, Parked
from barnraise.protocol.network import Handler, Way

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 30.0
DEAD_AFTER_S = 45.0  # a silent connection is given up after this long
WINDOW = 256 * 1024  # as yamux begins
PIECE = 64 * 1024
_IN_A_ROW = 8  # reads that need not wait, before others get their turn all the same


@dataclass
class _Link:
    """One direction between two hosts: where its wire is busy until."""

    latency_s: float
    bandwidth: float | None
    free_at: float = 0.0


@dataclass(eq=False)
class _Connection:
    """Two hosts that may exchange streams, until ``broken`` says why not."""

    ends: frozenset[str]
    broken: str = ""
    pipes: list[_Pipe] = field(default_factory=list)

    def break_(self, reason: str) -> None:
        if not self.broken:
            self.broken = reason
            for pipe in self.pipes:
                pipe.wake()
            self.pipes = []  # through them a stream that somebody forgot keeps whole hosts in memory


class _Pipe:
    """One direction of one stream: timed pieces in flight, then an end or a reset."""

    def __init__(
        self, swarm: MemorySwarm, connection: _Connection, source: str, target: str, protocol: str = ""
    ) -> None:
        self._swarm = swarm
        self._protocol = protocol
        self._connection = connection
        self.way = (source, target)
        self._link = swarm._link(source, target)
        self._target = swarm._hosts.get(target)
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
        if self._end_at is None:
            self._end_at = max(trio.current_time(), self._link.free_at) + self._link.latency_s
            self._comes(self._end_at)
            for parked in tuple(self._writers):
                parked.go()

    def _comes(self, at: float) -> None:
        for parked in tuple(self._readers):
            self._swarm._alarm.sooner(parked, at)

    def use(self, link: _Link) -> None:
        """From now on it goes over ``link``."""
        self._link = link

    @property
    def over(self) -> bool:
        """Whether nothing more can happen here."""
        return self.reset or (self._end_at is not None and not self._pieces)

    def _check(self) -> None:
        self._swarm._expire(self._connection)
        if self._connection.broken:
            raise PeerError(self._connection.broken)
        if self.reset:
            raise PeerError("the stream was reset")

    async def _pause(self, until: float, waiting: list[Parked]) -> None:
        await self._swarm._alarm.sleep(min(until, self._swarm._expiry(self._connection)), waiting)

    def write_now(self, data: bytes) -> bool:
        """Queue ``data`` if it may be written without waiting, whole; else, or if it broke, nothing."""
        if self.reset or self._end_at is not None or self._held >= WINDOW or len(data) > PIECE:
            return False
        self._swarm._expire(self._connection)
        if self._connection.broken:
            return False
        self._queue(bytes(data))
        return True

    def _queue(self, piece: bytes) -> None:
        begin = max(trio.current_time(), self._link.free_at)
        if self._link.bandwidth is not None:
            weigh = self._swarm.weigh
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
        if self._target is not None:
            self._target._expect(arrival, len(piece))
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
            cut = self._swarm._is_cut(self._connection)
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

    def __init__(self, host: MemoryNetwork, peer_id: str, inbound: _Pipe, outbound: _Pipe) -> None:
        self._host = host
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
        self._host.bytes_out += await self._out.write(data)

    def write_now(self, data: bytes) -> bool:
        """Send all of ``data`` if that needs no waiting; false, and nothing sent, if it does or cannot be."""
        if not self._out.write_now(data):
            return False
        self._host.bytes_out += len(data)
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


class MemoryNetwork:
    """A host in a ``MemorySwarm``; satisfies ``barnraise.protocol.network.Network``.

    Attributes:
        dialable: false for a host behind a router with NAT: it only dials out. May be changed.
        outside: the internet address that others see it at, as ``/ip4/203.0.113.7``; "": its own.
    """

    def __init__(self, swarm: MemorySwarm, peer_id: str, nursery: trio.Nursery, number: int) -> None:
        self._swarm = swarm
        self._peer_id = peer_id
        self._nursery = nursery
        self._handlers: dict[str, Handler] = {}
        self._connections: dict[str, _Connection] = {}
        self._known: set[str] = set()
        self._number = number
        self._address = f"/memory/{number}/p2p/{peer_id}"
        self.dialable = True
        self.outside = ""
        self.bytes_out = 0
        self._in = 0
        self._coming: list[tuple[float, int]] = []  # a heap: when how many bytes arrive

    @property
    def bytes_in(self) -> int:
        """Bytes that have arrived since the start, whether read or not."""
        self._count()
        return self._in

    def _expect(self, arrival: float, size: int) -> None:
        self._count()  # so that the heap stays small, whether or not anybody looks
        heapq.heappush(self._coming, (arrival, size))

    def _count(self) -> None:
        now = trio.current_time()
        while self._coming and self._coming[0][0] <= now:
            self._in += heapq.heappop(self._coming)[1]

    @property
    def peer_id(self) -> str:
        """Our own id."""
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """One address of the form ``/memory/<number>/p2p/<peer id>``."""
        return (self._address,)

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Run ``handler`` for every inbound stream that asks for ``protocol``."""
        self._handlers[protocol] = handler

    async def connect(self, address: str) -> str:
        """Connect to ``address`` and return the peer id there; ``PeerError`` if nobody answers."""
        wanted = address.rpartition("/p2p/")[2]
        target = self._swarm._find(address)
        if target is not None and target.peer_id != wanted:
            raise PeerError(f"another peer answers at {address}: {target.peer_id}")
        await self._dial(wanted, target, address)
        return wanted

    async def open_stream(self, peer_id: str, protocol: str) -> MemoryStream:
        """Open a stream to a peer that is, or once was, connected."""
        if not self.connected(peer_id):
            if peer_id not in self._known:
                raise PeerError(f"not connected to {peer_id}")
            await self._dial(peer_id, self._swarm._hosts.get(peer_id), peer_id)
        connection = self._connections[peer_id]
        target = self._swarm._hosts.get(peer_id)
        await self._round_trip(connection, peer_id)
        handler = target._handlers.get(protocol) if target is not None else None
        if target is None or handler is None:
            raise PeerError(f"{peer_id} does not speak {protocol}")
        there = _Pipe(self._swarm, connection, self._peer_id, peer_id, protocol)
        back = _Pipe(self._swarm, connection, peer_id, self._peer_id, protocol)
        connection.pipes = [pipe for pipe in connection.pipes if not pipe.over] + [there, back]
        target._nursery.start_soon(
            target._serve, handler, MemoryStream(target, self._peer_id, there, back), protocol
        )
        return MemoryStream(self, peer_id, back, there)

    def connected(self, peer_id: str) -> bool:
        """Whether a connection to ``peer_id`` is open."""
        connection = self._connections.get(peer_id)
        if connection is None:
            return False
        self._swarm._expire(connection)
        return not connection.broken

    def way(self, peer_id: str) -> Way | None:
        """``"direct"`` while connected."""
        return "direct" if self.connected(peer_id) else None

    def observed(self, peer_id: str) -> str:
        """The address of a connected peer, without its id."""
        host = self._swarm._hosts.get(peer_id) if self.connected(peer_id) else None
        if host is None:
            return ""
        return f"{host.outside}/tcp/{host._number}" if host.outside else f"/memory/{host._number}"

    async def dial_back(self, peer_id: str, port: int) -> str:
        """The peer's address if it can be dialled (``port`` is its number); else ``PeerError``."""
        target = self._swarm._hosts.get(peer_id) if self.connected(peer_id) else None
        if target is None or port != target._number:
            raise PeerError(f"nobody answers at port {port}")
        await self._knock(target, target._address)
        return target._address

    async def _knock(self, target: MemoryNetwork, address: str) -> None:
        """Wait in vain at a host that cannot be dialled."""
        if not target.dialable:
            await trio.sleep(DIAL_TIMEOUT_S)
            raise PeerError(f"{address} did not answer within {DIAL_TIMEOUT_S:.0f} s")
        await trio.lowlevel.checkpoint()

    async def _dial(self, peer_id: str, target: MemoryNetwork | None, address: str) -> None:
        if self._swarm._hosts.get(self._peer_id) is not self:
            raise PeerError("this host has crashed")
        if self.connected(peer_id):
            await trio.lowlevel.checkpoint()
            return
        if peer_id == self._peer_id:
            raise PeerError(f"{address} is this very host")
        if target is None:
            await trio.sleep(self._swarm._link(self._peer_id, peer_id).latency_s * 2)
            raise PeerError(f"nobody answers at {address}")
        await self._knock(target, address)
        connection = _Connection(frozenset((self._peer_id, peer_id)))
        await self._round_trip(connection, peer_id)
        if self._swarm._hosts.get(peer_id) is not target:
            raise PeerError(f"nobody answers at {address}")
        for host, other in ((self, peer_id), (target, self._peer_id)):
            host._connections[other] = connection
            host._known.add(other)

    async def _round_trip(self, connection: _Connection, peer_id: str) -> None:
        delay = self._swarm._link(self._peer_id, peer_id).latency_s
        delay += self._swarm._link(peer_id, self._peer_id).latency_s
        if self._swarm._is_cut(connection):
            await trio.sleep(DIAL_TIMEOUT_S)
            if self._swarm._is_cut(connection):
                raise PeerError(f"{peer_id} did not answer within {DIAL_TIMEOUT_S:.0f} s")
        await trio.sleep(delay)
        if connection.broken:
            raise PeerError(connection.broken)

    async def _serve(self, handler: Handler, stream: MemoryStream, protocol: str) -> None:
        try:
            await handler(stream)
        except PeerError as error:
            log.info("%s stream from %s ended: %s", protocol, stream.peer_id, error)
            await stream.reset()
        except MalformedError as error:
            log.warning("%s stream from %s: %s", protocol, stream.peer_id, error)
            await stream.reset()
        except Exception:
            log.warning("%s stream from %s failed", protocol, stream.peer_id, exc_info=True)
            await stream.reset()
        else:
            await stream.close()


def _place(address: str) -> str:
    return address.rpartition("/p2p/")[0]


async def _hold_open(*, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    async with trio.open_nursery() as nursery:
        task_status.started(nursery)
        await trio.sleep_forever()


class MemorySwarm:
    """The space in which ``MemoryNetwork`` hosts find each other.

    Args:
        latency_s: one way, in seconds, of every link not set otherwise.
        bandwidth: bytes per second and direction of every link; None is unlimited.
        weigh: how many bytes a piece of so many bytes on a stream of some protocol counts for on
            a link with a bandwidth, where a small model stands for a large one.
    """

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        bandwidth: float | None = None,
        weigh: Callable[[str, int], float] | None = None,
    ) -> None:
        self.weigh = weigh
        self._alarm = Alarm()
        self._latency_s = latency_s
        self._bandwidth = bandwidth
        self._hosts: dict[str, MemoryNetwork] = {}
        self._places: dict[str, MemoryNetwork] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._defaults: dict[str, tuple[float | None, float | None, float | None]] = {}
        self._cut_since: dict[frozenset[str], float] = {}
        self._islands: dict[str, tuple[str, float]] = {}  # those not on the mainland, and since when
        self._count = 0

    @asynccontextmanager
    async def network(
        self,
        peer_id: str,
        *,
        latency_s: float | None = None,
        bandwidth: float | None = None,
        upload: float | None = None,
        dialable: bool = True,
        outside: str = "",
        number: int | None = None,
    ) -> AsyncIterator[MemoryNetwork]:
        """Run a host named ``peer_id``; ``latency_s`` and ``bandwidth`` are those of its own line;
        ``upload`` where it sends slower than it receives (bytes/s).

        One that is not ``dialable`` announces its address as any other, as a program behind
        a home router does, and whoever dials it waits in vain.
        ``outside``: as the host's attribute; many may share one, as behind a provider's NAT.
        ``number``: in its address, where that is to be one of an earlier life; a new one by default.
        A link's latency is the larger of its two ends', its bandwidth the smaller.
        """
        if peer_id in self._hosts:
            raise ValueError(f"a host named {peer_id} runs already")
        self._defaults[peer_id] = (latency_s, bandwidth, upload if upload is not None else bandwidth)
        self._count += 1
        number = self._count if number is None else number  # before another begins, too
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            handlers: trio.Nursery = await nursery.start(_hold_open)
            host = MemoryNetwork(self, peer_id, handlers, number)
            host.dialable, host.outside = dialable, outside
            self._hosts[peer_id] = self._places[_place(host._address)] = host
            try:
                yield host
            except Exception as error:
                failure = error
            finally:
                if self._hosts.get(peer_id) is host:
                    self.crash(peer_id)
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure  # the body's own, not wrapped in a group

    def link(self, a: str, b: str, *, latency_s: float, bandwidth: float | None = None) -> None:
        """Set both directions between ``a`` and ``b``."""
        for pair in ((a, b), (b, a)):
            link = self._links[pair] = self._link(*pair)
            link.latency_s, link.bandwidth = latency_s, bandwidth
        for connection in self._between(frozenset((a, b))):
            for pipe in connection.pipes:
                pipe.use(self._links[pipe.way])

    def partition(self, a: str, b: str) -> None:
        """Lose everything between ``a`` and ``b``; connections break after 45 s unless healed."""
        self._cut_since.setdefault(frozenset((a, b)), trio.current_time())
        self._wake(frozenset((a, b)))

    def heal(self, a: str, b: str) -> None:
        """Let ``a`` and ``b`` hear each other again; what was under way arrives."""
        pair = frozenset((a, b))
        for connection in self._between(pair):
            self._expire(connection)
        self._cut_since.pop(pair, None)
        self._wake(pair)

    def move(self, peer_id: str, island: str = "") -> None:
        """Put a host on an island: nothing crosses between islands (``""`` is the mainland).

        Connections that lead elsewhere break after 45 s unless both ends are together again.
        """
        connections = list(self._hosts[peer_id]._connections.values()) if peer_id in self._hosts else []
        for connection in connections:
            self._expire(connection)
        if island:
            self._islands[peer_id] = (island, trio.current_time())
        else:
            self._islands.pop(peer_id, None)
        for connection in connections:
            for pipe in connection.pipes:
                pipe.wake()

    def drop(self, peer_id: str) -> None:
        """Break a host's connections, as a router that restarts does; they can be opened again."""
        host = self._hosts.get(peer_id)
        for other, connection in list(host._connections.items()) if host else ():
            connection.break_(f"the connection between {peer_id} and {other} was reset")

    def crash(self, peer_id: str) -> None:
        """Kill a host: its handlers are cancelled, its connections break, nobody answers.

        The body of its ``async with`` runs on and meets ``PeerError`` at every turn.
        """
        host = self._hosts.pop(peer_id, None)
        if host is None:
            return
        del self._places[_place(host._address)]
        for other, connection in list(host._connections.items()):
            connection.break_(f"the connection to {peer_id} was lost")
            there = self._hosts.get(other)
            if there is not None and there._connections.get(peer_id) is connection:
                del there._connections[peer_id]
        host._connections.clear()
        host._handlers.clear()
        host._nursery.cancel_scope.cancel()

    def _find(self, address: str) -> MemoryNetwork | None:
        return self._places.get(_place(address))

    def _link(self, source: str, target: str) -> _Link:
        link = self._links.get((source, target))
        if link is None:
            latency, bandwidth = self._latency_s, self._bandwidth
            for name in (source, target):
                own_latency, down, up = self._defaults.get(name, (None, None, None))
                own_bandwidth = up if name == source else down
                if own_latency is not None:
                    latency = max(latency, own_latency)
                if own_bandwidth is not None:
                    bandwidth = own_bandwidth if bandwidth is None else min(bandwidth, own_bandwidth)
            link = _Link(latency, bandwidth)
            if bandwidth is not None:  # others are as good as new each time: a thousand hosts make many pairs
                self._links[(source, target)] = link
        return link

    def _between(self, pair: frozenset[str]) -> list[_Connection]:
        found = []
        for name in pair:
            host = self._hosts.get(name)
            for connection in host._connections.values() if host else ():
                if connection.ends == pair and connection not in found:
                    found.append(connection)
        return found

    def _wake(self, pair: frozenset[str]) -> None:
        for connection in self._between(pair):
            for pipe in connection.pipes:
                pipe.wake()

    def _is_cut(self, connection: _Connection) -> bool:
        return self._since(connection) is not None

    def _since(self, connection: _Connection) -> float | None:
        """Since when its ends do not hear each other; None: they do."""
        if not self._cut_since and not self._islands:
            return None
        cut = self._cut_since.get(connection.ends)
        if cut is None and self._islands:
            places = [self._islands[end] for end in connection.ends if end in self._islands]
            if len(places) == 1 or (len(places) == 2 and places[0][0] != places[1][0]):
                return max(since for _, since in places)
        return cut

    def _expiry(self, connection: _Connection) -> float:
        since = self._since(connection)
        return float("inf") if since is None else since + DEAD_AFTER_S

    def _expire(self, connection: _Connection) -> None:
        if not self._cut_since and not self._islands:
            return
        if not connection.broken and trio.current_time() >= self._expiry(connection):
            connection.break_(f"no sign of life for {DEAD_AFTER_S:.0f} s: the connection is lost")
