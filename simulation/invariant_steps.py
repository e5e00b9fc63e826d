"""Nobody works for nothing: how often each node's tasks run, per second of virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import trio
from trio.abc import Instrument
from trio.lowlevel import Task

from barnraise.simulation.invariant_record import Broken

WINDOW_S = 10.0
NODE_STEPS = 200.0  # a second, over a window: 25 are usual, 62 were seen on lossy lines
SHARED_STEPS = 400.0  # of the coordinator and the network with few nodes, and more with each node
AT_ONCE = 20_000  # rounds of the scheduler without the clock moving
_OTHERS = ""


class Steps(Instrument):
    """Counts task steps by the family that a task belongs to.

    ``tell``: called with what is found broken, at once: a loop without end would leave no other moment.
    """

    def __init__(self, tell: Callable[[Broken], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.families: dict[Task, str] = {}  # root task -> name
        self.nodes = 0
        self._tell = tell
        self._family: dict[Task, str] = {}
        self._window_began = trio.current_time()
        self._still = 0
        self._still_at = -1.0

    def belongs(self, task: Task, name: str) -> None:
        """``task``, and whatever it starts from now on, is part of ``name``."""
        self._family[task] = name

    def task_spawned(self, task: Task) -> None:
        nursery = task.parent_nursery
        if nursery is not None:
            self._family[task] = self._family.get(nursery.parent_task, _OTHERS)

    def task_exited(self, task: Task) -> None:
        self._family.pop(task, None)

    def before_task_step(self, task: Task) -> None:
        self.counts[self._family.get(task, _OTHERS)] += 1

    def before_io_wait(self, timeout: float) -> None:
        now = trio.current_time()
        if now != self._still_at:
            self._still_at, self._still = now, 0
        self._still += 1
        if self._still > AT_ONCE:  # rounds, each of one step at least
            self._still = 0
            self._tell(Broken("no-busy-loop", f"{AT_ONCE} rounds without a moment passing{self._who()}", now))
        if now - self._window_began >= WINDOW_S:
            self._close(now)

    def _who(self) -> str:
        return "".join(f"; most by {name or 'others'}: {n} steps" for name, n in self.counts.most_common(1))

    def _close(self, now: float) -> None:
        elapsed = now - self._window_began
        counts, self.counts, self._window_began = self.counts, Counter(), now
        try:
            check_steps(counts, elapsed, self.nodes)
        except Broken as broken:
            broken.at_s = now
            self._tell(broken)


def check_steps(counts: Counter[str], elapsed_s: float, nodes: int) -> None:
    """That nobody ran more often than what happens would explain.

    Raises:
        Broken: a node, or everybody else together.
    """
    for name, steps in counts.items():
        most = NODE_STEPS if name else SHARED_STEPS + NODE_STEPS * nodes
        if steps > most * elapsed_s:
            raise Broken(
                "no-busy-loop",
                f"{name or 'coordinator and network'}: {steps / elapsed_s:.0f} task steps a second for "
                f"{elapsed_s:.0f} s, at most {most:.0f} are explained by what happens",
            )
