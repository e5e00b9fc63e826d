"""Stops a family of tasks where they stand, as SIGSTOP or a closed lid stops a machine.

Whatever would make one of them run is remembered until it is thawed. Time goes on meanwhile,
and with it everybody else; timers that ran out go off late, which is how a machine finds out
that it slept. The queue of trio's scheduler is replaced while anybody is frozen.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from trio._core import _run
from trio.lowlevel import Task


class Freezer:
    """Who is frozen, of one ``trio.run``. Families are named by the task at their root."""

    def __init__(self) -> None:
        self._held: dict[Task, list[Task]] = {}

    def freeze(self, root: Task) -> None:
        """Stop ``root`` and every task below it, at their next wish to run."""
        self._held.setdefault(root, [])
        runner: Any = _run.GLOBAL_RUN_CONTEXT.runner
        if not isinstance(runner.runq, _Queue):
            queue = _Queue(self)
            waiting, runner.runq = list(runner.runq), queue
            for task in waiting:
                queue.append(task)

    def thaw(self, root: Task) -> None:
        """Let them run on. Nothing happens if they do already."""
        held = self._held.pop(root, [])
        runner: Any = _run.GLOBAL_RUN_CONTEXT.runner
        if not self._held and isinstance(runner.runq, _Queue):
            runner.runq = deque(runner.runq)
        for task in held:
            runner.runq.append(task)

    def frozen(self, root: Task | None) -> bool:
        """Whether the family of ``root`` stands still."""
        return root in self._held

    def _place(self, task: Task) -> list[Task] | None:
        at: Task | None = task
        while at is not None:
            held = self._held.get(at)
            if held is not None:
                return held
            at = None if at.parent_nursery is None else at.parent_nursery.parent_task
        return None


class _Queue(deque[Any]):
    def __init__(self, freezer: Freezer) -> None:
        super().__init__()
        self._freezer = freezer

    def append(self, task: Task) -> None:
        held = self._freezer._place(task)
        if held is None:
            super().append(task)
        else:
            held.append(task)
