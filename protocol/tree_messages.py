"""Messages of treecast: the overlay, the tree and the shards that travel over both.

They travel on one control stream per pair of neighbours, except ``Piece``, which
goes ahead of raw bytes on a bulk stream of its own. ``TREE_FRAMES`` gives codes
(50-79) and largest bodies, as ``barnraise.protocol.frames`` does for the
rest. The state machines behind them: ``views``, ``tree``, ``transfer``.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from barnraise.protocol.messages import Address, Digest, Frame, Message, PeerId, Signed, Size, Version

MAX_SHARDS = 262_144  # of one version: 1 TiB in shards of 4 MiB
MAX_INDICES = 64
MAX_SAMPLE = 16
MAX_TTL = 8
MAX_PIECE = 256 * 1024

TREE_PROTOCOL = "/barnraise/1/tree"
BULK_PROTOCOL = "/barnraise/1/bulk"

Ttl = Annotated[int, Meta(ge=0, le=MAX_TTL)]
Hops = Annotated[int, Meta(ge=0, le=1024)]
Index = Annotated[int, Meta(ge=0, lt=MAX_SHARDS)]
Indices = Annotated[tuple[Index, ...], Meta(max_length=MAX_INDICES)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=16)]


class Contact(Message, frozen=True):
    """A node and where it may be dialled; no address means that it only dials out (R1)."""

    peer_id: PeerId
    addresses: Addresses


Sample = Annotated[tuple[Contact, ...], Meta(max_length=MAX_SAMPLE)]


# --- overlay (HyParView). The sender's id is the one that the transport proved.


class OverlayJoin(Message, frozen=True):
    """A newcomer asks for a place in the receiver's active view; always granted."""

    addresses: Addresses


class ForwardJoin(Message, frozen=True):
    """A newcomer on a random walk through the overlay; ``ttl`` steps are left."""

    newcomer: Contact
    ttl: Ttl


class Neighbour(Message, frozen=True):
    """Ask to be in the receiver's active view. ``urgent``: the sender has few, so it is granted."""

    addresses: Addresses
    urgent: bool


class NeighbourReply(Message, frozen=True):
    """Whether the sender took the receiver into its active view."""

    accepted: bool


class LeaveView(Message, frozen=True):
    """The sender took the receiver out of its active view and keeps it in the passive one."""


class Shuffle(Message, frozen=True):
    """Part of ``origin``'s views on a random walk; where it ends, as much goes back to ``origin``."""

    origin: Contact
    ttl: Ttl
    sample: Sample


class ShuffleReply(Message, frozen=True):
    sample: Sample


# --- tree (Plumtree): signed heads, whole over eager links, by id over lazy ones


class Gossip(Message, frozen=True):
    """A signed head (or a part of one) and how many links it has crossed."""

    version: Version
    hops: Hops
    head: Signed


class HeadMark(Message, frozen=True):
    """Names one head: ``id`` is the SHA-256 of its payload."""

    id: Digest
    version: Version
    hops: Hops


class GossipHave(Message, frozen=True):
    """Lazy announcement: the sender holds these heads."""

    marks: Annotated[tuple[HeadMark, ...], Meta(min_length=1, max_length=16)]


class Graft(Message, frozen=True):
    """Make the link eager; send the head with this id if there is one."""

    id: Digest | None


class Prune(Message, frozen=True):
    """Make the link lazy: what came over it had come before."""


class Opened(Message, frozen=True):
    """A signed ``Opening``: the first shards of the version to come (``barnraise.protocol.opening``)."""

    opening: Signed


# --- shards


class Bitmap(Message, frozen=True):
    """Which shards of ``version`` the sender holds: bit i of byte i // 8 (least significant first).

    Trailing zero bytes may be left out. ``ask`` wants the receiver's bitmap in return.
    """

    version: Version
    bits: Annotated[bytes, Meta(max_length=MAX_SHARDS // 8)]
    ask: bool


class Have(Message, frozen=True):
    """The sender verified these shards since its ``Bitmap``."""

    version: Version
    indices: Indices


class Want(Message, frozen=True):
    """A standing order, in place of the one before: send any one of ``indices``, the first ones rather.

    The answer is one shard at a time; its arrival is followed by a new order.
    ``busy``: shards under way from others, not to be pushed; 64 of them, and nothing is
    to be pushed. ``starved``: nothing has come from anybody for a while.
    """

    version: Version
    indices: Indices
    busy: Indices
    starved: bool


class Cancel(Message, frozen=True):
    """Stop sending this shard: it came from somebody else, or too slowly."""

    version: Version
    index: Index


class Unavailable(Message, frozen=True):
    """The sender cannot send this shard after all (deleted, unreadable)."""

    version: Version
    index: Index


class Piece(Message, frozen=True):
    """``size`` raw bytes of a shard follow on the bulk stream, from ``offset`` of ``total``."""

    version: Version
    index: Index
    offset: Size
    size: Annotated[int, Meta(ge=1, le=MAX_PIECE)]
    total: Size


_HEAD = 4 * 1024 * 1024
_VIEW = 16 * 300 * 16 + 8 * 1024

TREE_FRAMES: tuple[Frame, ...] = (
    Frame(50, OverlayJoin, 8 * 1024, "plain"),
    Frame(51, ForwardJoin, 8 * 1024, "plain"),
    Frame(52, Neighbour, 8 * 1024, "plain"),
    Frame(53, NeighbourReply, 64, "plain"),
    Frame(54, LeaveView, 16, "plain"),
    Frame(55, Shuffle, _VIEW, "plain"),
    Frame(56, ShuffleReply, _VIEW, "plain"),
    Frame(60, Gossip, _HEAD, "plain"),
    Frame(61, GossipHave, 4 * 1024, "plain"),
    Frame(62, Graft, 128, "plain"),
    Frame(63, Prune, 16, "plain"),
    Frame(64, Opened, _HEAD, "plain"),
    Frame(70, Bitmap, MAX_SHARDS // 8 + 64, "plain"),
    Frame(71, Have, 1024, "plain"),
    Frame(72, Want, 2048, "plain"),
    Frame(73, Cancel, 64, "plain"),
    Frame(74, Unavailable, 64, "plain"),
    Frame(75, Piece, 128, "plain"),
)
