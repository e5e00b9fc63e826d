"""Virtual time for a thousand nodes: trio's ``MockClock`` with autojump, at a fraction of its price.

When no task can run, trio's loop asks its clock how long to sleep until the next deadline. This
clock moves there and says: not at all. ``MockClock`` is asked for the jump only after a round
through the operating system, with statistics of everything.

It also keeps timers of its own beside trio's deadlines: a call at a time (``call_at``), and
``trio.sleep`` without a cancel scope of its own and without the exception that ends one, which cost
several times what the sleeping task then does. What sleeps is cancelled as ever.
"""

from __future__ import annotations

import heapq
import math
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from trio._core import _run

_POLL_EVERY = 64  # rounds of the scheduler between two looks at signals (Ctrl-C) and files
_NOT_AT_ALL = 999_999_999.0


class VirtualClock(trio.abc.Clock):
    """Time stands still while a task can run, and jumps to whatever is due next when none can.

    For one ``trio.run``. Begins at 0 s.

    Attributes:
        asks_seldom: whether it keeps trio's own loop from asking the operating system at each turn.
    """

    def __init__(self) -> None:
        self.asks_seldom = True
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def start_clock(self) -> None:
        """For trio."""
        runner: Any = _run.GLOBAL_RUN_CONTEXT.runner
        if self.asks_seldom and hasattr(select, "epoll"):
            runner.io_manager = _Seldom(runner.io_manager)

    def current_time(self) -> float:
        """Virtual seconds since the run began."""
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """For trio, which asks when no task can run: be at what is due next, and wait for nothing."""
        runner: Any = _run.GLOBAL_RUN_CONTEXT.runner
        if runner.waiting_for_idle:  # ``wait_all_tasks_blocked`` comes before any jump
            return _NOT_AT_ALL
        due = self._due
        at = min(deadline, due[0][0]) if due else deadline
        if at == math.inf:
            return _NOT_AT_ALL
        if at > self._now:
            self._now = at
        while due and due[0][0] <= self._now:
            heapq.heappop(due)[2]()
        return 0.0

    def call_at(self, at: float, what: Callable[[], object]) -> None:
        """Call ``what``, which must not raise, outside of any task at that time; it cannot be taken back."""
        self._count += 1
        heapq.heappush(self._due, (at, self._count, what))


class _Seldom:
    """An I/O manager of trio that asks the operating system now and then, as virtual time needs no I/O."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._rounds = 0
        self.process_events = inner.process_events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_events(self, timeout: float) -> Any:
        self._rounds += 1
        if timeout <= 0 and self._rounds % _POLL_EVERY:
            return []
        return self._inner.get_events(timeout)


class _Sleep:
    """One task that sleeps."""

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: trio.lowlevel.Task | None = trio.lowlevel.current_task()

    def wake(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def cancelled(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


@contextmanager
def cheap_sleep(clock: VirtualClock) -> Iterator[None]:
    """While it lasts ``trio.sleep`` and ``trio.sleep_until`` are timers of ``clock``."""

    async def sleep_until(deadline: float) -> None:
        if math.isnan(deadline):
            raise ValueError("`deadline` must not be NaN")
        if deadline <= clock.current_time():
            await trio.lowlevel.checkpoint()
            return
        sleep = _Sleep()
        if deadline < math.inf:
            clock.call_at(deadline, sleep.wake)
        await trio.lowlevel.wait_task_rescheduled(sleep.cancelled)

    async def sleep(seconds: float) -> None:
        if seconds < 0:
            raise ValueError("`seconds` must be non-negative")
        await sleep_until(clock.current_time() + seconds)

    trio_: Any = trio
    before = trio.sleep, trio.sleep_until
    trio_.sleep, trio_.sleep_until = sleep, sleep_until
    try:
        yield
    finally:
        trio_.sleep, trio_.sleep_until = before
