"""The network for real: py-libp2p over TCP, Noise and yamux, with its traps closed.

libp2p does the handshakes, the negotiation of protocols and the bookkeeping of
connections. Listening, dialling, the limits and everything per frame (see
``barnraise.protocol.yamux``) are ours, because there py-libp2p 0.8.1 lets a remote
peer exhaust memory, take the process down, or hold every inbound slot.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import psutil
import trio
from libp2p import new_swarm
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from barnraise.protocol.addresses import parse_address
from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.network import Handler
from barnraise.protocol.yamux import GuardedStream, GuardedYamux

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 5.0  # inbound: from the first byte to a multiplexed connection
OPEN_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 900.0  # dead connections are noticed much earlier, by pings
NEGOTIATION_TIMEOUT_S = 5
PIECE = 256 * 1024
MAX_CONNECTIONS = 2048
MAX_HALF_OPEN = 256
MAX_HALF_OPEN_PER_ADDRESS = 32
MAX_PER_ADDRESS = 256
MAX_CONNECTIONS_PER_PEER = 4
MAX_HANDLERS_PER_CONNECTION = 128
MAX_KNOWN_PEERS = 4096
MAX_ADDRESSES = 16


class Libp2pStream:
    """A stream to an authenticated peer; see ``barnraise.protocol.network.Stream``."""

    def __init__(self, stream: GuardedStream) -> None:
        self._stream = stream
        self._peer_id = str(stream.conn.peer_id)

    @property
    def peer_id(self) -> str:
        """The peer's id, proven by the Noise handshake."""
        return self._peer_id

    async def read(self, limit: int) -> bytes:
        """1 to ``limit`` bytes, or ``b""`` at the end. Cancelling loses nothing.

        Raises:
            PeerError: reset, connection lost, or nothing came for 15 minutes.
        """
        with trio.move_on_after(READ_TIMEOUT_S):
            try:
                return await self._stream.read(limit)
            except MuxedStreamEOF:
                return b""
            except Exception as error:
                raise PeerError(f"lost the stream to {self._peer_id}: {error}") from error
        raise PeerError(f"{self._peer_id} sent nothing for {READ_TIMEOUT_S:.0f} s")

    async def write(self, data: bytes) -> None:
        """Send all of ``data``. A cancelled write resets the stream: half a message is no message.

        Raises:
            PeerError: reset, connection lost, or the peer read nothing for 30 s.
        """
        try:
            await self._stream.write(data)
        except Exception as error:
            self._stream.abort("writing failed")
            raise PeerError(f"lost the stream to {self._peer_id}: {error}") from error
        except BaseException:
            self._stream.abort("writing was cancelled")
            raise
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """Close our side; never raises but on cancellation."""
        await self._stream.close()

    async def reset(self) -> None:
        """Abandon the stream; never raises but on cancellation."""
        await self._stream.reset()


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
        self._swarm.upgrader.muxer_multistream = _OnlyGuardedYamux()
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

        Raises:
            PeerError: not such an address, unreachable, timed out, or another peer answered.
        """
        host, port, peer_id = parse_address(address)
        if peer_id == self._peer_id:
            raise PeerError(f"{address} is this very host")
        turn = self._dials.setdefault(peer_id, trio.Lock())
        try:
            async with turn:
                if self._connection(peer_id) is None:
                    await self._dial(address, host, port, peer_id)
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
                return await self._open_on(connection, peer_id, protocol)
            except PeerError:
                if attempt == 2 or not connection.event_shutting_down.is_set():
                    raise
        raise AssertionError

    def connected(self, peer_id: str) -> bool:
        """Whether a connection to ``peer_id`` is open now."""
        return self._connection(peer_id) is not None

    async def _open_on(self, connection: GuardedYamux, peer_id: str, protocol: str) -> Libp2pStream:
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

    def _connection(self, peer_id: str) -> GuardedYamux | None:
        try:
            connections = self._swarm.connections.get(ID.from_string(peer_id), ())
        except ValueError:
            return None
        for connection in reversed(connections):
            muxed = connection.muxed_conn
            if isinstance(muxed, GuardedYamux) and muxed.is_established and not connection.is_closed:
                return muxed
        return None

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
                tcp = await trio.open_tcp_stream(host, port)
                raw = RawConnection(_CountedStream(tcp, self), True)
                await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(peer_id))
        except trio.TooSlowError as error:
            await _drop(tcp)
            raise PeerError(f"{address} did not answer within {DIAL_TIMEOUT_S:.0f} s") from error
        except Exception as error:
            await _drop(tcp)
            reason = _reason(error)
            if "does not correspond" in reason or "mismatch" in reason.lower():
                raise PeerError(f"another peer answers at {address}: {reason}") from error
            raise PeerError(f"cannot connect to {address}: {reason}") from error
        except BaseException:
            await _drop(tcp)
            raise

    async def _accept(self, tcp: trio.SocketStream) -> None:
        """Serve one inbound TCP connection to its end. Never raises but on cancellation."""
        try:
            place = str(tcp.socket.getpeername()[0])
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
                raw = RawConnection(_CountedStream(tcp, self), False)
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
    identity: Identity, listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",)
) -> AsyncIterator[Libp2pNetwork]:
    """Run a host with ``identity``, listening on ``listen`` (multiaddrs; empty: dial only).

    Raises:
        PeerError: an address is malformed, not ours, or its port is in use.
    """
    _quiet_libp2p()
    network = Libp2pNetwork(identity)
    listeners: list[trio.SocketListener] = []
    failure: Exception | None = None
    try:
        for address in listen:
            listeners += await _listen(address)
        network._addresses = tuple(_dialable(listeners, identity.peer_id))
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
        for listener in listeners:
            with trio.CancelScope(shield=True):
                await listener.aclose()
    if failure is not None:
        raise failure  # the body's own, not wrapped in a group


async def _nothing() -> None:
    pass


class _CountedStream(TrioTCPStream):
    def __init__(self, stream: trio.SocketStream, network: Libp2pNetwork) -> None:
        super().__init__(stream)
        self._network = network

    async def write(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the connection was lost: {error}", transport="tcp") from error
        self._network.bytes_out += len(data)

    async def read(self, n: int | None = None) -> bytes:
        data = bytes(await super().read(n))
        self._network.bytes_in += len(data)
        return data


class _OnlyGuardedYamux(MuxerMultistream):
    """Negotiates yamux alone; the base class makes its own ``Yamux`` whatever class it was given."""

    def __init__(self) -> None:
        super().__init__({TProtocol(YAMUX): GuardedYamux}, int(HANDSHAKE_TIMEOUT_S))

    async def new_conn(self, conn: Any, peer_id: Any) -> GuardedYamux:
        await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return GuardedYamux(conn, peer_id, is_initiator=conn.is_initiator)


async def _listen(address: str) -> list[trio.SocketListener]:
    parts = address.strip("/").split("/")
    if len(parts) != 4 or parts[0] not in ("ip4", "ip6") or parts[2] != "tcp" or not parts[3].isdigit():
        raise PeerError(f"cannot listen on {address!r}; write it like /ip4/0.0.0.0/tcp/4600")
    host, port = parts[1], int(parts[3])
    try:
        # Not libp2p's listener: its SO_REUSEPORT lets a second host share the port unnoticed.
        return list(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        code = error.errno
        if code is None and isinstance(error.__cause__, OSError):
            code = error.__cause__.errno
        if code == errno.EADDRINUSE:
            raise PeerError(
                f"port {port} is in use on {host}: stop the program that holds it, "
                "or choose another port (0 takes any free one)"
            ) from error
        if code == errno.EACCES:
            raise PeerError(f"port {port} needs privileges: choose one above 1023") from error
        raise PeerError(f"cannot listen on {address}: {error}") from error
    except (ValueError, OverflowError) as error:
        raise PeerError(f"cannot listen on {address}: {error}") from error


def _dialable(listeners: Sequence[trio.SocketListener], peer_id: str) -> list[str]:
    found: list[str] = []
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        ip = ipaddress.ip_address(host)
        places = _interfaces(ip.version) if ip.is_unspecified else [host]
        found += [f"/ip{ip.version}/{place}/tcp/{port}/p2p/{peer_id}" for place in places]
    return list(dict.fromkeys(found))[:MAX_ADDRESSES]


def _interfaces(version: int) -> list[str]:
    """This machine's addresses, loopback first; link-local ones cannot be dialled from elsewhere."""
    places = ["127.0.0.1" if version == 4 else "::1"]
    with suppress(OSError):
        for addresses in psutil.net_if_addrs().values():
            for entry in addresses:
                with suppress(ValueError):
                    ip = ipaddress.ip_address(entry.address.partition("%")[0])
                    if ip.version == version and not ip.is_loopback and not ip.is_link_local:
                        places.append(str(ip))
    return places


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
            return seen.strerror
        text = str(seen) or text
        seen = seen.__cause__
    return text


class _ToFiles(logging.Handler):
    """Passes records on to the log files of the program, never to its terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        for name in (None, "barnraise"):
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.FileHandler) and record.levelno >= handler.level:
                    handler.handle(record)


def _quiet_libp2p() -> None:
    for name in ("libp2p", "async_service", "multiaddr"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        if not any(isinstance(handler, _ToFiles) for handler in logger.handlers):
            logger.addHandler(_ToFiles())
    # This module calls logging.debug(), which gives the root logger a handler on stderr unasked.
    cast(Any, swarm_connection).logging = logging.getLogger("libp2p.network.connection")
