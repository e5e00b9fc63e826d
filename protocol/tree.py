"""How heads spread: Plumtree, epidemic broadcast trees (Leitao, Pereira, Rodrigues, SRDS 2007).

Over the links of the active view a head (a signed manifest or a part of one) goes
whole along *eager* links and by id along *lazy* ones. What arrives a second time
prunes its link; an id whose head does not follow in time grafts the link that
announced it. When nothing is lost the eager links form a tree; when a link or a node
goes, the lazy ones mend it. Shards follow the same eager links (``transfer``).

A state machine without sockets or clock. The caller checks a head's signature before
``on_gossip``; whoever sent a forged one is banned.
"""

from __future__ import annotations

from hashlib import sha256

from msgspec import Struct

from barnraise.protocol.messages import Message, Signed
from barnraise.protocol.tree_effects import Deliver, Effects, LinkEager, Send
from barnraise.protocol.tree_messages import Gossip, GossipHave, Graft, HeadMark, Prune


class TreeConfig(Struct, frozen=True):
    """Timers in seconds: the first wait for an announced head, the next ones; and bounds."""

    missing_timeout: float = 1.0
    graft_timeout: float = 0.5
    shorter_by: int = 4  # hops that make a lazy link worth an eager one
    heads: int = 64  # remembered; older ones are answered no more
    missing: int = 16  # announced heads waited for, per neighbour that announced them first
    graft_back: float = 2.0  # after a demotion, how long that peer's grafts are refused


class _Missing(Struct):
    until: float
    first: str
    sources: list[tuple[str, int]]  # peer, hops


class Tree:
    """The eager and lazy links of one node, and the heads that it knows."""

    def __init__(self, config: TreeConfig | None = None) -> None:
        self.config = config or TreeConfig()
        self.eager: dict[str, None] = {}  # dictionaries as sets in a stable order
        self.lazy: dict[str, None] = {}
        self._heads: dict[bytes, tuple[Gossip, str]] = {}  # id: as we hold it, whom from ("" for our own)
        self._missing: dict[bytes, _Missing] = {}
        self._demoted: dict[str, float] = {}

    @property
    def wake_at(self) -> float | None:
        """When ``on_time`` is due next, or None."""
        return min((entry.until for entry in self._missing.values()), default=None)

    def parent(self, head: bytes) -> str | None:
        """Which neighbour gave us the head with this id first; None if unknown or our own."""
        entry = self._heads.get(head)
        return entry[1] or None if entry is not None else None

    # --- events

    def link_up(self, peer: str) -> Effects:
        """``peer`` is a neighbour now: eager at first, and told which heads we hold."""
        if peer in self.eager or peer in self.lazy:
            return []
        self.eager[peer] = None
        effects: Effects = [LinkEager(peer, True)]
        marks = tuple(
            HeadMark(id=id_, version=gossip.version, hops=min(gossip.hops, 1024))
            for id_, (gossip, _) in list(self._heads.items())[-16:]
        )
        if marks:
            effects.append(Send(peer, GossipHave(marks=marks)))
        return effects

    def link_down(self, peer: str) -> Effects:
        """``peer`` is a neighbour no longer."""
        self.eager.pop(peer, None)
        self.lazy.pop(peer, None)
        self._demoted.pop(peer, None)
        for entry in self._missing.values():
            entry.sources = [source for source in entry.sources if source[0] != peer]
        return []

    def broadcast(self, version: int, head: Signed, now: float) -> Effects:
        """Send our own head to everybody. Nothing happens if it is known already."""
        return self._accept("", Gossip(version=version, hops=0, head=head), now)[1:]

    def on_message(self, peer: str, message: Message, now: float) -> Effects:
        """Take one tree message from a neighbour. ``Gossip`` only after its signature was checked."""
        if peer not in self.eager and peer not in self.lazy:
            return []
        match message:
            case Gossip():
                return self._on_gossip(peer, message, now)
            case GossipHave(marks=marks):
                return [effect for mark in marks for effect in self._on_mark(peer, mark, now)]
            case Graft(id=id_):
                return self._on_graft(peer, id_, now)
            case Prune():
                return self._make(peer, eager=False)
        return []

    def demote(self, peer: str, now: float) -> Effects:
        """Make the link lazy because ``peer`` is slow, and refuse its grafts for a moment."""
        if peer not in self.eager:
            return []
        self._demoted[peer] = now + self.config.graft_back
        return [*self._make(peer, eager=False), Send(peer, Prune())]

    def on_time(self, now: float) -> Effects:
        """Graft where an announced head did not follow in time."""
        effects: Effects = []
        for id_, entry in list(self._missing.items()):
            if entry.until > now:
                continue
            if not entry.sources:
                del self._missing[id_]
                continue
            peer, _ = entry.sources.pop(0)
            entry.until = now + self.config.graft_timeout
            effects += [*self._make(peer, eager=True), Send(peer, Graft(id=id_))]
        return effects

    # --- rules

    def _on_gossip(self, peer: str, gossip: Gossip, now: float) -> Effects:
        if sha256(gossip.head.payload).digest() in self._heads:
            return [*self._make(peer, eager=False), Send(peer, Prune())]
        return [*self._make(peer, eager=True), *self._accept(peer, gossip, now)]

    def _accept(self, sender: str, gossip: Gossip, now: float) -> Effects:
        id_ = sha256(gossip.head.payload).digest()
        if id_ in self._heads or self._too_old(gossip.version):
            return []
        ours = Gossip(version=gossip.version, hops=min(gossip.hops + 1, 1024), head=gossip.head)
        self._heads[id_] = (ours, sender)
        waited = self._missing.pop(id_, None)
        announced = set() if waited is None else {peer for peer, _ in waited.sources}
        if len(self._heads) > self.config.heads:
            del self._heads[min(self._heads, key=lambda known: self._heads[known][0].version)]
        effects: Effects = [Deliver(sender, gossip.version, gossip.head)]
        twice = [peer for peer in self.eager if peer in announced and peer != sender]
        if not sender:
            del twice[:1]  # the head came another way: one who has it stays the way to the next one
        for peer in twice:  # it would be the same head again, and the answer to it a prune
            effects += [*self._make(peer, eager=False), Send(peer, Prune())]
        effects += [Send(peer, ours) for peer in self.eager if peer != sender and peer not in announced]
        mark = HeadMark(id=id_, version=ours.version, hops=ours.hops)
        effects += [
            Send(peer, GossipHave(marks=(mark,)))
            for peer in self.lazy
            if peer != sender and peer not in announced
        ]
        return effects

    def _too_old(self, version: int) -> bool:
        if len(self._heads) < self.config.heads:
            return False
        return version < min(gossip.version for gossip, _ in self._heads.values())

    def _on_mark(self, peer: str, mark: HeadMark, now: float) -> Effects:
        known = self._heads.get(mark.id)
        if known is not None:
            return self._shorten(peer, mark, *known)
        entry = self._missing.get(mark.id)
        if entry is None:
            waiting = sum(1 for other in self._missing.values() if other.first == peer)
            if waiting >= self.config.missing or self._too_old(mark.version):
                return []
            entry = _Missing(now + self.config.missing_timeout, peer, [])
            self._missing[mark.id] = entry
        if all(source != peer for source, _ in entry.sources):
            entry.sources.append((peer, mark.hops))
        return []

    def _shorten(self, peer: str, mark: HeadMark, ours: Gossip, parent: str) -> Effects:
        """Plumtree's optimisation: a lazy link that is much shorter takes the eager one's place."""
        if (
            peer not in self.lazy
            or parent not in self.eager
            or ours.hops - mark.hops < self.config.shorter_by + 1
        ):
            return []
        moved = Gossip(version=ours.version, hops=mark.hops + 1, head=ours.head)
        self._heads[mark.id] = (moved, peer)
        return [
            *self._make(peer, eager=True),
            Send(peer, Graft(id=None)),
            *self._make(parent, eager=False),
            Send(parent, Prune()),
        ]

    def _on_graft(self, peer: str, id_: bytes | None, now: float) -> Effects:
        if self._demoted.get(peer, 0.0) <= now:
            self._demoted.pop(peer, None)
            effects = self._make(peer, eager=True)
        else:
            effects = [Send(peer, Prune())]  # it still gets the head
        known = self._heads.get(id_) if id_ is not None else None
        if known is not None:
            effects.append(Send(peer, known[0]))
        return effects

    def _make(self, peer: str, *, eager: bool) -> Effects:
        source, target = (self.lazy, self.eager) if eager else (self.eager, self.lazy)
        if peer not in source:
            return []
        del source[peer]
        target[peer] = None
        return [LinkEager(peer, eager)]
