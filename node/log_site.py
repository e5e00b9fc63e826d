"""Where a static log (c2sp.org/tlog-tiles) is read from: a web site or a folder, both trusted with nothing.

A file is one plain GET (``plain_http``) whose size is bounded before anything is read, and redirects
lead nowhere but to the same scheme, host and port.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

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
from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.mirrors import check_mirror
from barnraise.protocol.wire import printable

CONNECTIONS = 8
TRIES = 6
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


class LogSource(Protocol):
    """Gives the files of a log."""

    async def get(self, path: str, limit: int) -> bytes | None:
        """The file at ``path``, of at most ``limit`` bytes; None: there is none.

        Raises:
            PeerError: it could not be had, after all tries.
            MalformedError: what is served there is longer, or not the plain file.
        """


class LogSite:
    """The log below a base URL (https, or http to this machine). Several tasks may use it at once.

    Args:
        base: where ``checkpoint`` and ``tile/`` are.
        timeout: seconds of silence after which a try is given up.
        pause: seconds before the second try; doubled before each further one.

    Raises:
        MalformedError: ``base`` is no plain URL.
    """

    def __init__(self, base: str, timeout: float = 20.0, pause: float = 0.5) -> None:
        check_mirror(base)
        self.base = base.rstrip("/") + "/"
        self._timeout, self._pause = timeout, pause
        self._transport = transport(CONNECTIONS)

    async def get(self, path: str, limit: int) -> bytes | None:
        trouble = ""
        for tries in range(TRIES):
            if tries:
                await trio.sleep(self._pause * 2 ** (tries - 1))
            with trio.move_on_after(2 * self._timeout + limit / SLOWEST) as scope:
                try:
                    return await self._once(path, limit)
                except PeerError as error:
                    trouble = str(error)
                except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
                    trouble = printable(f"{type(error).__name__} {error}".strip(), 200)
            if scope.cancelled_caught:
                trouble = "it sends too slowly"
        raise PeerError(f"{self.base}{path} cannot be had, tried {TRIES} times: {trouble}")

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def _once(self, path: str, limit: int) -> bytes | None:
        url = httpx.URL(self.base + path)
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._transport.handle_async_request(request(url, self._timeout))
            async with released(answer) as response:
                if response.status_code in REDIRECTS:
                    url = self._redirected(url, response.headers.get("location", ""))
                    continue
                return None if response.status_code in ABSENT else await self._body(response, url, limit)
        raise MalformedError(f"{self.base}{path} redirects more than {MAX_REDIRECTS} times")

    def _redirected(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            target = url.join(location)
        except httpx.InvalidURL as error:
            raise MalformedError(f"{url} redirects to {printable(location, 200)!r}: {error}") from error
        same = (target.scheme, target.host, target.port) == (url.scheme, url.host, url.port)
        if not same or target.userinfo or not location:
            raise MalformedError(
                f"{url} redirects to {printable(location, 200)!r}: that is another place than was named"
            )
        return target

    async def _body(self, response: httpx.Response, url: httpx.URL, limit: int) -> bytes:
        status = response.status_code
        if status != 200:
            kind = PeerError if status in _BUSY else MalformedError
            raise kind(f"{url} answers with HTTP status {status}")
        if not is_plain(response):
            raise MalformedError(f"{url} is compressed: a log's files are served as they are")
        length = response.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 12 or int(length) > limit):
            raise MalformedError(f"{url} offers {printable(length, 20)} bytes; at most {limit} can be right")
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > limit:
                raise MalformedError(f"{url} sends more than the {limit} bytes that can be right")
        return bytes(data)


class LogDirectory:
    """A folder with the same files, such as ``RUN/log``."""

    def __init__(self, folder: Path) -> None:
        self.base = f"{folder}/"
        self._folder = folder

    async def get(self, path: str, limit: int) -> bytes | None:
        try:
            with (self._folder / path).open("rb") as file:
                data = file.read(limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PeerError(f"cannot read {self._folder / path} ({error.strerror})") from error
        if len(data) > limit:
            raise MalformedError(f"{self._folder / path} has more than the {limit} bytes that can be right")
        return data

    async def close(self) -> None:
        """Nothing is open."""
