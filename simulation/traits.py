"""What one simulated volunteer is like: fixed at its first arrival, kept when it comes back."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from barnraise.protocol.identity import Identity
from barnraise.simulation.determinism import drawn
from barnraise.simulation.scenario import Line, Scenario

T = TypeVar("T")

_PACKET = 1460 * 8  # bits of payload in an Ethernet frame over TCP


@dataclass(frozen=True)
class Traits:
    """``speed``: tokens per second. ``skew_s``: how far the clock is ahead. ``line``: None: ideal.

    ``outside``: the internet address that it comes from, as ``/ip4/203.0.113.7``; "": none of the internet's.
    """

    speed: float
    line: Line | None = None
    dialable: bool = True
    corrupt: bool = False
    cheat: str = ""
    skew_s: float = 0.0
    outside: str = ""


def identity_of(seed: int, name: str) -> Identity:
    """The key of ``name``, the same in each run with ``seed``."""
    return Identity.from_private_bytes(drawn(seed, "key", name).randbytes(32))


def unit_tokens(scenario: Scenario) -> int:
    """Completion tokens in one unit."""
    work = scenario.work
    return work.prompts * work.group_size * work.tokens


def draw_traits(scenario: Scenario, seed: int, name: str) -> Traits:
    """What ``name`` is like in this scenario. Each property has a generator of its own.

    Shares are kept to the node among ``n0000``, ``n0001``, ...: 10 % of 30 cheat means three.
    """
    swarm, work = scenario.swarm, scenario.work

    def at(purpose: str) -> float:
        return _place(seed, purpose, name, swarm.nodes)

    slowness = drawn(seed, "speed", name).lognormvariate(0, work.unit_spread)
    return Traits(
        speed=unit_tokens(scenario) / (work.unit_s * slowness),
        line=_pick(at("line"), [(item.share, item) for item in scenario.lines]),
        dialable=at("nat") >= swarm.nat_share,
        corrupt=at("corrupt") < swarm.corrupt_share,
        cheat=_pick(at("cheat"), [(item.share, item.kind) for item in scenario.cheats]) or "",
        skew_s=drawn(seed, "skew", name).uniform(-swarm.skew_s, swarm.skew_s),
        outside=_outside(scenario, seed, name),
    )


@lru_cache(maxsize=16)
def _order(seed: int, purpose: str, count: int) -> list[int]:
    order = list(range(count))
    drawn(seed, purpose).shuffle(order)
    return order


def _place(seed: int, purpose: str, name: str, count: int) -> float:
    """Where a node stands in [0, 1) among the first ``count``, all at equal distances."""
    if name[:1] == "n" and name[1:].isdecimal():
        return (_order(seed, purpose, count)[int(name[1:]) % count] + 0.5) / count
    return drawn(seed, purpose, name).random()


def _outside(scenario: Scenario, seed: int, name: str) -> str:
    """An address of the network that ``name`` comes from."""
    number = int(name[1:]) if name[:1] == "n" and name[1:].isdecimal() else 0
    networks = [happening.network for happening, numbers in scenario.crowds if number in numbers]
    text = networks[0] if networks else scenario.swarm.network
    if not text:
        return ""
    network = ipaddress.ip_network(text)
    host = network[drawn(seed, "outside", name).randrange(network.num_addresses)]
    return f"/ip{host.version}/{host}"


def _pick(at: float, shares: list[tuple[float, T]]) -> T | None:
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
