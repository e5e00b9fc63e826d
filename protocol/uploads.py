"""What goes out, to whom: the upload slots of one node, and the measure of its upload.

Part of ``transfer``, which shares its neighbours and versions with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from barnraise.protocol.bitmaps import pick, to_mask
from barnraise.protocol.transfer_state import (
    CROSSING,
    Order,
    PeerState,
    Stats,
    TransferConfig,
    VersionState,
    unhold,
)
from barnraise.protocol.tree_effects import Demote, Effects, Send, StartSend, StopSend
from barnraise.protocol.tree_messages import MAX_INDICES, Unavailable, Want

_EXTRA_SLOTS = 2  # for transfers that their receivers hold up
_GIVE_AT_MOST = 2  # copies of a version over one link: enough for a receiver that loses much


class Uplink:
    """Measures the upload while all slots are in use, and derives how many to use."""

    def __init__(self, config: TransferConfig) -> None:
        self.rate = 0.0  # bytes/s; 0 until measured
        self.slots = 0  # how many shards to send at once: the fan-out
        self.reconfigure(config)
        self._since: float | None = None
        self._time = 0.0
        self._bytes = 0

    def reconfigure(self, config: TransferConfig) -> None:
        """Take other settings."""
        self._config = config
        measured = max(1, round(self.rate / config.slot_rate)) if self.rate else config.slots
        # Where receivers are what is slow, fewer transfers carry less, and would measure as still less.
        self.slots = min(max(measured, config.slots // 2), config.max_slots)

    def patience(self, size: int) -> float:
        """Seconds after which a transfer of ``size`` bytes counts as held up by its receiver."""
        return max(1.0, 3 * size * max(self.slots, 1) / self.rate) if self.rate else 5.0

    def note(self, sending: int, sent: int, now: float) -> None:
        """``sending`` shards are under way from now on; ``sent`` bytes were finished just now."""
        if self._since is not None:
            self._time += now - self._since
            self._bytes += sent
            if self._time >= 2.0 and self._bytes:
                rate = self._bytes / self._time
                self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate
                self._time, self._bytes = 0.0, 0
                self.reconfigure(self._config)
        self._since = now if sending >= self.slots else None


class Uploads:
    """The upload slots. A slot takes the neediest neighbour there is something for, and its rarest shard."""

    def __init__(
        self,
        config: TransferConfig,
        rng: random.Random,
        peers: dict[str, PeerState],
        versions: dict[int, VersionState],
        stats: Stats,
    ) -> None:
        self.uplink = Uplink(config)
        self._config, self._rng, self._stats = config, rng, stats
        self._peers, self._versions = peers, versions
        self._sending: dict[str, PeerState] = {}

    def reconfigure(self, config: TransferConfig) -> None:
        """Take other settings."""
        self._config = config
        self.uplink.reconfigure(config)

    def held_up_at(self) -> Iterator[float]:
        """When each transfer under way stops counting against the slots."""
        for peer in self._sending.values():
            yield peer.held_up_at

    def fill(self, now: float) -> Effects:
        """Begin transfers while there are free slots and somebody to serve."""
        effects: Effects = []
        slots = self.uplink.slots
        while slots and len(self._sending) < slots + _EXTRA_SLOTS:
            if len(self._sending) >= slots:
                moving = [peer for peer in self._sending.values() if peer.held_up_at > now]
                if len(moving) >= slots:
                    break
            choice = self._choose()
            if choice is None:
                break
            name, version, index = choice
            peer, state, bit = self._peers[name], self._versions[version], 1 << index
            peer.sending, peer.started_at = (version, index), now
            peer.held_up_at = now + self.uplink.patience(state.sizes[index])
            if not peer.holds[version] & bit:  # from now on it counts as held there
                state.counts.add(bit)
                peer.holds[version] |= bit
            if version in peer.orders:
                peer.orders[version].mask &= ~bit
            self._sending[name] = peer
            self._stats.started += 1
            self.uplink.note(len(self._sending), 0, now)
            effects.append(StartSend(name, version, index))
        return effects

    def on_want(self, peer: PeerState, version: int, state: VersionState, want: Want, now: float) -> Effects:
        """``peer`` has a new standing order with us."""
        mask = to_mask(want.indices)
        full = len(want.busy) == MAX_INDICES
        peer.orders[version] = Order(mask, to_mask(want.busy), want.starved, full)
        if peer.sending is not None and peer.sending[0] == version:
            mask &= ~(1 << peer.sending[1])
        if now - peer.sent_at < CROSSING and not want.starved:
            mask &= ~peer.just_sent.get(version, 0)  # our shard and its order crossed
            peer.orders[version].mask = mask
        unhold(state, peer, version, mask)  # it lacks what it orders, whatever we believed
        return self.fill(now)

    def sent(self, name: str, version: int, index: int, now: float) -> Effects:
        """A shard went out whole."""
        peer = self._peers.get(name)
        if peer is None or peer.sending != (version, index):
            return []
        state = self._versions[version]
        size = state.sizes[index]
        state.sent_bytes += size
        peer.given[version] = peer.given.get(version, 0) + size
        if now - peer.sent_at > CROSSING:
            peer.just_sent.clear()
        peer.just_sent[version] = peer.just_sent.get(version, 0) | 1 << index
        peer.sent_at = now
        self._stats.sent += 1
        self._stats.sent_bytes += size
        rate = size / max(now - peer.started_at, 1e-6)
        peer.rate = rate if not peer.rate else 0.7 * peer.rate + 0.3 * rate
        share = self.uplink.rate / max(self.uplink.slots, 1)
        peer.slow = peer.slow + 1 if rate < self._config.slow_fraction * share else 0
        self.idle(name, peer, size, now)
        return [Demote(name)] if peer.slow >= 3 and peer.eager else []

    def stop(self, name: str, peer: PeerState, now: float) -> Effects:
        """End a transfer from our side: the shard is gone."""
        if peer.sending is None:
            return []
        version, index = peer.sending
        if version in self._versions:
            unhold(self._versions[version], peer, version, 1 << index)
        self.idle(name, peer, 0, now)
        return [StopSend(name, version, index), Send(name, Unavailable(version=version, index=index))]

    def idle(self, name: str, peer: PeerState, size: int, now: float) -> None:
        """Nothing is under way to ``name`` any more; ``size`` bytes of it went out whole."""
        peer.sending = None
        self._sending.pop(name, None)
        self.uplink.note(len(self._sending), size, now)

    def _choose(self) -> tuple[str, int, int] | None:
        """Whom to send what: newest version first, then who holds least, then what is rarest."""
        pushed = self._children()
        for version, state in self._versions.items():
            if not state.have:
                continue
            spent = self._spent(version, state)
            best: tuple[int, float, str, int] | None = None
            for name, peer in self._peers.items():
                holds = peer.holds.get(version)
                if holds is None or peer.sending is not None or peer.muted_until == math.inf:
                    continue
                order = peer.orders.get(version)
                mask = order.mask if order is not None else 0
                if name in pushed and not (order is not None and order.full):
                    mask |= ~holds & ~(order.busy if order is not None else 0)
                mask &= state.have
                if spent and not (order is not None and order.starved):
                    mask = state.counts.zero(mask)
                if mask and peer.given.get(version, 0) < _GIVE_AT_MOST * state.total:
                    offer = (holds.bit_count(), self._rng.random(), name, mask)
                    best = offer if best is None else min(best, offer)
            if best is not None:
                return best[2], version, pick(state.counts.rarest(best[3]), self._rng)
        return None

    def _spent(self, version: int, state: VersionState) -> bool:
        """Whether the origin's limit is reached, with what is under way."""
        if self._config.copies is None:
            return False
        pairs = [peer.sending for peer in self._sending.values() if peer.sending is not None]
        under_way = sum(state.sizes[index] for number, index in pairs if number == version)
        return state.sent_bytes + under_way >= self._config.copies * state.total

    def _children(self) -> set[str]:
        """The eager neighbours that are pushed to unasked: as many as there are slots, the fastest."""
        children = [name for name, peer in self._peers.items() if peer.eager]
        if len(children) > self.uplink.slots:
            children.sort(key=lambda name: -self._peers[name].rate)
        return set(children[: self.uplink.slots])
