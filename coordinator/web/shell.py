"""HTTP over TCP: Hypercorn's HTTP/1.1 in an accept loop of ours, where everything is bounded.

Hypercorn's own worker lets an exception of one connection end all of them, waits without
limit for a client that does not read, speaks HTTP/2 to whoever asks, and counts no
addresses (docs/decisions/0010-own-accept-loop.md). Here bytes from outside can end their
connection, never more; a connection has a deadline at every moment.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app

log = logging.getLogger(__name__)

_RECEIVE: Final = 16 * 1024
_SEND: Final = 64 * 1024
_LINGER_S: Final = 1.0
_UPGRADES: Final = frozenset((b"upgrade", b"http2-settings", b"sec-websocket-key"))


@dataclass(frozen=True, slots=True)
class Limits:
    """What strangers may take. Loopback is not counted by address: a reverse proxy comes from there."""

    connections: int = 256
    per_address: int = 16  # IPv6: per /64
    head_bytes: int = 16 * 1024
    head_s: float = 10.0  # for a request's head; between requests, too
    send_s: float = 20.0  # for every 64 KiB of a reply
    quiet_s: float = 60.0  # between a request's head and the next byte of its reply
    requests: int = 1000  # on one connection


@dataclass
class Doorman:
    """Who is connected, and how many from where."""

    limits: Limits
    connected: int = 0
    refused: int = 0
    _by_address: Counter[str] = field(default_factory=Counter)

    def enter(self, host: str) -> str | None:
        """A key to ``leave`` with; None: there is no room."""
        key = counted_as(host)
        full = self.connected >= self.limits.connections
        if full or (key and self._by_address[key] >= self.limits.per_address):
            self.refused += 1
            return None
        self.connected += 1
        self._by_address[key] += 1
        return key

    def leave(self, key: str) -> None:
        """The connection is over."""
        self.connected -= 1
        self._by_address[key] -= 1
        if not self._by_address[key]:
            del self._by_address[key]


def counted_as(host: str) -> str:
    """The address as it is counted: IPv6 by its /64; "" is loopback, "unknown" is none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return counted_as(str(address.ipv4_mapped))
        if not address.is_loopback:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return "" if address.is_loopback else str(address)


async def serve_http(
    app: Any,
    listeners: list[trio.SocketListener],
    limits: Limits = Limits(),
    task_status: Any = trio.TASK_STATUS_IGNORED,  # trio.TaskStatus[Doorman]
) -> None:
    """Serve an ASGI application (HTTP alone, no lifespan) until cancelled."""
    server = Server(app, limits)

    async def accepted(stream: trio.SocketStream) -> None:
        try:
            client, own = stream.socket.getpeername()[:2], stream.socket.getsockname()[:2]
        except OSError:  # it is gone already
            await trio.aclose_forcefully(stream)
        else:
            await server.serve(stream, client, own)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, accepted, listeners, handler_nursery=nursery))
        task_status.started(server.doorman)


class Server:
    """An ASGI application, and what one connection after the other may take."""

    def __init__(self, app: Any, limits: Limits = Limits()) -> None:
        framework: ASGIFramework = app
        self.app = wrap_app(framework, 0, "asgi")
        self.doorman = Doorman(limits)
        self.context = WorkerContext(None)
        self.config = Config()
        self.config.h11_max_incomplete_size = limits.head_bytes
        self.config.keep_alive_max_requests = limits.requests
        self.config.include_server_header = False
        self.config.max_app_queue_size = 2
        self.config.errorlog = log

    async def serve(
        self, stream: trio.abc.HalfCloseableStream, client: tuple[str, int], own: tuple[str, int]
    ) -> None:
        """One connection, whatever happens in it. ``client``, ``own``: host and port of its two ends."""
        key = self.doorman.enter(client[0])
        if key is None:
            await trio.aclose_forcefully(stream)
            return
        try:
            await _Connection(self, stream, client, own).run()
        except* Exception as group:
            log.debug("a connection from %s ended: %r", client[0], group.exceptions[0])
        finally:
            self.doorman.leave(key)
            await trio.aclose_forcefully(stream)


class _Connection:
    def __init__(
        self,
        server: Server,
        stream: trio.abc.HalfCloseableStream,
        client: tuple[str, int],
        own: tuple[str, int],
    ) -> None:
        self._limits = server.doorman.limits
        self._stream = stream
        self._scope = trio.CancelScope()
        self._sending = trio.Lock()
        self._group = TaskGroup()
        self._ended = False
        self._protocol = _Http1(
            server.app,
            server.config,
            server.context,
            self._group,
            ConnectionState({}),
            False,
            client,
            own,
            self._send,
        )

    async def run(self) -> None:
        with self._scope:
            self._scope.deadline = trio.current_time() + self._limits.head_s
            async with self._group:
                await self._read()
                self._scope.cancel()  # whoever still makes a reply makes it for nobody

    async def _read(self) -> None:
        while data := await self._stream.receive_some(_RECEIVE):
            if not self._ended:  # else it is thrown away, for a reset could overtake the reply
                await self._protocol.handle(RawData(bytes(data)))
        await self._protocol.handle(Closed())

    async def _send(self, event: Event) -> None:
        try:
            if isinstance(event, RawData):
                await self._send_data(event.data)
            elif isinstance(event, Updated):
                wait = self._limits.head_s if event.idle else self._limits.quiet_s
                self._scope.deadline = trio.current_time() + wait
            elif isinstance(event, Closed) and not self._ended:
                self._ended = True
                self._scope.deadline = trio.current_time() + _LINGER_S
                async with self._sending:
                    await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            self._scope.cancel()  # nobody is there, or nobody reads

    async def _send_data(self, data: bytes) -> None:
        async with self._sending:
            for start in range(0, len(data), _SEND):
                with trio.fail_after(self._limits.send_s):
                    await self._stream.send_all(data[start : start + _SEND])
        if not self._ended:
            self._scope.deadline = trio.current_time() + self._limits.quiet_s


class _Http1(H11Protocol):
    """HTTP/1.1 and nothing else: no upgrade is heard, to HTTP/2 or to a web socket.

    A body that the application does not read ends the connection, if there is more of it to come. Hypercorn
    waits until it is read, and a proxy's connection is many people's: the next one's request waited, too.
    """

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and self.connection.their_state is not h11.DONE:
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)

    async def _close_stream(self) -> None:
        if self.stream is not None:
            self.stream.closed = True  # told to nobody: the application is done, or is cancelled next
            self.stream = None

    async def _check_protocol(self, event: h11.Request) -> None:
        await trio.lowlevel.checkpoint()

    async def _create_stream(self, request: h11.Request) -> None:
        headers = [(name, value) for name, value in request.headers if name.lower() not in _UPGRADES]
        plain = h11.Request(
            method=request.method, target=request.target, headers=headers, http_version=request.http_version
        )
        await super()._create_stream(plain)
