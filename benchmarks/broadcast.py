"""Treecast on shaped home links: time to give everybody a version, against the bound, a star and HTTP relays.

    python -m benchmarks.broadcast [--json] [--quick] [--nodes 64] [--mebibytes 1024]
        [--growth 16,256,1000] [--large 16384] [--plot FILE]...
    python -m benchmarks.broadcast real [--json] ...    between real processes: ``benchmarks.real``
    python -m benchmarks.broadcast hop [--json] ...     one hop on loopback: ``benchmarks.hop``

The real state machines (overlay, tree, transfers) run on ``benchmarks.flowsim`` in
virtual time. Conditions by default: 64 nodes, 500 Mb/s down and 110 up, an origin
of 1 Gb/s, 40 ms round trip, 4 MiB shards; time from the publication of the head
until the last live node has verified the last shard. Keys:

ratio_to_lower_bound  time / T_min, T_min = max(S/u_seed, S/d_min, N S/(u_seed + sum u_i))
ratio_capped          the same with an origin limited to 1.5 copies (``origin_copies``: measured)
ratio_with_churn      20 % of the nodes crash at half of T_min; T_min still counts all N
ratio_mixed           uploads drawn from 10, 20, 50, 110, 250 Mb/s instead
ratio_large           16 GiB instead of 1
speedup_over_star     N S/u_seed (the origin sends to each; S/d_min if larger), over the time
speedup_over_relay    the time of an HTTP relay tree whose relays are nodes, over the time; of a
                      few numbers of relays around the best by arithmetic the best is taken
schemes               star, relay and relay_dedicated (8 further machines of 1 Gb/s as relays), each
                      with its ratio to the same T_min; from ``benchmarks.relaysim``
growth                one row for each further N, with the ratios of star and relay
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.views import ViewConfig
from benchmarks import hop, real, relaysim
from benchmarks.flowsim import FlowSim

MEGABIT = 1e6 / 8
SHARD = 4 * 1024 * 1024
ORIGIN_LINKS = 16
MOST_RELAYED = 256  # nodes up to which the relay tree is computed: its model is slow
TITLES = {
    "plain": "treecast",
    "capped": "treecast, origin 1.5 copies",
    "churn": "treecast, 20 % crash",
    "star": "star",
    "relay": "HTTP relays, nodes",
    "relay_dedicated": "HTTP relays, 8 servers of 1 Gb/s",
}
DEDICATED = 8  # relays that are machines of their own, with links like the origin's


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


@dataclass
class Scheme:
    """One run of another scheme; times in virtual seconds, ratio to treecast's lower bound."""

    name: str
    nodes: int
    relays: int
    seconds: float
    ratio: float
    done_s: list[float] = field(repr=False)

    def row(self) -> dict[str, float | str]:
        """All but the times of single nodes."""
        values = asdict(self)
        del values["done_s"]
        return values


def other_scheme(name: str, nodes: int, mebibytes: int) -> Scheme:
    """``star``, ``relay`` or ``relay_dedicated`` under the same conditions."""
    sizes = [SHARD] * (mebibytes * 1024 * 1024 // SHARD)
    origin, up, down = 1000 * MEGABIT, 110 * MEGABIT, 500 * MEGABIT
    bound = max(sum(sizes) / down, nodes * sum(sizes) / (origin + nodes * up))
    best = relaysim.best_relays(nodes, up, origin)
    parts = (0.8, 1.0, 1.2, 1.5) if nodes <= 64 else (1.2,)  # the model takes minutes for many nodes
    counts = {
        "star": [0],
        "relay": sorted({max(1, min(nodes - 1, round(best * part))) for part in parts}),
        "relay_dedicated": [DEDICATED],
    }[name]
    rows = []
    for count in counts:
        done = relaysim.broadcast(
            [up] * nodes,
            down,
            origin,
            sizes,
            relays=count,
            dedicated=origin if name == "relay_dedicated" else 0.0,
        )
        rows.append(Scheme(name, nodes, count, round(done[-1], 3), round(done[-1] / bound, 4), done))
    return min(rows, key=lambda row: row.seconds)


def draw(path: str, runs: dict[str, Result], schemes: list[Scheme], grown: list[dict[str, Any]]) -> None:
    """Left: how many nodes are done, over time in lower bounds. Right: the ratio over N, by scheme."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    bound = runs["plain"].lower_bound_s
    curves = {TITLES[name]: runs[name].done_s for name in ("plain", "capped", "churn")}
    curves |= {TITLES[scheme.name]: scheme.done_s for scheme in schemes}
    for title, done in curves.items():
        times = [0.0, *(seconds / bound for seconds in done)]
        share = [100 * i / (len(times) - 1) for i in range(len(times))]
        left.step(times, share, where="post", label=title, linestyle="-" if "treecast" in title else "--")
    left.axvline(1, color="black", linewidth=0.8)
    left.set(xlabel="time / lower bound", ylabel="nodes done (%)", xlim=(0.8, None), xscale="log")
    ticks = [1, 2, 4, 8]
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.set_title(f"{runs['plain'].nodes} nodes, {runs['plain'].mebibytes} MiB")
    left.legend(fontsize="small")
    for key, title in (("treecast", "treecast"), ("relay", TITLES["relay"]), ("star", TITLES["star"])):
        rows = [row for row in grown if row.get(key)]
        style = "-" if key == "treecast" else "--"
        right.plot(
            [row["nodes"] for row in rows],
            [row[key] for row in rows],
            marker="o",
            linestyle=style,
            label=title,
        )
    right.axhline(1, color="black", linewidth=0.8)
    right.set(xlabel="nodes", ylabel="time / lower bound", xscale="log", yscale="log")
    right.set_xticks([row["nodes"] for row in grown], [str(row["nodes"]) for row in grown])
    right.set_yticks(ticks, [str(tick) for tick in ticks])
    right.minorticks_off()
    right.set_title("growth")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run, print a table, or one JSON object."""
    for name, module in (("real", real), ("hop", hop)):
        if sys.argv[1:2] == [name]:
            module.main(sys.argv[2:])
            return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="8 nodes, 64 MiB: does it still run?")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--growth", default="16,256,1000", help="further numbers of nodes, comma separated")
    parser.add_argument("--large", type=int, default=16384, help="MiB of one further run; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", metavar="FILE", action="append", help="also draw the runs (.png or .svg)")
    options = parser.parse_args()
    nodes, size, seed = options.nodes, options.mebibytes, options.seed
    counts = [int(text) for text in options.growth.split(",") if text]
    large = options.large
    if options.quick:
        nodes, size, counts, large = 8, 64, [4], 0

    runs: dict[str, Result] = {}

    def tell(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    def run(name: str, count: int, mebibytes: int = size, **more: float | bool) -> Result:
        result = runs[name] = broadcast(count, mebibytes, seed=seed, **more)  # type: ignore[arg-type]
        tell(
            f"{name:>15}: {result.nodes:4d} nodes, {result.mebibytes} MiB in {result.seconds:.1f} s, "
            f"{result.ratio:.3f} x the bound, {result.speedup_over_star:.1f} x a star, origin "
            f"{result.origin_copies:.2f} copies, wasted {result.wasted_fraction:.2%}, control "
            f"{result.control_fraction:.3%} ({result.wall_s:.0f} s of computing)"
        )
        return result

    def other(name: str, count: int) -> Scheme:
        scheme = other_scheme(name, count, size)
        tell(f"{name:>15}: {count:4d} nodes in {scheme.seconds:.1f} s, {scheme.ratio:.3f} x the bound")
        return scheme

    plain = run("plain", nodes)
    capped = run("capped", nodes, copies=1.5)
    churned = run("churn", nodes, churn=0.2)
    mixed = run("mixed", nodes, mixed=True)
    schemes = {name: other(name, nodes) for name in ("star", "relay", "relay_dedicated")}
    growth = [run(f"N={count}", count) for count in counts]
    grown: list[dict[str, Any]] = [
        {"nodes": nodes, "treecast": plain.ratio, **{k: schemes[k].ratio for k in ("star", "relay")}}
    ]
    for result in growth:
        relay = other("relay", result.nodes).ratio if result.nodes <= MOST_RELAYED else None
        star = round(result.ratio * result.speedup_over_star, 4)
        grown.append({"nodes": result.nodes, "treecast": result.ratio, "star": star, "relay": relay})
    grown.sort(key=lambda row: row["nodes"])
    biggest = run("large", nodes, large) if large else None
    for path in options.plot or ():
        draw(path, runs, list(schemes.values()), grown)
    if options.json:
        report = {
            "ratio_to_lower_bound": plain.ratio,
            "ratio_capped": capped.ratio,
            "origin_copies": capped.origin_copies,
            "ratio_with_churn": churned.ratio,
            "ratio_mixed": mixed.ratio,
            "ratio_large": biggest.ratio if biggest else None,
            "speedup_over_star": plain.speedup_over_star,
            "speedup_over_relay": round(schemes["relay"].seconds / plain.seconds, 3),
            "schemes": {name: scheme.row() for name, scheme in schemes.items()},
            "growth": grown,
            "runs": {name: result.row() for name, result in runs.items()},
            "conditions": (
                f"{nodes} nodes 500/110 Mb/s, origin 1 Gb/s, 40 ms RTT, 4 MiB shards, {size} MiB, "
                f"seed {seed}; real state machines on a flow model of the links in virtual time "
                "(no packets, no slow start)"
            ),
        }
        json.dump(report, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
