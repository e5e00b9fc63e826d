"""Treecast on shaped home links: time to give everybody a version, against the bound and a star.

    python -m benchmarks.broadcast [--json] [--nodes 64] [--mebibytes 1024] [--growth 16,256] [--plot FILE]

The real state machines (overlay, tree, transfers) run on ``benchmarks.flowsim`` in
virtual time. Conditions by default: 64 nodes, 500 Mb/s down and 110 up, an origin
of 1 Gb/s, 40 ms round trip, 4 MiB shards; time from the publication of the head
until the last live node has verified the last shard. Keys:

ratio_to_lower_bound  time / T_min, T_min = max(S/u_seed, S/d_min, N S/(u_seed + sum u_i))
ratio_capped          the same with an origin limited to 1.5 copies (``origin_copies``: measured)
ratio_with_churn      20 % of the nodes crash at half of T_min; T_min still counts all N
speedup_over_star     N S/u_seed (the origin sends to each; S/d_min if larger), over the time
ratio_mixed           uploads drawn from 10, 20, 50, 110, 250 Mb/s instead
growth                one row for each further N
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field

from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.views import ViewConfig
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
    mixed: bool = False,
    copies: float | None = None,
    churn: float = 0.0,
    active: int = 8,
    slots: int = 2,
    order: int = 4,
) -> Result:
    """Broadcast one version to ``nodes`` nodes; ``churn`` of them crash half-way to the bound.

    Raises:
        RuntimeError: somebody was not done after 50 times the lower bound.
    """
    began = time.perf_counter()
    sim = FlowSim(seed)
    sim.count_bytes = True
    origin_up, down = 1000 * MEGABIT, 500 * MEGABIT
    origin = sim.add(
        "origin",
        [],
        up=origin_up,
        down=origin_up,
        views=ViewConfig(active=ORIGIN_LINKS),
        transfer=TransferConfig(slots=ORIGIN_LINKS, max_slots=ORIGIN_LINKS, copies=copies, order=order),
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
    sizes = [SHARD] * (total // SHARD)
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

    hosts = [host for host in sim.hosts.values() if host is not origin]
    done = [host.done[1] - start for host in hosts]
    stats = [host.core.transfer.stats for host in hosts]
    return Result(
        nodes=nodes,
        mebibytes=mebibytes,
        seconds=round(max(done), 3),
        lower_bound_s=round(bound, 3),
        ratio=round(max(done) / bound, 4),
        first_done_s=round(min(done), 3),
        origin_copies=round(origin.bytes_out / total, 3),
        wasted_fraction=round(sum(host.wasted for host in hosts) / (total * nodes), 5),
        control_fraction=round((sim.control_bytes - control) / (total * nodes), 6),
        duplicates_per_shard=round(sum(one.duplicates for one in stats) / (len(sizes) * nodes), 4),
        timeouts=sum(one.timeouts for one in stats),
        speedup_over_star=round(max(nodes * total / origin_up, total / down) / max(done), 3),
        wall_s=round(time.perf_counter() - began, 2),
        done_s=sorted(done),
    )


def draw(path: str, runs: dict[str, Result], growth: list[Result]) -> None:
    """Left: how many nodes are done, over time in lower bounds. Right: the ratio over N."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("plain", "capped", "churn", "mixed"):
        result = runs[name]
        times = [seconds / result.lower_bound_s for seconds in result.done_s]
        left.step(times, [100 * (i + 1) / len(times) for i in range(len(times))], where="post", label=name)
    plain = runs["plain"]
    star = plain.ratio * plain.speedup_over_star
    left.axvline(star, color="grey", linestyle=":", label=f"star: {star:.1f}")
    left.axvline(1, color="black", linestyle="--", label="lower bound")
    left.set(xlabel="time / lower bound", ylabel="nodes done (%)", xlim=(0.9, None))
    left.legend()
    rows = sorted(growth, key=lambda result: result.nodes)
    right.plot([row.nodes for row in rows], [row.ratio for row in rows], marker="o")
    right.axhline(1, color="black", linestyle="--")
    right.set(xlabel="nodes", ylabel="time / lower bound", xscale="log", ylim=(0.95, None))
    right.set_xticks([row.nodes for row in rows], [str(row.nodes) for row in rows], minor=False)
    right.minorticks_off()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run, print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--growth", default="16,256", help="further numbers of nodes, comma separated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", metavar="FILE", help="also draw the runs (.png or .svg)")
    options = parser.parse_args()
    nodes, size, seed = options.nodes, options.mebibytes, options.seed

    runs: dict[str, Result] = {}

    def run(name: str, count: int, **more: float | bool) -> Result:
        result = runs[name] = broadcast(count, size, seed=seed, **more)  # type: ignore[arg-type]
        if not options.json:
            print(
                f"{name:>8}: {result.nodes:4d} nodes, {result.mebibytes} MiB in {result.seconds:.1f} s, "
                f"{result.ratio:.3f} x the bound, {result.speedup_over_star:.1f} x a star, origin "
                f"{result.origin_copies:.2f} copies, wasted {result.wasted_fraction:.2%}, control "
                f"{result.control_fraction:.3%} ({result.wall_s:.0f} s of computing)",
                flush=True,
            )
        return result

    plain = run("plain", nodes)
    capped = run("capped", nodes, copies=1.5)
    churned = run("churn", nodes, churn=0.2)
    mixed = run("mixed", nodes, mixed=True)
    counts = [int(text) for text in options.growth.split(",") if text]
    growth = [run(f"N={count}", count) for count in counts]
    if options.plot:
        draw(options.plot, runs, [plain, *growth])
    if options.json:
        report = {
            "ratio_to_lower_bound": plain.ratio,
            "ratio_capped": capped.ratio,
            "origin_copies": capped.origin_copies,
            "ratio_with_churn": churned.ratio,
            "ratio_mixed": mixed.ratio,
            "speedup_over_star": plain.speedup_over_star,
            "growth": [result.row() for result in growth],
            "runs": {name: result.row() for name, result in runs.items()},
            "conditions": (
                f"{nodes} nodes 500/110 Mb/s, origin 1 Gb/s, 40 ms RTT, 4 MiB shards, {size} MiB; real state "
                "machines on a flow model of the links in virtual time (no packets, no slow start)"
            ),
        }
        json.dump(report, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
