"""Where a host listens, and which addresses it may tell others."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Sequence
from contextlib import suppress

import psutil
import trio

from barnraise.protocol.errors import PeerError

MAX_ADDRESSES = 16


async def listen_on(address: str) -> list[trio.SocketListener]:
    """Listen on ``/ip4|ip6/HOST/tcp/PORT`` (port 0: any free one).

    Raises:
        PeerError: malformed, not an address of this machine, or the port is in use; says what to do.
    """
    parts = address.strip("/").split("/")
    if len(parts) != 4 or parts[0] not in ("ip4", "ip6") or parts[2] != "tcp" or not parts[3].isdigit():
        raise PeerError(f"cannot listen on {address!r}; write it like /ip4/0.0.0.0/tcp/4600")
    host, port = parts[1], int(parts[3]) if len(parts[3]) <= 5 else 65_536
    if port > 65_535:  # the system would take the remainder, a port that nobody named
        raise PeerError(f"cannot listen on {address[:100]!r}: a port is a number from 0 to 65535")
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
        if code == errno.EADDRNOTAVAIL:
            raise PeerError(
                f"cannot listen on {host}: it is no address of this machine; "
                f"/ip{'6/::' if parts[0] == 'ip6' else '4/0.0.0.0'}/tcp/{port} takes all that it has"
            ) from error
        raise PeerError(f"cannot listen on {address}: {error}") from error
    except (ValueError, OverflowError) as error:
        raise PeerError(f"cannot listen on {address}: {error}") from error


def dialable(listeners: Sequence[trio.SocketListener], peer_id: str) -> list[str]:
    """Full multiaddrs of ``listeners``; a wildcard stands for loopback and every interface."""
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
