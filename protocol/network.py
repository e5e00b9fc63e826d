"""The seam between the protocol and whatever carries its bytes.

Two implementations exist: ``barnraise.protocol.libp2p_network`` (TCP, Noise,
yamux) and ``barnraise.protocol.memory_network`` (for tests and simulation, with
latency, bandwidth, loss and partitions). Everything above this line runs on
either without knowing which.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

Way = Literal["direct", "hole-punched", "relayed"]
"""How a connection goes: TCP from end to end, TCP opened from both sides at once, or through a relay."""


class Stream(Protocol):
    """A reliable, ordered, bidirectional byte stream to one authenticated peer."""

    @property
    def peer_id(self) -> str:
        """The peer's libp2p id (base58), proven by the transport's handshake."""

    async def read(self, limit: int) -> bytes:
        """Return 1 to ``limit`` bytes, or ``b""`` once the peer closed its side.

        Raises:
            PeerError: the stream was reset or the connection is gone.
        """

    async def write(self, data: bytes) -> None:
        """Send all of ``data``, waiting while the peer's window is full.

        Raises:
            PeerError: the stream was reset or the connection is gone.
        """

    async def close(self) -> None:
        """Close our side gracefully; never raises, safe to call twice."""

    async def reset(self) -> None:
        """Abandon the stream in both directions; never raises, safe to call twice."""


Handler = Callable[[Stream], Awaitable[None]]


class Network(Protocol):
    """A host: it has an identity, listens, dials, and opens streams."""

    @property
    def peer_id(self) -> str:
        """Our own libp2p id (base58)."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The full multiaddrs (``.../p2p/<peer id>``) where others may reach us."""

    @property
    def bytes_in(self) -> int:
        """Bytes received since the start, over all connections."""

    @property
    def bytes_out(self) -> int:
        """Bytes sent since the start, over all connections."""

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve ``protocol``: ``handler`` runs once per inbound stream.

        Whatever ``handler`` raises ends that stream (reset), never the host.
        When it returns the stream is closed.
        """

    async def connect(self, address: str) -> str:
        """Connect to a full multiaddr and return the peer id proven there.

        Raises:
            PeerError: unreachable, refused, timed out, or another peer answered.
        """

    async def open_stream(self, peer_id: str, protocol: str) -> Stream:
        """Open a stream to a peer that is connected or was connected before.

        Raises:
            PeerError: not connected, or the peer does not speak ``protocol``.
        """

    def connected(self, peer_id: str) -> bool:
        """Whether a connection to ``peer_id`` is open now."""

    def way(self, peer_id: str) -> Way | None:
        """How the connection to ``peer_id`` goes; None: there is none now."""

    def observed(self, peer_id: str) -> str:
        """Where the connection to ``peer_id`` leads, as ``/ip4/HOST/tcp/PORT``; ``""`` if unknown.

        Behind a router with NAT that is the router's address, as seen here.
        """

    async def dial_back(self, peer_id: str, port: int) -> str:
        """Dial a connected peer anew, at the host it is observed at and this port, and hang up.

        Returns the full address that answered and proved to be ``peer_id``.

        Raises:
            PeerError: it is not connected, or nobody or somebody else answers there.
        """


class Detours(Protocol):
    """Ways around NAT that a network may have; see ``barnraise.protocol.circuit``.

    Attributes:
        punched, failed: hole punches since the start, and ``last_failure`` why.
        relayed: connections through a relay that carried more than the arranging of one.
    """

    punched: int
    failed: int
    relayed: int
    last_failure: str

    async def reserve(self, relay: str) -> tuple[float, bool]:
        """Let the connected peer ``relay`` call us; for how long (s), and whether it carries shards.

        Raises:
            PeerError, MalformedError: it does not.
        """


NetworkContext = AbstractAsyncContextManager[Network]
