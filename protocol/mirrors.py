"""Mirrors: static file hosts that hold a run's shards, as its manifests name them.

A mirror is a base URL; the shard with digest ``aabb...`` lies at
``<base>/shards/aa/aabb...`` (hex), which is the layout of ``DiskStore``. Mirrors are
named by the operator and visited by every volunteer, so a URL is plain: https, or
http to this very machine; no user, no query, no fragment, no dot segments.
"""

from __future__ import annotations

import ipaddress
import re

from barnraise.protocol.errors import MalformedError

MAX_MIRRORS = 8
FOLDER = "shards"

_URL = re.compile(
    r"(https?)://([A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?"
    r"((?:/[A-Za-z0-9._~-]+)*)/?"
)


def check_mirror(url: str) -> None:
    """Refuse anything but a plain base URL.

    Raises:
        MalformedError: what is wrong with it.
    """
    match = _URL.fullmatch(url)
    if match is None or len(url) > 256:
        raise MalformedError(
            f"{url[:300]!r} is no mirror: it must look like https://host/path, "
            "without user, query or fragment"
        )
    scheme, _, port, path = match.groups()
    if port is not None and not 0 < int(port) < 65_536:
        raise MalformedError(f"mirror {url}: there is no port {port}")
    if {".", ".."} & set(path.split("/")):
        raise MalformedError(f"mirror {url}: '.' and '..' are not allowed in its path")
    if scheme == "http" and not is_loopback(url):
        raise MalformedError(f"mirror {url}: http is allowed to this machine only; use https")


def is_loopback(url: str) -> bool:
    """Whether a mirror's host is this very machine."""
    match = _URL.match(url)
    if match is None:
        return False
    host = match[2].strip("[]").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def shard_path(digest: bytes) -> str:
    """Where a shard lies below the base: ``shards/aa/<hex>``."""
    name = digest.hex()
    return f"{FOLDER}/{name[:2]}/{name}"


def shard_url(base: str, digest: bytes) -> str:
    """The URL of a shard."""
    return f"{base.rstrip('/')}/{shard_path(digest)}"
