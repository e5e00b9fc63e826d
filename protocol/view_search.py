"""Whom a node asks to be its neighbour, how, and when it stops: the searching part of ``views``.

A node asks politely, and full views refuse; below half of its links it asks in a way that they
grant; one without any link joins again where it came in, after longer and longer pauses.
"""

from __future__ import annotations

from collections.abc import Iterable

from barnraise.protocol.tree_effects import Connect, Effects
from barnraise.protocol.tree_messages import Contact
from barnraise.protocol.view_state import ViewState

JOIN, URGENT, POLITE, ADOPT, ANSWER = "join", "urgent", "polite", "adopt", "answer"
_BRINGS = {JOIN: 4, URGENT: 2}  # links that a request leads to, since those who make room come along


class Search:
    """The requests of one node, over the views in ``state``.

    Attributes:
        pending: dialled or asked: purpose, whom, until.
        refused: asked since the last shuffle, and full.
        retry_at: when the contacts to begin with are asked again, or None.
    """

    def __init__(self, state: ViewState, bootstrap: Iterable[Contact]) -> None:
        self._state = state
        self._bootstrap = tuple(contact for contact in bootstrap if contact.peer_id != state.me.peer_id)
        self.pending: dict[str, tuple[str, Contact, float]] = {}
        self.refused: set[str] = set()
        self._refusals = 0  # since the last shuffle
        self._polite = 0  # requests since the last shuffle that nobody has to grant
        self.retry_at: float | None = None
        self._backoff = state.config.bootstrap_backoff[0]
        self._started = False

    def start(self, now: float) -> Effects:
        """Ask for the first time; before, nothing is tried again."""
        self._started = True
        return self.bootstrap(now)

    def forget_refusals(self) -> None:
        """Whoever refused may be asked again."""
        self.refused.clear()
        self._polite = self._refusals = 0

    def was_granted(self) -> None:
        """A request led to a link."""
        self._backoff = self._state.config.bootstrap_backoff[0]

    def was_refused(self, peer: str) -> None:
        """``peer`` is full."""
        self.refused.add(peer)
        self._refusals += 1

    def retry(self, now: float) -> Effects:
        """Ask the contacts to begin with again, if that is due."""
        if self.retry_at is None or self.retry_at > now:
            return []
        self.retry_at = None
        return self.bootstrap(now)

    def ask(self, contact: Contact, purpose: str, now: float) -> Effects:
        """Dial ``contact``; what it is asked then depends on the ``purpose``."""
        self.pending[contact.peer_id] = (purpose, contact, now + self._state.config.reply_timeout)
        return [Connect(contact)]

    def repair(self, now: float) -> Effects:
        """Replace missing neighbours from the passive view, as many as are not asked for already."""
        purposes = [purpose for purpose, _, _ in self.pending.values() if purpose != ANSWER]
        asked = sum(self._brings(purpose) for purpose in purposes)
        tone = POLITE if JOIN in purposes else self.tone()
        effects: Effects = []
        while (missing := self._state.config.active - self._state.links) > asked and not self._in_vain:
            fresh = [
                contact
                for peer, contact in self._state.passive.items()
                if peer not in self.pending and peer not in self.refused
            ]
            if not fresh or (tone == POLITE and self._polite >= 2 * missing):
                break
            self._polite += tone == POLITE
            if self._state.is_guest and tone == URGENT and not self._state.active and JOIN not in purposes:
                purposes.append(JOIN)
                effects += self.ask(self._state.rng.choice(fresh), JOIN, now)
            else:
                effects += self.ask(self._state.rng.choice(fresh), tone, now)
            asked += self._brings(tone)
        if not self._state.active and not asked and self.retry_at is None and self._started:
            self.refused.clear()
            self.retry_at = now + self._backoff * (0.5 + self._state.rng.random())
            self._backoff = min(self._backoff * 2, self._state.config.bootstrap_backoff[1])
        return effects

    def bootstrap(self, now: float, purpose: str = JOIN) -> Effects:
        """Ask the contacts to begin with."""
        effects: Effects = []
        for contact in self._bootstrap:
            if contact.peer_id not in self._state.active and contact.peer_id not in (
                *self.pending,
                *self._state.banned,
            ):
                effects += self.ask(contact, purpose, now)
        return effects + self.repair(now)

    def tone(self) -> str:
        """Below half of its links a node asks in a way that full views grant, too."""
        return URGENT if self._state.links <= self._state.config.active // 2 else POLITE

    @property
    def _in_vain(self) -> bool:
        """Whether there is no use in asking: a guest that has a link was refused often enough."""
        return (
            self._state.is_guest
            and bool(self._state.active)
            and self._refusals >= self._state.config.refusals
        )

    def _brings(self, purpose: str) -> int:
        return 1 if self._state.is_guest else _BRINGS.get(purpose, 1)
