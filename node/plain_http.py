"""What a plain GET from a web server is, of which nothing is believed.

Left out of HTTP: cookies, compressed bodies, proxies and certificates from the environment
(``HTTPS_PROXY``, ``SSL_CERT_FILE`` and .netrc are not looked at). Where a redirect may lead and what
an answer may be is for who asks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import trio

MAX_REDIRECTS = 3
SLOWEST = 16 * 1024  # bytes/s
ABSENT = frozenset({403, 404, 410})  # object stores say 403 for what does not exist
REDIRECTS = frozenset({301, 302, 303, 307, 308})


def transport(connections: int) -> httpx.AsyncHTTPTransport:
    """A client's connections: so many at most."""
    limits = httpx.Limits(max_connections=connections, keepalive_expiry=30.0)
    return httpx.AsyncHTTPTransport(trust_env=False, limits=limits)


def request(url: httpx.URL, timeout: float, offset: int = 0) -> httpx.Request:
    """A GET, of what follows ``offset`` bytes. ``timeout``: seconds of silence, in each phase."""
    headers = {"user-agent": "barnraise", "accept-encoding": "identity", "accept": "*/*"}
    if offset:
        headers["range"] = f"bytes={offset}-"
    times = httpx.Timeout(timeout, pool=None).as_dict()
    return httpx.Request("GET", url, headers=headers, extensions={"timeout": times})


@asynccontextmanager
async def released(response: httpx.Response) -> AsyncIterator[httpx.Response]:
    """Give the connection back afterwards, also when cancelled."""
    try:
        yield response
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await response.aclose()


def is_plain(response: httpx.Response) -> bool:
    """Whether the body is sent as it is."""
    encoding: str = response.headers.get("content-encoding", "identity")
    return encoding.lower() == "identity"
