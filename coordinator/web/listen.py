"""Where the page is served: an address from the command line to listening sockets."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from barnraise.protocol.errors import PeerError

log = logging.getLogger(__name__)

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8080
BACKLOG: Final = 128


@dataclass(frozen=True, slots=True)
class Bind:
    """``HOST:PORT``. ``fall_back``: nobody asked for this port, so any other will do if it is taken."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    fall_back: bool = True


def read_bind(text: str) -> Bind:
    """``HOST:PORT``, with an IPv6 address in brackets; port 0 takes any that is free.

    Raises:
        ValueError: it is none; the message says what is.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    fits = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65_536
    if not colon or not plain or not fits or (":" in plain) != bracketed:
        raise ValueError("write it like 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080")
    return Bind(plain, int(port), fall_back=False)


def open_listeners(bind: Bind) -> list[trio.SocketListener]:
    """Listening sockets for a bind. Needs a running trio.

    Raises:
        PeerError: the address is not one of this machine's, or taken; the message says which.
    """
    try:
        return [_listener(*address) for address in _addresses(bind.host, bind.port)]
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        if bind.fall_back and taken:
            log.warning(
                "port %d is taken, so the page is on another one: choose one with --http HOST:PORT", bind.port
            )
            return open_listeners(Bind(bind.host, 0, fall_back=False))
        cure = "choose another with --http HOST:PORT, or none with --no-http"
        raise PeerError(
            f"cannot serve the page at {bind.host}:{bind.port} ({error.strerror or error}): {cure}"
        ) from error


def urls_of(listeners: Sequence[trio.SocketListener]) -> list[str]:
    """Where a browser on this machine finds them."""
    found = []
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        found.append(f"http://[{local}]:{port}/" if ":" in local else f"http://{local}:{port}/")
    return found


def _addresses(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, tuple[str, int]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    unique = {(family, (str(address[0]), port)) for family, _, _, _, address in found}
    return sorted(unique, key=str)[:8]


def _listener(family: socket.AddressFamily, address: tuple[str, int]) -> trio.SocketListener:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return trio.SocketListener(trio.socket.from_stdlib_socket(listening))
