"""Environments made of others: ``mixture`` draws from several, ``length`` asks for an answer of some length.

``mixture`` takes ``parts``, a list of ``{"name", "settings", "weight"}``; weights are the
curriculum. ``length`` takes ``of`` (``{"name", "settings"}``), ``targets`` (tokens) and
``weight``: with a target drawn from the task's seed the prompt says how long the answer is to
be, and the reward loses ``weight`` for each token that it is off (INTELLECT-2, section 3.3:
r = r_task - alpha * |l_target - l_y|, alpha 0.0003, five targets). What a task asks decides
whether it is held out, part by part, so that the sides stay disjoint whatever the weights.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from barnraise.protocol.environments import Environment, Task, TaskError

MAX_PARTS = 64
MAX_TARGETS = 32
MAX_TARGET = 65_536
_PLACES = 2**64

Build = Callable[[str, Mapping[str, Any]], Environment]


@dataclass(frozen=True)
class Mixture:
    """Tasks of several environments. ``Task.key`` is JSON: the part's number, and the part's own key."""

    parts: tuple[Environment, ...]
    weights: tuple[float, ...]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], build: Build) -> Mixture:
        """Check ``settings`` and build every part.

        Raises:
            TaskError: what is wrong, and in which part.
        """
        _only(settings, "mixture", "parts")
        parts = settings.get("parts")
        if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_PARTS:
            raise TaskError(f"environment 'mixture' needs parts: a list of 1 to {MAX_PARTS} environments")
        made, weights = [], []
        for number, part in enumerate(parts):
            where = f"part {number + 1} of environment 'mixture'"
            environment, weight = _part(part, where, build, ("name", "settings", "weight"))
            made.append(environment)
            weights.append(weight)
        return cls(tuple(made), tuple(weights))

    def task(self, seed: int, *, held_out: bool) -> Task:
        """A task of the part that ``seed`` draws by the weights; the part gets a seed of its own."""
        number = self.part_of(seed)
        task = self.parts[number].task(_seed(seed, b"task"), held_out=held_out)
        return replace(task, key=json.dumps([number, task.key]))

    def part_of(self, seed: int) -> int:
        """Which part a seed draws."""
        bounds = list(accumulate(self.weights))
        place = _seed(seed, b"part") / _PLACES * bounds[-1]
        return min(bisect_right(bounds, place), len(self.parts) - 1)

    def score(self, task: Task, answer: str) -> float:
        """The part's own reward."""
        number, key = json.loads(task.key)
        reward: float = self.parts[number].score(replace(task, key=key), answer)
        return reward


@dataclass(frozen=True)
class WithLength:
    """Another environment's tasks, each with a length that its answer is to have."""

    of: Environment
    targets: tuple[int, ...]
    weight: float

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], build: Build) -> WithLength:
        """Check ``settings`` and build.

        Raises:
            TaskError: what is wrong.
        """
        _only(settings, "length", "of", "targets", "weight")
        of, _ = _part(settings.get("of"), "'of' in environment 'length'", build, ("name", "settings"))
        targets = settings.get("targets")
        good = isinstance(targets, list) and 1 <= len(targets) <= MAX_TARGETS
        if not good or not all(type(item) is int and 1 <= item <= MAX_TARGET for item in targets or ()):
            raise TaskError(
                f"environment 'length' needs targets: 1 to {MAX_TARGETS} numbers of tokens up to {MAX_TARGET}"
            )
        weight = _number(settings.get("weight", 0.0003), "weight of environment 'length'", 1.0)
        return cls(of, tuple(targets or ()), weight)

    def task(self, seed: int, *, held_out: bool) -> Task:
        """The task of ``seed``, and below it how long the answer is to be."""
        task = self.of.task(seed, held_out=held_out)
        target = self.targets[_seed(seed, b"length") % len(self.targets)]
        prompt = f"{task.prompt}\n\nAnswer in about {target} tokens."
        return replace(task, prompt=prompt, target_tokens=target, length_weight=self.weight)

    def score(self, task: Task, answer: str) -> float:
        """The other environment's reward, without regard to length; see ``shaped``."""
        return self.of.score(task, answer)


def shaped(task: Task, reward: float, tokens: int) -> float:
    """The reward of an answer of ``tokens`` tokens: less where the task asked for another length.

    Within [0, 1] like every reward.
    """
    if not task.target_tokens:
        return reward
    return min(1.0, max(0.0, reward - task.length_weight * abs(tokens - task.target_tokens)))


def _seed(seed: int, what: bytes) -> int:
    """64 bits that follow from a seed and what they are for."""
    digest = hashlib.sha256(b"barnraise/1/mixed/" + what + b"\0" + seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest[:8], "big")


def _part(part: Any, where: str, build: Build, keys: tuple[str, ...]) -> tuple[Environment, float]:
    if not isinstance(part, dict) or not isinstance(part.get("name"), str):
        raise TaskError(f'{where} must be an object such as {{"name": "chain_sum", "settings": {{}}}}')
    unknown = sorted(set(part) - set(keys))
    if unknown:
        raise TaskError(f"{where} has no {unknown[0]!r}: {', '.join(keys)}")
    settings = part.get("settings", {})
    if not isinstance(settings, dict):
        raise TaskError(f"settings of {where} must be an object")
    weight = _number(part.get("weight", 1.0), f"weight of {where}", 1e6)
    return build(part["name"], settings), weight


def _number(value: Any, what: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise TaskError(f"{what} must be a number above 0, at most {most:g}")
    return float(value)


def _only(settings: Mapping[str, Any], name: str, *known: str) -> None:
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise TaskError(f"environment {name!r} has no setting {unknown[0]!r}: {', '.join(known)}")
