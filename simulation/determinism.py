"""One order of events for one seed: trio's scheduling seeded, no threads, no wall clock.

What runs between two moments of virtual time is a batch of tasks, which trio shuffles. Here
the batch is sorted by the order in which the tasks were born and shuffled by a seeded
generator (the switch that Hypothesis uses, ``trio._core._run``). Blocking calls that would go
to a worker thread run in place: a clock in virtual time does not wait for threads. Names of
temporary files, which errors quote, are drawn from the seed, too. How time goes by is
``virtual_clock``'s business.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from trio._core import _run

from barnraise.simulation.quick_trio import quick_trio
from barnraise.simulation.virtual_clock import VirtualClock, cheap_sleep

T = TypeVar("T")

_COLLECT = 100_000, 200, 50  # as ``gc.set_threshold`` has it: of a thousand nodes a million objects are young
START_MS = 1_700_000_000_000  # what the wall clock shows as a simulation begins


def virtual_ms() -> int:
    """The simulated wall clock, ms since the Unix epoch. Only inside of ``run_virtual``."""
    return START_MS + round(trio.current_time() * 1000)


def drawn(seed: int, purpose: str, name: str = "") -> random.Random:
    """A generator of its own for each purpose and name: one more draw here moves nothing elsewhere."""
    return random.Random(f"{seed}/{purpose}/{name}")  # seeded by SHA-512 of the text, not by hash()


async def _in_place(function: Callable[..., T], *arguments: Any, **_options: Any) -> T:
    await trio.lowlevel.checkpoint()
    return function(*arguments)


class _Order(random.Random):
    """What shuffles the tasks that may run: mostly it is one."""

    def shuffle(self, x: Any) -> None:
        if len(x) > 1:
            draw = self.random  # a sort by draws costs a third of a shuffle
            x.sort(key=lambda _: draw())


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Make trio's scheduling in this process follow from ``seed``; restores what was before."""
    switches: Any = _run
    before = switches._ALLOW_DETERMINISTIC_SCHEDULING, _run._r, trio.to_thread.run_sync
    threads: Any = trio.to_thread
    names: Any = tempfile
    named = names._name_sequence
    names._name_sequence = _names(drawn(seed, "names"))
    switches._ALLOW_DETERMINISTIC_SCHEDULING = True
    switches._r = _Order(f"{seed}/scheduling/")
    threads.run_sync = _in_place
    try:
        yield
    finally:
        switches._ALLOW_DETERMINISTIC_SCHEDULING, switches._r, threads.run_sync = before
        names._name_sequence = named


@contextmanager
def _calm_collector() -> Iterator[None]:
    """Look for cycles seldom, and not among what was there before: it was a fifth of what joins cost."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_COLLECT)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _names(rng: random.Random) -> Iterator[str]:
    while True:
        yield f"{rng.getrandbits(40):010x}"


def run_virtual(seed: int, main: Callable[[], Awaitable[T]]) -> T:
    """Run ``main`` in virtual time (it begins at 0 s and jumps whenever everybody waits)."""
    clock = VirtualClock()
    with deterministic(seed), cheap_sleep(clock), quick_trio(clock), _calm_collector():
        return trio.run(main, clock=clock)
