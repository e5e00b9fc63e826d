"""The accept loop against clients that mean no good: they end their own connection, and nothing else."""

import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair

from barnraise.coordinator.web.listen import Bind, open_listeners, read_bind, urls_of
from barnraise.coordinator.web.shell import Doorman, Limits, Server, serve_http
from barnraise.protocol.errors import PeerError

LIMITS = Limits(connections=8, per_address=2)
HERE = ("127.0.0.1", 1)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says where it was asked for; ``/big`` is too much for a buffer, ``/never`` waits, ``/bad`` breaks."""
    assert scope["type"] == "http"
    if scope["path"] == "/never":
        await trio.sleep_forever()
    if scope["path"] == "/bad":
        raise ValueError("a defect of ours")
    body = b"b" * 50_000_000 if scope["path"] == "/big" else scope["path"].encode()
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


class Client:
    """The far end of a connection in memory."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream

    async def read(self) -> bytes:
        """Everything until the end of the stream."""
        data = b""
        while chunk := await self.stream.receive_some():
            data += chunk
        return data


@asynccontextmanager
async def connected(server: Server, address: str = "203.0.113.9") -> AsyncIterator[Client]:
    """A client of a server, in memory; the server's end must be over when the block is."""
    near, far = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, far, (address, 5), HERE)
        yield Client(near)
        await near.aclose()
    assert server.doorman.connected == 0


async def said(data: bytes, *, end: bool = False) -> bytes:
    """What a fresh server answers to these bytes."""
    async with connected(Server(app, LIMITS)) as client:
        await client.stream.send_all(data)
        if end:
            await client.stream.send_eof()
        return await client.read()


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1]) if reply else 0


async def test_requests_on_one_connection_are_answered_in_order(autojump_clock: MockClock) -> None:
    requests = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(5))
    reply = await said(requests)
    assert [part.rsplit(b"/", 1)[-1][:1] for part in reply.split(b"HTTP/1.1 200")[1:]] == [
        *(b"0", b"1", b"2", b"3", b"4"),
    ]
    assert b"server:" not in reply.lower()


@pytest.mark.parametrize("method", [b"GET", b"POST"])
@pytest.mark.parametrize(
    "body",
    [
        *(b"Content-Length: 5\r\n\r\nxxxxx", b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"),
        b"Transfer-Encoding: chunked\r\n\r\n" + 9 * b"1\r\nx\r\n" + b"0\r\n\r\n",
        *(b"Content-Length: 90\r\n\r\nx", b"Content-Length: 90000\r\n\r\n" + 90_000 * b"x"),
    ],
    ids=["short", "one chunk", "chunks", "not whole", "long"],
)
async def test_a_body_that_nobody_reads_keeps_nobody_waiting(
    autojump_clock: MockClock, method: bytes, body: bytes
) -> None:
    """A proxy sends many people's requests over one connection: the next is answered, or knows at once."""
    async with connected(Server(app, LIMITS)) as client:
        began = trio.current_time()
        with suppress(trio.BrokenResourceError):
            await client.stream.send_all(method + b" /1 HTTP/1.1\r\nHost: x\r\n" + body)
        reply = b""
        while b"\r\n\r\n/1" not in reply:
            more = await client.stream.receive_some()
            assert more
            reply += more
        if b"connection: close" not in reply.lower():
            await client.stream.send_all(GET.replace(b"/ ", b"/2 "))
            assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 200")
        else:
            await client.read()
        assert trio.current_time() - began < 2


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ", id="half a head"),
        pytest.param(b"G", id="one byte"),
        pytest.param(GET, id="idle after a reply"),
        pytest.param(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n", id="a reply that never comes"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx", id="half a body"),
        pytest.param(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n", id="a reply that is not read"),
    ],
)
async def test_whoever_stands_still_is_let_go(autojump_clock: MockClock, data: bytes) -> None:
    server = Server(app, LIMITS)
    near, far = memory_stream_pair()
    if data.startswith(b"GET /big"):
        full = trio.Event()
        far.send_stream.send_all_hook = full.wait  # nobody reads: the buffer is full for ever
    await near.send_all(data)
    with trio.fail_after(2 * LIMITS.quiet_s):
        await server.serve(far, ("203.0.113.9", 5), HERE)
    assert server.doorman.connected == 0


async def test_a_head_that_trickles_in_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with connected(Server(app, LIMITS)) as client:
        began = trio.current_time()
        with suppress(trio.BrokenResourceError):
            for byte in b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 1000:
                await client.stream.send_all(bytes((byte,)))
                await trio.sleep(1)
        assert trio.current_time() - began <= LIMITS.head_s + 2


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"\x00\xff\x16\x03\x01" * 40 + b"\r\n\r\n", 400, id="noise"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400, id="TLS"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"A: " + b"a" * 70_000 + b"\r\n\r\n", 431, id="a giant header"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", 431, id="20,000 headers"),
        pytest.param(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, id="a giant path"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, id="two hosts"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, id="a negative length"),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            400,
            id="two lengths",
        ),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nX\x00: y\r\n\r\n", 400, id="a NUL in a header"),
        pytest.param(b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="bytes that are no ASCII"),
        pytest.param(b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", 200, id="an absolute target"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64), 200, id="HTTP/2 by prior knowledge"),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade, http2-settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n",
            200,
            id="an upgrade to HTTP/2",
        ),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            200,
            id="an upgrade to a web socket",
        ),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nwhat",
            400,
            id="bad chunks",
        ),
        pytest.param(b"GET /bad HTTP/1.1\r\nHost: x\r\n\r\n", 500, id="a defect of ours"),
    ],
)
async def test_bytes_from_anywhere_end_at_most_their_connection(
    autojump_clock: MockClock, data: bytes, status: int
) -> None:
    reply = await said(data)
    assert status_of(reply) == status, reply[:200]
    assert b"101 " not in reply[:20]
    assert reply.count(b"HTTP/1.1 ") <= 2


async def test_random_bytes_never_reach_further_than_their_connection(autojump_clock: MockClock) -> None:
    rng = random.Random(1)
    server = Server(app, LIMITS)
    parts = (
        GET,
        b"\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"POST / ",
        b"\x00",
    )
    for _ in range(300):
        data = b"".join(
            rng.choice((*parts, rng.randbytes(rng.randint(0, 40)))) for _ in range(rng.randint(1, 12))
        )
        async with connected(server) as client:
            await client.stream.send_all(data)
            if rng.random() < 0.5:
                await client.stream.send_eof()
            if rng.random() < 0.5:
                await client.read()
    async with connected(server) as client:
        await client.stream.send_all(GET)
        await client.stream.send_eof()
    assert server.doorman.refused == 0


def test_addresses_have_their_share_and_loopback_has_all() -> None:
    doorman = Doorman(Limits(connections=8, per_address=2))
    keys = [doorman.enter(host) for host in ("203.0.113.1", "203.0.113.1", "203.0.113.1", "203.0.113.2")]
    assert [key is not None for key in keys] == [True, True, False, True]
    six = [doorman.enter(f"2001:db8:1:2::{number}") for number in range(3)]
    assert [key is not None for key in six] == [True, True, False]
    assert doorman.enter("::ffff:203.0.113.1") is None
    here = [doorman.enter("127.0.0.1") for _ in range(9)]
    assert [key is not None for key in here] == [True] * 3 + [False] * 6
    for key in (*keys, *six, *here):
        if key is not None:
            doorman.leave(key)
    assert doorman.connected == 0
    assert doorman.refused == 9
    assert doorman.enter("203.0.113.1") is not None


async def over_loopback(work: Callable[[str, int], Awaitable[None]], limits: Limits = Limits()) -> None:
    listeners = open_listeners(Bind("127.0.0.1", 0, fall_back=False))
    (url,) = urls_of(listeners)
    port = int(url.rsplit(":", 1)[1].rstrip("/"))
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_http, app, listeners, limits)
        await work(url, port)
        nursery.cancel_scope.cancel()


async def test_many_connections_and_resets_leave_room_for_the_next() -> None:
    async def work(url: str, port: int) -> None:
        idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(6)]
        for number in range(60):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            if number % 3:
                await stream.send_all(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n" if number % 2 else b"\0" * 100)
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await trio.aclose_forcefully(stream)
        async with httpx.AsyncClient() as client:
            for _ in range(200):  # those that were reset leave in their own time
                try:
                    reply = await client.get(f"{url}after")
                    break
                except httpx.TransportError:
                    await trio.lowlevel.checkpoint()
            assert reply.text == "/after"
        for stream in idle:
            await stream.aclose()

    await over_loopback(work, Limits(connections=8))


async def test_beyond_the_limit_a_connection_is_closed_at_once() -> None:
    async def work(url: str, port: int) -> None:
        held = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        for stream in held:
            await ask(stream)
        extra = await trio.open_tcp_stream("127.0.0.1", port)
        with suppress(trio.BrokenResourceError):
            assert await extra.receive_some() == b""
        for stream in held:
            await ask(stream)
            await stream.aclose()

    async def ask(stream: trio.SocketStream) -> None:
        await stream.send_all(GET)
        reply = b""
        while not reply.endswith(b"\r\n\r\n/"):
            reply += await stream.receive_some()
        assert status_of(reply) == 200

    await over_loopback(work, Limits(connections=2))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("[::1]:0", "::1", 0),
        (" localhost:65535 ", "localhost", 65_535),
    ],
)
def test_a_bind_is_read(text: str, host: str, port: int) -> None:
    assert read_bind(text) == Bind(host, port, fall_back=False)


@pytest.mark.parametrize(
    "text", ["", ":8080", "8080", "host:", "host:65536", "host:-1", "::1:80", "[]:1", "h:80x"]
)
def test_what_is_no_bind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        read_bind(text)


async def test_a_taken_port_is_named_and_the_default_one_gives_way() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"127.0.0.1:{port} .*--http HOST:PORT"):
            open_listeners(Bind("127.0.0.1", port, fall_back=False))
        listeners = open_listeners(Bind("127.0.0.1", port, fall_back=True))
        assert urls_of(listeners)[0].rsplit(":", 1)[1] != f"{port}/"
        for listener in listeners:
            await listener.aclose()
    with pytest.raises(PeerError, match="--no-http"):
        open_listeners(Bind("203.0.113.1", 80, fall_back=True))
