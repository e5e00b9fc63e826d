"""Performs attacks and counts: what the tests and ``benchmarks/verification.py`` share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from attacks import claims, draws, leases, patience, weights  # noqa: F401  each registers its attacks
from attacks.registry import ATTACKS, Attack
from attacks.stage import Stage, exact_verify_spec
from barnraise.coordinator import presets


class Stages:
    """Stages by the precision of their run, made when first used."""

    def __init__(self, folder: Path, model: str = "demo") -> None:
        self._folder = folder
        self._model = model
        self._made: dict[str, Stage] = {}

    def __getitem__(self, precision: str) -> Stage:
        if precision not in self._made:
            self._made[precision] = self._make(precision)
        return self._made[precision]

    def _make(self, precision: str) -> Stage:
        preset = presets.demo() if self._model == "demo" else presets.smollm2()
        (self._folder / precision).mkdir(exist_ok=True)
        folder = self._folder / precision / "run"
        if precision == "bfloat16":
            settings = replace(preset, compute_dtype="bfloat16")
            return Stage(folder, self._model, settings, verify_in="float32")
        return Stage(folder, self._model, preset, exact_verify_spec() if precision == "exact" else None)


def perform(stage: Stage, attack: Attack, tries: int) -> dict[str, Any]:
    """Perform ``attack`` as often as ``tries``, each time under a key of its own.

    Returns:
        ``caught`` and ``of`` (single submissions); ``median`` submissions until caught, the
        tries read as one cheat's career after another, or None if it never was; ``checks``:
        check -> how often; ``credit`` that the cheat earned per try; ``largest``: of those
        that passed, the rewards they brought on average.
    """
    outcomes = []
    for number in range(tries):
        me = stage.join(f"{attack.name} {number}")
        outcomes.append(attack.perform(stage, me, Random(number)))
    checks: dict[str, int] = {}
    careers, length = [], 0
    for outcome in outcomes:
        length += 1
        if not outcome.accepted:
            checks[outcome.check] = checks.get(outcome.check, 0) + 1
            careers.append(length)
            length = 0
    passed = [outcome for outcome in outcomes if outcome.accepted]
    return {
        "caught": len(careers),
        "of": tries,
        "median": median(careers) if careers else None,
        "checks": dict(sorted(checks.items(), key=lambda item: -item[1])),
        "credit": sum(outcome.credit for outcome in passed) / tries,
        "reward": sum(outcome.reward for outcome in passed) / len(passed) if passed else 0.0,
    }


def expect(stage: Stage, attack: Attack) -> None:
    """One try: honest work passes, a cheat is caught as often as it must be, and by its check."""
    row = perform(stage, attack, tries=1)
    if attack.honest:
        assert row["caught"] == 0, row
        return
    assert row["caught"] >= attack.least * row["of"], row
    for check in row["checks"]:
        assert check.startswith(attack.caught_by), f"{attack.name} is found by {check} instead"


__all__ = ["ATTACKS", "Stages", "expect", "perform"]
