"""Treecast, a star and an HTTP relay tree between real processes, in network namespaces with shaped links.

    python -m benchmarks.broadcast real [--json] [--nodes 8] [--mebibytes 256] [--only treecast,star]

Linux, as root. Every process is a host with its own link (``benchmarks.netns``). Schemes:

treecast  ``benchmarks.swarm_peer``: libp2p, disk stores, hashes, the gossip shell, as in production
capped    the same, with an origin limited to 1.5 copies
churn     the same; two of eight nodes are killed (SIGKILL) at half of the bound
star      ``benchmarks.http_peer``: everybody fetches from the origin over HTTP
relay     likewise by way of relays, which are nodes themselves (nobody else's links are there), as
          many as suit these links best: five of eight with the default rates

A scheme's time ends when the last live node has the last shard verified and on its disk.
``model_s`` is what the model of ``benchmarks.flowsim`` says of the same links, less the
headers of packets.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from barnraise.coordinator.origin import SLOTS
from barnraise.protocol.view_state import ViewConfig
from benchmarks import relaysim
from benchmarks.modelled import broadcast as modelled_broadcast
from benchmarks.netns import QUEUE_MS, Lab, Shape, open_lab
from benchmarks.relaysim import best_relays

MIB = 1024 * 1024
MEGABIT = 1e6 / 8
SCHEMES = ("treecast", "capped", "churn", "star", "relay")
ROOT = Path(__file__).resolve().parent.parent
PORT = 8080
PAYLOAD = 1448 / 1514  # of a full packet: Ethernet, IP and TCP take the rest of what the links carry


class Plan(NamedTuple):
    """What moves where: Mb/s, bytes a shard."""

    nodes: int = 8
    mebibytes: int = 256
    up: float = 22.0
    down: float = 100.0
    origin: float = 200.0
    shard: int = 4 * MIB
    settle_s: float = 5.0  # for the overlay, after the last start

    @property
    def names(self) -> list[str]:
        """The nodes."""
        return [f"n{number}" for number in range(self.nodes)]

    def shapes(self) -> dict[str, Shape]:
        """Everybody's link."""
        return {
            "origin": Shape(self.origin, self.origin),
            **{name: Shape(self.up, self.down) for name in self.names},
        }

    def bound_s(self) -> float:
        """Seconds that no scheme can beat, headers of packets not counted."""
        size = self.mebibytes * MIB
        total = self.origin + self.nodes * self.up
        return max(size / self.origin, size / self.down, self.nodes * size / total) / MEGABIT


class Process:
    """One process of a scheme, and the JSON lines that it prints."""

    def __init__(self, lab: Lab, host: str, module: str, settings: Mapping[str, Any]) -> None:
        self.host = host
        self.popen = lab.start(
            host,
            [sys.executable, "-P", "-m", f"benchmarks.{module}", json.dumps(settings)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._seen: list[dict[str, Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        try:
            for line in self.popen.stdout:
                self._events.put(json.loads(line))
        except ValueError:
            pass  # closed, or cut off in the middle
        self._events.put({"event": "end"})

    def wait(self, event: str, limit: float) -> dict[str, Any]:
        """The next event of this kind, within ``limit`` seconds.

        Raises:
            RuntimeError: it did not come.
        """
        for number, known in enumerate(self._seen):
            if known["event"] == event:
                return self._seen.pop(number)
        deadline = time.monotonic() + limit
        while True:
            try:
                found = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"{self.host}: no {event!r} within {limit:.0f} s") from None
            if found["event"] == event:
                return found
            if found["event"] == "end":
                code = self.popen.wait()
                raise RuntimeError(f"{self.host}: the process ended ({code}) before {event!r}")
            self._seen.append(found)

    def order(self, text: str) -> None:
        """A line to its standard input."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()

    def stats(self) -> dict[str, Any]:
        """What it says of itself."""
        self.order("stats")
        return self.wait("stats", 30)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for everybody's disk, gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="barnraise-real-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(scheme: str, plan: Plan, seed: int) -> dict[str, Any]:
    """One scheme in a laboratory of its own; returns a row of numbers.

    Raises:
        RuntimeError: no laboratory can be built here, or somebody was not done in 20 times the bound.
    """
    load = round(os.getloadavg()[0], 1)
    with scratch() as folder, open_lab(plan.shapes()) as lab:
        for name in ("origin", *plan.names):
            (folder / name).mkdir()
        how = _http if scheme in ("star", "relay") else _treecast
        return {**how(scheme, plan, seed, lab, folder), "load_before": load}


def _treecast(scheme: str, plan: Plan, seed: int, lab: Lab, folder: Path) -> dict[str, Any]:
    def start(name: str, number: int, **more: Any) -> Process:
        settings = {"folder": str(folder / name), "host": lab.address(name), "seed": seed * 1000 + number}
        settings |= {"mebibytes": plan.mebibytes, "shard": plan.shard, **more}
        return Process(lab, name, "swarm_peer", settings)

    origin = start("origin", 0, copies=1.5 if scheme == "capped" else 0.0)
    address = origin.wait("ready", 60)["addresses"][0]
    nodes = [start(name, number, origin=address) for number, name in enumerate(plan.names, 1)]
    for node in nodes:
        node.wait("ready", 60)
    time.sleep(plan.settle_s)
    before = [process.stats() for process in (origin, *nodes)]
    origin.order("publish")
    began = origin.wait("published", 10)["at"]
    killed = 0
    if scheme == "churn":
        time.sleep(plan.bound_s() / 2)
        killed = max(1, plan.nodes // 4)
        for node in nodes[:killed]:
            node.popen.kill()
    live = nodes[killed:]
    limit = 20 * plan.bound_s()
    done = [node.wait("shards", limit) for node in live]
    after = [process.stats() for process in (origin, *live)]
    for node in live:
        node.wait("whole", 60)
    cpu = sum(one["cpu_s"] for one in after) - sum(one["cpu_s"] for one in (before[0], *before[1 + killed :]))
    row = _row(plan, began, [one["at"] for one in done], cpu)
    return {
        **row,
        "killed": killed,
        "origin_copies": round(after[0]["sent"] / (plan.mebibytes * MIB), 3),
        "beside_fraction": round(
            1 - sum(one["tree"] for one in done) / (len(live) * plan.mebibytes * MIB), 4
        ),
        "wire_overhead": round(
            sum(b["bytes_in"] - a["bytes_in"] for a, b in zip(before[1 + killed :], after[1:], strict=True))
            / (len(live) * plan.mebibytes * MIB)
            - 1,
            4,
        ),
        "duplicates": sum(one["duplicates"] for one in after),
        "timeouts": sum(one["timeouts"] for one in after),
        "defects": sum(one["defects"] for one in after),
        "rss_mib": round(max(one["rss_mib"] for one in after)),
    }


def _http(scheme: str, plan: Plan, seed: int, lab: Lab, folder: Path) -> dict[str, Any]:
    def start(name: str, number: int, upstream: list[str]) -> Process:
        settings = {"folder": str(folder / name), "host": lab.address(name), "port": PORT}
        settings |= {"seed": seed * 1000 + number, "mebibytes": plan.mebibytes, "shard": plan.shard}
        return Process(lab, name, "http_peer", {**settings, "upstream": upstream})

    origin = start("origin", 0, [])
    url = origin.wait("ready", 60)["url"]
    relays = plan.names[: best_relays(plan.nodes, plan.up, plan.origin)] if scheme == "relay" else []
    urls = [f"http://{lab.address(name)}:{PORT}" for name in relays]
    nodes = [
        start(name, number, urls if urls and name not in relays else [url])
        for number, name in enumerate(plan.names, 1)
    ]
    for node in nodes:
        node.wait("ready", 60)
    before = [process.stats() for process in (origin, *nodes)]
    began = time.monotonic()
    for node in nodes:
        node.order("fetch")
    done = [node.wait("shards", 20 * plan.bound_s() * max(1, plan.nodes // 8)) for node in nodes]
    after = [process.stats() for process in (origin, *nodes)]
    for node in nodes:
        node.wait("whole", 60)
    cpu = sum(one["cpu_s"] for one in after) - sum(one["cpu_s"] for one in before)
    return {**_row(plan, began, [one["at"] for one in done], cpu), "relays": len(relays)}


def modelled(scheme: str, plan: Plan) -> float:
    """Seconds that the flow model takes for ``scheme``."""
    up, down, origin = (PAYLOAD * rate for rate in (plan.up, plan.down, plan.origin))
    if scheme in ("star", "relay"):
        relays = best_relays(plan.nodes, up, origin) if scheme == "relay" else 0
        sizes = [plan.shard] * (plan.mebibytes * MIB // plan.shard)
        links = [up * MEGABIT] * plan.nodes
        return relaysim.broadcast(links, down * MEGABIT, origin * MEGABIT, sizes, relays=relays)[-1]
    return modelled_broadcast(
        plan.nodes,
        plan.mebibytes,
        up=up,
        down=down,
        origin=origin,
        shard=plan.shard,
        active=ViewConfig().active,
        origin_active=ViewConfig().active,
        origin_slots=SLOTS,
        copies=1.5 if scheme == "capped" else None,
        churn=0.25 if scheme == "churn" else 0.0,
    ).seconds


def _row(plan: Plan, began: float, done: list[float], cpu: float) -> dict[str, Any]:
    times = sorted(at - began for at in done)
    return {
        "seconds": round(times[-1], 2),
        "bound_s": round(plan.bound_s(), 2),
        "ratio_to_lower_bound": round(times[-1] / plan.bound_s(), 3),
        "first_done_s": round(times[0], 2),
        "done_s": [round(one, 2) for one in times],
        "processors_used": round(cpu / times[-1], 2),
    }


def measure(plan: Plan, schemes: list[str], seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """The schemes one after the other; the report's top-level keys are treecast's."""
    rows: dict[str, Any] = {}
    for scheme in schemes:
        rows[scheme] = row = {**run(scheme, plan, seed), "model_s": round(modelled(scheme, plan), 2)}
        tell(
            f"{scheme:>9}: {row['seconds']:.1f} s, {row['ratio_to_lower_bound']:.3f} x the bound of "
            f"{row['bound_s']:.1f} s (model: {row['model_s']:.1f} s), {row['processors_used']:.2f} processors"
        )
    report: dict[str, Any] = {"bound_s": round(plan.bound_s(), 2)}
    names = {"treecast": "ratio_to_lower_bound", "capped": "ratio_capped", "churn": "ratio_with_churn"}
    for scheme, key in names.items():
        if scheme in rows:
            report[key] = rows[scheme]["ratio_to_lower_bound"]
    if "treecast" in rows:
        report["seconds"] = rows["treecast"]["seconds"]
        for scheme in ("star", "relay"):
            if scheme in rows:
                report[f"speedup_over_{scheme}"] = round(
                    rows[scheme]["seconds"] / rows["treecast"]["seconds"], 3
                )
    report["runs"] = rows
    report["conditions"] = (
        f"{plan.nodes} processes and an origin in network namespaces on one machine of {os.cpu_count()} "
        f"processors (shared with other work), {plan.mebibytes} MiB in shards of {plan.shard // 1024} KiB; "
        f"links by tc tbf {plan.down:g} down / {plan.up:g} up Mb/s, origin {plan.origin:g}, with headers; "
        f"no added delay, queues up to {QUEUE_MS} ms; seed {seed}"
    )
    return report


def main(arguments: list[str]) -> None:
    """Run, print a line each, or one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks.broadcast real")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="4 nodes, 4 MiB: does it still run?")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--mebibytes", type=int)
    parser.add_argument("--rate", type=float, default=1.0, help="factor on all link rates")
    parser.add_argument("--only", default=",".join(SCHEMES), help="schemes, comma separated")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    schemes = [name for name in options.only.split(",") if name]
    if not set(schemes) <= set(SCHEMES):
        parser.error(f"schemes are {', '.join(SCHEMES)}")
    plan = Plan()
    if options.quick:
        plan = plan._replace(nodes=4, mebibytes=4, shard=MIB // 4, settle_s=1.5)
    plan = plan._replace(nodes=options.nodes or plan.nodes, mebibytes=options.mebibytes or plan.mebibytes)
    factor = options.rate
    plan = plan._replace(up=plan.up * factor, down=plan.down * factor, origin=plan.origin * factor)
    try:
        report = measure(
            plan,
            schemes,
            options.seed,
            (lambda text: None) if options.json else lambda text: print(text, flush=True),
        )
    except (RuntimeError, subprocess.SubprocessError) as error:
        sys.exit(f"benchmarks.broadcast real: {error}")
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
