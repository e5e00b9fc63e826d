"""What fresh keys from one address hold up by taking leases and doing nothing.

    python -m benchmarks.squatters [--json] [--keys 64] [--lags 0 2] [--hours 3]

Nodes and coordinator are real (``barnraise.simulation``), in virtual time: ``NODES`` honest ones, a
minute for a unit, batches of as many units, at most ``units_out`` lent or waiting at a time. After a
quarter of an hour ``--keys`` new keys come from one internet address, as many as the limit lets in
by default, take a unit each and never answer. ``per_10_min``: units of the honest that were accepted
in each ten minutes from then on, and ``without``: the same where nobody came; ``share``: all of the
one over all of the other.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

from barnraise.coordinator.scheduler import capacity
from barnraise.node.engine import Generated, Progress, Work
from barnraise.simulation import scenario
from barnraise.simulation.determinism import run_virtual
from barnraise.simulation.event_log import EventLog
from barnraise.simulation.run import scratch_folder
from barnraise.simulation.workers import StandInEngine
from barnraise.simulation.world import open_world

NODES = 8
BEFORE_S, STEP_S = 900.0, 600.0


class Squatter(StandInEngine):
    """Takes units, and never finishes one."""

    async def generate(self, work: Work, progress: Callable[[Progress], None]) -> Generated:
        await trio.sleep_forever()
        raise AssertionError


def squatter(rng: random.Random) -> StandInEngine:
    """Its engine."""
    return Squatter(tokens_per_s=1.0, rng=rng, load_s=1.0)


def play(lag: int, keys: int, hours: float) -> dict[str, Any]:
    """One run with ``keys`` squatters: ``accepted`` per ten minutes, ``units_out``, ``let_in``."""
    plan = scenario.Scenario(
        swarm=scenario.Swarm(
            nodes=NODES, heartbeat_s=30, tree=False, model_bytes=4096, shard_bytes=4096, hours=hours + 1
        ),
        work=scenario.Work(
            unit_s=60,
            unit_spread=0.1,
            load_s=1,
            learn_s=5,
            units_per_version=1,
            max_lag=lag,
            tokens=4,
            group_size=2,
        ),
    )
    found: dict[str, Any] = {}

    async def story(folder: Path, log: EventLog) -> None:
        async with open_world(plan, 0, folder, log) as world:
            for number in range(NODES):
                await world.join(f"n{number:04d}", outside=f"/ip4/198.51.{number}.1")
            await world.advance(BEFORE_S)
            assert world.core is not None
            rollout = world.core.settings.rollout
            found["units_out"] = capacity(world.core.state, rollout) // rollout.prompts_per_unit
            for number in range(keys):
                await world.join(f"s{number}", outside="/ip4/203.0.113.7", engine=squatter)
            accepted = [world.core.state.accepted]
            for _ in range(round(hours * 3600 / STEP_S)):
                await world.advance(STEP_S)
                accepted.append(world.core.state.accepted)
            found["accepted"] = [after - before for before, after in pairwise(accepted)]
            found["let_in"] = len(world.core.state.nodes) - NODES

    with scratch_folder() as scratch:
        log = EventLog(scratch / "events.jsonl", trio.current_time)
        run_virtual(0, lambda: story(scratch / "world", log))
        log.close()
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--hours", type=float, default=3.0)
    chosen = parser.parse_args(arguments)
    rows = []
    for lag in chosen.lags:
        without, held = play(lag, 0, chosen.hours), play(lag, chosen.keys, chosen.hours)
        rows.append(
            {
                "max_lag": lag,
                "units_out": held["units_out"],
                "let_in": held["let_in"],
                "without": without["accepted"],
                "per_10_min": held["accepted"],
                "share": round(sum(held["accepted"]) / sum(without["accepted"]), 3),
            }
        )
        if not chosen.json:
            print(json.dumps(rows[-1]))
    if chosen.json:
        print(json.dumps({"nodes": NODES, "keys": chosen.keys, "hours": chosen.hours, "rows": rows}))


if __name__ == "__main__":
    main()
