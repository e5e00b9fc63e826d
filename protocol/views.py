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
from barnraise.protocol.view_search import ADOPT, ANSWER, JOIN, POLITE, URGENT, Search
from barnraise.protocol.view_state import Budget, ViewConfig, ViewState

_LOOK_BACK = 6  # shuffles after which a node with room for neighbours asks its bootstrap contacts again
_JOIN_AGAIN = 20  # of these times one asks as a newcomer does, whom even a full view grants


class Views:
    """The partial views of one node, as events change them.

    Attributes:
        state: the views and what is known of who is in them.
        search: who was asked for a link.
        active, passive, banned, pending: those of ``state`` and ``search``.
    """

    def __init__(
        self, me: Contact, bootstrap: Iterable[Contact], rng: random.Random, config: ViewConfig | None = None
    ) -> None:
        self.state = ViewState(me, config or ViewConfig(), rng)
        self.search = Search(self.state, bootstrap)
        self.active, self.passive, self.banned = self.state.active, self.state.passive, self.state.banned
        self.pending = self.search.pending
        self._budgets: dict[str, Budget] = {}
        self._connected: set[str] = set()
        self._replies_due = 0
        self._refreshes = 0
        self._shuffles = 0
        self._shuffle_at: float | None = None
        self._period = self.state.config.shuffle_period
        self._lost = False  # a neighbour, since the last shuffle

    @property
    def wake_at(self) -> float | None:
        """When ``on_time`` is due next, or None."""
        times = [until for _, _, until in self.pending.values()]
        times += [at for at in (self._shuffle_at, self.search.retry_at) if at is not None]
        return min(times, default=None)

    # --- events

    def start(self, now: float, known: Iterable[Contact] = ()) -> Effects:
        """Begin, with contacts remembered from an earlier run (R4) besides the bootstrap ones."""
        self._shuffle_at = now + self.state.config.shuffle_period * (0.5 + self.state.rng.random())
        for contact in known:
            self.state.remember(contact)
        return self.search.start(now)

    def connected(self, peer: str, now: float) -> Effects:
        """A connection to ``peer`` is open, dialled by either side."""
        if peer in self.banned:
            return [Disconnect(peer)]
        self._connected.add(peer)
        purpose, contact, _ = self.pending.get(peer, (None, None, 0.0))
        if purpose is None or contact is None or peer in self.active:
            return []
        if purpose == ANSWER:
            del self.pending[peer]
            return [Send(peer, ShuffleReply(sample=self.state.sample(peer))), Disconnect(peer)]
        self.pending[peer] = (purpose, contact, now + self.state.config.reply_timeout)
        if purpose == JOIN:
            self._replies_due += 1
            return [Send(peer, OverlayJoin(addresses=self.state.me.addresses))]
        return [
            Send(
                peer,
                Neighbour(
                    addresses=self.state.me.addresses,
                    urgent=purpose == URGENT or self.search.tone() == URGENT,
                ),
            )
        ]

    def connect_failed(self, peer: str, now: float) -> Effects:
        """Dialling ``peer`` failed: it is forgotten (bootstrap contacts excepted)."""
        self.pending.pop(peer, None)
        self.passive.pop(peer, None)
        return self.search.repair(now)

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
        return effects + self.search.repair(now)

    def drop(self, peer: str, now: float) -> Effects:
        """Take ``peer`` out of the views without telling it more than that; it may come back."""
        effects = self._part(peer)
        self.passive.pop(peer, None)
        return effects + self.search.repair(now)

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
        if self.state.crowded:
            effects += self._part(self.state.rng.choice(self.state.hosts()))
        fresh = [contact for peer, contact in self.passive.items() if peer not in self.pending]
        self._refreshes += 1
        if not fresh or self._refreshes % 2 == 0:
            return effects + self.search.bootstrap(now)
        return effects + self.search.ask(self.state.rng.choice(fresh), POLITE, now)

    def leave(self) -> Effects:
        """Say goodbye to all neighbours (the program ends), and tie them together two by two."""
        left = sorted(self.active)
        self.state.rng.shuffle(left)
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
                    self.state.merge(sample)
                return []
            case LeaveView():
                contact = self.active.get(peer)
                effects = self._unlink(peer)
                if contact is not None:
                    self.state.remember(contact)
                    self.search.refused.add(peer)
                    effects.append(Disconnect(peer))
                    if self.state.links < self.state.enough:
                        self._hurry(now)
                return effects + self.search.repair(now)
        if peer not in self.active:
            known = isinstance(message, ForwardJoin | Shuffle)
            return [Send(peer, LeaveView())] if known else []  # it believes in a link that we lack
        budget = self._budgets.setdefault(peer, Budget(self.state.config.messages_per_second * 5, now))
        if not budget.take(self.state.config.messages_per_second, now):
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
            self.search.forget_refusals()
            effects += self._shuffle()
            self._shuffles += 1
            if self._shuffles % _LOOK_BACK == 0 and not self.state.crowded:
                effects += self._look_back(now)
        effects += self.search.retry(now)
        return effects + self.search.repair(now)

    # --- answers

    def _on_join(self, contact: Contact, now: float) -> Effects:
        peer = contact.peer_id
        contacts = Send(peer, ShuffleReply(sample=self.state.sample(peer)))
        effects: Effects = []
        if not self.state.has_room(contact):
            oldest = next((each for each in self.state.guests if each != peer), "")
            if not contact.addresses and self.state.guests.get(oldest, now) + self.state.config.tenure > now:
                return [contacts, Send(peer, NeighbourReply(accepted=False))]
            effects += self._part(oldest) if not contact.addresses else []
        effects.append(Send(peer, NeighbourReply(accepted=True)))  # before anything on the new link
        effects += [contacts, *self._link_anew(contact, now)]
        if not contact.addresses:  # it cannot be dialled, so it looks for its neighbours itself
            return effects
        others = [other for other in self.active if other != peer]
        walk = ForwardJoin(newcomer=contact, ttl=self.state.config.active_walk)
        few = min(len(others), self.state.config.join_walks)
        chosen = (
            self.state.rng.sample(others, few) if self.state.crowded else others
        )  # else there is room everywhere
        return effects + [Send(other, walk) for other in chosen]

    def _on_forward_join(self, sender: str, newcomer: Contact, ttl: int, now: float) -> Effects:
        peer = newcomer.peer_id
        if peer == self.state.me.peer_id or peer in self.banned or not newcomer.addresses:
            return []
        onward = [other for other in self.active if other not in (sender, peer)]
        known = peer in self.active or peer in self.pending
        room = not self.state.crowded and ttl <= self.state.config.passive_walk
        if ttl == 0 or not onward or (room and not known):
            return [] if known else self.search.ask(newcomer, ADOPT, now)
        if ttl == self.state.config.passive_walk:
            self.state.remember(newcomer)
        return [Send(self.state.rng.choice(onward), ForwardJoin(newcomer=newcomer, ttl=ttl - 1))]

    def _on_neighbour(self, contact: Contact, urgent: bool, now: float) -> Effects:
        peer = contact.peer_id
        if contact.addresses:
            accepted = urgent or peer in self.active or self.state.has_room(contact)
        elif urgent or peer in self.state.guests:
            accepted = self.state.has_room(contact)
        else:
            accepted = len(self.active) < self.state.config.active
        effects: Effects = [Send(peer, NeighbourReply(accepted=accepted))]
        if accepted:
            return effects + self._link_anew(contact, now)
        self.state.remember(contact)
        return effects

    def _on_reply(self, peer: str, accepted: bool, now: float) -> Effects:
        purpose, contact, _ = self.pending.pop(peer, (None, None, 0.0))
        if contact is None or purpose == ANSWER:  # not asked, or no longer waited for
            return [Send(peer, LeaveView())] if accepted and peer not in self.active else []
        if accepted and purpose == POLITE and self.state.crowded:
            self.state.remember(contact)  # others were faster
            return [Send(peer, LeaveView()), Disconnect(peer)]
        if accepted:
            self.search.was_granted()
            return self._link(contact, now)
        self.search.was_refused(peer)
        self.state.remember(contact)
        return [Disconnect(peer), *self.search.repair(now)]

    def _on_shuffle(
        self, sender: str, origin: Contact, ttl: int, sample: tuple[Contact, ...], now: float
    ) -> Effects:
        if origin.peer_id == self.state.me.peer_id or origin.peer_id in self.banned:
            return []
        onward = [other for other in self.active if other not in (sender, origin.peer_id)]
        answerable = origin.addresses or origin.peer_id != sender  # else only we can answer it
        if ttl > 0 and onward and answerable:
            walk = Shuffle(origin=origin, ttl=ttl - 1, sample=sample)
            return [Send(self.state.rng.choice(onward), walk)]
        reply = self.state.sample(origin.peer_id)
        self.state.merge((origin, *sample))
        if origin.peer_id in self._connected:
            return [Send(origin.peer_id, ShuffleReply(sample=reply))]
        if origin.peer_id in self.pending or not origin.addresses:
            return []
        self.pending[origin.peer_id] = (ANSWER, origin, now + self.state.config.reply_timeout)
        return [Connect(origin)]

    # --- keeping the views

    def _next_period(self) -> float:
        longest = self.state.config.shuffle_longest
        if len(self.active) < self.state.config.active:
            longest /= 4
        longest = max(longest, self.state.config.shuffle_period)
        quiet = not self._lost and (
            len(self.active) >= self.state.enough or (self.state.is_guest and bool(self.active))
        )
        self._period = min(2 * self._period, longest) if quiet else self.state.config.shuffle_period
        self._lost = False
        return self._period

    def _hurry(self, now: float) -> None:
        """Shuffle within a period: links are missing."""
        if self._shuffle_at is not None:
            self._shuffle_at = min(self._shuffle_at, now + self.state.config.shuffle_period)

    def _shuffle(self) -> Effects:
        if not self.active:
            return []
        self._replies_due = 1
        walk = Shuffle(
            origin=self.state.me,
            ttl=self.state.config.active_walk,
            sample=self.state.sample(self.state.me.peer_id),
        )
        return [Send(self.state.rng.choice(sorted(self.active)), walk)]

    def _link_anew(self, contact: Contact, now: float) -> Effects:
        """Link to a peer that asked; one that was linked knows nothing of it, so all begins again."""
        return [*self._unlink(contact.peer_id), *self._link(contact, now)]

    def _link(self, contact: Contact, now: float) -> Effects:
        peer = contact.peer_id
        self.pending.pop(peer, None)
        self.passive.pop(peer, None)
        if peer in self.active or peer == self.state.me.peer_id:
            return []
        effects: Effects = []
        if not contact.addresses:
            self.state.guests[peer] = now
        elif self.state.crowded:
            dropped = self.active[self.state.rng.choice(self.state.hosts())]
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
        self.state.guests.pop(peer, None)
        return [] if self.active.pop(peer, None) is None else [LinkDown(peer)]

    def _part(self, peer: str) -> Effects:
        contact = self.active.get(peer)
        if contact is None:
            return []
        effects = self._unlink(peer)
        self.state.remember(contact)
        self.search.refused.add(peer)
        return [*effects, Send(peer, LeaveView()), Disconnect(peer)]

    def _look_back(self, now: float) -> Effects:
        """A group cut off from the rest knows only itself: ask where we came in.

        Politely, since joining makes a full view drop a neighbour, who has room then and
        asks in turn: the links would never come to rest.
        """
        again = self._shuffles % (_LOOK_BACK * _JOIN_AGAIN) == 0
        return self.search.bootstrap(now, JOIN if again else POLITE)
