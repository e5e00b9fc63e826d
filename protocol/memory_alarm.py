"""Tasks that wait for something or for a time, in great numbers: the clockwork of the in-memory network."""

from __future__ import annotations

import heapq
import math
from typing import Any

import trio


class Parked:
    """A task that waits for something on a pipe, until ``until`` at the latest."""

    __slots__ = ("among", "task", "until")

    def __init__(self, task: trio.lowlevel.Task, among: list[Parked]) -> None:
        self.task: trio.lowlevel.Task | None = task
        self.until = math.inf
        self.among = among

    def go(self) -> None:
        """Let it run on; safe to call twice."""
        task = self._leave()
        if task is not None:
            trio.lowlevel.reschedule(task)

    def cancelled(self, raise_cancel: Any) -> trio.lowlevel.Abort:
        """For trio."""
        self._leave()
        return trio.lowlevel.Abort.SUCCEEDED

    def _leave(self) -> trio.lowlevel.Task | None:
        task, self.task = self.task, None
        if task is not None:
            self.among.remove(self)
        return task


class Alarm:
    """Wakes parked tasks at their times: one task for the whole swarm, no cancel scope for each wait.

    No task at all where the clock has timers: a method ``call_at(at, what)`` (the simulation's has).
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Parked]] = []
        self._count = 0
        self._scope: trio.CancelScope | None = None  # in which our task sleeps, once it runs
        self._next = math.inf
        self._call_at: Any = None
        self._clock: trio.abc.Clock | None = None

    async def sleep(self, until: float, among: list[Parked]) -> None:
        """Wait until then, or until somebody calls ``go`` of what is added to ``among``."""
        parked = Parked(trio.lowlevel.current_task(), among)
        among.append(parked)
        self._set(parked, until)
        await trio.lowlevel.wait_task_rescheduled(parked.cancelled)

    def sooner(self, parked: Parked, at: float) -> None:
        """Wake it by ``at`` if it was to sleep longer."""
        if at < parked.until:
            self._set(parked, at)

    def _set(self, parked: Parked, at: float) -> None:
        parked.until = at
        if at == math.inf:
            return
        if self._clock is None:
            self._clock = trio.lowlevel.current_clock()
            self._call_at = getattr(self._clock, "call_at", None)
        if self._call_at is not None:
            self._call_at(at, parked.go)  # too late where it was to wake sooner, which does no harm
            return
        self._count += 1
        heapq.heappush(self._due, (at, self._count, parked))
        if at < self._next:
            self._next = at
            if self._scope is None:
                self._scope = trio.CancelScope()
                trio.lowlevel.spawn_system_task(self._run)
            self._scope.deadline = at

    async def _run(self) -> None:
        while True:
            now = trio.current_time()
            while self._due and self._due[0][0] <= now:
                at, _, parked = heapq.heappop(self._due)
                if parked.until == at:  # else it is woken at another time
                    parked.go()
            self._next = self._due[0][0] if self._due else math.inf
            with trio.CancelScope(deadline=self._next) as self._scope:
                await trio.sleep_forever()
