"""Shards from static file hosts: real servers on loopback, honest and otherwise."""

from __future__ import annotations

import contextlib
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node import webseed as webseed_module
from barnraise.node.webseed import WebSeed
from barnraise.protocol.bandwidth import Pacer
from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.mirrors import check_mirror, is_loopback, shard_path, shard_url
from barnraise.protocol.shards import BadShardError

DATA = random.Random(1).randbytes(300_000)
NAME = sha256(DATA).digest()
PATH = f"/{shard_path(NAME)}"


@dataclass
class Host:
    """An HTTP server whose answers a test decides; ``answer(handler)`` writes the whole response."""

    answer: Callable[[Any], None]
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""


Serve = Callable[[Callable[[Any], None]], Host]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[Any], None]) -> Host:
        host = Host(answer)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                host.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                with contextlib.suppress(OSError):
                    host.answer(self)

            def log_message(self, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *args: None  # type: ignore[method-assign]  # clients hang up here
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        host.url = f"http://127.0.0.1:{server.server_port}"
        return host

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler: Any, body: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def cut_off(handler: Any) -> None:
    handler.close_connection = True
    handler.wfile.flush()
    handler.connection.shutdown(2)


async def fetched(host: Host | str, timeout: float = 5.0, **more: Any) -> bytes | None:
    seed = WebSeed(host if isinstance(host, str) else host.url, timeout=timeout, **more)
    try:
        with trio.fail_after(30):
            return await seed.fetch(NAME, len(DATA))
    finally:
        await seed.close()


async def test_a_shard_comes_from_the_layout_that_the_store_has(tmp_path: Path) -> None:
    from barnraise.protocol.store import DiskStore

    DiskStore(tmp_path / "site" / "shards").put(NAME, DATA)

    class Site(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        arrived: list[int] = []
        url = f"http://127.0.0.1:{server.server_port}/site"
        assert await fetched(url, received=arrived.append) == DATA
        assert sum(arrived) == len(DATA)
        seed = WebSeed(url)
        assert await seed.fetch(b"?" * 32, 100) is None
        await seed.close()
        await seed.close()
    finally:
        server.shutdown()
        server.server_close()


async def test_requests_are_plain_whatever_the_environment_says(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    host = serve(lambda handler: send(handler, DATA, Set_Cookie="who=you; Path=/"))
    seed = WebSeed(host.url)
    assert await seed.fetch(NAME, len(DATA)) == DATA
    assert await seed.fetch(NAME, len(DATA)) == DATA
    await seed.close()
    for path, headers in host.asked:
        assert path == PATH
        assert headers["accept-encoding"] == "identity"
        assert not headers.keys() & {"cookie", "authorization", "range", "referer"}


async def test_a_flipped_bit_is_the_mirrors_fault(serve: Serve) -> None:
    host = serve(lambda handler: send(handler, DATA[:-1] + bytes([DATA[-1] ^ 1])))
    with pytest.raises(BadShardError, match="corrupt"):
        await fetched(host)


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: send(handler, DATA + b"more"),
        lambda handler: send(handler, b"<html>not found</html>"),
        lambda handler: send(handler, DATA, length=10**15),
        lambda handler: send(handler, DATA, Content_Encoding="gzip"),
        lambda handler: send(handler, DATA, 206, Content_Range="bytes 5-99/100"),
        lambda handler: send(handler, DATA, 206),
    ],
    ids=["longer", "another", "claims-much", "compressed", "wrong-range", "no-range"],
)
async def test_a_body_that_cannot_be_the_shard_is_refused_at_its_header(
    serve: Serve, answer: Callable[[Any], None]
) -> None:
    arrived: list[int] = []
    host = serve(answer)
    with pytest.raises(BadShardError):
        await fetched(host, received=arrived.append)
    assert not arrived
    assert len(host.asked) == 1


async def test_an_endless_body_of_no_stated_length_is_not_read_to_its_end(serve: Serve) -> None:
    def endless(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    arrived: list[int] = []
    with pytest.raises(BadShardError, match="more than"):
        await fetched(serve(endless), received=arrived.append)
    assert sum(arrived) <= len(DATA)


async def test_a_body_cut_in_the_middle_is_continued_where_it_stopped(serve: Serve) -> None:
    def half(handler: Any) -> None:
        begin = int(handler.headers.get("range", "bytes=0-")[6:-1])
        rest = DATA[begin:]
        part = rest[: max(100_000, 1)]
        status = 206 if begin else 200
        ranged = {"Content_Range": f"bytes {begin}-{len(DATA) - 1}/{len(DATA)}"} if begin else {}
        send(handler, part, status, length=len(rest), **ranged)
        if len(part) < len(rest):
            cut_off(handler)

    arrived: list[int] = []
    host = serve(half)
    assert await fetched(host, received=arrived.append) == DATA
    assert [headers.get("range") for _, headers in host.asked] == [None, "bytes=100000-", "bytes=200000-"]
    assert sum(arrived) == len(DATA)  # nothing came twice


async def test_a_host_without_ranges_begins_again(serve: Serve) -> None:
    def stubborn(handler: Any) -> None:
        first = len(host.asked) == 1
        send(handler, DATA[:50_000] if first else DATA, length=len(DATA))
        if first:
            cut_off(handler)

    host = serve(stubborn)
    assert await fetched(host) == DATA
    assert len(host.asked) == 2


async def test_a_host_that_always_cuts_is_struck_not_banned(serve: Serve) -> None:
    def never(handler: Any) -> None:
        send(handler, DATA[:1000], length=len(DATA))
        cut_off(handler)

    host = serve(never)
    seed = WebSeed(host.url)
    with pytest.raises(PeerError, match=r"of 300000 bytes") as caught:
        await seed.fetch(NAME, len(DATA))
    assert not isinstance(caught.value, BadShardError)
    assert len(host.asked) <= 1 + webseed_module.RESUMES
    assert seed.failures == 1
    await seed.close()


async def test_silence_and_trickles_are_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(handler: Any) -> None:
        send(handler, DATA[:1000], length=len(DATA))
        handler.wfile.flush()
        time.sleep(3)

    def trickle(handler: Any) -> None:
        send(handler, b"", length=len(DATA))
        for byte in DATA:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.05)

    def slow_header(handler: Any) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            time.sleep(0.1)

    monkeypatch.setattr(webseed_module, "SLOWEST", 10**7)
    for answer in (silent, trickle, slow_header):
        begin = trio.current_time()
        with pytest.raises(PeerError):
            await fetched(serve(answer), timeout=0.3)
        assert trio.current_time() - begin < 2.5


@pytest.mark.parametrize("status", [400, 401, 416, 429, 500, 503])
async def test_errors_are_named_and_counted_once_for_all_that_waited(serve: Serve, status: int) -> None:
    host = serve(lambda handler: send(handler, b"sorry", status))
    seed = WebSeed(host.url)
    caught: list[str] = []

    async def one() -> None:
        try:
            await seed.fetch(NAME, len(DATA))
        except PeerError as error:
            caught.append(str(error))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(one)
    assert len(caught) == 4
    assert all(str(status) in text for text in caught)
    assert seed.failures == 1
    await seed.close()


@pytest.mark.parametrize("status", [403, 404, 410])
async def test_what_is_not_there_is_no_fault(serve: Serve, status: int) -> None:
    assert await fetched(serve(lambda handler: send(handler, b"x" * 1000, status))) is None


async def test_a_host_that_does_not_answer_at_all_is_unreachable() -> None:
    with pytest.raises(PeerError, match="cannot be reached"):
        await fetched("http://127.0.0.1:1")


async def test_a_redirect_within_the_host_is_followed(serve: Serve) -> None:
    def moved(handler: Any) -> None:
        if handler.path.startswith("/new"):
            send(handler, DATA)
        else:
            send(handler, b"", 302, Location=f"/new{handler.path}?signature=1")

    assert await fetched(serve(moved)) == DATA


@pytest.mark.parametrize(
    "location",
    [
        "https://example.org/x",
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://user:secret@127.0.0.1/x",
        "http://192.168.0.1/admin",
        "http://localhost:1/x",
        "//169.254.169.254/latest",
        "",
        "http://[::1",
        "gopher:\n",
    ],
)
async def test_redirects_to_elsewhere_are_refused(serve: Serve, location: str) -> None:
    host = serve(lambda handler: send(handler, b"", 302, Location=location.replace("\n", "")))
    with pytest.raises(PeerError, match="redirects to"):
        await fetched(host)
    assert len(host.asked) == 1


async def test_redirects_in_a_circle_end(serve: Serve) -> None:
    host = serve(lambda handler: send(handler, b"", 307, Location=handler.path))
    with pytest.raises(PeerError, match="more than"):
        await fetched(host)
    assert len(host.asked) == 1 + webseed_module.MAX_REDIRECTS


def test_https_may_redirect_to_another_public_name_but_to_no_address() -> None:
    import httpx

    seed, here = WebSeed("https://mirror.example/run"), httpx.URL("https://mirror.example/run/shards/aa/b")
    assert seed._redirected(here, "https://cdn.example/x?sig=1").host == "cdn.example"
    for bad in ("http://mirror.example/x", "https://127.0.0.1/x", "https://10.0.0.1/", "https://localhost/x"):
        with pytest.raises(PeerError):
            seed._redirected(here, bad)


async def test_garbage_instead_of_http_is_an_error_like_any_other(serve: Serve) -> None:
    def garbage(handler: Any) -> None:
        handler.wfile.write(b"\0\xff" * 5000)
        cut_off(handler)

    with pytest.raises(PeerError):
        await fetched(serve(garbage))


async def test_its_bytes_count_against_the_cap(serve: Serve) -> None:
    down = Pacer(150_000)
    begin = trio.current_time()
    assert await fetched(serve(lambda handler: send(handler, DATA)), down=down) == DATA
    assert 1.6 < trio.current_time() - begin < 4
    assert down.total == len(DATA)


async def test_a_cancelled_fetch_leaves_a_mirror_that_works(serve: Serve) -> None:
    def slow(handler: Any) -> None:
        send(handler, DATA[:1000], length=len(DATA))
        handler.wfile.flush()
        time.sleep(1 if len(host.asked) == 1 else 0)
        handler.wfile.write(DATA[1000:])

    host = serve(slow)
    seed = WebSeed(host.url)
    with trio.move_on_after(0.2):
        await seed.fetch(NAME, len(DATA))
    assert await seed.fetch(NAME, len(DATA)) == DATA
    assert seed.failures == 0
    await seed.close()


def test_an_unknown_certificate_is_not_trusted() -> None:
    context = webseed_module.httpx.create_ssl_context(trust_env=False)
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize(
    "url",
    [
        "https://mirror.example",
        "https://mirror.example/",
        "https://mirror.example:8443/a/b-c_d.e~f/",
        "https://192.0.2.1/x",
        "https://[2001:db8::1]:443/x",
        "http://127.0.0.1:8000/run",
        "http://localhost/run",
        "http://[::1]:80",
    ],
)
def test_plain_urls_are_mirrors(url: str) -> None:
    check_mirror(url)
    assert is_loopback(url) == url.startswith("http:")
    assert shard_url(url, b"\xab" * 32) == f"{url.rstrip('/')}/shards/ab/{'ab' * 32}"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "mirror.example",
        "ftp://mirror.example",
        "http://mirror.example",
        "http://127.0.0.1.example.org",
        "http://127.0.0.1@example.org/",
        "https://user@mirror.example",
        "https://mirror.example/x?y",
        "https://mirror.example/x#y",
        "https://mirror.example/../x",
        "https://mirror.example/./x",
        "https://mirror.example//x",
        "https://mirror.example:0",
        "https://mirror.example:99999",
        "https://mirror.example/x\n",
        "https://mirror.example/a b",
        "https://mirror.example\\x",
        "HTTPS://mirror.example",
        "https://-x",
        "https://" + "a" * 300,
    ],
)
def test_anything_else_is_not(url: str) -> None:
    with pytest.raises(MalformedError):
        check_mirror(url)


@given(st.text(max_size=60))
def test_no_text_breaks_the_check(text: str) -> None:
    for url in (text, f"https://{text}", f"http://127.0.0.1{text}"):
        try:
            check_mirror(url)
        except MalformedError:
            continue
        assert webseed_module.httpx.URL(url).host
