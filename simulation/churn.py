"""Who comes, who goes, what breaks and when: a scenario and a seed made into a list of acts.

Pure: nothing here knows of a running swarm. A plan is a list that can be cut (``shrink``) and
carried out (``run``). Sessions are log-normal, absences exponential; that half of all sessions
of a volunteer swarm are shorter than 40 minutes is what the scenarios take.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from barnraise.simulation.determinism import drawn
from barnraise.simulation.scenario import Happening, Scenario

Do = Literal[
    "join",
    "rejoin",
    "leave",
    "crash",
    "power-cut",
    "partition",
    "heal",
    "network-down",
    "network-up",
    "freeze",
    "thaw",
    "skew",
    "disk-full",
    "disk-free",
    "upgrade",
    "coordinator-crash",
    "coordinator-return",
    "coordinator-upgrade",
    "coordinator-disk-full",
    "coordinator-disk-free",
]
UPGRADE_S = 20.0  # a new release is installed and started in so long


@dataclass(frozen=True)
class Planned:
    """At ``at_s``, do this to ``nodes``. ``by_s``: for ``skew``; ``to``, ``grace_s``: for upgrades."""

    at_s: float
    do: Do
    nodes: tuple[str, ...] = ()
    by_s: float = 0.0
    to: str = ""
    grace_s: float = 0.0


def plan(scenario: Scenario, seed: int) -> list[Planned]:
    """Everything that happens from outside, by time."""
    swarm = scenario.swarm
    acts: list[Planned] = []
    first = range(swarm.nodes)
    arrivals = [(drawn(seed, "arrival", name(n)).uniform(0, swarm.arrive_s), name(n)) for n in first]
    for happening, numbers in scenario.crowds:
        for number in numbers:
            spread = drawn(seed, "arrival", name(number)).uniform(0, max(1.0, happening.over_s))
            arrivals.append((happening.at_s + spread, name(number)))
    sessions: dict[str, list[tuple[float, float]]] = {}
    for at, who in arrivals:
        sessions[who] = _sessions(scenario, drawn(seed, "session", who), at)
        acts += _lives(scenario, drawn(seed, "departure", who), who, sessions[who])
    for number, happening in enumerate(scenario.happens):
        if happening.what != "flash-crowd":
            acts += _happen(scenario, happening, drawn(seed, "happening", str(number)), sessions)
    acts.sort(key=lambda act: (act.at_s, act.do, act.nodes))
    return [act for act in acts if act.at_s < scenario.end_s]


def name(number: int) -> str:
    """``n0007``"""
    return f"n{number:04d}"


def _sessions(scenario: Scenario, rng: random.Random, at: float) -> list[tuple[float, float]]:
    """When somebody who first comes at ``at`` is there; the last may end at infinity."""
    churn, found = scenario.churn, []
    while at < scenario.end_s:
        if churn.session_median_s <= 0:
            return [(at, math.inf)]
        end = at + churn.session_median_s * rng.lognormvariate(0, churn.session_spread)
        found.append((at, end))
        at = end + max(30.0, rng.expovariate(1 / max(1.0, churn.away_s)))
        # By night fewer come back: whoever meets a refusal sleeps on for a while (thinning).
        while churn.wave and at < scenario.end_s and rng.random() < churn.wave * _night(at, churn.day_s):
            at += churn.day_s / 24
    return found


def _night(at: float, day_s: float) -> float:
    """0 at noon, 1 at midnight; a simulation begins at noon."""
    return (1 - math.cos(2 * math.pi * at / day_s)) / 2


def _lives(
    scenario: Scenario, rng: random.Random, who: str, sessions: list[tuple[float, float]]
) -> list[Planned]:
    acts = []
    for number, (begin, end) in enumerate(sessions):
        acts.append(Planned(begin, "rejoin" if number else "join", (who,)))
        if end < scenario.end_s:
            how: Do = "leave"
            if rng.random() < scenario.churn.crash_share:
                how = "crash" if rng.random() < 0.5 else "power-cut"
            acts.append(Planned(end, how, (who,)))
    return acts


_PAIRS: dict[str, tuple[Do, Do]] = {
    "partition": ("partition", "heal"),
    "network-down": ("network-down", "network-up"),
    "sleep": ("freeze", "thaw"),
    "skew": ("skew", "skew"),
    "disk-full": ("disk-full", "disk-free"),
    "coordinator-crash": ("coordinator-crash", "coordinator-return"),
    "mass-exit": ("power-cut", "rejoin"),
    "upgrade": ("upgrade", "upgrade"),
    "coordinator-upgrade": ("coordinator-upgrade", "coordinator-upgrade"),
    "coordinator-disk-full": ("coordinator-disk-full", "coordinator-disk-free"),
}
_TO_COORDINATOR = frozenset({"coordinator-crash", "coordinator-disk-full"})
_ONE_BY_ONE = frozenset({"sleep", "skew", "disk-full", "mass-exit", "upgrade"})


def _happen(
    scenario: Scenario, what: Happening, rng: random.Random, sessions: dict[str, list[tuple[float, float]]]
) -> list[Planned]:
    begins, ends = _PAIRS[what.what]
    there = sorted(
        who for who, times in sessions.items() if any(begin < what.at_s < end for begin, end in times)
    )
    if what.what == "coordinator-upgrade":
        return [Planned(what.at_s, begins, to=what.to, grace_s=what.grace_s)]
    if what.what in _TO_COORDINATOR:
        return [Planned(what.at_s, begins), Planned(what.at_s + max(1.0, what.for_s), ends)]
    chosen = sorted(rng.sample(there, min(len(there), round(what.share * len(there)))))
    acts = []
    groups = [(who,) for who in chosen] if what.what in _ONE_BY_ONE else [tuple(chosen)]
    for group in groups:
        at = what.at_s + rng.uniform(0, what.over_s)
        acts.append(Planned(at, begins, group, what.by_s, what.to))
        if what.for_s > 0 and what.what != "upgrade":
            acts.append(Planned(at + what.for_s, ends, group))
    return acts
