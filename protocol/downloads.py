"""What is asked for, of whom: the standing orders of one node, and penalties for those who fail it.

Part of ``transfer``, which shares its neighbours and versions with it.
"""

from __future__ import annotations

import math
import random

from barnraise.protocol.bitmaps import members, pick
from barnraise.protocol.transfer_state import PeerState, TransferConfig, VersionState
from barnraise.protocol.tree_effects import Drop, Effects, Report, Send, StopReceive
from barnraise.protocol.tree_messages import MAX_INDICES, Cancel, Want


class Downloads:
    """The standing orders, and the shards that will not come."""

    def __init__(
        self,
        config: TransferConfig,
        rng: random.Random,
        peers: dict[str, PeerState],
        versions: dict[int, VersionState],
    ) -> None:
        self._config, self._rng = config, rng
        self._peers, self._versions = peers, versions
        self._typical = 1.0  # seconds that a shard takes to come, a moving average

    def reconfigure(self, config: TransferConfig) -> None:
        """Take other settings."""
        self._config = config

    def came(self, seconds: float) -> None:
        """A shard took this long from its first byte to its last."""
        self._typical = 0.9 * self._typical + 0.1 * seconds

    def starves_after(self, state: VersionState) -> float:
        """Seconds without a shard until a version counts as starved, longer each time."""
        return self._config.starved_after * 2.0 ** min(state.starved, 4)

    def late_at(self, peer: PeerState) -> float:
        """When the shard on its way from ``peer`` is late: not asked elsewhere, and everything else is."""
        if peer.receiving is None:
            return math.inf
        version, index = peer.receiving
        state = self._versions[version]
        if state.missing or state.counts.count(index) < 2:
            return math.inf
        return peer.begun_at + max(2.0, 4 * self._typical) * 2.0**state.overtaken

    def overtake(self, name: str, peer: PeerState, now: float) -> Effects:
        """At the end, ask others for what a slow neighbour is still sending; each time later than before."""
        if self.late_at(peer) > now or peer.receiving is None:
            return []
        version, index = peer.receiving
        self._versions[version].overtaken += 1
        peer.muted_until = max(peer.muted_until, now + self._config.progress_timeout)
        return [*self.stop(name, peer), *self.release(name, version, index, now)]

    def on_holds(
        self, name: str, peer: PeerState, version: int, state: VersionState, mask: int, now: float
    ) -> Effects:
        """``name`` announced the shards of ``mask``."""
        holds = peer.holds.get(version)
        if holds is None:
            return []  # its bitmap comes first
        new = mask & ~holds
        state.counts.add(new)
        peer.holds[version] = holds | mask
        if len(peer.asked.get(version, ())) < self._config.order and new & state.missing:
            return self.order(name, peer, version, state, now)
        return []

    def order_all(self, version: int, state: VersionState, now: float, *, again: bool = False) -> Effects:
        return [
            effect
            for name, peer in self._peers.items()
            for effect in self.order(name, peer, version, state, now, again=again)
        ]

    def order(
        self,
        name: str,
        peer: PeerState,
        version: int,
        state: VersionState,
        now: float,
        *,
        again: bool = False,
    ) -> Effects:
        """Bring our standing order with ``name`` up to date, if that changes it."""
        rest = peer.holds.get(version, 0) & state.missing if peer.muted_until <= now else 0
        chosen: list[int] = []
        while rest and len(chosen) < self._config.order:
            index = pick(state.counts.rarest(rest), self._rng)
            chosen.append(index)
            rest ^= 1 << index
        busy = state.incoming if peer.eager else 0
        order, before = tuple(chosen), peer.asked.get(version)
        if not again and busy == peer.busy_told.get(version, 0) and order == (before or ()):
            return []
        peer.asked[version], peer.busy_told[version] = order, busy
        others = tuple(members(busy))[:MAX_INDICES]
        return [Send(name, Want(version=version, indices=order, busy=others, starved=state.starved > 0))]

    def release(self, name: str, version: int, index: int, now: float) -> Effects:
        """The shard on its way from ``name`` will not come: everybody who holds it may be asked."""
        state = self._versions.get(version)
        if state is None or state.on_way.get(index) != name:
            return []
        del state.on_way[index]
        state.incoming &= ~(1 << index)
        return self.order_all(version, state, now)

    def stop(self, name: str, peer: PeerState) -> Effects:
        """Do without the shard that ``name`` is sending."""
        if peer.receiving is None:
            return []
        version, index = peer.receiving
        peer.receiving = None
        return [StopReceive(name, version, index), Send(name, Cancel(version=version, index=index))]

    def strike(self, name: str, peer: PeerState, code: str, version: int, index: int, now: float) -> Effects:
        """Ask ``name`` for nothing for a while, longer each time; at last drop it."""
        peer.strikes += 1
        text = f"strike {peer.strikes} of {self._config.strikes}"
        effects: Effects = [Report(code, name, version, index, text)]
        peer.muted_until = now + self._config.progress_timeout * peer.strikes**2
        if peer.strikes >= self._config.strikes:
            peer.muted_until = now + self._config.mute
            effects.append(Drop(name, code))
        return effects
