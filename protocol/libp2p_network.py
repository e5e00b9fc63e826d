"""The network for real: py-libp2p over TCP, Noise and yamux, with its traps closed.

libp2p does the handshakes, the negotiation of protocols and the bookkeeping of
connections. Listening, dialling, the limits and everything per frame (see
``barnraise.protocol.yamux``) are ours, because there py-libp2p 0.8.1 lets a remote
peer exhaust memory, take the process down, or hold every inbound slot.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections import Counter, OrderedDict
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
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from barnraise.protocol.addresses import household, parse_address, parse_circuit
from barnraise.protocol.circuit import Circuits
from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_dial import open_from, open_tcp, reserve_port
from barnraise.protocol.libp2p_listen import MAX_ADDRESSES, dialable, listen_on
from barnraise.protocol.libp2p_log import quiet_libp2p
from barnraise.protocol.libp2p_stream import CircuitStream, CountedStream, Libp2pStream, OnlyGuardedYamux
from barnraise.protocol.network import Handler, Way
from barnraise.protocol.yamux import GuardedYamux
from barnraise.protocol.yamux_stream import GuardedStream

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
DIAL_BACK_S = 5.0
PUNCH_TRY_S = 2.5
HANDSHAKE_TIMEOUT_S = 5.0  # inbound: from the first byte to a multiplexed connection
OPEN_TIMEOUT_S = 10.0
NEGOTIATION_TIMEOUT_S = 5
MAX_CONNECTIONS = 2048
MAX_HALF_OPEN = 256
MAX_HALF_OPEN_PER_ADDRESS = 32
MAX_PER_ADDRESS = 256
MAX_CONNECTIONS_PER_PEER = 4
MAX_HANDLERS_PER_CONNECTION = 128
MAX_KNOWN_PEERS = 4096


class Libp2pNetwork:
    """A host; satisfies ``barnraise.protocol.network.Network``. Make one with ``open_libp2p``.

    Attributes:
        bytes_in, bytes_out: bytes over all sockets since the start, encryption included.
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
        self._serve_stream = self._host._swarm_stream_handler
        self._swarm.set_stream_handler(self._guarded)
        self._peer_id = identity.peer_id
        self._addresses: tuple[str, ...] = ()
        self._known: OrderedDict[str, list[str]] = OrderedDict()
        self._dials: dict[str, trio.Lock] = {}
        self._source: int | None = None  # the port that connections leave from, if it is fixed
        self.circuits: Circuits | None = None
        self._half_open: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
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
                        await self._dial(address, host, port, peer_id)
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
        tcp: trio.SocketStream | None = None
        try:
            with trio.fail_after(DIAL_BACK_S):
                tcp = await trio.open_tcp_stream(str(ip), port)
                raw = RawConnection(CountedStream(tcp, self), True)
                await self._swarm.upgrader.upgrade_security(raw, True, ID.from_string(peer_id))
        except trio.TooSlowError as error:
            raise PeerError(f"{address} did not answer within {DIAL_BACK_S:.0f} s") from error
        except Exception as error:
            raise PeerError(f"cannot connect to {address}: {_reason(error)}") from error
        finally:
            await _drop(tcp)
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

    async def _dial(self, address: str, host: str, port: int, peer_id: str) -> None:
        # One address by hand: Swarm.dial_peer tries a single one, waits 250 ms and blocks the peer for 60 s.
        tcp: trio.SocketStream | None = None
        try:
            with trio.fail_after(DIAL_TIMEOUT_S):
                tcp = await open_tcp(host, port, self._source)
                raw = RawConnection(CountedStream(tcp, self), True)
                made = await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(peer_id))
                made.muxed_conn.local_port = int(tcp.socket.getsockname()[1])
        except trio.TooSlowError as error:
            await _drop(tcp)
            raise PeerError(f"{address} did not answer within {DIAL_TIMEOUT_S:.0f} s") from error
        except Exception as error:
            await _drop(tcp)
            reason = _reason(error)
            if "does not correspond" in reason or "mismatch" in reason.lower():
                raise PeerError(
                    f"another peer answers at {address}, with another key than the address names: "
                    "ask for the present address"
                ) from error
            raise PeerError(f"cannot connect to {address}: {reason}") from error
        except BaseException:
            await _drop(tcp)
            raise

    # --- ways around NAT, for ``barnraise.protocol.circuit``

    async def _dial_through(self, relay_address: str, peer_id: str) -> None:
        if self.circuits is None:
            raise PeerError(f"{peer_id} is behind a relay, and this host uses none")
        relay = await self.connect(relay_address)
        try:
            await self.circuits.dial(relay, peer_id)
        except MalformedError as error:
            raise PeerError(f"cannot reach {peer_id} through {relay}: {error}") from error

    async def adopt(self, stream: Libp2pStream, peer_id: str, *, initiator: bool, bulk: bool) -> GuardedYamux:
        """Make a connection to ``peer_id`` out of a stream through a relay.

        Raises:
            PeerError: the handshake failed, or somebody else is at the other end.
        """
        muxed = await self._upgrade(RawConnection(cast(Any, CircuitStream(stream)), initiator), peer_id)
        muxed.way, muxed.usable = "relayed", bulk
        return muxed

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
        tcp: trio.SocketStream | None = None
        try:
            with trio.fail_after(PUNCH_TRY_S):
                tcp = await open_from(source, host, port)
            muxed = await self._upgrade(RawConnection(CountedStream(tcp, self), initiator), peer_id)
        except (OSError, trio.TooSlowError) as error:
            await _drop(tcp)
            raise PeerError(_reason(error) if isinstance(error, OSError) else "no answer") from error
        except BaseException:
            await _drop(tcp)
            raise
        muxed.way = "hole-punched"

    async def ended(self, muxed: GuardedYamux) -> None:
        """Wait for the end of a connection."""
        await muxed.event_closed.wait()

    async def _upgrade(self, raw: RawConnection, peer_id: str) -> GuardedYamux:
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                if raw.is_initiator:
                    made = await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(peer_id))
                else:
                    made = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr("/tcp/0"))
        except Exception as error:
            raise PeerError(f"the handshake with {peer_id} failed: {_reason(error)}") from error
        muxed: GuardedYamux = made.muxed_conn if raw.is_initiator else made
        if str(muxed.peer_id) != peer_id:
            await muxed.close()
            raise PeerError(f"somebody else is there: {muxed.peer_id}")
        return muxed

    async def _accept(self, tcp: trio.SocketStream) -> None:
        """Serve one inbound TCP connection to its end. Never raises but on cancellation."""
        try:
            place = household(str(tcp.socket.getpeername()[0]))
        except OSError:
            return
        if (
            self._half_open.total() >= MAX_HALF_OPEN
            or self._half_open[place] >= MAX_HALF_OPEN_PER_ADDRESS
            or self._open[place] >= MAX_PER_ADDRESS
        ):
            return
        self._open[place] += 1
        try:
            self._half_open[place] += 1
            try:
                raw = RawConnection(CountedStream(tcp, self), False)
                with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                    connection = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr("/tcp/0"))
            finally:
                _decrease(self._half_open, place)
            # Swarm's own handler waits for the end of the host instead: its 250 slots never come back.
            await connection.event_closed.wait()
        except Exception as error:
            log.debug("inbound connection from %s failed: %s", place, error)
        finally:
            _decrease(self._open, place)

    async def _close(self) -> None:
        async with trio.open_nursery() as nursery:  # the host would say goodbye to one after the other
            for connections in tuple(self._swarm.connections.values()):
                for connection in connections:
                    nursery.start_soon(connection.muxed_conn.close)
        await self._host.close()

    async def _guarded(self, net_stream: Any) -> None:
        """libp2p's stream handler, such that nothing a peer sends can end the host."""
        muxed: GuardedStream = net_stream.muxed_stream
        if muxed.conn.handlers >= MAX_HANDLERS_PER_CONNECTION:
            muxed.abort("too many streams at once")
            return
        muxed.conn.handlers += 1
        try:
            await self._serve_stream(net_stream)
        except Exception as error:
            log.debug("stream from %s failed: %r", muxed.conn.peer_id, error)
            muxed.abort("the stream's negotiation failed")
        finally:
            muxed.conn.handlers -= 1


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
        network._source = int(holder.getsockname()[1])
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
                nursery.start_soon(trio.serve_listeners, network._accept, listeners)
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


async def _drop(tcp: trio.SocketStream | None) -> None:
    if tcp is not None:
        await trio.aclose_forcefully(tcp)


def _decrease(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


def _reason(error: BaseException) -> str:
    """The innermost text of an error and its causes."""
    text = str(error) or type(error).__name__
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BaseExceptionGroup):
            seen = seen.exceptions[0]
        if isinstance(seen, OSError) and seen.strerror:
            # trio's text repeats the address in its own notation; a resolver's numbers are negative
            return os.strerror(seen.errno) if seen.errno and seen.errno > 0 else seen.strerror
        text = str(seen) or text
        seen = seen.__cause__
    return text
