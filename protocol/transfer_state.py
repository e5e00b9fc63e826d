"""What ``transfer`` keeps: its settings, a version, a neighbour, and the measured upload."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from barnraise.protocol.bitmaps import Counts, to_bytes
from barnraise.protocol.tree_effects import Send
from barnraise.protocol.tree_messages import Bitmap

EARLY = 16  # bitmaps kept of each neighbour for versions that we do not know yet
CROSSING = 1.0  # seconds in which an order may still name what was sent already


class TransferConfig(Struct, frozen=True):
    """Bounds and times (seconds) of one node's transfers.

    ``slots``: shards uploaded at once until the upload is measured; after that one
    for each ``slot_rate`` bytes/s of it, at most ``max_slots`` (0: serve nobody). ``order``: shards named
    in one standing order. ``copies``: the origin's limit on what it uploads of a
    version, in copies of it (None: no limit); beyond it only shards go out that no
    neighbour holds or that a starved node orders. ``slow_fraction``: of its fair share;
    below it, three times in a row, an eager child is demoted. ``floor``: bytes/s below
    which a sender counts as trickling (half of the smallest cap that a node may have).
    ``inbound``: neighbours asked at a time (0: all), for a node under a download cap: each
    sends a whole window before it feels that it is read slowly.
    """

    slots: int = 2
    max_slots: int = 2
    slot_rate: float = 6.9e6
    order: int = 4
    copies: float | None = None
    progress_timeout: float = 5.0
    starved_after: float = 10.0
    strikes: int = 3
    mute: float = 60.0
    versions: int = 4
    slow_fraction: float = 0.25
    floor: float = 16e3
    inbound: int = 0


class Stats(Struct):
    """Shards so far. ``duplicates`` were refused on arrival: here already, or on their way."""

    started: int = 0
    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    duplicates: int = 0
    timeouts: int = 0
    trickles: int = 0
    corrupt: int = 0


class VersionState:
    """One policy version: what is here, what is on its way, how rare each shard is nearby."""

    __slots__ = (
        "all",
        "counts",
        "have",
        "incoming",
        "on_way",
        "overtaken",
        "progress_at",
        "sent_bytes",
        "sizes",
        "starved",
        "total",
        "wanted",
    )

    def __init__(self, sizes: Sequence[int], now: float, *, wanted: bool) -> None:
        self.sizes: list[int] = []
        self.all = 0
        self.total = 0  # bytes
        self.extend(sizes)
        self.have = 0
        self.incoming = 0  # the keys of on_way, as a mask
        self.on_way: dict[int, str] = {}  # shard: sender
        self.counts = Counts()
        self.wanted = wanted
        self.starved = 0  # times in a row that nothing came for long
        self.progress_at = now
        self.sent_bytes = 0
        self.overtaken = 0  # shards taken away from slow senders at the end

    def extend(self, sizes: Sequence[int]) -> None:
        """Take the sizes of further shards from the whole list."""
        self.sizes += sizes[len(self.sizes) :]
        self.all = (1 << len(self.sizes)) - 1
        self.total = sum(self.sizes)

    @property
    def missing(self) -> int:
        """What to ask for: wanted, not here, not on its way."""
        return self.all & ~self.have & ~self.incoming if self.wanted else 0

    @property
    def complete(self) -> bool:
        """Whether every shard known so far is here."""
        return self.have == self.all


class Order(Struct):
    """A neighbour's standing order, as masks."""

    mask: int
    busy: int
    starved: bool
    full: bool = False  # so much is busy that nothing is to be pushed


class PeerState:
    """What we know of one neighbour, and what is under way between us."""

    __slots__ = (
        "asked",
        "begun_at",
        "busy_told",
        "eager",
        "early",
        "early_lost",
        "given",
        "got",
        "held_up_at",
        "holds",
        "just_sent",
        "muted_until",
        "orders",
        "progress_at",
        "rate",
        "receiving",
        "sending",
        "sent_at",
        "slow",
        "spared_until",
        "started_at",
        "strikes",
        "told",
        "window_at",
        "window_got",
    )

    def __init__(self, muted_until: float) -> None:
        self.eager = False
        self.holds: dict[int, int] = {}  # by version: announced, or being sent to it by us
        self.early: dict[int, int] = {}  # the same of versions that we take no part in, as yet
        self.early_lost = False
        self.orders: dict[int, Order] = {}  # what it wants of us
        self.asked: dict[int, tuple[int, ...]] = {}  # what we want of it
        self.busy_told: dict[int, int] = {}  # what we told it not to push
        self.told: dict[int, int] = {}  # by version: what it knows that we hold
        self.receiving: tuple[int, int] | None = None
        self.begun_at = 0.0
        self.progress_at = 0.0
        self.got = 0  # bytes of the shard on its way
        self.window_at = 0.0  # its rate is judged from here on
        self.window_got = 0
        self.spared_until = 0.0  # late, but through no fault of its sender
        self.given: dict[int, int] = {}  # bytes sent to it, by version
        self.sending: tuple[int, int] | None = None
        self.just_sent: dict[int, int] = {}  # without a pause since the first of them
        self.sent_at = -math.inf
        self.started_at = 0.0
        self.held_up_at = 0.0
        self.rate = 0.0  # to it, bytes/s, a moving average
        self.slow = 0
        self.strikes = 0
        self.muted_until = muted_until


def note_early(peer: PeerState, version: int, mask: int, *, whole: bool) -> None:
    """``peer`` announced shards of a version that may become ours; ``whole``: that is all of its bitmap."""
    if not whole:
        if version in peer.early:
            peer.early[version] |= mask
        return
    before = peer.early.pop(version, None)
    if before is not None and not mask:
        return  # it has left
    peer.early[version] = mask
    if len(peer.early) > EARLY:
        del peer.early[next(iter(peer.early))]
        peer.early_lost = True


def unhold(state: VersionState, peer: PeerState, version: int, mask: int) -> None:
    """``peer`` does not hold the shards of ``mask`` after all."""
    mask &= peer.holds.get(version, 0)
    if mask:
        state.counts.subtract(mask)
        peer.holds[version] &= ~mask


def tell(name: str, peer: PeerState, version: int, state: VersionState, *, ask: bool) -> Send:
    """Say to neighbour ``name`` which shards are here; ``ask``: and have it say the same."""
    peer.told[version] = state.have
    return Send(name, Bitmap(version=version, bits=to_bytes(state.have), ask=ask))
