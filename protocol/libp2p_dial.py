"""TCP connections that all leave from one port, so that a router with NAT translates them alike.

A hole is punched from the port that the connection to the relay comes from: only for
that one is it known which port of the router stands for it.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

import trio


def reserve_port() -> socket.socket:
    """A port of our own for outgoing IPv4 connections, held as long as the socket is open."""
    holder = _shared()
    holder.bind(("0.0.0.0", 0))
    return holder


async def open_from(port: int, host: str, to: int) -> trio.SocketStream:
    """Connect to ``host`` (an IPv4 address) from our ``port``; OSError as ``connect`` raises it."""
    plain = _shared()
    plain.setblocking(False)
    tcp = trio.socket.from_stdlib_socket(plain)
    try:
        await tcp.bind(("0.0.0.0", port))
        await tcp.connect((host, to))
    except BaseException:
        tcp.close()
        raise
    return trio.SocketStream(tcp)


async def open_tcp(host: str, to: int, port: int | None) -> trio.SocketStream:
    """Connect to ``host``, from our own ``port`` where that is possible.

    It is not for IPv6. While an earlier connection between the same two ports lingers the
    system chooses another port, from which holes can be punched as well.
    """
    if port is not None:
        found = await trio.socket.getaddrinfo(host, to, family=socket.AF_UNSPEC, type=socket.SOCK_STREAM)
        if found and found[0][0] == socket.AF_INET:
            place = str(found[0][4][0])
            try:
                return await open_from(port, place, to)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                    raise
            return await open_from(0, place, to)
    return await trio.open_tcp_stream(host, to)


def _shared() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with suppress(AttributeError, OSError):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return made
