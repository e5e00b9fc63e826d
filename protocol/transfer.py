"""Which shard goes where: pushes down the tree, rarest-first swaps everywhere else.

Per version a node knows which shards it holds and which its neighbours hold (a
``Bitmap`` first, ``Have`` after that). Who lacks something tells all neighbours; who
lacks nothing tells those alone who do, so that between two that are done not a word is
said. To each neighbour that holds
something it lacks it gives a *standing order* (``Want``): a few shards, the rarest in
its neighbourhood first. An uploader with a free slot serves the rarest shard that is
ordered, or that an eager neighbour lacks and nobody is sending it; the choice is made
when the slot is free and not before, so none grows stale in a queue. A node sends
each neighbour one shard at a time and fills a few slots (two on a home link), so that
a shard is soon whole and can be passed on.

Nothing is believed: no announcement is proof of anything, an order binds nobody. A
shard without progress for 5 s, or that only trickles, is cancelled and asked for
elsewhere, a strike for its sender; one that fails its hash bans its sender. A bitmap
that lies costs a request at most, since every holder of a missing shard has an order.

A state machine without sockets, clock, disk or randomness of its own: events in
(methods), effects out. Sizes are bytes, times seconds of a monotonic clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from barnraise.protocol.arrivals import Arrivals
from barnraise.protocol.bitmaps import from_bytes, to_mask
from barnraise.protocol.downloads import Downloads
from barnraise.protocol.messages import Message
from barnraise.protocol.transfer_state import (
    PeerState,
    Stats,
    TransferConfig,
    VersionState,
    note_early,
    tell,
    unhold,
)
from barnraise.protocol.tree_effects import (
    Complete,
    Effects,
    Report,
    Send,
    StopReceive,
    StopSend,
)
from barnraise.protocol.tree_messages import (
    MAX_SHARDS,
    Bitmap,
    Cancel,
    Have,
    Unavailable,
    Want,
)
from barnraise.protocol.uploads import Uploads


class Transfer:
    """The shards of all versions in flight at one node.

    Attributes:
        arrivals: takes what happens to shards that come in.
    """

    def __init__(self, rng: random.Random, config: TransferConfig | None = None) -> None:
        self.config = config or TransferConfig()
        self.stats = Stats()
        self._peers: dict[str, PeerState] = {}
        self._versions: dict[int, VersionState] = {}  # newest first
        self._uploads = Uploads(self.config, rng, self._peers, self._versions, self.stats)
        self._downloads = Downloads(self.config, rng, self._peers, self._versions)
        self.arrivals = Arrivals(
            self.config, self._peers, self._versions, self.stats, self._downloads, self._uploads
        )
        self._muted: dict[str, float] = {}
        self._checked_at = 0.0

    # --- what the caller may read

    @property
    def wake_at(self) -> float | None:
        """When ``on_time`` is due next, or None."""
        times = [self._downloads.turn_at()]
        for peer in self._peers.values():
            if peer.receiving is not None:
                times.append(self._downloads.judged_at(peer))
            if peer.muted_until > self._checked_at:
                times.append(peer.muted_until)
        for state in self._versions.values():
            if state.wanted and not state.complete:
                times.append(state.progress_at + self._downloads.starves_after(state))
        times += [at for at in self._uploads.held_up_at() if at > self._checked_at]
        earliest = min(times)
        return earliest if earliest < math.inf else None

    def bitmap(self, version: int) -> int:
        """Which shards of ``version`` are here, as a mask; 0 for an unknown version."""
        state = self._versions.get(version)
        return state.have if state is not None else 0

    def missing(self, version: int) -> int:
        """Which shards of ``version`` are wanted, not here and not on their way, as a mask."""
        state = self._versions.get(version)
        return state.missing if state is not None else 0

    def announced(self, name: str, version: int) -> bool:
        """Whether neighbour ``name`` says that it has ``version`` whole."""
        peer, state = self._peers.get(name), self._versions.get(version)
        return (
            peer is not None and state is not None and 0 < state.all == peer.holds.get(version, 0) & state.all
        )

    def versions(self) -> tuple[int, ...]:
        """The versions taken part in, newest first."""
        return tuple(self._versions)

    def receiving(self) -> dict[str, tuple[int, int]]:
        """Shards on their way here: sender, then version and index."""
        return {name: peer.receiving for name, peer in self._peers.items() if peer.receiving is not None}

    def sending(self) -> dict[str, tuple[int, int]]:
        """Shards on their way out: receiver, then version and index."""
        return {name: peer.sending for name, peer in self._peers.items() if peer.sending is not None}

    @property
    def asked(self) -> int:
        """How many neighbours are asked for shards at the moment, under ``config.inbound``."""
        return self._downloads.asked

    @property
    def upload(self) -> float:
        """The measured upload in bytes per second; 0 until all slots were in use for a while."""
        return self._uploads.uplink.rate

    @property
    def fan_out(self) -> int:
        """How many shards are sent at once, and to how many eager neighbours unasked."""
        return self._uploads.uplink.slots

    # --- versions

    def reconfigure(self, config: TransferConfig, now: float) -> Effects:
        """Take other settings while transfers run; those under way go on."""
        unlimited = self.config.inbound and not config.inbound
        self.config = config
        self._uploads.reconfigure(config)
        self._downloads.reconfigure(config)
        self.arrivals.reconfigure(config)
        effects = self._uploads.fill(now)
        for version, state in self._versions.items() if unlimited else ():
            effects += self._downloads.order_all(version, state, now)
        return effects

    def want(
        self, version: int, sizes: Sequence[int], now: float, *, have: int = 0, wanted: bool = True
    ) -> Effects:
        """Take part in ``version``, whose shards have these sizes; fetch it unless ``wanted`` is false.

        ``have``: shards that are on disk already, and verified, as a mask (first call only).
        Called again with more sizes it extends the version (a manifest that comes in
        parts). Over ``config.versions`` the oldest is forgotten, or not
        begun if it is this one.

        Raises:
            ValueError: more shards than a version may have.
        """
        if len(sizes) > MAX_SHARDS:
            raise ValueError(f"{len(sizes)} shards; a version has at most {MAX_SHARDS}: use larger shards")
        effects: Effects = []
        state = self._versions.get(version)
        if state is None:
            if len(self._versions) >= self.config.versions and version < min(self._versions):
                return []
            while len(self._versions) >= self.config.versions:
                effects += self.forget(min(self._versions), now)
            state = self._versions[version] = VersionState(sizes, now, wanted=wanted)
            state.have = have & state.all
            newest_first = sorted(self._versions.items(), reverse=True)
            self._versions.clear()
            self._versions.update(newest_first)
            for name, peer in self._peers.items():
                early = peer.early.pop(version, None)
                if early is not None:
                    peer.holds[version] = early
                    state.counts.add(early)
                if wanted and not state.complete:
                    lost = early is None and peer.early_lost
                    effects.append(tell(name, peer, version, state, ask=lost))
                    effects += self._downloads.order(name, peer, version, state, now)
                elif early is not None and state.have & ~early:
                    effects.append(tell(name, peer, version, state, ask=False))
                if self.config.inbound and peer.eager:  # before it begins to push
                    effects += self._downloads.order(name, peer, version, state, now)
            effects += self._uploads.fill(now)
            return effects if state.missing or not have else [*effects, Complete(version)]
        longer = len(sizes) > len(state.sizes)
        state.extend(sizes)
        fresh = wanted and not state.wanted and not state.complete
        state.wanted = state.wanted or wanted
        if fresh:
            effects += [
                tell(name, peer, version, state, ask=version not in peer.holds)  # what it said is gone
                for name, peer in self._peers.items()
                if version not in peer.told
            ]
        if longer:  # who offered us what was beyond the list may do so again
            effects += [tell(name, peer, version, state, ask=False) for name, peer in self._peers.items()]
        return [*effects, *self._downloads.order_all(version, state, now), *self._uploads.fill(now)]

    def forget(self, version: int, now: float) -> Effects:
        """Leave ``version``: it is no longer on disk, or no longer wanted."""
        state = self._versions.pop(version, None)
        effects: Effects = []
        if state is None:
            return effects
        for name, peer in self._peers.items():
            if peer.sending is not None and peer.sending[0] == version:
                effects += self._uploads.stop(name, peer, now)
            if peer.receiving is not None and peer.receiving[0] == version:
                effects += self._downloads.stop(name, peer)
            if version in peer.told:
                effects.append(Send(name, Bitmap(version=version, bits=b"", ask=False)))
            if version in peer.holds:
                note_early(peer, version, peer.holds[version], whole=True)
            for known in (peer.holds, peer.told, peer.busy_told, peer.given, peer.just_sent):
                known.pop(version, None)
            peer.orders.pop(version, None)
            peer.asked.pop(version, None)
        return effects + self._uploads.fill(now)

    # --- links

    def link_up(self, name: str, now: float) -> Effects:
        """``name`` is a neighbour now; it learns what we hold."""
        if name in self._peers:
            return []
        peer = self._peers[name] = PeerState(self._muted.pop(name, 0.0))
        return [
            tell(name, peer, version, state, ask=False)
            for version, state in self._versions.items()
            if state.wanted and not state.complete
        ]

    def link_down(self, name: str, now: float) -> Effects:
        """``name`` is a neighbour no longer: what was under way is asked for elsewhere."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return []
        effects: Effects = []
        if peer.muted_until > now:
            self._muted[name] = peer.muted_until
            if len(self._muted) > 256:
                del self._muted[next(iter(self._muted))]
        if peer.sending is not None:
            effects.append(StopSend(name, *peer.sending))
            self._uploads.idle(name, peer, 0, now)
        for version, holds in peer.holds.items():
            if version in self._versions:
                self._versions[version].counts.subtract(holds)
        if peer.receiving is not None:
            effects.append(StopReceive(name, *peer.receiving))
            effects += self._downloads.release(name, *peer.receiving, now)
        for version in [version for version, asked in peer.asked.items() if asked]:
            effects += self._downloads.order_instead(version, now)
        return effects + self._uploads.fill(now)

    def link_eager(self, name: str, now: float, *, eager: bool) -> Effects:
        """The tree made the link to ``name`` eager or lazy."""
        peer = self._peers.get(name)
        if peer is None or peer.eager == eager:
            return []
        peer.eager, peer.slow = eager, 0
        return self._uploads.fill(now)

    # --- shards that go out

    def sent(self, name: str, version: int, index: int, now: float) -> Effects:
        """The last byte of a shard was handed to the connection with ``name``."""
        return [*self._uploads.sent(name, version, index, now), *self._uploads.fill(now)]

    def sent_beside(self, size: int) -> None:
        """``size`` bytes of shards went out to somebody who asked beside the links.

        They count against ``config.copies`` like those of the links: of the newest
        version's files, the largest list there is, since whose they are is not known.
        """
        if self._versions:
            newest = max(self._versions, key=lambda version: (self._versions[version].total, version))
            self._versions[newest].sent_bytes += size

    def send_failed(self, name: str, version: int, index: int, now: float) -> Effects:
        """A shard could not be sent whole (the stream broke); the link itself may still be up."""
        peer = self._peers.get(name)
        if peer is None or peer.sending != (version, index):
            return []
        unhold(self._versions[version], peer, version, 1 << index)
        self._uploads.idle(name, peer, 0, now)
        return self._uploads.fill(now)

    # --- messages and time

    def on_message(self, name: str, message: Message, now: float) -> Effects:
        """Take one transfer message from a neighbour."""
        peer = self._peers.get(name)
        version = getattr(message, "version", None)
        state = self._versions.get(version) if version is not None else None
        if peer is None or version is None:
            return []
        if state is None:
            if isinstance(message, Have):
                note_early(peer, version, to_mask(message.indices), whole=False)
            elif isinstance(message, Bitmap):
                note_early(peer, version, from_bytes(message.bits), whole=True)
            return []
        match message:
            case Have(indices=indices):
                return self._downloads.on_holds(name, peer, version, state, to_mask(indices), now)
            case Want():
                return self._uploads.on_want(peer, version, state, message, now)
            case Bitmap(bits=bits, ask=ask):
                mask = from_bytes(bits)
                effects: Effects = []
                if ask or state.have & ~mask & ~peer.told.get(version, 0):
                    effects.append(tell(name, peer, version, state, ask=False))
                under_way = 1 << peer.sending[1] if peer.sending and peer.sending[0] == version else 0
                unhold(state, peer, version, peer.holds.get(version, 0) & ~mask & ~under_way)
                peer.holds.setdefault(version, 0)
                return effects + self._downloads.on_holds(name, peer, version, state, mask, now)
            case Cancel(index=index):
                if peer.sending != (version, index):
                    return []
                effects = [StopSend(name, version, index)]
                self._uploads.idle(name, peer, 0, now)
                return effects + self._uploads.fill(now)
            case Unavailable(index=index):
                unhold(state, peer, version, 1 << index & peer.holds.get(version, 0))
                if peer.receiving != (version, index):
                    effects = self._downloads.order(name, peer, version, state, now)
                    return effects + self._downloads.order_instead(version, now)
                peer.receiving = None
                effects = [StopReceive(name, version, index)]
                effects += self._downloads.strike(name, peer, "lied", version, index, now)
                return effects + self._downloads.release(name, version, index, now)
        return []

    def on_time(self, now: float) -> Effects:
        """Do what is due: shards without progress, starvation, peers whose penalty is over."""
        effects: Effects = []
        for name, peer in self._peers.items():
            if self._checked_at < peer.muted_until <= now:
                peer.muted_until = 0.0
                for version, state in self._versions.items():
                    effects += self._downloads.order(name, peer, version, state, now)
            why = self._downloads.judge(name, peer, now)
            if why:
                self.stats.timeouts += why == "timeout"
                self.stats.trickles += why == "trickle"
                effects += self._downloads.give_up(name, peer, why, now)
        if self._downloads.turn_at() <= now:
            effects += self._downloads.turn(now)
        for version, state in self._versions.items():
            waited = now - state.progress_at
            if state.wanted and not state.complete and waited >= self._downloads.starves_after(state):
                state.progress_at = now
                if not state.incoming:
                    state.starved += 1
                    effects.append(Report("starved", "", version, -1, "no neighbour sends what is missing"))
                    effects += self._downloads.order_all(version, state, now, again=True)
        self._checked_at = now
        return effects + self._uploads.fill(now)
