"""Treecast in one piece: overlay, tree and transfers, wired together; still without I/O.

A shell feeds events and carries out the effects that come back: ``Send``, ``Connect``,
``Disconnect``, ``Deliver``, ``StartSend``, ``StopSend``, ``StopReceive``, ``Ban``,
``Report``, ``Complete``. The rest (links up, down, eager; demotions) is settled here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from barnraise.protocol.messages import Message, Signed
from barnraise.protocol.transfer import Transfer
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree import Tree, TreeConfig
from barnraise.protocol.tree_effects import (
    Ban,
    Demote,
    Drop,
    Effects,
    LinkDown,
    LinkEager,
    LinkUp,
    Report,
    Send,
)
from barnraise.protocol.tree_messages import (
    Bitmap,
    Cancel,
    Contact,
    Gossip,
    GossipHave,
    Graft,
    Have,
    Prune,
    Unavailable,
    Want,
)
from barnraise.protocol.view_state import ViewConfig
from barnraise.protocol.views import Views

_TREE = (Gossip, GossipHave, Graft, Prune)
_TRANSFER = (Have, Want, Bitmap, Cancel, Unavailable)


class Treecast:
    """One node's part in the broadcast. ``bootstrap`` are the contacts to begin with."""

    def __init__(
        self,
        me: Contact,
        bootstrap: Iterable[Contact],
        rng: random.Random,
        *,
        views: ViewConfig | None = None,
        tree: TreeConfig | None = None,
        transfer: TransferConfig | None = None,
    ) -> None:
        self.views = Views(me, bootstrap, rng, views)
        self.tree = Tree(tree)
        self.transfer = Transfer(rng, transfer)

    @property
    def wake_at(self) -> float | None:
        """When ``on_time`` is due next, or None."""
        times = (self.views.wake_at, self.tree.wake_at, self.transfer.wake_at)
        return min((at for at in times if at is not None), default=None)

    # --- connections

    def start(self, now: float, known: Iterable[Contact] = ()) -> Effects:
        """Begin; ``known`` are contacts remembered from before."""
        return self._settle(self.views.start(now, known), now)

    def connected(self, peer: str, now: float) -> Effects:
        """A connection to ``peer`` is open."""
        return self._settle(self.views.connected(peer, now), now)

    def connect_failed(self, peer: str, now: float) -> Effects:
        """A ``Connect`` did not succeed."""
        return self._settle(self.views.connect_failed(peer, now), now)

    def disconnected(self, peer: str, now: float) -> Effects:
        """The connection to ``peer`` is gone."""
        return self._settle(self.views.disconnected(peer, now), now)

    def leave(self, now: float) -> Effects:
        """Say goodbye to all neighbours."""
        return self._settle(self.views.leave(), now)

    def ban(self, peer: str, now: float) -> Effects:
        """Refuse ``peer`` from now on (it sent a forged head, broke the framing, ...)."""
        return self._settle([Ban(peer, "banned by the caller")], now)

    def on_message(self, peer: str, message: Message, now: float) -> Effects:
        """Take one message from ``peer``. A ``Gossip`` only after its signature was checked."""
        if isinstance(message, _TRANSFER):
            return self._settle(self.transfer.on_message(peer, message, now), now)
        if isinstance(message, _TREE):
            return self._settle(self.tree.on_message(peer, message, now), now)
        return self._settle(self.views.on_message(peer, message, now), now)

    def on_time(self, now: float) -> Effects:
        """Do what is due."""
        effects = [*self.views.on_time(now), *self.tree.on_time(now), *self.transfer.on_time(now)]
        return self._settle(effects, now)

    # --- versions and shards

    def publish(self, version: int, head: Signed, now: float) -> Effects:
        """Send a head of our own down the tree (the origin; or a head that came another way)."""
        return self._settle(self.tree.broadcast(version, head, now), now)

    def want(
        self, version: int, sizes: Sequence[int], now: float, *, have: int = 0, wanted: bool = True
    ) -> Effects:
        """See ``Transfer.want``."""
        return self._settle(self.transfer.want(version, sizes, now, have=have, wanted=wanted), now)

    def reconfigure(self, config: TransferConfig, now: float) -> Effects:
        """See ``Transfer.reconfigure``."""
        return self._settle(self.transfer.reconfigure(config, now), now)

    def forget(self, version: int, now: float) -> Effects:
        """See ``Transfer.forget``."""
        return self._settle(self.transfer.forget(version, now), now)

    def incoming(self, peer: str, version: int, index: int, now: float) -> Effects:
        """See ``Transfer.incoming``."""
        return self._settle(self.transfer.arrivals.incoming(peer, version, index, now), now)

    def progress(self, peer: str, size: int, now: float) -> None:
        """See ``Transfer.progress``."""
        self.transfer.arrivals.progress(peer, size, now)

    def received(self, peer: str, version: int, index: int, now: float) -> Effects:
        """See ``Transfer.received``."""
        return self._settle(self.transfer.arrivals.received(peer, version, index, now), now)

    def verified(self, peer: str | None, version: int, index: int, now: float) -> Effects:
        """See ``Transfer.verified``."""
        return self._settle(self.transfer.arrivals.verified(peer, version, index, now), now)

    def corrupt(self, peer: str, version: int, index: int, now: float) -> Effects:
        """See ``Transfer.corrupt``."""
        return self._settle(self.transfer.arrivals.corrupt(peer, version, index, now), now)

    def lost(self, version: int, index: int, now: float) -> Effects:
        """See ``Transfer.lost``."""
        return self._settle(self.transfer.arrivals.lost(version, index, now), now)

    def sent(self, peer: str, version: int, index: int, now: float) -> Effects:
        """See ``Transfer.sent``."""
        return self._settle(self.transfer.sent(peer, version, index, now), now)

    def send_failed(self, peer: str, version: int, index: int, now: float) -> Effects:
        """See ``Transfer.send_failed``."""
        return self._settle(self.transfer.send_failed(peer, version, index, now), now)

    def _settle(self, effects: Effects, now: float) -> Effects:
        """Pass on between the parts what concerns them; return the rest in order."""
        outside: Effects = []
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if type(effect) is Send:  # nearly all of them
                outside.append(effect)
                continue
            more: Effects = []
            match effect:
                case LinkUp(peer=peer):
                    more = [*self.transfer.link_up(peer, now), *self.tree.link_up(peer)]
                case LinkDown(peer=peer):
                    more = [*self.tree.link_down(peer), *self.transfer.link_down(peer, now)]
                case LinkEager(peer=peer, eager=eager):
                    more = self.transfer.link_eager(peer, now, eager=eager)
                case Demote(peer=peer):
                    more = self.tree.demote(peer, now)
                case Drop(peer=peer):
                    more = self.views.drop(peer, now)
                case Ban(peer=peer):
                    outside.append(effect)
                    more = self.views.ban(peer, now)
                case Report(code="starved"):
                    outside.append(effect)
                    more = self.views.refresh(now)
                case _:
                    outside.append(effect)
            queue.extendleft(reversed(more))
        return outside
