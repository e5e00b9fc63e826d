"""Treecast's real state machines broadcast one version on ``benchmarks.flowsim``, in virtual time."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, field

from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.view_state import ViewConfig
from benchmarks.flowsim import FlowSim

MEGABIT = 1e6 / 8
SHARD = 4 * 1024 * 1024
ORIGIN_LINKS = 16


@dataclass
class Result:
    """One run. Times in virtual seconds, except ``wall_s``."""

    nodes: int
    mebibytes: int
    seconds: float
    lower_bound_s: float
    ratio: float
    first_done_s: float
    origin_copies: float
    wasted_fraction: float
    control_fraction: float
    duplicates_per_shard: float
    timeouts: int
    speedup_over_star: float
    wall_s: float
    done_s: list[float] = field(default_factory=list, repr=False)  # per node, sorted

    def row(self) -> dict[str, float]:
        """All but the times of single nodes."""
        values = asdict(self)
        del values["done_s"]
        return values


def broadcast(
    nodes: int,
    mebibytes: int,
    *,
    seed: int = 1,
    up: float = 110.0,
    down: float = 500.0,
    origin: float = 1000.0,
    mixed: bool = False,
    copies: float | None = None,
    churn: float = 0.0,
    active: int = 8,
    slots: int = 2,
    order: int = 4,
    shard: int = SHARD,
    origin_active: int = ORIGIN_LINKS,
    origin_slots: int = ORIGIN_LINKS,
) -> Result:
    """Broadcast one version to ``nodes`` nodes; ``churn`` of them crash half-way to the bound.

    ``up``, ``down`` and ``origin`` are links in Mb/s, ``active`` the neighbours of a
    node, ``slots`` the shards that it uploads at a time, ``order`` those that it orders.

    Raises:
        RuntimeError: somebody was not done after 50 times the lower bound.
    """
    began = time.perf_counter()
    sim = FlowSim(seed)
    sim.count_bytes = True
    origin_up, down = origin * MEGABIT, down * MEGABIT
    root = sim.add(
        "origin",
        [],
        up=origin_up,
        down=origin_up,
        views=ViewConfig(active=origin_active),
        transfer=TransferConfig(slots=origin_slots, max_slots=origin_slots, copies=copies, order=order),
    )
    links = random.Random(seed)
    uploads = []
    for index in range(nodes):
        upload = (links.choice((10.0, 20.0, 50.0, 110.0, 250.0)) if mixed else up) * MEGABIT
        uploads.append(upload)
        sim.add(
            f"node{index}",
            ["origin"],
            up=upload,
            down=down,
            views=ViewConfig(active=active),
            transfer=TransferConfig(slots=slots, order=order),
        )
        sim.run(sim.now + 0.1)
    sim.run(sim.now + 60)

    total = mebibytes * 1024 * 1024
    sizes = [shard] * (total // shard)
    bound = max(total / origin_up, total / down, nodes * total / (origin_up + sum(uploads)))
    start, control = sim.now, sim.control_bytes
    sim.publish("origin", 1, sizes)
    if churn:
        sim.run(start + bound / 2)
        for name in sim.rng.sample(sorted(set(sim.hosts) - {"origin"}), round(nodes * churn)):
            sim.crash(name)
    while any(1 not in host.done for host in sim.hosts.values()):
        if sim.now > start + 50 * bound:
            raise RuntimeError(f"{nodes} nodes: not everybody was done after 50 times the lower bound")
        sim.run(sim.now + 1)

    hosts = [host for host in sim.hosts.values() if host is not root]
    done = [host.done[1] - start for host in hosts]
    stats = [host.core.transfer.stats for host in hosts]
    return Result(
        nodes=nodes,
        mebibytes=mebibytes,
        seconds=round(max(done), 3),
        lower_bound_s=round(bound, 3),
        ratio=round(max(done) / bound, 4),
        first_done_s=round(min(done), 3),
        origin_copies=round(root.bytes_out / total, 3),
        wasted_fraction=round(sum(host.wasted for host in hosts) / (total * nodes), 5),
        control_fraction=round((sim.control_bytes - control) / (total * nodes), 6),
        duplicates_per_shard=round(sum(one.duplicates for one in stats) / (len(sizes) * nodes), 4),
        timeouts=sum(one.timeouts for one in stats),
        speedup_over_star=round(max(nodes * total / origin_up, total / down) / max(done), 3),
        wall_s=round(time.perf_counter() - began, 2),
        done_s=sorted(done),
    )
