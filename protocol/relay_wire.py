"""The messages of circuit relay v2 and of DCUtR on a stream: varint length, then protobuf.

Formats: libp2p specs, relay/circuit-v2.md and relay/DCUtR.md; the generated classes are
py-libp2p's. Bounded before anything is allocated, and judged field by field afterwards.
"""

from __future__ import annotations

import ipaddress
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.identity import public_key_of
from barnraise.protocol.network import Stream

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
DCUTR_PROTOCOL = "/libp2p/dcutr"
MAX_MESSAGE = 4096
M = TypeVar("M", HopMessage, StopMessage, HolePunch)

OK, REFUSED, LIMIT, DENIED, FAILED, NO_RESERVATION, MALFORMED = 100, 200, 201, 202, 203, 204, 400
REASONS = {
    REFUSED: "it takes no more reservations",
    LIMIT: "its limits are reached",
    DENIED: "it does not allow that",
    FAILED: "it cannot reach that node",
    NO_RESERVATION: "that node has no reservation there",
    MALFORMED: "it did not understand",
}


async def read_message(stream: Stream, type_: type[M]) -> M:
    """One message of ``type_``.

    Raises:
        MalformedError: too long, cut off or no such message.
        PeerError: the stream broke.
    """
    size, shift = 0, 0
    while True:
        byte = await stream.read(1)
        if not byte:
            raise MalformedError(f"the stream ended before a {type_.__name__}")
        size |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
        if shift > 14:
            raise MalformedError(f"a {type_.__name__} is too long")
    if size > MAX_MESSAGE:
        raise MalformedError(f"a {type_.__name__} of {size} bytes is too long")
    data = b""
    while len(data) < size:
        piece = await stream.read(size - len(data))
        if not piece:
            raise MalformedError(f"the stream ended inside a {type_.__name__}")
        data += piece
    message = type_()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedError(f"no {type_.__name__}: {error}") from None
    return message


async def write_message(stream: Stream, message: Any) -> None:
    """Send one message; PeerError if the stream broke."""
    data = message.SerializeToString()
    size, prefix = len(data), b""
    while size >= 0x80:
        prefix += bytes([size & 0x7F | 0x80])
        size >>= 7
    await stream.write(prefix + bytes([size]) + data)


def peer_in(message: Any) -> str:
    """The peer id that a message names.

    Raises:
        MalformedError: none, or not that of an Ed25519 key.
    """
    peer = str(ID(message.peer.id)) if 0 < len(message.peer.id) <= 64 else ""
    public_key_of(peer)
    return peer


def peer_bytes(peer_id: str) -> bytes:
    """A peer id as these messages carry it."""
    return ID.from_string(peer_id).to_bytes()


def packed(observed: str) -> list[bytes]:
    """``/ip4/HOST/tcp/PORT`` as these messages carry addresses; empty for ``""``."""
    return [Multiaddr(observed).to_bytes()] if observed else []


def places(addresses: Any) -> list[tuple[str, int]]:
    """The IPv4 hosts and TCP ports among packed addresses, at most four; anything else is left out.

    Loopback, multicast and unspecified addresses are never dialled on somebody's word.
    """
    found: list[tuple[str, int]] = []
    for data in list(addresses)[:16]:
        try:
            parts = str(Multiaddr(bytes(data[:256]))).split("/")
            ip, port = ipaddress.IPv4Address(parts[2]), int(parts[4])
        except Exception:  # whatever the parser thinks of bytes from strangers
            continue
        fit = parts[1] == "ip4" and parts[3] == "tcp" and len(parts) == 5 and 0 < port < 65_536
        if fit and not (ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip.is_reserved):
            found.append((str(ip), port))
    return found[:4]
