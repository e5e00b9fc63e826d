"""What is asked for, of whom: the standing orders of one node, and penalties for those who fail it.

Part of ``transfer``, which shares its neighbours and versions with it.
"""

from __future__ import annotations

import math
import random

from barnraise.protocol.bitmaps import members, pick
from barnraise.protocol.meter import Meter
from barnraise.protocol.transfer_state import PeerState, TransferConfig, VersionState
from barnraise.protocol.tree_effects import Drop, Effects, Report, Send, StopReceive
from barnraise.protocol.tree_messages import MAX_INDICES, Cancel, Want

_BEST_HALVES_S = 30.0  # how fast the best rate of the past is forgotten
_LATE = 0.5  # of a fair share of the downlink: a sender that is faster is not what is slow
_TRICKLE = 0.25  # of a fair share of what comes in
_LOOK_AGAIN_S = 1.0
_TURN_S = 3.0  # a neighbour that was asked begins within this time, or another is asked instead


class Downlink:
    """What comes in, from everybody together: bytes per second now, and at best lately."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._best = 0.0
        self._best_at = 0.0

    def add(self, size: int, now: float) -> None:
        """``size`` bytes of shards arrived."""
        self._meter.add(size, now)
        self._best, self._best_at = self.best(now), now

    def rate(self, now: float) -> float:
        """Bytes/s now."""
        return self._meter.rate(now)

    def best(self, now: float) -> float:
        """Bytes/s that the downlink has shown to carry, forgotten by half in 30 s."""
        return max(self.rate(now), self._best * math.exp2((self._best_at - now) / _BEST_HALVES_S))


class Downloads:
    """The standing orders, and the shards that will not come.

    A sender is judged by what comes from it, compared with the others': where our own
    downlink is what is slow, all of them are, and none is at fault.
    """

    def __init__(
        self,
        config: TransferConfig,
        rng: random.Random,
        peers: dict[str, PeerState],
        versions: dict[int, VersionState],
    ) -> None:
        self._config, self._rng = config, rng
        self._peers, self._versions = peers, versions
        self._downlink = Downlink()
        self._turns: dict[str, float] = {}  # whom we ask, where not all may be asked: since when
        self._turned_at = 0.0
        self._passed_over: set[str] = set()
        self._typical = 1.0  # seconds that a shard takes to come, a moving average

    def reconfigure(self, config: TransferConfig) -> None:
        """Take other settings."""
        self._config = config
        if not config.inbound:
            self._turns.clear()

    @property
    def asked(self) -> int:
        """How many neighbours have their turn; only counted where not all may be asked."""
        return len(self._turns)

    def begins(self, peer: PeerState, version: int, index: int, now: float) -> None:
        """A shard is on its way from ``peer``."""
        peer.receiving, peer.begun_at, peer.spared_until = (version, index), now, now
        peer.progress_at = peer.window_at = now
        peer.got = peer.window_got = 0

    def arrived(self, peer: PeerState, size: int, now: float) -> None:
        """``size`` bytes of it are here."""
        peer.progress_at = now
        peer.got += size
        peer.window_got += size
        self._downlink.add(size, now)

    def came(self, name: str, peer: PeerState, size: int, now: float) -> None:
        """All of its ``size`` bytes are here."""
        self.arrived(peer, max(0, size - peer.got), now)
        peer.receiving = None
        if name in self._turns:
            self._turns[name] = now
        self._typical = 0.9 * self._typical + 0.1 * (now - peer.begun_at)

    def starves_after(self, state: VersionState) -> float:
        """Seconds without a shard until a version counts as starved, longer each time."""
        return self._config.starved_after * 2.0 ** min(state.starved, 4)

    def judged_at(self, peer: PeerState) -> float:
        """When the shard on its way from ``peer`` is due to be looked at."""
        if peer.receiving is None:
            return math.inf
        timeout = self._config.progress_timeout
        return min(peer.progress_at + timeout, peer.window_at + timeout, self._late_at(peer))

    def judge(self, name: str, peer: PeerState, now: float) -> str:
        """Why ``name``'s shard is to come from elsewhere: timeout, trickle, late; or ``""``.

        Trickling is what brings less than ``floor`` in the time without progress that is
        allowed, and much less than the others at the same moment. Late is, at the end
        when nothing else is to be asked for, what takes far longer than usual and uses
        less than half of its share of the downlink.
        """
        if peer.receiving is None:
            return ""
        timeout = self._config.progress_timeout
        if peer.progress_at + timeout <= now:
            return "timeout"
        if peer.window_at + timeout <= now:
            rate = peer.window_got / (now - peer.window_at)
            peer.window_at, peer.window_got = now, 0
            if rate < self._least(now):
                return "trickle"
        if self._late_at(peer) <= now:
            if peer.got / (now - peer.begun_at) < _LATE * self._downlink.best(now) / self._senders():
                return "late"
            peer.spared_until = now + _LOOK_AGAIN_S
        return ""

    def _late_at(self, peer: PeerState) -> float:
        if peer.receiving is None:
            return math.inf
        version, index = peer.receiving
        state = self._versions[version]
        if state.missing or state.counts.count(index) < 2:
            return math.inf
        late = peer.begun_at + max(2.0, 4 * self._typical) * 2.0**state.overtaken
        return max(late, peer.spared_until)

    def _least(self, now: float) -> float:
        """Bytes/s that a sender has to bring now."""
        rate, floor = self._downlink.rate(now), self._config.floor
        return floor if rate < floor else min(floor, _TRICKLE * rate / self._senders())

    def _senders(self) -> int:
        return max(1, sum(peer.receiving is not None for peer in self._peers.values()))

    def give_up(self, name: str, peer: PeerState, why: str, now: float) -> Effects:
        """Ask others for what ``name`` is sending; a strike, unless it is only late: each time later then."""
        if peer.receiving is None:
            return []
        version, index = peer.receiving
        effects: Effects = []
        if why == "late":
            self._versions[version].overtaken += 1
            peer.muted_until = max(peer.muted_until, now + self._config.progress_timeout)
        else:
            effects += self.strike(name, peer, why, version, index, now)
        return [*effects, *self.stop(name, peer), *self.release(name, version, index, now)]

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
        if version in peer.orders:
            peer.orders[version].mask &= ~mask  # what it has it orders no more
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
        if rest and len(state.sizes) == 1 and not state.starved and self._asked_elsewhere(name, version):
            rest = 0  # of two that send the only shard at once, one sends it in vain
        if self._config.inbound and not self._has_turn(name, peer, now):
            rest = 0
        chosen: list[int] = []
        while rest and len(chosen) < self._config.order:
            index = pick(state.counts.rarest(rest), self._rng)
            chosen.append(index)
            rest ^= 1 << index
        busy = 0
        if peer.eager:  # all that we lack, where nothing is to be pushed
            busy = state.all & ~state.have if self._config.inbound and state.wanted else state.incoming
        order, before = tuple(chosen), peer.asked.get(version)
        if not again and busy == peer.busy_told.get(version, 0) and order == (before or ()):
            return []
        peer.asked[version], peer.busy_told[version] = order, busy
        others = tuple(members(busy))[:MAX_INDICES]
        return [Send(name, Want(version=version, indices=order, busy=others, starved=state.starved > 0))]

    def order_instead(self, version: int, now: float) -> Effects:
        """Whoever was asked for ``version`` may not be any more: if nobody else is, ask now."""
        state = self._versions.get(version)
        if state is None or len(state.sizes) > 1:
            return []
        return self.order_all(version, state, now)

    def _asked_elsewhere(self, name: str, version: int) -> bool:
        return any(peer.asked.get(version) for other, peer in self._peers.items() if other != name)

    def turn_at(self) -> float:
        """When turns are due to be looked at."""
        if not self._config.inbound or all(
            state.complete or not state.wanted for state in self._versions.values()
        ):
            return math.inf
        return self._turned_at + _LOOK_AGAIN_S

    def turn(self, now: float) -> Effects:
        """Ask others in place of those who were asked and do not begin, where not all may be asked."""
        self._turned_at = now
        if not self._config.inbound:
            return []
        for name, since in list(self._turns.items()):
            peer = self._peers.get(name)
            if peer is None or (peer.receiving is None and now - since >= _TURN_S):
                del self._turns[name]
                self._passed_over.add(name)
        names = list(self._peers)
        self._rng.shuffle(names)
        effects = self._order_of(names, now)  # takes the orders back, asks others
        if self._passed_over:
            again = [name for name in names if name in self._passed_over]
            self._passed_over.clear()
            effects += self._order_of(again, now)  # or the same ones, if there are no others
        return effects

    def _order_of(self, names: list[str], now: float) -> Effects:
        return [
            effect
            for name in names
            for version, state in self._versions.items()
            for effect in self.order(name, self._peers[name], version, state, now)
        ]

    def _has_turn(self, name: str, peer: PeerState, now: float) -> bool:
        if peer.receiving is not None:
            self._turns.setdefault(name, now)
        elif not any(peer.holds.get(version, 0) & state.missing for version, state in self._versions.items()):
            self._turns.pop(name, None)
        elif len(self._turns) < self._config.inbound and name not in self._passed_over:
            self._turns.setdefault(name, now)
        return name in self._turns

    def release(self, name: str, version: int, index: int, now: float) -> Effects:
        """The shard on its way from ``name`` will not come: everybody who holds it may be asked."""
        state = self._versions.get(version)
        if state is None or state.on_way.get(index) != name:
            return []
        del state.on_way[index]
        state.incoming &= ~(1 << index)
        return self.order_all(version, state, now)

    def claim(self, version: int, state: VersionState, now: float) -> tuple[int, Effects]:
        """Take the rarest missing shard out of the orders: it comes from no neighbour."""
        index = pick(state.counts.rarest(state.missing), self._rng)
        state.incoming |= 1 << index
        state.on_way[index] = ""
        return index, self.order_all(version, state, now)

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
