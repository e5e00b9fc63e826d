"""The network for real: py-libp2p over TCP, Noise and yamux, with its traps closed.

libp2p does the handshakes, the negotiation of protocols and the bookkeeping of
connections. Listening, dialling (``libp2p_outbound``), the limits (``libp2p_inbound``) and
everything per frame (``yamux``) are ours, because there py-libp2p 0.8.1 lets a remote
peer exhaust memory, take the process down, or hold every inbound slot.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
from libp2p import new_swarm
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from barnraise.protocol.addresses import parse_address, parse_circuit
from barnraise.protocol.circuit import Circuits
from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_dial import reserve_port
from barnraise.protocol.libp2p_inbound import HANDSHAKE_TIMEOUT_S, Inbound
from barnraise.protocol.libp2p_listen import MAX_ADDRESSES, dialable, listen_on
from barnraise.protocol.libp2p_log import quiet_libp2p
from barnraise.protocol.libp2p_outbound import DIAL_TIMEOUT_S, Outbound
from barnraise.protocol.libp2p_stream import Libp2pStream, OnlyGuardedYamux
from barnraise.protocol.network import Handler, Way
from barnraise.protocol.yamux import GuardedYamux
from barnraise.protocol.yamux_stream import GuardedStream

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
NEGOTIATION_TIMEOUT_S = 5
MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_PER_PEER = 4
MAX_KNOWN_PEERS = 4096


class Libp2pNetwork:
    """A host; satisfies ``barnraise.protocol.network.Network``. Make one with ``open_libp2p``.

    Attributes:
        bytes_in, bytes_out: bytes over all sockets since the start, encryption included.
        outbound: makes connections; for ``barnraise.protocol.circuit``.
    """

    def __init__(self, identity: Identity) -> None:
        keys = create_new_key_pair(identity.private_bytes())
        noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
        swarm = new_swarm(
            key_pair=keys,
            sec_opt={NOISE: noise},
            muxer_opt={TProtocol(YAMUX): GuardedYamux},
            connection_config=ConnectionConfig(
                max_connections=MAX_CONNECTIONS,
                high_watermark=MAX_CONNECTIONS,
                low_watermark=0,
                min_connections=0,
                max_connections_per_peer=MAX_CONNECTIONS_PER_PEER,
                inbound_upgrade_timeout=HANDSHAKE_TIMEOUT_S,
                outbound_upgrade_timeout=DIAL_TIMEOUT_S,
                inbound_stream_protocol_negotiation_timeout=NEGOTIATION_TIMEOUT_S,
            ),
        )
        self._swarm = cast(Any, swarm)  # its class has more than the interface it is declared as
        # Our own limits stand in for the resource manager, whose defaults let a peer lock others out.
        self._swarm._resource_manager = None
        self._swarm._stream_semaphore = None
        self._swarm.auto_connector.maybe_connect = _nothing  # nobody is dialled unasked
        self._swarm.upgrader.muxer_multistream = OnlyGuardedYamux(int(HANDSHAKE_TIMEOUT_S))
        self._host: Any = BasicHost(network=self._swarm, disable_identify_address_discovery=True)
        self._host.multiselect.remove_handler(ID_PUSH)  # it fills the peer store with what anybody says
        for notifee in tuple(self._swarm.notifees):  # they would ask every peer to identify itself
            self._swarm.remove_notifee(notifee)
        self._inbound = Inbound(self._swarm, self, self._host._swarm_stream_handler)
        self._swarm.set_stream_handler(self._inbound.serve)
        self.outbound = Outbound(self._swarm, self)
        self._peer_id = identity.peer_id
        self._addresses: tuple[str, ...] = ()
        self._known: OrderedDict[str, list[str]] = OrderedDict()
        self._dials: dict[str, trio.Lock] = {}
        self.circuits: Circuits | None = None
        self.bytes_in = 0
        self.bytes_out = 0

    @property
    def peer_id(self) -> str:
        """Our own id."""
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can dial us; wildcard addresses are replaced by loopback and the interfaces'."""
        return self._addresses

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Run ``handler`` once per inbound stream that asks for ``protocol``."""

        async def serve(net_stream: Any) -> None:
            muxed: GuardedStream = net_stream.muxed_stream
            stream = Libp2pStream(muxed)
            try:
                await handler(stream)
            except PeerError as error:
                log.info("%s stream from %s ended: %s", protocol, stream.peer_id, error)
                muxed.abort("the handler gave up")
            except MalformedError as error:
                log.warning("%s stream from %s: %s", protocol, stream.peer_id, error)
                muxed.abort("the handler refused what came")
            except Exception:
                log.warning("%s stream from %s failed", protocol, stream.peer_id, exc_info=True)
                muxed.abort("the handler failed")
            except BaseException:
                muxed.abort("the handler was cancelled")
                raise
            else:
                muxed.abandon()

        self._host.set_stream_handler(protocol, serve)

    async def connect(self, address: str) -> str:
        """Connect to ``.../tcp/<port>/p2p/<peer id>`` and return the peer id proven there.

        ``<such an address>/p2p-circuit/p2p/<peer id>`` goes through that relay.

        Raises:
            PeerError: not such an address, unreachable, timed out, or another peer answered.
        """
        circuit = parse_circuit(address)
        host, port, peer_id = parse_address(address) if circuit is None else ("", 0, circuit[1])
        if peer_id == self._peer_id:
            raise PeerError(f"{address} is this very host")
        turn = self._dials.setdefault(peer_id, trio.Lock())
        try:
            async with turn:
                if self._connection(peer_id) is None:
                    if circuit is None:
                        await self.outbound.dial(address, host, port, peer_id)
                    else:
                        await self._dial_through(circuit[0], peer_id)
        finally:
            if not turn.statistics().tasks_waiting and not turn.locked():
                self._dials.pop(peer_id, None)
        self._remember(peer_id, address)
        return peer_id

    async def open_stream(self, peer_id: str, protocol: str) -> Libp2pStream:
        """Open a stream; a peer that was connected before is dialled again at its known addresses.

        Raises:
            PeerError: not connected and not reachable, or the peer does not speak ``protocol``.
        """
        for attempt in (1, 2):
            connection = self._connection(peer_id)
            if connection is None:
                await self._redial(peer_id)
                connection = self._connection(peer_id)
            if connection is None:
                raise PeerError(f"not connected to {peer_id}")
            try:
                return await self.open_on(connection, peer_id, protocol)
            except PeerError:
                if attempt == 2 or not connection.event_shutting_down.is_set():
                    raise
        raise AssertionError

    def connected(self, peer_id: str) -> bool:
        """Whether a connection to ``peer_id`` is open now."""
        return self._connection(peer_id) is not None

    def way(self, peer_id: str) -> Way | None:
        """How the connection to ``peer_id`` goes; None: there is none now."""
        connection = self._connection(peer_id)
        return None if connection is None else connection.way

    def observed(self, peer_id: str) -> str:
        """Where a connection to ``peer_id`` comes from or goes to, as a multiaddr; ``""`` if unknown."""
        place = self._place(peer_id)
        if place is None:
            return ""
        ip, port = place
        return f"/ip{ip.version}/{ip}/tcp/{port}"

    async def dial_back(self, peer_id: str, port: int) -> str:
        """Dial a connected peer anew, where it is observed and at this port; hang up; return the address.

        The new connection proves the peer's key and is never used for anything.

        Raises:
            PeerError: not connected, or nobody or somebody else answers there.
        """
        place = self._place(peer_id)
        if place is None:
            raise PeerError(f"it is not known where {peer_id} is")
        ip = place[0]
        address = f"/ip{ip.version}/{ip}/tcp/{port}/p2p/{peer_id}"
        await self.outbound.prove(address, str(ip), port, peer_id)
        return address

    def _place(self, peer_id: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int] | None:
        for muxed in self._connections(peer_id):
            if muxed.remote is not None:
                ip = ipaddress.ip_address(muxed.remote[0].partition("%")[0])
                mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
                return mapped or ip, muxed.remote[1]
        return None

    async def open_on(self, connection: GuardedYamux, peer_id: str, protocol: str) -> Libp2pStream:
        """Open a stream on one connection; PeerError if that does not work."""
        stream: GuardedStream | None = None
        try:
            with trio.fail_after(OPEN_TIMEOUT_S):
                stream = await connection.open_stream()
                await MultiselectClient().select_one_of(
                    [TProtocol(protocol)], MultiselectCommunicator(stream), int(OPEN_TIMEOUT_S)
                )
                return Libp2pStream(stream)
        except Exception as error:
            if stream is not None:
                stream.abort("the stream was not opened")
            reason = f": {error}" if str(error) else ""
            text = f"cannot open a stream to {peer_id}: it does not speak {protocol}, or is gone{reason}"
            raise PeerError(text) from error
        except BaseException:
            if stream is not None:
                stream.abort("opening was cancelled")
            raise

    def _connections(self, peer_id: str) -> list[GuardedYamux]:
        """The open ones, the newest first, those through a relay last."""
        try:
            connections = self._swarm.connections.get(ID.from_string(peer_id), ())
        except ValueError:
            return []
        found = []
        for connection in reversed(connections):
            muxed = connection.muxed_conn
            live = isinstance(muxed, GuardedYamux) and muxed.is_established and not connection.is_closed
            if live and muxed.usable:
                found.append(muxed)
        return sorted(found, key=lambda muxed: muxed.way == "relayed")

    def _connection(self, peer_id: str) -> GuardedYamux | None:
        return next(iter(self._connections(peer_id)), None)

    async def _redial(self, peer_id: str) -> None:
        last: PeerError | None = None
        for address in tuple(self._known.get(peer_id, ())):
            try:
                await self.connect(address)
                return
            except PeerError as error:
                last = error
        if last is not None:
            raise last

    def _remember(self, peer_id: str, address: str) -> None:
        known = self._known.setdefault(peer_id, [])
        if address in known:
            known.remove(address)
        known.insert(0, address)
        del known[MAX_ADDRESSES:]
        self._known.move_to_end(peer_id)
        while len(self._known) > MAX_KNOWN_PEERS:
            self._known.popitem(last=False)

    # --- ways around NAT, for ``barnraise.protocol.circuit``

    async def _dial_through(self, relay_address: str, peer_id: str) -> None:
        if self.circuits is None:
            raise PeerError(f"{peer_id} is behind a relay, and this host uses none")
        relay = await self.connect(relay_address)
        try:
            await self.circuits.dial(relay, peer_id)
        except MalformedError as error:
            raise PeerError(f"cannot reach {peer_id} through {relay}: {error}") from error

    async def punch(self, peer_id: str, host: str, port: int, *, via: str, initiator: bool) -> None:
        """Connect to ``host`` while it connects to us. One side is the ``initiator`` of what follows.

        The connection leaves from the port that the one to the relay ``via`` does: that is
        the one whose translation the other side has been told.

        Raises:
            PeerError: no connection, the handshake failed, or somebody else is there.
        """
        source = next((muxed.local_port for muxed in self._connections(via) if muxed.local_port), None)
        if source is None:
            raise PeerError(f"we have not dialled the relay {via}: there is no port to punch from")
        await self.outbound.punch(source, peer_id, host, port, initiator=initiator)

    async def ended(self, muxed: GuardedYamux) -> None:
        """Wait for the end of a connection."""
        await muxed.event_closed.wait()

    async def _close(self) -> None:
        async with trio.open_nursery() as nursery:  # the host would say goodbye to one after the other
            for connections in tuple(self._swarm.connections.values()):
                for connection in connections:
                    nursery.start_soon(connection.muxed_conn.close)
        await self._host.close()


@asynccontextmanager
async def open_libp2p(
    identity: Identity, listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",), *, circuits: bool = False
) -> AsyncIterator[Libp2pNetwork]:
    """Run a host with ``identity``, listening on ``listen`` (multiaddrs; empty: dial only).

    With ``circuits`` it can be reached, and reaches others, by relays and hole punching
    (``barnraise.protocol.circuit``); its connections then all leave from one port.

    Raises:
        PeerError: an address is malformed, not ours, or its port is in use.
    """
    quiet_libp2p()
    network = Libp2pNetwork(identity)
    holder: socket.socket | None = None
    if circuits:
        holder = reserve_port()
        network.outbound.source = int(holder.getsockname()[1])
        network.circuits = Circuits(network)
    listeners: list[trio.SocketListener] = []
    failure: Exception | None = None
    try:
        for address in listen:
            listeners += await listen_on(address)
        network._addresses = tuple(dialable(listeners, identity.peer_id))
        own = [Multiaddr(address) for address in network._addresses]
        network._host._addrs_factory = lambda _: own  # what identify tells others
        async with background_trio_service(network._swarm), trio.open_nursery() as nursery:
            if listeners:
                nursery.start_soon(trio.serve_listeners, network._inbound.accept, listeners)
            try:
                yield network
            except Exception as error:
                failure = error
            finally:
                # Leaving the service closes no connection: the host must, whatever is cancelled.
                with trio.CancelScope(shield=True), trio.move_on_after(5.0):
                    await network._close()
                nursery.cancel_scope.cancel()
    finally:
        if holder is not None:
            holder.close()
        for listener in listeners:
            with trio.CancelScope(shield=True):
                await listener.aclose()
    if failure is not None:
        raise failure  # the body's own, not wrapped in a group


async def _nothing() -> None:
    pass
