"""What ``views`` keeps: its settings, the two views, and who of the neighbours is a guest."""

from __future__ import annotations

import random
from collections.abc import Iterable

from msgspec import Struct

from barnraise.protocol.tree_messages import Contact


class ViewConfig(Struct, frozen=True):
    """Sizes, walks and periods (seconds). The paper's: 5, 30, 6, 3, 3, 4. With eight neighbours
    walks of 4 lead as far: 1000 nodes joined with walks of 6 have the same paths and clustering.

    While no neighbour is lost and no more than ``spare`` are missing, the time between shuffles
    doubles, from ``shuffle_period`` up to ``shuffle_longest``, or a quarter of it while one is
    missing: in a swarm at rest they are most of what is sent. ``join_walks``: walks on which
    a full node sends a newcomer; each brings it two links.

    ``guests``: neighbours beyond ``active`` that only dial out; ``tenure``: seconds until one of
    them may have to make room for another. Of itself, a guest asks until ``refusals`` full views
    between two shuffles said no.
    """

    active: int = 8
    passive: int = 48
    guests: int = 32
    tenure: float = 60.0
    refusals: int = 4
    spare: int = 2
    join_walks: int = 3
    active_walk: int = 4
    passive_walk: int = 2
    shuffle_active: int = 3
    shuffle_passive: int = 4
    shuffle_period: float = 10.0
    shuffle_longest: float = 300.0
    reply_timeout: float = 10.0
    bootstrap_backoff: tuple[float, float] = (1.0, 60.0)
    messages_per_second: float = 20.0  # walks taken from one neighbour; the rest is dropped


class Budget:
    """A token bucket: what one neighbour may make us do."""

    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens, self.at = tokens, at

    def take(self, rate: float, now: float) -> bool:
        """Whether it allows one more, at ``rate`` per second."""
        self.tokens = min(rate * 5, self.tokens + (now - self.at) * rate)
        self.at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class ViewState:
    """The partial views of one node.

    Attributes:
        me: what others are told of this node; without addresses it is a guest.
        active, passive: neighbours, and contacts to replace them from, by peer id.
        guests: of the active view, those that only dial out: since when.
        banned: never again in this run.
    """

    def __init__(self, me: Contact, config: ViewConfig, rng: random.Random) -> None:
        self.me = me
        self.config = config
        self.rng = rng
        self.active: dict[str, Contact] = {}
        self.passive: dict[str, Contact] = {}
        self.guests: dict[str, float] = {}
        self.banned: set[str] = set()

    @property
    def enough(self) -> int:
        """As many links as a node rests with."""
        return max(1, self.config.active - self.config.spare)

    @property
    def links(self) -> int:
        """Neighbours that are not guests: those that count towards ``active``."""
        return len(self.active) - len(self.guests)

    @property
    def crowded(self) -> bool:
        """Whether there is no room for one more that counts."""
        return self.links >= self.config.active

    def hosts(self) -> list[str]:
        """Neighbours that are not guests."""
        return sorted(peer for peer in self.active if peer not in self.guests)

    def has_room(self, contact: Contact) -> bool:
        """Whether ``contact`` can be a neighbour, or stay one, without another's loss."""
        if contact.peer_id in self.active and (contact.peer_id in self.guests) == (not contact.addresses):
            return True
        if contact.addresses:
            return not self.crowded
        return len(self.guests) < self.config.guests or len(self.active) < self.config.active

    def remember(self, contact: Contact) -> None:
        """Keep ``contact`` in the passive view, where a random one makes room for it."""
        peer = contact.peer_id
        if peer == self.me.peer_id or peer in self.active or peer in self.banned or not contact.addresses:
            return
        if peer not in self.passive and len(self.passive) >= self.config.passive:
            del self.passive[self.rng.choice(list(self.passive))]
        self.passive[peer] = contact

    def merge(self, sample: Iterable[Contact]) -> None:
        """``remember`` each of them."""
        for contact in sample:
            self.remember(contact)

    def sample(self, for_peer: str) -> tuple[Contact, ...]:
        """Some of both views, without the one it is for."""
        chosen: list[Contact] = []
        for view, size in (
            (self.active, self.config.shuffle_active),
            (self.passive, self.config.shuffle_passive),
        ):
            others = [contact for peer, contact in view.items() if peer != for_peer and contact.addresses]
            chosen += self.rng.sample(others, min(size, len(others)))
        return tuple(chosen)

    @property
    def is_guest(self) -> bool:
        """Whether this node only dials out."""
        return not self.me.addresses
