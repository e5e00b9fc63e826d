"""A swarm inside one process: the libp2p network's twin for tests and simulation.

Bytes cost what a link says they cost (``memory_pipe``): latency in seconds, bandwidth in
bytes per second, in virtual time when trio's autojump clock runs. Links can be cut and
mended (``memory_wires``), hosts can crash, or be behind a router that lets nobody in.
Given the same scheduling, a run repeats exactly.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.memory_pipe import Connection, MemoryStream, Pipe, Traffic
from barnraise.protocol.memory_wires import Wires
from barnraise.protocol.network import Handler, Way

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0


class MemoryNetwork:
    """A host in a ``MemorySwarm``; satisfies ``barnraise.protocol.network.Network``.

    Attributes:
        traffic: what it sent and received.
        dialable: false for a host behind a router with NAT: it only dials out. May be changed.
        outside: the internet address that others see it at, as ``/ip4/203.0.113.7``; "": its own.
    """

    def __init__(self, swarm: MemorySwarm, peer_id: str, nursery: trio.Nursery, number: int) -> None:
        self._swarm = swarm
        self._wires = swarm.wires
        self._peer_id = peer_id
        self._nursery = nursery
        self._handlers: dict[str, Handler] = {}
        self._connections: dict[str, Connection] = {}
        self._known: set[str] = set()
        self._number = number
        self._address = f"/memory/{number}/p2p/{peer_id}"
        self.dialable = True
        self.outside = ""
        self.traffic = Traffic()

    @property
    def bytes_in(self) -> int:
        """Bytes that have arrived since the start, whether read or not."""
        return self.traffic.arrived

    @property
    def bytes_out(self) -> int:
        """Bytes sent since the start."""
        return self.traffic.sent

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
        there = Pipe(connection, self._peer_id, peer_id, target.traffic, protocol)
        back = Pipe(connection, peer_id, self._peer_id, self.traffic, protocol)
        connection.pipes = [pipe for pipe in connection.pipes if not pipe.over] + [there, back]
        target._nursery.start_soon(
            target._serve, handler, MemoryStream(target.traffic, self._peer_id, there, back), protocol
        )
        return MemoryStream(self.traffic, peer_id, back, there)

    def connected(self, peer_id: str) -> bool:
        """Whether a connection to ``peer_id`` is open."""
        connection = self._connections.get(peer_id)
        if connection is None:
            return False
        connection.expire()
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
            await trio.sleep(self._wires.link(self._peer_id, peer_id).latency_s * 2)
            raise PeerError(f"nobody answers at {address}")
        await self._knock(target, address)
        connection = Connection(self._wires, frozenset((self._peer_id, peer_id)))
        await self._round_trip(connection, peer_id)
        if self._swarm._hosts.get(peer_id) is not target:
            raise PeerError(f"nobody answers at {address}")
        for host, other in ((self, peer_id), (target, self._peer_id)):
            host._connections[other] = connection
            host._known.add(other)

    async def _round_trip(self, connection: Connection, peer_id: str) -> None:
        delay = self._wires.link(self._peer_id, peer_id).latency_s
        delay += self._wires.link(peer_id, self._peer_id).latency_s
        if self._wires.since(connection.ends) is not None:
            await trio.sleep(DIAL_TIMEOUT_S)
            if self._wires.since(connection.ends) is not None:
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
        self.wires = Wires(latency_s, bandwidth, weigh)
        self._hosts: dict[str, MemoryNetwork] = {}
        self._places: dict[str, MemoryNetwork] = {}
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
        self.wires.set_line(peer_id, latency_s, bandwidth, upload if upload is not None else bandwidth)
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
        self.wires.set_link(a, b, latency_s, bandwidth)
        for connection in self._between(frozenset((a, b))):
            for pipe in connection.pipes:
                pipe.use(self.wires.link(*pipe.way))

    def partition(self, a: str, b: str) -> None:
        """Lose everything between ``a`` and ``b``; connections break after 45 s unless healed."""
        self.wires.cut_since.setdefault(frozenset((a, b)), trio.current_time())
        self._wake(frozenset((a, b)))

    def heal(self, a: str, b: str) -> None:
        """Let ``a`` and ``b`` hear each other again; what was under way arrives."""
        pair = frozenset((a, b))
        for connection in self._between(pair):
            connection.expire()
        self.wires.cut_since.pop(pair, None)
        self._wake(pair)

    def move(self, peer_id: str, island: str = "") -> None:
        """Put a host on an island: nothing crosses between islands (``""`` is the mainland).

        Connections that lead elsewhere break after 45 s unless both ends are together again.
        """
        connections = list(self._hosts[peer_id]._connections.values()) if peer_id in self._hosts else []
        for connection in connections:
            connection.expire()
        if island:
            self.wires.islands[peer_id] = (island, trio.current_time())
        else:
            self.wires.islands.pop(peer_id, None)
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

    def _between(self, pair: frozenset[str]) -> list[Connection]:
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
