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
import signal
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import hop, real, relaysim
from benchmarks.modelled import MEGABIT, SHARD, Result, broadcast

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


def main(arguments: list[str]) -> None:
    """Run, print a table, or one JSON object."""
    for name, module in (("real", real), ("hop", hop)):
        if arguments[:1] == [name]:
            module.main(arguments[1:])
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
    options = parser.parse_args(arguments)
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
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is cleaned up
    main(sys.argv[1:])
