"""Several verifiers behind the one seam: every batch goes to one that is free.

What a batch does to its verifier (time, memory, a crash) is felt by that batch alone.
The verifier that was used last is used first, so that its weights are warm and those
that are not needed are never started.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import trio

from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.workers import Judged, Verifier, VerifyJob

T = TypeVar("T")

MAX_VERIFIERS = 64
_CORES_KEPT = 1  # for the coordinator's own event loop and the learner


class VerifierPool:
    """A ``Verifier`` with as many slots as its members together."""

    def __init__(self, members: Sequence[Verifier]) -> None:
        """``members``: at least one, each used for one batch at a time per slot of its own."""
        if not members:
            raise ValueError("a pool needs at least one verifier")
        self.members = tuple(members)
        self._free = [member for member in reversed(self.members) for _ in range(member.slots)]
        self._turns = trio.Semaphore(len(self._free))
        self.slots = len(self._free)

    @property
    def busy(self) -> int:
        """How many slots are judging now."""
        return self.slots - len(self._free)

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        """See ``barnraise.coordinator.workers.Verifier``; waits until a member is free.

        Raises:
            ChildError: the member that was given the batch failed; the others go on.
        """
        return await self._with_member(lambda member: member.verify(jobs))

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        """See ``barnraise.coordinator.workers.Verifier``; waits until a member is free.

        Raises:
            ChildError: the member that was given the unit failed; the others go on.
        """
        return await self._with_member(lambda member: member.verify_block(job))

    async def _with_member(self, ask: Callable[[Verifier], Awaitable[T]]) -> T:
        async with self._turns:
            member = self._free.pop()
            place = 0  # a member that failed is the last choice next time
            try:
                result = await ask(member)
                place = self.slots
                return result
            finally:
                self._free.insert(place, member)

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
