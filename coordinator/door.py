"""Who has never been here before, and whether one more may come from where they are.

The rule is ``barnraise.coordinator.newcomers``, what outlives a restart ``newcomer_book``; here
both meet the run: who is known or was let in by name passes, everybody else is counted.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from barnraise.coordinator.core import Core
from barnraise.coordinator.newcomer_book import NewcomerBook
from barnraise.coordinator.newcomers import AROUND, Groups, NewcomerLimits, Newcomers, groups_of
from barnraise.protocol.errors import NEWCOMERS, RefusedError, StorageError
from barnraise.protocol.identity import peer_id_of

log = logging.getLogger(__name__)

HOUR_MS = 3_600_000
TIDY_EVERY_S = 3600.0
MOST_TURNED_AWAY = 4096  # keys that are told apart


class Door:
    """Lets new keys in, as many as there may be.

    Attributes:
        let_in: new keys since the start. ``refused``: attempts of others since the start.
    """

    def __init__(
        self, core: Core, observed: Callable[[str], str], limits: NewcomerLimits, book: NewcomerBook
    ) -> None:
        """``observed``: where a peer's connection comes from, as ``Network.observed``."""
        self.let_in = self.refused = 0
        self._core, self._observed, self._limits, self._book = core, observed, limits, book
        self._newcomers = Newcomers(max(1, limits.per_day), book.kept)
        self._away: OrderedDict[bytes, int] = OrderedDict()  # keys turned away -> when last, oldest first

    async def run(self) -> None:
        """Keep nothing for longer than it counts, for ever."""
        while True:
            self.tidy()
            await trio.sleep(TIDY_EVERY_S)

    def tidy(self) -> None:
        """Forget what is too old, on the disk as well."""
        self._newcomers.forget(self._core.now_ms())
        self._book.replace(self._newcomers.arrivals)  # whoever came in between had them forgotten here alone

    def is_new(self, key: bytes) -> bool:
        """Whether this run has neither seen a key nor been told by its operator to let it in."""
        return key not in self._core.state.nodes and key not in self._core.state.operations.allowed

    def _groups(self, key: bytes, peer_id: str) -> Groups | None:
        """For whom a key would be counted; None: it is not."""
        if not self._limits.per_day or not self.is_new(key):
            return None
        return groups_of(self._observed(peer_id), self._book.secret, self._limits.private)

    def wait_ms(self, key: bytes, peer_id: str) -> int:
        """How long until a key may come in from where its peer is; 0: now."""
        groups = self._groups(key, peer_id)
        return 0 if groups is None else self._newcomers.wait_ms(groups, self._core.now_ms())

    def check(self, key: bytes, peer_id: str) -> None:
        """That a key may come in now.

        Raises:
            RefusedError: ``newcomers``, with cause, cure and when to come again.
        """
        wait = self.wait_ms(key, peer_id)
        if wait <= 0:
            return
        now = self._core.now_ms()
        if self._recently(now, key) is None:
            log.info("%s turned away: too many new keys came from where it is", peer_id_of(key))
        self.refused += 1
        self._away.pop(key, None)
        self._away[key] = now
        if len(self._away) > MOST_TURNED_AWAY:
            self._away.popitem(last=False)
        raise RefusedError(NEWCOMERS, self._words(wait), -(-wait // 1000))

    def _words(self, wait_ms: int) -> str:
        most = self._limits.per_day
        return (
            f"this run lets {most} keys a day that it has never seen come in from one internet address "
            f"({AROUND * most} from its surroundings), and so many have come from yours: the next may in "
            f"{_duration(wait_ms)}. Leave the node running, it tries by itself. Or ask the operator for an "
            "invite and join with `barnraise join ADDRESS --invite WORD`, or send them your peer id "
            "(`barnraise key show`). A key that was here before always gets in"
        )

    @contextmanager
    def counting(self, key: bytes, peer_id: str) -> Iterator[None]:
        """While a key's first join is made durable; if the disk refuses, nobody came in.

        Whoever hangs up meanwhile is counted: what was begun is written all the same.
        """
        new, groups = self.is_new(key), self._groups(key, peer_id)
        arrival = None if groups is None else self._newcomers.let_in(groups, self._core.now_ms())
        came = True
        try:
            yield
        except StorageError:
            came = False
            raise
        finally:
            if came:
                self.let_in += new
                self._away.pop(key, None)
            if came and arrival is not None:
                self._book.add(arrival, self._newcomers.arrivals)
            elif arrival is not None:
                self._newcomers.take_back(arrival)

    def _recently(self, now_ms: int, key: bytes) -> int | None:
        while self._away and next(iter(self._away.values())) <= now_ms - HOUR_MS:
            self._away.popitem(last=False)
        return self._away.get(key)

    def turned_away(self) -> int:
        """How many keys were turned away within the last hour and are not in yet."""
        self._recently(self._core.now_ms(), b"")
        return len(self._away)

    def fields(self) -> dict[str, Any]:
        """For the state tree: counts, and nothing of any address."""
        return {
            "per_day": self._limits.per_day,
            "let_in": self.let_in,
            "refused": self.refused,
            "turned_away_1h": self.turned_away(),
        }


def _duration(wait_ms: int) -> str:
    minutes = -(-wait_ms // 60_000)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
