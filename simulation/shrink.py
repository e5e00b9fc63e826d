"""Looks for a smaller scenario that fails in the same way: fewer acts, a shorter time.

Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input",
2002) over the list of planned acts. A plan may be cut anywhere (``run.carry_out``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from barnraise.simulation.churn import Planned, plan
from barnraise.simulation.scenario import Scenario

Fails = Callable[[Scenario, Sequence[Planned]], bool]


@dataclass(frozen=True)
class Shrunk:
    """What still fails, and how many runs it took to find it."""

    scenario: Scenario
    acts: tuple[Planned, ...]
    runs: int


def shrink(scenario: Scenario, seed: int, failed_at_s: float, fails: Fails, *, most_runs: int = 40) -> Shrunk:
    """The smallest plan found within ``most_runs`` for which ``fails(scenario, acts)`` still holds.

    ``failed_at_s``: when the whole one did; nothing after it matters.
    """
    hours = min(scenario.swarm.hours, (failed_at_s + 1.0) / 3600)
    shorter = structs.replace(scenario, swarm=structs.replace(scenario.swarm, hours=hours))
    acts = [act for act in plan(scenario, seed) if act.at_s <= failed_at_s]
    budget = _Budget(shorter, fails, most_runs)
    acts = _fewer(_one_by_one(acts), budget)
    return Shrunk(shorter, tuple(acts), budget.runs)


class _Budget:
    def __init__(self, scenario: Scenario, fails: Fails, most: int) -> None:
        self._scenario, self._fails, self._most = scenario, fails, most
        self.runs = 0

    @property
    def left(self) -> bool:
        return self.runs < self._most

    def fails(self, acts: Sequence[Planned]) -> bool:
        self.runs += 1
        return self._fails(self._scenario, acts)


def _one_by_one(acts: Sequence[Planned]) -> list[Planned]:
    """Acts on one node each: half of a partition may do."""
    single = []
    for act in acts:
        single += [replace(act, nodes=(who,)) for who in act.nodes] or [act]
    return single


def _fewer(acts: list[Planned], budget: _Budget) -> list[Planned]:
    pieces = 2
    while budget.left and acts:
        size = -(-len(acts) // pieces)
        for start in range(0, len(acts), size):
            if not budget.left:
                return acts
            rest = acts[:start] + acts[start + size :]
            if budget.fails(rest):
                acts, pieces = rest, max(2, pieces - 1)
                break
        else:
            if size == 1:
                return acts
            pieces = min(len(acts), pieces * 2)
    return acts
