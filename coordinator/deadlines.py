"""Which leases are due, without looking at those that are not.

With ten thousand leases open, walking over all of them four times a second would be the
most that a quiet coordinator does. What is due is decided by ``scheduler.expired`` and
``block_scheduler.expired``, as before; here is only whom to ask them about, and how much earlier
than they say leases end that were issued on a clock that has gone back since.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

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
        self._seen_ms = 0  # the latest time that was seen since the clock went back last
        self._earlier: dict[bytes, int] = {}  # lease -> ms
        core.listeners.append(self._note)

    def due(self, now_ms: int, spared: Callable[[bytes, int], bool]) -> list[Event]:
        """Timeouts and deadlines that have passed, as events to be recorded at once.

        ``spared`` leases outlive their deadline.
        """
        state = self._core.state
        # The first time; the disk refused, and the state was folded again; the clock went back.
        if state is not self._state or now_ms < self._seen_ms:
            self._begin(state, now_ms)
        self._seen_ms = now_ms
        asked: dict[bytes, None] = {}
        while self._heap and self._heap[0][0] <= now_ms:
            asked[heapq.heappop(self._heap)[2]] = None
        if not asked:
            return []
        for key in asked:
            lease: Lease | BlockHold | None = state.leases.get(key) or state.blocks.leases.get(key)
            if lease is not None:
                self._push(max(lease.terms.deadline_at - self._earlier.get(key, 0), now_ms + AGAIN_MS), key)
            else:
                self._earlier.pop(key, None)
        return [
            *scheduler.expired(state, now_ms, spared, asked, self._earlier),
            *block_scheduler.expired(state, now_ms, spared, asked, self._earlier),
        ]

    def _begin(self, state: State, now_ms: int) -> None:
        """Look at every lease. One that was issued in the future lasts from now on as long as it was to."""
        self._state, self._heap = state, []
        both: list[Mapping[bytes, Lease | BlockHold]] = [state.leases, state.blocks.leases]
        earlier = {}
        for key, lease in ((key, lease) for leases in both for key, lease in leases.items()):
            if lease.terms.issued_at > now_ms:
                ahead = lease.terms.issued_at - now_ms
                earlier[key] = max(ahead, self._earlier.get(key, 0))
            self._push(lease.terms.timeout_at - earlier.get(key, 0), key)
        self._earlier = earlier

    def _push(self, at_ms: int, key: bytes) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at_ms, self._number, key))

    def _note(self, write: Write) -> None:
        for event in write.events:
            if isinstance(event, LeaseIssued | BlockLeased):
                self._seen_ms = max(self._seen_ms, event.lease.issued_at)
                self._push(event.lease.timeout_at, event.lease.lease_id)
