"""What one simulated volunteer is like: fixed at its first arrival, kept when it comes back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

from barnraise.protocol.identity import Identity
from barnraise.simulation.determinism import drawn
from barnraise.simulation.scenario import Line, Scenario

T = TypeVar("T")

_PACKET = 1460 * 8  # bits of payload in an Ethernet frame over TCP


@dataclass(frozen=True)
class Traits:
    """``speed``: tokens per second. ``skew_s``: how far the clock is ahead. ``line``: None: ideal."""

    speed: float
    line: Line | None = None
    dialable: bool = True
    corrupt: bool = False
    cheat: str = ""
    skew_s: float = 0.0


def identity_of(seed: int, name: str) -> Identity:
    """The key of ``name``, the same in each run with ``seed``."""
    return Identity.from_private_bytes(drawn(seed, "key", name).randbytes(32))


def unit_tokens(scenario: Scenario) -> int:
    """Completion tokens in one unit."""
    work = scenario.work
    return work.prompts * work.group_size * work.tokens


def draw_traits(scenario: Scenario, seed: int, name: str) -> Traits:
    """What ``name`` is like in this scenario. Each property has a generator of its own."""
    swarm, work = scenario.swarm, scenario.work
    slowness = drawn(seed, "speed", name).lognormvariate(0, work.unit_spread)
    return Traits(
        speed=unit_tokens(scenario) / (work.unit_s * slowness),
        line=_pick(drawn(seed, "line", name), [(item.share, item) for item in scenario.lines]),
        dialable=drawn(seed, "nat", name).random() >= swarm.nat_share,
        corrupt=drawn(seed, "corrupt", name).random() < swarm.corrupt_share,
        cheat=_pick(drawn(seed, "cheat", name), [(item.share, item.kind) for item in scenario.cheats]) or "",
        skew_s=drawn(seed, "skew", name).uniform(-swarm.skew_s, swarm.skew_s),
    )


def _pick(rng: random.Random, shares: list[tuple[float, T]]) -> T | None:
    at = rng.random()
    for share, item in shares:
        at -= share
        if at < 0:
            return item
    return None


def usable_rate(mbit: float, line: Line) -> float | None:
    """Bytes per second that TCP gets out of a line; None: as many as anybody asks.

    With loss p it is at most 1.22 segments / (round trip * sqrt(p)) (Mathis et al.,
    "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm", 1997).
    """
    rates = [] if mbit == 0 else [mbit * 1e6]
    if line.loss > 0:
        rates.append(1.22 * _PACKET / (max(2 * line.latency_ms, 1.0) / 1000 * line.loss**0.5))
    return min(rates) / 8 if rates else None
