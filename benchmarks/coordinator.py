"""What one coordinator carries: submissions a second, and nodes that hold leases at once.

    python -m benchmarks.coordinator [--json] [--nodes 10000] [--bytes 1500] [--in-flight 256] [--rate 200]
                                     [--no-logs]

Everything of the coordinator is real (sessions and their frames, hub, scheduler, state, ledger, journal
with its fsyncs on the disk of ``--scratch``, receipts, the ticker), and all of it shares ONE core with the
nodes' side. Three things stand in: the wire is a queue in memory (what libp2p costs is ``benchmarks.hop``'s
business), the verifier accepts everything at once (what a model costs is ``benchmarks.verification``'s),
and there is no learner. The nodes' submissions are built and signed before the clock starts. Logs are
written as a coordinator writes them (``log_bytes``, of all stages), unless ``--no-logs``.

Stages: every node joins; every node asks for a lease and holds it (``leased_nodes``, ``lease_ms``: from the
request to the signed reply that is on the disk); every node submits, ``--in-flight`` at a time
(``submissions_per_s``: signature, schema, lease, state, ledger, commit, acknowledgement, while verdicts
come and take their share; ``judged_per_s``: until the last has its verdict and signed receipt, too; the
same by seconds of processor time, which other work on the machine does not change); then, with all leases
held anew, nodes come at random ``--rate`` times a second, submit, and ask again: ``submit_ms`` and
``ask_ms`` under that load.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import trio

from barnraise.coordinator.main import _logging
from barnraise.protocol import wire
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.messages import JoinRequest, RolloutLease
from benchmarks.coordinator_world import Wire, World, world
from benchmarks.starts import peak_mb


async def for_all(wires: Sequence[Wire], in_flight: int, do: Any) -> tuple[float, list[float]]:
    """``do(index, wire)`` for each, so many at a time; seconds in all, and of each."""
    took: list[float] = []
    queue = iter(enumerate(wires))

    async def worker() -> None:
        for index, node in queue:
            began = time.perf_counter()
            await do(index, node)
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(in_flight):
            nursery.start_soon(worker)
    return time.perf_counter() - began, took


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In ms."""
    cut = statistics.quantiles(seconds, n=100)
    return {"p50": cut[49] * 1e3, "p90": cut[89] * 1e3, "p99": cut[98] * 1e3, "max": max(seconds) * 1e3}


async def stages(
    scratch: Path, nodes: int, size: int, in_flight: int, rate: float, seconds: float
) -> dict[str, Any]:
    """All of it."""
    result: dict[str, Any] = {}
    async with world(scratch, nodes, size) as place:
        core, leases = place.core, dict[int, RolloutLease]()

        async def join(index: int, node: Wire) -> None:
            place.nursery.start_soon(place.sessions.serve, node)
            await node.ask(
                wire.frame(
                    JoinRequest(
                        id=place.number(),
                        public_key=node.identity.public_key,
                        instance=bytes(16),
                        name=f"node-{index}",
                        engine="benchmark",
                        addresses=(),
                    )
                )
            )

        async def ask(index: int, node: Wire) -> None:
            leases[index] = await place.lease(node)

        whole, _ = await for_all(place.wires, in_flight, join)
        result["joins_per_s"] = nodes / whole
        whole, took = await for_all(place.wires, in_flight, ask)
        result |= {
            "leased_nodes": len(core.state.leases),
            "leases_per_s": nodes / whole,
            "lease_ms": percentiles(took),
            "sessions": len(place.hub.by_key),
        }
        place.pause[0] = 0.0
        await trio.sleep(2.0)
        began = time.process_time()
        await trio.sleep(3.0)
        result["idle_core_share"] = (time.process_time() - began) / 3.0
        result["idle_longest_pause_ms"] = place.pause[0] * 1e3

        frames = [place.work(node, leases[index]) for index, node in enumerate(place.wires)]
        result["submission_bytes"] = statistics.fmean(map(len, frames))

        turned_away = 0

        async def submit(index: int, node: Wire) -> None:
            nonlocal turned_away
            while True:
                try:
                    await node.ask(frames[index])
                    return
                except RefusedError as error:  # the verifier's queue is full: its lease is kept
                    if error.code != "busy":
                        raise
                    turned_away += 1
                    await trio.sleep(0.25)

        began, used = time.perf_counter(), time.process_time()
        place.pause[0] = 0.0
        whole, took = await for_all(place.wires, in_flight, submit)
        result["submissions_per_s"] = nodes / whole
        result["submissions_per_core_s"] = nodes / (time.process_time() - used)
        result["acknowledged_ms"] = percentiles(took)
        while core.state.waiting or sum(node.receipts for node in place.wires) < nodes:
            await trio.sleep(0.01)
        result["judged_per_s"] = nodes / (time.perf_counter() - began)
        result["judged_per_core_s"] = nodes / (time.process_time() - used)
        result["longest_pause_ms"] = place.pause[0] * 1e3
        result["turned_away"] = turned_away
        frames.clear()

        await for_all(place.wires, in_flight, ask)
        result |= await _under_load(place, leases, rate, seconds)
        result["entries"] = len(core.ledger)
        result["peak_rss_mb"] = peak_mb()
    return result


async def _under_load(
    place: World, leases: dict[int, RolloutLease], rate: float, seconds: float
) -> dict[str, Any]:
    """Nodes that come at random, as if there were no end of them."""
    rng, free = random.Random(7), list(range(len(place.wires)))
    submitted: list[float] = []
    asked: list[float] = []

    async def once(index: int) -> None:
        node = place.wires[index]
        frame = place.work(node, leases[index])
        began = time.perf_counter()
        await node.ask(frame)
        submitted.append(time.perf_counter() - began)
        began = time.perf_counter()
        leases[index] = await place.lease(node)
        asked.append(time.perf_counter() - began)
        free.append(index)

    place.pause[0] = 0.0
    held = len(place.core.state.leases)
    began = trio.current_time()
    at = began
    async with trio.open_nursery() as nursery:
        while at < began + seconds and free:
            at += -math.log(1.0 - rng.random()) / rate
            await trio.sleep_until(at)
            free[0], free[-1] = free[-1], free[0]
            place_of = rng.randrange(len(free))
            free[place_of], free[-1] = free[-1], free[place_of]
            nursery.start_soon(once, free.pop())
    return {
        "load_per_s": rate,
        "load_held": held,
        "load_done_per_s": len(submitted) / (trio.current_time() - began),
        "submit_ms": percentiles(submitted),
        "ask_ms": percentiles(asked),
        "load_longest_pause_ms": place.pause[0] * 1e3,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What one coordinator carries.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=1_500, help="about the size of a submission")
    parser.add_argument("--in-flight", type=int, default=256, help="requests under way at a time")
    parser.add_argument("--rate", type=float, default=200.0, help="submit and ask, times a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of that load")
    parser.add_argument("--no-logs", action="store_true", help="write no logs, to see what they cost")
    parser.add_argument("--scratch", type=Path, default=None, help="a folder on the disk to measure with")
    options = parser.parse_args(arguments)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    with (
        tempfile.TemporaryDirectory(prefix="barnraise-coordinator-", dir=options.scratch) as scratch,
        ExitStack() as stack,
    ):
        logs = Path(scratch) / "logs"
        logs.mkdir()
        if not options.no_logs:
            stack.enter_context(_logging(logs, lambda line: None))
        result = trio.run(
            stages,
            Path(scratch),
            options.nodes,
            options.bytes,
            options.in_flight,
            options.rate,
            options.seconds,
        )
        result["log_bytes"] = sum(path.stat().st_size for path in logs.iterdir())
    result["conditions"] = {
        "logs": not options.no_logs,
        "cores_used": 1,
        "cores": len(cores),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "in_flight": options.in_flight,
        "load_average": os.getloadavg()[0],
        "msgspec": msgspec.__version__,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name:24} {value if isinstance(value, dict) else f'{value:,.3f}'}")


if __name__ == "__main__":
    main()
