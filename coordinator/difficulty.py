"""How hard a run's tasks are for its policy: solve rates by part of a mixture, from verified work.

The swarm measures: a run whose batches never fill lends units at one version, its verified
rewards say how often each prompt was solved, and what is solved neither always nor never is
worth training on (INTELLECT-2, section 3.2, kept tasks with a pass rate between 0.125 and
0.5 at 16 samples; here 0.1 to 0.8).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from barnraise.coordinator.events import Event, LeaseIssued, SubmissionJudged, Submitted
from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.messages import RolloutLease
from barnraise.protocol.seeds import task_seed
from barnraise.protocol.spec import EnvironmentSpec, RunSpec
from barnraise.protocol.tasks_mixed import Mixture, WithLength

LOW, HIGH = 0.1, 0.8
LEAST_PROMPTS = 8  # fewer say little about a part
_SLICES = 10


class DifficultyError(BarnraiseError):
    """There is nothing to go by, or nothing would be left; the text says what to do."""


@dataclass
class Part:
    """What was measured of one part: prompts, and how many were solved at which rate."""

    name: str
    settings: dict[str, Any]
    weight: float
    prompts: int = 0
    solved: float = 0.0  # sum of solve rates
    within: int = 0  # prompts whose rate lies between the limits
    slices: list[int] = field(default_factory=lambda: [0] * (_SLICES + 1))  # by tenths of the rate

    @property
    def rate(self) -> float:
        """Mean solve rate; 0 where nothing was measured."""
        return self.solved / self.prompts if self.prompts else 0.0


def measure(
    events: Iterable[Event],
    spec: RunSpec,
    run_id: bytes,
    version: int = 0,
    low: float = LOW,
    high: float = HIGH,
) -> list[Part]:
    """Solve rates at policy ``version``: of each part of a mixture, or of the one environment.

    A prompt's rate is the mean reward of its samples, with what a target length took from it. Of a
    mixture of which lengths are asked, the parts are the mixture's.
    """
    environment = build_environment(spec.environment)
    if isinstance(environment, WithLength):
        environment = environment.of
    parts = parts_of(spec.environment)
    mixture = environment if isinstance(environment, Mixture) else None
    leases: dict[bytes, RolloutLease] = {}
    of: dict[bytes, RolloutLease] = {}
    for event in events:
        match event:
            case LeaseIssued(lease=lease) if lease.policy_version == version:
                leases[lease.lease_id] = lease
            case Submitted() if event.lease_id in leases:
                of[event.submission_id] = leases[event.lease_id]
            case SubmissionJudged() if event.submission_id in of and event.verdict.accepted:
                lease = of.pop(event.submission_id)
                for index in range(lease.prompts):
                    seed = task_seed(run_id, lease.lease_id, lease.node, index)
                    part = parts[mixture.part_of(seed) if mixture is not None else 0]
                    start = index * lease.group_size
                    _count(part, event.rewards[start : start + lease.group_size], low, high)
            case _:
                pass
    return parts


def _count(part: Part, rewards: tuple[float, ...], low: float, high: float) -> None:
    rate = sum(rewards) / len(rewards)
    part.prompts += 1
    part.solved += rate
    part.within += low <= rate <= high
    part.slices[min(_SLICES, int(rate * _SLICES))] += 1


def parts_of(spec: EnvironmentSpec) -> list[Part]:
    """The parts of a mixture as its settings have them; the environment itself if it is none."""
    name, settings, _ = _unwrapped(spec)
    if name != "mixture":
        return [Part(name, settings, 1.0)]
    return [
        Part(part["name"], part.get("settings", {}), float(part.get("weight", 1.0)))
        for part in settings["parts"]
    ]


def _unwrapped(spec: EnvironmentSpec) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """Name and settings of what is measured, and the settings of the ``length`` around it, if any."""
    settings = json.loads(spec.settings.strip() or "{}")
    if spec.name != "length":
        return spec.name, settings, None
    return settings["of"]["name"], settings["of"].get("settings", {}), settings


def kept(
    parts: list[Part],
    measured: EnvironmentSpec,
    low: float = LOW,
    high: float = HIGH,
    least: int = LEAST_PROMPTS,
) -> EnvironmentSpec:
    """``measured`` with those parts whose solve rate lies between the limits; weights and lengths stay.

    Raises:
        DifficultyError: a part was measured too little, or none is left.
    """
    scarce = [part for part in parts if part.prompts < least]
    if scarce:
        raise DifficultyError(
            f"{scarce[0].name} {json.dumps(scarce[0].settings)} was measured on {scarce[0].prompts} prompts, "
            f"{least} are wanted: let the swarm go on for a while"
        )
    good = [part for part in parts if low <= part.rate <= high]
    if not good:
        rates = ", ".join(f"{part.name} {part.rate:.2f}" for part in parts)
        raise DifficultyError(
            f"no part is solved between {low:g} and {high:g} of the time ({rates}): offer harder or easier "
            "ones"
        )
    if len(good) == 1 and len(parts) == 1:
        name, settings = good[0].name, good[0].settings
    else:
        name = "mixture"
        settings = {
            "parts": [{"name": item.name, "settings": item.settings, "weight": item.weight} for item in good]
        }
    if (around := _unwrapped(measured)[2]) is not None:
        name, settings = "length", {**around, "of": {"name": name, "settings": settings}}
    return msgspec.structs.replace(measured, name=name, settings=json.dumps(settings))
