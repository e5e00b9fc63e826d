"""What becomes of each shard on its way here: begun, whole, right, wrong, or fetched from elsewhere.

Part of ``transfer``, which shares its neighbours and versions with it. What is asked for, and
when a sender is given up, is decided in ``downloads``.
"""

from __future__ import annotations

import math

from barnraise.protocol.downloads import Downloads
from barnraise.protocol.transfer_state import PeerState, Stats, TransferConfig, VersionState, tell
from barnraise.protocol.tree_effects import Ban, Complete, Effects, Report, Send, StopReceive
from barnraise.protocol.tree_messages import Cancel, Have
from barnraise.protocol.uploads import Uploads


class Arrivals:
    """The shards that come in, from neighbours or from elsewhere. Times are seconds, sizes bytes."""

    def __init__(
        self,
        config: TransferConfig,
        peers: dict[str, PeerState],
        versions: dict[int, VersionState],
        stats: Stats,
        downloads: Downloads,
        uploads: Uploads,
    ) -> None:
        self._config, self._stats = config, stats
        self._peers, self._versions = peers, versions
        self._downloads, self._uploads = downloads, uploads

    def reconfigure(self, config: TransferConfig) -> None:
        """Take other settings."""
        self._config = config

    def incoming(self, name: str, version: int, index: int, now: float) -> Effects:
        """``name`` begins to send a shard. ``StopReceive`` among the effects: it is not taken."""
        peer, state = self._peers.get(name), self._versions.get(version)
        refusal: Effects = [
            StopReceive(name, version, index),
            Send(name, Cancel(version=version, index=index)),
        ]
        if peer is None:
            return refusal[:1]
        if state is None or index >= len(state.sizes):
            return refusal
        bit = 1 << index
        if peer.receiving is not None or (version not in peer.asked and not peer.eager):
            return [*refusal, *self._downloads.strike(name, peer, "unasked", version, index, now)]
        if not state.missing & bit:
            self._stats.duplicates += 1
            return [*refusal, *self._downloads.order(name, peer, version, state, now)]
        state.incoming |= bit
        state.on_way[index] = name
        self._downloads.begins(peer, version, index, now)
        if not peer.holds.get(version, 0) & bit:
            state.counts.add(bit)
            peer.holds[version] = peer.holds.get(version, 0) | bit
        effects: Effects = []
        for other, link in self._peers.items():
            if other == name or link.eager or index in link.asked.get(version, ()):
                effects += self._downloads.order(other, link, version, state, now)
        return effects

    def progress(self, name: str, size: int, now: float) -> None:
        """``size`` bytes of the shard on its way from ``name`` arrived."""
        peer = self._peers.get(name)
        if peer is not None and peer.receiving is not None and size:
            self._downloads.arrived(peer, size, now)

    def received(self, name: str, version: int, index: int, now: float) -> Effects:
        """The last byte of a shard arrived; its hash is being checked. ``name`` may send the next one."""
        peer = self._peers.get(name)
        if peer is not None and peer.receiving == (version, index):
            self._downloads.came(name, peer, self._versions[version].sizes[index], now)
        return []

    def verified(self, name: str | None, version: int, index: int, now: float) -> Effects:
        """A shard is here, whole, on disk, and has its hash; ``name`` None: from no peer (disk, mirror)."""
        state = self._versions.get(version)
        if state is None or index >= len(state.sizes):
            return []
        bit = 1 << index
        effects: Effects = []
        sender = state.on_way.pop(index, None)
        state.incoming &= ~bit
        link = self._peers.get(sender) if sender is not None else None
        if link is not None and sender is not None:
            if sender == name:
                link.strikes = 0
            elif link.receiving == (version, index):
                effects += self._downloads.stop(sender, link)
            if link.receiving == (version, index):
                link.receiving = None
        if state.have & bit:
            return effects
        state.have |= bit
        self._stats.received += name is not None
        state.progress_at, state.starved = now, 0
        message = Have(version=version, indices=(index,))
        for other, peer in self._peers.items():
            asked = peer.asked.get(version)
            holds = peer.holds.get(version)
            if holds is not None and version in peer.told:
                # Its sender knows. Of one shard alone the lazy that hold it need not know either;
                # of more, what is rare is reckoned by it.
                needed = len(state.sizes) > 1 or peer.eager or not holds & bit or index in (asked or ())
                if other != name and needed:
                    effects.append(Send(other, message))
                    peer.told[version] |= bit
                    peer.busy_told[version] = peer.busy_told.get(version, 0) & ~bit  # goes without saying
                    if asked == (index,):
                        peer.asked[version] = asked = ()
            elif holds is not None and not holds & bit:
                effects.append(tell(other, peer, version, state, ask=False))
            if asked is not None and (index in asked or (other == name and len(asked) < self._config.order)):
                effects += self._downloads.order(other, peer, version, state, now)
        if state.complete:
            effects.append(Complete(version))
        return effects + self._uploads.fill(now)

    def corrupt(self, name: str, version: int, index: int, now: float) -> Effects:
        """The shard that ``name`` sent does not have its hash. Its sender is banned for the run."""
        effects: Effects = [
            Report("corrupt", name, version, index, "the shard does not have the hash in the manifest"),
            Ban(name, f"sent a corrupt shard ({index} of version {version})"),
        ]
        self._stats.corrupt += 1
        peer = self._peers.get(name)
        if peer is not None:
            peer.muted_until = math.inf
            if peer.receiving == (version, index):
                peer.receiving = None
        effects += self._downloads.release(name, version, index, now)
        return effects

    def lost(self, version: int, index: int, now: float) -> Effects:
        """A shard that was here cannot be read any more: it is wanted again."""
        state = self._versions.get(version)
        if state is None or not state.have >> index & 1:
            return []
        state.have &= ~(1 << index)
        effects: Effects = []
        for name, peer in self._peers.items():
            if peer.sending == (version, index):
                effects += self._uploads.stop(name, peer, now)
            effects.append(tell(name, peer, version, state, ask=False))
        return [*effects, *self._downloads.order_all(version, state, now), *self._uploads.fill(now)]

    def claim(self, version: int, now: float) -> tuple[int | None, Effects]:
        """The rarest missing shard is fetched from elsewhere (a mirror): no neighbour is asked for it.

        None: nothing is missing that is not on its way. ``verified`` or ``unclaim`` follows.
        """
        state = self._versions.get(version)
        if state is None or not state.missing:
            return None, []
        return self._downloads.claim(version, state, now)

    def unclaim(self, version: int, index: int, now: float) -> Effects:
        """It does not come from there, or too slowly: neighbours are asked for it again."""
        return self._downloads.release("", version, index, now)
