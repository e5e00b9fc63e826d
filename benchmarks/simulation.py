"""How fast a swarm is simulated: virtual seconds per real one, memory, task steps.

    python -m benchmarks.simulation [--json] [--nodes 100 1000 5000] [--minutes 10] [--heartbeat 40]

Everything of the nodes and the coordinator is real (``barnraise.simulation``); nobody leaves, nothing
breaks. Every size runs in a process of its own, on one core. The nodes arrive within the first
minute, which costs more than any other; ``virtual_s_per_wall_s`` is of all ``--minutes``, and
``steady`` of the time from the third minute on, in which units are worked on, judged, learned from and
versions go down the tree. ``--heartbeat`` is the period of heartbeats (s); a thousand nodes on one
core are simulated with a longer one than the 5 s of a real node, and the periods of gossip and
witnesses follow from it. By processor time (``per_cpu_s``) the same, which other work on the machine
changes less. ``steps_per_node_s``: task steps of the scheduler per node and virtual second;
``events_per_s``: task steps per real second.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
from msgspec.structs import replace

from barnraise.simulation.run import simulate
from barnraise.simulation.scenario import Scenario, load_scenario
from barnraise.simulation.world import World

SETTLED_S = 180.0  # virtual: from here on it counts as steady


@dataclass
class _Mark:
    """Where a run stood: real time, processor time, virtual time, task steps."""

    wall: float = 0.0
    cpu: float = 0.0
    virtual: float = 0.0
    steps: int = 0


@dataclass(eq=False)
class _Steps(trio.abc.Instrument):
    count: int = 0
    marks: list[_Mark] = field(default_factory=list)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1

    def mark(self, virtual: float) -> None:
        self.marks.append(_Mark(time.perf_counter(), time.process_time(), virtual, self.count))

    async def watch(self, world: World) -> None:
        trio.lowlevel.add_instrument(self)
        self.mark(world.now)
        await trio.sleep_until(min(SETTLED_S, world.scenario.end_s / 2))
        self.mark(world.now)
        await trio.sleep_until(world.scenario.end_s - 1.0)
        self.mark(world.now)


def _paces(start: _Mark, end: _Mark, nodes: int) -> dict[str, float]:
    virtual = end.virtual - start.virtual
    wall, cpu, steps = end.wall - start.wall, end.cpu - start.cpu, end.steps - start.steps
    return {
        "virtual_s_per_wall_s": round(virtual / wall, 2),
        "virtual_s_per_cpu_s": round(virtual / cpu, 2),
        "steps_per_node_s": round(steps / virtual / nodes, 3),
        "events_per_s": round(steps / wall),
        "us_per_step": round(cpu / steps * 1e6, 1),
    }


def _scenario(nodes: int, minutes: float, heartbeat_s: float) -> Scenario:
    steady = load_scenario("steady")
    swarm = replace(steady.swarm, nodes=nodes, hours=minutes / 60, heartbeat_s=heartbeat_s)
    return replace(steady, swarm=swarm)


def measure(nodes: int, minutes: float, heartbeat_s: float, scratch: Path) -> dict[str, Any]:
    """One size, in this very process."""
    steps = _Steps()
    outcome = simulate(_scenario(nodes, minutes, heartbeat_s), 7, scratch / str(nodes), watch=[steps.watch])
    if outcome.error is not None:
        raise outcome.error
    if outcome.facts["deaths"]:
        raise RuntimeError(f"{outcome.facts['deaths']} nodes ended by a defect; see {outcome.log_path}")
    first, settled, last = steps.marks
    return {
        "nodes": nodes,
        "virtual_minutes": minutes,
        **_paces(first, last, nodes),
        "steady": _paces(settled, last, nodes),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "log_events": outcome.events,
        "facts": {name: outcome.facts[name] for name in sorted(outcome.facts)},
    }


def _scratch() -> Path:
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="barnraise-bench-", dir=memory if memory.is_dir() else None))


def main(arguments: list[str] | None = None) -> int:
    """Measure each size in a process of its own, and print the table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--minutes", type=float, default=10.0, help="virtual minutes")
    parser.add_argument("--heartbeat", type=float, default=40.0, help="seconds between heartbeats")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        scratch = _scratch()
        try:
            found = measure(options.nodes[0], options.minutes, options.heartbeat, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        print(json.dumps(found))
        return 0
    rows = []
    for nodes in options.nodes:
        command = [sys.executable, "-m", "benchmarks.simulation", "--here", "--nodes", str(nodes)]
        command += ["--minutes", str(options.minutes), "--heartbeat", str(options.heartbeat)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stderr[-2000:], file=sys.stderr)
            return 1
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        if not options.json:
            row, steady = rows[-1], rows[-1]["steady"]
            print(
                f"{nodes:6,d} nodes: {row['virtual_s_per_wall_s']:8.1f} virtual s per s "
                f"(steady {steady['virtual_s_per_wall_s']:.1f}, {steady['steps_per_node_s']:.2f} steps a node"
                f" and virtual s, {steady['us_per_step']:.0f} us each), {row['peak_rss_mb']:,} MB",
                flush=True,
            )
    if options.json:
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        print(json.dumps({"machine": machine, "heartbeat_s": options.heartbeat, "sizes": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
