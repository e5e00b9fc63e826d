"""Multiaddrs as people type them: checked before anything is dialled."""

from __future__ import annotations

import ipaddress

from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.identity import public_key_of
from barnraise.protocol.wire import printable

EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."


def parse_address(address: str) -> tuple[str, int, str]:
    """Split ``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT/p2p/PEER`` into host, port and peer id.

    Raises:
        PeerError: not an address that can be dialled; the text says what is wrong with it.
    """
    shown = printable(address, 120)
    parts = address.strip().strip("/").split("/")
    if len(parts) != 6 or parts[2] != "tcp" or parts[4] != "p2p" or not parts[1]:
        raise PeerError(f"{shown!r} is not a coordinator's or node's full address; it looks like {EXAMPLE}")
    kind, host, _, port, _, peer_id = parts
    try:
        if kind in ("ip4", "ip6"):
            if ipaddress.ip_address(host).version != int(kind[2]):
                raise ValueError(f"{host} is not {kind}")
        elif kind not in ("dns", "dns4", "dns6"):
            raise ValueError(f"unknown protocol {kind}")
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
            raise ValueError(f"no such port: {port}")
        public_key_of(peer_id)
    except (ValueError, MalformedError) as error:
        text = printable(str(error), 200)
        raise PeerError(f"{shown!r} cannot be dialled ({text}); an address looks like {EXAMPLE}") from error
    return host, int(port), peer_id


def household(ip: str) -> str:
    """Whose limits an IP address counts towards: its own, or of IPv6 its /64, which costs its holder nothing.

    Anything else (a name, a host in memory) stands for itself.
    """
    try:
        parsed = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return ip[:256].lower()
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))


def household_of(address: str) -> str:
    """``household`` of the host in ``/ip4|ip6|dns/HOST/...``; empty if there is none."""
    parts = address.split("/", 3)
    return household(parts[2]) if len(parts) > 2 else ""


def parse_circuit(address: str) -> tuple[str, str] | None:
    """Split ``<relay's address>/p2p-circuit/p2p/PEER`` into the relay's address and the peer id.

    None for an address that goes through no relay.

    Raises:
        PeerError: it goes through one and is malformed.
    """
    relay, found, target = address.strip().rstrip("/").partition("/p2p-circuit/p2p/")
    if not found:
        return None
    parse_address(relay)
    try:
        public_key_of(target)
    except MalformedError as error:
        raise PeerError(f"{printable(address, 120)!r} names no node behind its relay: {error}") from error
    return relay, target
