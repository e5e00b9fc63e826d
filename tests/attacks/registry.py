"""The list of attacks: what each does, which check is to find it, and what cannot be found.

An attack is a function ``(stage, me, rng) -> Outcome``: it takes a lease for the key
``me``, cheats as well as it can, hands the result in and returns what became of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from attacks.stage import Outcome, Stage
from barnraise.protocol.identity import Identity

Perform = Callable[[Stage, Identity, Random], Outcome]


@dataclass(frozen=True)
class Attack:
    """One way to cheat, or one honest way that must pass.

    Attributes:
        name: as in the tables.
        what: what it does, in a few words.
        caught_by: beginnings of the checks or refusal codes that find it, any of them.
        least: share of single submissions that must be caught with the demo model, under the
            thresholds that ``run init`` writes.
        least_exact: the same under ``exact_verify_spec``; at least ``least``.
        honest: no cheat at all: every submission must be accepted.
        limits: what cannot be detected, and why; empty where all of it can.
        precision: of the run's engines, ``"float32"`` or ``"bfloat16"``.
    """

    name: str
    what: str
    perform: Perform
    caught_by: tuple[str, ...]
    least: float
    least_exact: float
    honest: bool
    limits: str
    precision: str


ATTACKS: dict[str, Attack] = {}


def attack(
    what: str,
    *caught_by: str,
    least: float = 1.0,
    least_exact: float = 1.0,
    honest: bool = False,
    limits: str = "",
    precision: str = "float32",
) -> Callable[[Perform], Perform]:
    """Register the decorated function under its name."""

    def register(perform: Perform) -> Perform:
        name = perform.__name__.replace("_", "-")
        assert name not in ATTACKS, f"two attacks are called {name}"
        ATTACKS[name] = Attack(
            name, what, perform, caught_by, least, max(least, least_exact), honest, limits, precision
        )
        return perform

    return register
