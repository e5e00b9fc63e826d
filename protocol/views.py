"""Who our neighbours are: HyParView partial views (Leitao, Pereira, Rodrigues, DSN 2007).

The *active view* is a small set of symmetric links that carry everything else; the
*passive view* is a larger set of contacts to replace them from, kept fresh by
shuffling. Newcomers walk through the overlay and end in random active views; a lost
link is replaced at once, a node without any link is never refused; one without any
contact left goes back to its bootstrap contacts.

Where the paper drops a neighbour to make room, the two that lose a link are also
introduced to each other: the newcomer is spliced into a link, nobody else is short of
one, and no eviction leads to the next. A node that leaves ties its neighbours together
likewise. Who lacks a link or two asks few, since nearly everybody is full.

The paper takes for granted that everybody can be dialled. A *guest* is a neighbour that
cannot, and guests have places of their own: else, where most nodes are guests, they would
push each other out without rest. A guest that asks is refused when all places are taken,
but for one without any link: it gets the place of whoever has had one longest.

A state machine without sockets, clock or randomness of its own: events in (methods),
effects out. Times are seconds of the caller's monotonic clock. ``wake_at`` says when
``on_time`` is due. Ids of peers are those the transport proved.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from msgspec import Struct

from barnraise.protocol.messages import Message
from barnraise.protocol.tree_effects import Connect, Disconnect, Effects, LinkDown, LinkUp, Report, Send
from barnraise.protocol.tree_messages import (
    Contact,
    ForwardJoin,
    LeaveView,
    Neighbour,
    NeighbourReply,
    OverlayJoin,
    Shuffle,
    ShuffleReply,
)

_LOOK_BACK = 6  # shuffles after which a node with room for neighbours asks its bootstrap contacts again
_JOIN_AGAIN = 20  # of these times one asks as a newcomer does, whom even a full view grants
_JOIN, _URGENT, _POLITE, _ADOPT, _ANSWER = "join", "urgent", "polite", "adopt", "answer"
_BRINGS = {_JOIN: 4, _URGENT: 2}  # links that a request leads to, since those who make room come along


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


class _Budget:
    """A token bucket: what one neighbour may make us do."""

    __slots__ = ("at", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens, self.at = tokens, at

    def take(self, rate: float, now: float) -> bool:
        self.tokens = min(rate * 5, self.tokens + (now - self.at) * rate)
        self.at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Views:
    """The partial views of one node."""

    def __init__(
        self, me: Contact, bootstrap: Iterable[Contact], rng: random.Random, config: ViewConfig | None = None
    ) -> None:
        self.me = me
        self.config = config or ViewConfig()
        self.active: dict[str, Contact] = {}
        self.passive: dict[str, Contact] = {}
        self.banned: set[str] = set()
        self._bootstrap = tuple(contact for contact in bootstrap if contact.peer_id != me.peer_id)
        self._rng = rng
        self.pending: dict[str, tuple[str, Contact, float]] = {}  # dialled or asked: purpose, whom, until
        self._guests: dict[str, float] = {}  # of the active view, those that only dial out: since when
        self._refused: set[str] = set()  # asked since the last shuffle, and full
        self._refusals = 0  # since the last shuffle
        self._polite = 0  # requests since the last shuffle that nobody has to grant
        self._budgets: dict[str, _Budget] = {}
        self._connected: set[str] = set()
        self._replies_due = 0
        self._refreshes = 0
        self._shuffles = 0
        self._shuffle_at: float | None = None
        self._period = self.config.shuffle_period
        self._lost = False  # a neighbour, since the last shuffle
        self._retry_at: float | None = None
        self._backoff = self.config.bootstrap_backoff[0]

    @property
    def wake_at(self) -> float | None:
        """When ``on_time`` is due next, or None."""
        times = [until for _, _, until in self.pending.values()]
        times += [at for at in (self._shuffle_at, self._retry_at) if at is not None]
        return min(times, default=None)

    # --- events

    def start(self, now: float, known: Iterable[Contact] = ()) -> Effects:
        """Begin, with contacts remembered from an earlier run (R4) besides the bootstrap ones."""
        self._shuffle_at = now + self.config.shuffle_period * (0.5 + self._rng.random())
        for contact in known:
            self._remember(contact)
        return self._bootstrap_now(now)

    def connected(self, peer: str, now: float) -> Effects:
        """A connection to ``peer`` is open, dialled by either side."""
        if peer in self.banned:
            return [Disconnect(peer)]
        self._connected.add(peer)
        purpose, contact, _ = self.pending.get(peer, (None, None, 0.0))
        if purpose is None or contact is None or peer in self.active:
            return []
        if purpose == _ANSWER:
            del self.pending[peer]
            return [Send(peer, ShuffleReply(sample=self._sample(peer))), Disconnect(peer)]
        self.pending[peer] = (purpose, contact, now + self.config.reply_timeout)
        if purpose == _JOIN:
            self._replies_due += 1
            return [Send(peer, OverlayJoin(addresses=self.me.addresses))]
        return [
            Send(
                peer,
                Neighbour(addresses=self.me.addresses, urgent=purpose == _URGENT or self._tone() == _URGENT),
            )
        ]

    def connect_failed(self, peer: str, now: float) -> Effects:
        """Dialling ``peer`` failed: it is forgotten (bootstrap contacts excepted)."""
        self.pending.pop(peer, None)
        self.passive.pop(peer, None)
        return self._repair(now)

    def disconnected(self, peer: str, now: float) -> Effects:
        """The connection to ``peer`` is gone, for whatever reason."""
        self._connected.discard(peer)
        self._budgets.pop(peer, None)
        self.pending.pop(peer, None)
        self.passive.pop(peer, None)  # where few can be dialled, all others would take turns at them
        effects = self._unlink(peer)
        if effects:
            self._lost = True
            self._hurry(now)
        return effects + self._repair(now)

    def drop(self, peer: str, now: float) -> Effects:
        """Take ``peer`` out of the views without telling it more than that; it may come back."""
        effects = self._part(peer)
        self.passive.pop(peer, None)
        return effects + self._repair(now)

    def ban(self, peer: str, now: float) -> Effects:
        """Never again in this run."""
        self.banned.add(peer)
        self.pending.pop(peer, None)
        was_active = peer in self.active
        effects = self.drop(peer, now)
        return effects if was_active else [*effects, Disconnect(peer)]

    def refresh(self, now: float) -> Effects:
        """Trade a random neighbour for a new one: the present ones do not help.

        Every second time the new one comes from the bootstrap contacts, so that a group
        of nodes that know only each other finds back.
        """
        effects: Effects = []
        if self._crowded:
            effects += self._part(self._rng.choice(self._hosts()))
        fresh = [contact for peer, contact in self.passive.items() if peer not in self.pending]
        self._refreshes += 1
        if not fresh or self._refreshes % 2 == 0:
            return effects + self._bootstrap_now(now)
        return effects + self._ask(self._rng.choice(fresh), _POLITE, now)

    def leave(self) -> Effects:
        """Say goodbye to all neighbours (the program ends), and tie them together two by two."""
        left = sorted(self.active)
        self._rng.shuffle(left)
        effects = [
            effect
            for one, other in zip(left[::2], left[1::2], strict=False)
            for effect in self._introduce(self.active[one], self.active[other])
        ]
        return effects + [effect for peer in left for effect in self._part(peer)]

    def on_message(self, peer: str, message: Message, now: float) -> Effects:
        """Take one overlay message from ``peer``; others, and those of strangers, are ignored."""
        if peer in self.banned:
            return [Disconnect(peer)]
        match message:
            case OverlayJoin(addresses=addresses):
                return self._on_join(Contact(peer_id=peer, addresses=addresses), now)
            case Neighbour(addresses=addresses, urgent=urgent):
                return self._on_neighbour(Contact(peer_id=peer, addresses=addresses), urgent, now)
            case NeighbourReply(accepted=accepted):
                return self._on_reply(peer, accepted, now)
            case ShuffleReply(sample=sample):
                if self._replies_due > 0:  # one for each shuffle of ours: nobody fills our view unasked
                    self._replies_due -= 1
                    self._merge(sample)
                return []
            case LeaveView():
                contact = self.active.get(peer)
                effects = self._unlink(peer)
                if contact is not None:
                    self._remember(contact)
                    self._refused.add(peer)
                    effects.append(Disconnect(peer))
                    if self._links < self._enough:
                        self._hurry(now)
                return effects + self._repair(now)
        if peer not in self.active:
            known = isinstance(message, ForwardJoin | Shuffle)
            return [Send(peer, LeaveView())] if known else []  # it believes in a link that we lack
        budget = self._budgets.setdefault(peer, _Budget(self.config.messages_per_second * 5, now))
        if not budget.take(self.config.messages_per_second, now):
            return [Report("flood", peer, -1, -1, "more overlay messages than one neighbour has to send")]
        match message:
            case ForwardJoin(newcomer=newcomer, ttl=ttl):
                return self._on_forward_join(peer, newcomer, ttl, now)
            case Shuffle(origin=origin, ttl=ttl, sample=sample):
                return self._on_shuffle(peer, origin, ttl, sample, now)
        return []

    def on_time(self, now: float) -> Effects:
        """Do what is due: shuffles, requests without an answer, bootstrapping again."""
        effects: Effects = []
        for peer, (_, _, until) in list(self.pending.items()):
            if until <= now:
                del self.pending[peer]
                self.passive.pop(peer, None)
                if peer not in self.active and peer in self._connected:
                    effects.append(Disconnect(peer))
        if self._shuffle_at is not None and self._shuffle_at <= now:
            self._shuffle_at = now + self._next_period()
            self._refused.clear()
            self._polite = self._refusals = 0
            effects += self._shuffle()
            self._shuffles += 1
            if self._shuffles % _LOOK_BACK == 0 and not self._crowded:
                effects += self._look_back(now)
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            effects += self._bootstrap_now(now)
        return effects + self._repair(now)

    # --- answers

    def _on_join(self, contact: Contact, now: float) -> Effects:
        peer = contact.peer_id
        contacts = Send(peer, ShuffleReply(sample=self._sample(peer)))
        effects: Effects = []
        if not self._has_room(contact):
            oldest = next((each for each in self._guests if each != peer), "")
            if not contact.addresses and self._guests.get(oldest, now) + self.config.tenure > now:
                return [contacts, Send(peer, NeighbourReply(accepted=False))]
            effects += self._part(oldest) if not contact.addresses else []
        effects.append(Send(peer, NeighbourReply(accepted=True)))  # before anything on the new link
        effects += [contacts, *self._link_anew(contact, now)]
        if not contact.addresses:  # it cannot be dialled, so it looks for its neighbours itself
            return effects
        others = [other for other in self.active if other != peer]
        walk = ForwardJoin(newcomer=contact, ttl=self.config.active_walk)
        few = min(len(others), self.config.join_walks)
        chosen = self._rng.sample(others, few) if self._crowded else others  # else there is room everywhere
        return effects + [Send(other, walk) for other in chosen]

    def _on_forward_join(self, sender: str, newcomer: Contact, ttl: int, now: float) -> Effects:
        peer = newcomer.peer_id
        if peer == self.me.peer_id or peer in self.banned or not newcomer.addresses:
            return []
        onward = [other for other in self.active if other not in (sender, peer)]
        known = peer in self.active or peer in self.pending
        room = not self._crowded and ttl <= self.config.passive_walk
        if ttl == 0 or not onward or (room and not known):
            return [] if known else self._ask(newcomer, _ADOPT, now)
        if ttl == self.config.passive_walk:
            self._remember(newcomer)
        return [Send(self._rng.choice(onward), ForwardJoin(newcomer=newcomer, ttl=ttl - 1))]

    def _on_neighbour(self, contact: Contact, urgent: bool, now: float) -> Effects:
        peer = contact.peer_id
        if contact.addresses:
            accepted = urgent or peer in self.active or self._has_room(contact)
        elif urgent or peer in self._guests:
            accepted = self._has_room(contact)
        else:
            accepted = len(self.active) < self.config.active
        effects: Effects = [Send(peer, NeighbourReply(accepted=accepted))]
        if accepted:
            return effects + self._link_anew(contact, now)
        self._remember(contact)
        return effects

    def _on_reply(self, peer: str, accepted: bool, now: float) -> Effects:
        purpose, contact, _ = self.pending.pop(peer, (None, None, 0.0))
        if contact is None or purpose == _ANSWER:  # not asked, or no longer waited for
            return [Send(peer, LeaveView())] if accepted and peer not in self.active else []
        if accepted and purpose == _POLITE and self._crowded:
            self._remember(contact)  # others were faster
            return [Send(peer, LeaveView()), Disconnect(peer)]
        if accepted:
            self._backoff = self.config.bootstrap_backoff[0]
            return self._link(contact, now)
        self._refused.add(peer)
        self._refusals += 1
        self._remember(contact)
        return [Disconnect(peer), *self._repair(now)]

    def _on_shuffle(
        self, sender: str, origin: Contact, ttl: int, sample: tuple[Contact, ...], now: float
    ) -> Effects:
        if origin.peer_id == self.me.peer_id or origin.peer_id in self.banned:
            return []
        onward = [other for other in self.active if other not in (sender, origin.peer_id)]
        answerable = origin.addresses or origin.peer_id != sender  # else only we can answer it
        if ttl > 0 and onward and answerable:
            walk = Shuffle(origin=origin, ttl=ttl - 1, sample=sample)
            return [Send(self._rng.choice(onward), walk)]
        reply = self._sample(origin.peer_id)
        self._merge((origin, *sample))
        if origin.peer_id in self._connected:
            return [Send(origin.peer_id, ShuffleReply(sample=reply))]
        if origin.peer_id in self.pending or not origin.addresses:
            return []
        self.pending[origin.peer_id] = (_ANSWER, origin, now + self.config.reply_timeout)
        return [Connect(origin)]

    # --- keeping the views

    @property
    def _enough(self) -> int:
        return max(1, self.config.active - self.config.spare)

    @property
    def _links(self) -> int:
        """Neighbours that are not guests: those that count towards ``active``."""
        return len(self.active) - len(self._guests)

    @property
    def _crowded(self) -> bool:
        return self._links >= self.config.active

    def _hosts(self) -> list[str]:
        """Neighbours that are not guests."""
        return sorted(peer for peer in self.active if peer not in self._guests)

    def _has_room(self, contact: Contact) -> bool:
        """Whether ``contact`` can be a neighbour, or stay one, without another's loss."""
        if contact.peer_id in self.active and (contact.peer_id in self._guests) == (not contact.addresses):
            return True
        if contact.addresses:
            return not self._crowded
        return len(self._guests) < self.config.guests or len(self.active) < self.config.active

    def _next_period(self) -> float:
        longest = self.config.shuffle_longest
        if len(self.active) < self.config.active:
            longest /= 4
        longest = max(longest, self.config.shuffle_period)
        quiet = not self._lost and (
            len(self.active) >= self._enough or (self._is_guest and bool(self.active))
        )
        self._period = min(2 * self._period, longest) if quiet else self.config.shuffle_period
        self._lost = False
        return self._period

    def _hurry(self, now: float) -> None:
        """Shuffle within a period: links are missing."""
        if self._shuffle_at is not None:
            self._shuffle_at = min(self._shuffle_at, now + self.config.shuffle_period)

    def _shuffle(self) -> Effects:
        if not self.active:
            return []
        self._replies_due = 1
        walk = Shuffle(origin=self.me, ttl=self.config.active_walk, sample=self._sample(self.me.peer_id))
        return [Send(self._rng.choice(sorted(self.active)), walk)]

    def _sample(self, for_peer: str) -> tuple[Contact, ...]:
        """Some of both views, without the one it is for."""
        chosen: list[Contact] = []
        for view, size in (
            (self.active, self.config.shuffle_active),
            (self.passive, self.config.shuffle_passive),
        ):
            others = [contact for peer, contact in view.items() if peer != for_peer and contact.addresses]
            chosen += self._rng.sample(others, min(size, len(others)))
        return tuple(chosen)

    def _merge(self, sample: Iterable[Contact]) -> None:
        for contact in sample:
            self._remember(contact)

    def _remember(self, contact: Contact) -> None:
        peer = contact.peer_id
        if peer == self.me.peer_id or peer in self.active or peer in self.banned or not contact.addresses:
            return
        if peer not in self.passive and len(self.passive) >= self.config.passive:
            del self.passive[self._rng.choice(list(self.passive))]
        self.passive[peer] = contact

    def _link_anew(self, contact: Contact, now: float) -> Effects:
        """Link to a peer that asked; one that was linked knows nothing of it, so all begins again."""
        return [*self._unlink(contact.peer_id), *self._link(contact, now)]

    def _link(self, contact: Contact, now: float) -> Effects:
        peer = contact.peer_id
        self.pending.pop(peer, None)
        self.passive.pop(peer, None)
        if peer in self.active or peer == self.me.peer_id:
            return []
        effects: Effects = []
        if not contact.addresses:
            self._guests[peer] = now
        elif self._crowded:
            dropped = self.active[self._rng.choice(self._hosts())]
            effects += [*self._introduce(dropped, contact), *self._part(dropped.peer_id)]
        self.active[peer] = contact
        self._connected.add(peer)
        return [*effects, LinkUp(peer)]

    def _introduce(self, one: Contact, other: Contact) -> Effects:
        """Two neighbours, or nearly: whichever can ask the other is told to."""
        if other.addresses:
            return [Send(one.peer_id, ForwardJoin(newcomer=other, ttl=0))]
        if one.addresses:
            return [Send(other.peer_id, ForwardJoin(newcomer=one, ttl=0))]
        return []

    def _unlink(self, peer: str) -> Effects:
        self._guests.pop(peer, None)
        return [] if self.active.pop(peer, None) is None else [LinkDown(peer)]

    def _part(self, peer: str) -> Effects:
        contact = self.active.get(peer)
        if contact is None:
            return []
        effects = self._unlink(peer)
        self._remember(contact)
        self._refused.add(peer)
        return [*effects, Send(peer, LeaveView()), Disconnect(peer)]

    def _ask(self, contact: Contact, purpose: str, now: float) -> Effects:
        self.pending[contact.peer_id] = (purpose, contact, now + self.config.reply_timeout)
        return [Connect(contact)]

    def _repair(self, now: float) -> Effects:
        """Replace missing neighbours from the passive view, as many as are not asked for already."""
        purposes = [purpose for purpose, _, _ in self.pending.values() if purpose != _ANSWER]
        asked = sum(self._brings(purpose) for purpose in purposes)
        tone = _POLITE if _JOIN in purposes else self._tone()
        effects: Effects = []
        while (missing := self.config.active - self._links) > asked and not self._in_vain:
            fresh = [
                contact
                for peer, contact in self.passive.items()
                if peer not in self.pending and peer not in self._refused
            ]
            if not fresh or (tone == _POLITE and self._polite >= 2 * missing):
                break
            self._polite += tone == _POLITE
            if self._is_guest and tone == _URGENT and not self.active and _JOIN not in purposes:
                purposes.append(_JOIN)
                effects += self._ask(self._rng.choice(fresh), _JOIN, now)
            else:
                effects += self._ask(self._rng.choice(fresh), tone, now)
            asked += self._brings(tone)
        if not self.active and not asked and self._retry_at is None and self._shuffle_at is not None:
            self._refused.clear()
            self._retry_at = now + self._backoff * (0.5 + self._rng.random())
            self._backoff = min(self._backoff * 2, self.config.bootstrap_backoff[1])
        return effects

    @property
    def _is_guest(self) -> bool:
        return not self.me.addresses

    @property
    def _in_vain(self) -> bool:
        """Whether there is no use in asking: a guest that has a link was refused often enough."""
        return self._is_guest and bool(self.active) and self._refusals >= self.config.refusals

    def _brings(self, purpose: str) -> int:
        return 1 if self._is_guest else _BRINGS.get(purpose, 1)

    def _tone(self) -> str:
        """Below half of its links a node asks in a way that full views grant, too."""
        return _URGENT if self._links <= self.config.active // 2 else _POLITE

    def _look_back(self, now: float) -> Effects:
        """A group cut off from the rest knows only itself: ask where we came in.

        Politely, since joining makes a full view drop a neighbour, who has room then and
        asks in turn: the links would never come to rest.
        """
        again = self._shuffles % (_LOOK_BACK * _JOIN_AGAIN) == 0
        return self._bootstrap_now(now, _JOIN if again else _POLITE)

    def _bootstrap_now(self, now: float, purpose: str = _JOIN) -> Effects:
        effects: Effects = []
        for contact in self._bootstrap:
            if contact.peer_id not in self.active and contact.peer_id not in (*self.pending, *self.banned):
                effects += self._ask(contact, purpose, now)
        return effects + self._repair(now)
