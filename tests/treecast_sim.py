"""Shared by the transfer tests: small swarms on the benchmark's flow simulator."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.view_state import ViewConfig
from benchmarks.flowsim import FlowSim, Host

SHARD = 1 << 20
MB = 1e6


def swarm(seed: int, nodes: int, *, active: int = 4, copies: float | None = None) -> FlowSim:
    """An origin "o" (100 MB/s) and ``nodes`` nodes "n0"... (12 MB/s up, 50 down), settled."""
    sim = FlowSim(seed)
    sim.add(
        "o",
        [],
        up=100 * MB,
        down=100 * MB,
        views=ViewConfig(active=8),
        transfer=TransferConfig(slots=8, max_slots=8, copies=copies),
    )
    for index in range(nodes):
        join(sim, f"n{index}", active=active)
        sim.run(sim.now + 0.3)
    sim.run(sim.now + 40)
    return sim


def join(sim: FlowSim, name: str, *, active: int = 4, up: float = 12 * MB) -> Host:
    return sim.add(name, ["o"], up=up, down=50 * MB, views=ViewConfig(active=active, passive=16))


def run_until_complete(sim: FlowSim, version: int, limit: float, but: frozenset[str] = frozenset()) -> float:
    """Run until every live host but those named has ``version``; return the seconds it took."""
    start = sim.now
    while any(version not in host.done for name, host in sim.hosts.items() if name not in but):
        assert sim.now < start + limit, f"not complete after {limit} s: " + ", ".join(
            f"{name} {host.core.transfer.bitmap(version).bit_count()}"
            for name, host in sim.hosts.items()
            if version not in host.done and name not in but
        )
        sim.run(sim.now + 0.25)
    return max(host.done[version] for name, host in sim.hosts.items() if name not in but) - start
