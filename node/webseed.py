"""Shards from a mirror over HTTPS, trusted no more than a peer's.

Each shard is one GET; its size is known before and nothing beyond it is read, its
SHA-256 is checked. A body that breaks off is continued by a ranged request. What is
surprising in HTTP clients is left out (``plain_http``), and redirects are followed only
``MAX_REDIRECTS`` deep, never to another scheme, to an address instead of a name, or away
from this machine's own host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import httpx
import trio

from barnraise.node.plain_http import (
    ABSENT,
    MAX_REDIRECTS,
    REDIRECTS,
    SLOWEST,
    is_plain,
    released,
    request,
    transport,
)
from barnraise.protocol.bandwidth import WINDOW, Pacer
from barnraise.protocol.errors import PeerError
from barnraise.protocol.manifest import check_shard
from barnraise.protocol.messages import MAX_SHARD
from barnraise.protocol.mirrors import check_mirror, is_loopback, shard_url
from barnraise.protocol.shards import PROGRESS_S, BadShardError, off_loop
from barnraise.protocol.wire import printable

CONNECTIONS = 4
RESUMES = 3  # of one shard, each after some progress


class WebSeed:
    """One mirror; a ``barnraise.node.weights.Donor``. ``fetch`` may run in several tasks at once.

    Args:
        base: the mirror's base URL.
        down: the cap that its bytes count against.
        received: told of bytes of shards as they arrive.
        timeout: seconds without progress after which a request is given up.

    Raises:
        MalformedError: ``base`` is no mirror's URL.
    """

    def __init__(
        self,
        base: str,
        *,
        down: Pacer | None = None,
        received: Callable[[int], None] = lambda size: None,
        timeout: float = PROGRESS_S,
    ) -> None:
        check_mirror(base)
        self.base = base
        self.failures = 0
        self.received = 0
        self.waits: Callable[[], bool] = lambda: True
        self.foreseen = False  # what is read here never arrived before
        self._down = down
        self._received = received
        self._timeout = timeout
        self._transport: httpx.AsyncHTTPTransport | None = None

    @property
    def waiting(self) -> int:
        """0: what waits in the system's buffers is not known."""
        return 0

    @property
    def room(self) -> int:
        """As of a peer; it is not known either."""
        return WINDOW

    async def fetch(self, digest: bytes, size: int) -> bytes | None:
        """The shard named ``digest`` of exactly ``size`` bytes, verified; ``None`` if it is not there.

        Raises:
            BadShardError: something else was sent.
            PeerError: unreachable, refused, silent for ``timeout`` seconds, or too slow.
        """
        if not 0 < size <= MAX_SHARD:
            raise ValueError(f"a shard has 1 to {MAX_SHARD} bytes, not {size}")
        failures = self.failures
        try:
            data = await self._whole(digest, size)
        except BadShardError:
            raise
        except PeerError:
            if self.failures == failures:  # once, however many requests an outage hit
                self.failures += 1
            raise
        if data is not None and not await off_loop(size, lambda: check_shard(data, digest)):
            raise BadShardError(f"{self.base} sent a corrupt shard {digest.hex()[:16]}")
        return data

    async def close(self) -> None:
        """Close the connections; a later ``fetch`` opens others."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()

    async def _whole(self, digest: bytes, size: int) -> bytes | None:
        shard = _Shard(size, 2 * self._timeout + size / SLOWEST)
        for _ in range(1 + RESUMES):
            before = len(shard.data)
            try:
                if not await self._get(shard_url(self.base, digest), shard):
                    return None
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
                shard.trouble = _reason(error)
            if len(shard.data) == size:
                return bytes(shard.data)
            if len(shard.data) <= before or shard.seconds_left <= 0:
                break
        raise PeerError(
            f"{self.base}: {shard.trouble or 'the body ended too soon'}, "
            f"after {len(shard.data)} of {size} bytes"
        )

    async def _get(self, start: str, shard: _Shard) -> bool:
        """Read more of the shard, through redirects; False if it is not there."""
        url = httpx.URL(start)
        for _ in range(1 + MAX_REDIRECTS):
            async with released(await self._send(url, len(shard.data))) as response:
                if response.status_code in REDIRECTS:
                    url = self._redirected(url, response.headers.get("location", ""))
                    continue
                if response.status_code in ABSENT:
                    return False
                self._judge(response, shard)
                await self._read(response, shard)
                return True
        raise PeerError(f"{self.base} redirects more than {MAX_REDIRECTS} times")

    async def _send(self, url: httpx.URL, offset: int) -> httpx.Response:
        if self._transport is None:
            self._transport = transport(CONNECTIONS)
        # A server that trickles its header restarts the time-out of each read.
        with trio.move_on_after(3 * self._timeout):
            return await self._transport.handle_async_request(request(url, self._timeout, offset))
        raise PeerError(f"{self.base} did not answer within {3 * self._timeout:g} s")

    def _redirected(self, url: httpx.URL, location: str) -> httpx.URL:
        refusal = f"{self.base} redirects to {printable(location)!r}"
        try:
            target = url.join(location)
        except httpx.InvalidURL as error:
            raise PeerError(f"{refusal}: {error}") from error
        if target.scheme != url.scheme or target.userinfo or not location:
            raise PeerError(f"{refusal}: only to plain {url.scheme} URLs it may")
        if (target.host, target.port) == (url.host, url.port):
            return target
        local = is_loopback(self.base) or is_loopback(f"{target.scheme}://{target.host}")
        if local or _is_address(target.host):
            raise PeerError(f"{refusal}: that is another machine, or this one, not a public host's name")
        return target

    def _judge(self, response: httpx.Response, shard: _Shard) -> None:
        """Decide from the header whether the body may be read, and where it begins."""
        status, headers = response.status_code, response.headers
        if status not in (200, 206):
            raise PeerError(f"{self.base} answered with HTTP status {status}")
        if not is_plain(response):
            raise BadShardError(f"{self.base} compresses shards: it must serve them as they are")
        if status == 200:
            shard.data.clear()
        else:
            wanted = f"bytes {len(shard.data)}-{shard.size - 1}/"
            offered = headers.get("content-range", "")
            if offered not in (f"{wanted}{shard.size}", f"{wanted}*"):
                raise BadShardError(
                    f"{self.base} answered with {printable(offered, 60)!r}, not with {wanted}"
                )
        due = shard.size - len(shard.data)
        length = headers.get("content-length", str(due))
        if length != str(due):
            raise BadShardError(f"{self.base} offers {printable(length, 20)} bytes where {due} are due")

    async def _read(self, response: httpx.Response, shard: _Shard) -> None:
        pieces = response.aiter_raw()
        while True:
            begin = trio.current_time()
            piece: bytes | None = None
            with trio.move_on_after(shard.seconds_left) as scope:
                piece = await anext(pieces, None)
            shard.seconds_left -= trio.current_time() - begin
            if scope.cancelled_caught:
                shard.trouble = f"sends less than {SLOWEST // 1024} KiB/s"
                return
            if piece is None:
                return
            if len(shard.data) + len(piece) > shard.size:
                raise BadShardError(f"{self.base} sent more than the {shard.size} bytes of the shard")
            self._received(len(piece))
            self.received += len(piece)
            if self._down is not None:
                await self._down.take(len(piece))
            shard.data += piece


class _Shard:
    """A shard on its way. ``seconds_left``: of waiting for the mirror, our own cap left out."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self.data = bytearray()
        self.seconds_left = seconds
        self.trouble = ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _reason(error: Exception) -> str:
    match error:
        case httpx.ConnectTimeout():
            name = "no connection in time"
        case httpx.ReadTimeout():
            name = "it went silent"
        case httpx.ConnectError():
            name = "cannot be reached"
        case _:
            name = type(error).__name__
    text = printable(str(error), 200)
    return f"{name} ({text})" if text else name
