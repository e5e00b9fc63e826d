"""Which leases are due, without looking at those that are not.

With ten thousand leases open, walking over all of them four times a second would be the
most that a quiet coordinator does. What is due is decided by ``scheduler.expired`` and
``block_scheduler.expired``, as before; here is only whom to ask them about.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from barnraise.coordinator import block_scheduler, scheduler
from barnraise.coordinator.block_events import BlockLeased
from barnraise.coordinator.block_fold import BlockHold
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Event, LeaseIssued
from barnraise.coordinator.journal import Write
from barnraise.coordinator.state import Lease, State

AGAIN_MS = 1_000  # a lease that outlives its deadline is looked at again so much later


class Deadlines:
    """The open leases of ``core.state`` in the order in which something is due. O(log n) a lease."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._heap: list[tuple[int, int, bytes]] = []
        self._number = 0  # ties are broken by age, so that a replay of the same story is the same
        self._state: State | None = None
        core.listeners.append(self._note)

    def due(self, now_ms: int, spared: Callable[[bytes, int], bool]) -> list[Event]:
        """Timeouts and deadlines that have passed, as events to be recorded at once.

        ``spared`` leases outlive their deadline.
        """
        state = self._core.state
        if state is not self._state:  # the first time; or the disk refused and the state was folded again
            self._state, self._heap = state, []
            for key, lent in state.leases.items():
                self._push(lent.terms.timeout_at, key)
            for key, hold in state.blocks.leases.items():
                self._push(hold.terms.timeout_at, key)
        asked: dict[bytes, None] = {}
        while self._heap and self._heap[0][0] <= now_ms:
            asked[heapq.heappop(self._heap)[2]] = None
        if not asked:
            return []
        for key in asked:
            lease: Lease | BlockHold | None = state.leases.get(key) or state.blocks.leases.get(key)
            if lease is not None:
                self._push(max(lease.terms.deadline_at, now_ms + AGAIN_MS), key)
        return [
            *scheduler.expired(state, now_ms, spared, asked),
            *block_scheduler.expired(state, now_ms, spared, asked),
        ]

    def _push(self, at_ms: int, key: bytes) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at_ms, self._number, key))

    def _note(self, write: Write) -> None:
        for event in write.events:
            if isinstance(event, LeaseIssued | BlockLeased):
                self._push(event.lease.timeout_at, event.lease.lease_id)
