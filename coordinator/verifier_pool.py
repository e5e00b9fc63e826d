"""Several verifiers behind the one seam: every batch goes to one that is free.

What a batch does to its verifier (time, memory, a crash) is felt by that batch alone.
The verifier that was used last is used first, so that its weights are warm and those
that are not needed are never started.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.patience import WorkerAwayError
from barnraise.coordinator.workers import Judged, Verifier, VerifyJob

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_VERIFIERS = 64
FIRST_REST_S = 2.0
LAST_REST_S = 60.0
_CORES_KEPT = 1  # for the coordinator's own event loop and the learner


@dataclass(frozen=True)
class _Away:
    times: int
    until: float


class VerifierPool:
    """A ``Verifier`` with as many slots as its members together."""

    def __init__(self, members: Sequence[Verifier]) -> None:
        """``members``: at least one, each used for one batch at a time per slot of its own."""
        if not members:
            raise ValueError("a pool needs at least one verifier")
        self.members = tuple(members)
        self._free = [member for member in reversed(self.members) for _ in range(member.slots)]
        self._turns = trio.Semaphore(len(self._free))
        self._away: dict[int, _Away] = {}  # members elsewhere that could not be reached, by id
        self.slots = len(self._free)

    @property
    def busy(self) -> int:
        """How many slots are judging now."""
        return self.slots - len(self._free)

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        """See ``barnraise.coordinator.workers.Verifier``; waits until a member is free.

        Raises:
            ChildError: the member that was given the batch failed; the others go on.
            WorkerAwayError: no member that can be reached is free.
        """
        return await self._with_member(lambda member: member.verify(jobs))

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        """See ``barnraise.coordinator.workers.Verifier``; waits until a member is free.

        Raises:
            ChildError, WorkerAwayError: as ``verify``.
        """
        return await self._with_member(lambda member: member.verify_block(job))

    async def _with_member(self, ask: Callable[[Verifier], Awaitable[T]]) -> T:
        async with self._turns:
            while True:
                member = self._next()
                place = 0  # a member that failed is the last choice next time
                try:
                    await trio.sleep_until(self._rests_until(member))
                    result = await ask(member)
                    self._away.pop(id(member), None)
                    place = self.slots
                    return result
                except WorkerAwayError as error:
                    self._rest(member)
                    if all(self._rests_until(other) > trio.current_time() for other in self._free):
                        raise
                    log.warning("%s; another verifier takes its work, and it is tried again later", error)
                finally:
                    self._free.insert(place, member)

    def _next(self) -> Verifier:
        """The free member that was used last; if none can be reached, the one to try first."""
        now = trio.current_time()
        ready = [at for at, member in enumerate(self._free) if self._rests_until(member) <= now]
        every = range(len(self._free))
        at = ready[-1] if ready else min(every, key=lambda number: self._rests_until(self._free[number]))
        return self._free.pop(at)

    def _rest(self, member: Verifier) -> None:
        before = self._away.get(id(member))
        times = 0 if before is None else before.times + 1
        pause = min(FIRST_REST_S * 2.0**times, LAST_REST_S)
        self._away[id(member)] = _Away(times, trio.current_time() + pause)

    def _rests_until(self, member: Verifier) -> float:
        away = self._away.get(id(member))
        return -math.inf if away is None else away.until

    async def close(self) -> None:
        """End all members, side by side."""
        async with trio.open_nursery() as nursery:
            for member in self.members:
                nursery.start_soon(member.close)


def automatic_verifiers(threads: int, cores: int | None = None, accelerators: int | None = None) -> int:
    """How many verifiers this machine can feed: one per accelerator, else by its cores.

    ``threads``: of each verifier. ``cores`` and ``accelerators``: what the machine has; asked if None.
    """
    found = len(visible_accelerators()) if accelerators is None else accelerators
    if found:
        return min(found, MAX_VERIFIERS)
    usable = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(1, min((usable - _CORES_KEPT) // max(1, threads), MAX_VERIFIERS))


def visible_accelerators(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Indices of NVIDIA devices that this process may use, without loading torch (a GB of memory)."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(item.strip() for item in chosen.split(",") if item.strip() not in ("", "-1"))
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia*"))
    return tuple(sorted((number for number in numbers if number.isdigit()), key=int))
