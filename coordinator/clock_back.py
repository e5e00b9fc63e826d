"""A clock that ran ahead and went back: what was set on it ends when it was meant to, not years later.

Leases are a matter of ``deadlines``, pauses and appeals of a reading (``audit.quiet_ms``). Bans are
here: their ends are public, and so they are moved by an event, which the ledger shows.
"""

from __future__ import annotations

import logging

from barnraise.coordinator.core import Core
from barnraise.coordinator.events import BanLifted, Event, NodeBanned
from barnraise.coordinator.journal import Write
from barnraise.coordinator.state import State
from barnraise.coordinator.state_parts import CLOCK_BACK_MS

log = logging.getLogger(__name__)


class ClockBack:
    """Notices that the clock went back, also while nobody was here: the state knows its newest event."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._newest = newest_ms(core.state)
        core.listeners.append(self._note)

    def due(self, now_ms: int) -> list[Event]:
        """Bans that end at another moment now, as events to be recorded at once; mostly nothing."""
        if now_ms >= self._newest - CLOCK_BACK_MS:
            self._newest = max(self._newest, now_ms)
            return []
        events = moved_bans(self._core.state, self._newest, now_ms)
        if not events:  # else it is asked again until they are durable
            log.warning("the clock went back by %.0f s", (self._newest - now_ms) / 1000)
            self._newest = now_ms
        return events

    def _note(self, write: Write) -> None:
        for event in write.events:
            if isinstance(event, NodeBanned):  # nobody may have looked before the clock went back
                self._newest = max(self._newest, event.at_ms)


def newest_ms(state: State) -> int:
    """The latest moment that is known of a state's clock since it went back last."""
    return max(state.last_ms, *(node.banned_from for node in state.nodes.values()), 0)


def moved_bans(state: State, before_ms: int, now_ms: int) -> list[Event]:
    """What becomes of bans that were set on a clock that showed ``before_ms`` and then ``now_ms``, earlier.

    What was left of them is left of them. Those set at a moment that both clocks have had stay as they are.
    """
    events: list[Event] = []
    for node in state.nodes.values():
        if node.banned_from <= now_ms + CLOCK_BACK_MS or node.banned_until <= now_ms:
            continue
        left = node.banned_until - max(before_ms, node.banned_from)
        if left > 0:
            events.append(
                NodeBanned(
                    node=node.key,
                    reason=node.ban_reason,
                    until=now_ms + left,
                    by_rule=False,
                    at_ms=now_ms,
                    moved=True,
                )
            )
        else:
            events.append(
                BanLifted(node=node.key, reason="it was over when the clock went back", at_ms=now_ms)
            )
    return events
