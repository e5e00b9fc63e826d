"""A coordinator's start with a long history; part of ``python -m benchmarks.ledger``.

Makes a run folder whose journal has so many ledger entries (as the coordinator's own code writes them, three
to a unit, a version every 300 units), published as tiles, with a snapshot that is as old as one can get: a
start from it replays the most that it ever has to. What is measured happens in fresh processes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

from barnraise.coordinator.core import Core
from barnraise.coordinator.events import (
    BatchFormed,
    Event,
    LeaseIssued,
    NodeJoined,
    RunOpened,
    SubmissionJudged,
    Submitted,
    VersionPublished,
    VersionTrained,
)
from barnraise.coordinator.folder import Run
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.ledger_log import advance
from barnraise.coordinator.log_belt import LogBelt
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.server import TREE_HEAD_EVERY, wall_clock_ms
from barnraise.coordinator.snapshot import Fold, Snapshots, take_snapshot
from barnraise.coordinator.snapshot_belt import EVERY, in_child
from barnraise.protocol.envelope import sign
from barnraise.protocol.messages import RolloutLease, TreeHead, Verdict
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, origin_of, sign_checkpoint
from tests.coordinator_support import opened

GOOD = Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message="")
UNITS_A_VERSION = 300
AT_ONCE = 30_000  # events in one transaction


def events_of(run: Run, nodes: int) -> Iterator[Event]:
    """A run in which every unit is lent, answered, accepted and used; without an end."""
    yield RunOpened(run_id=run.run_id, operator=run.spec.operator, at_ms=1)
    keys = [hashlib.sha256(b"node %d" % number).digest() for number in range(nodes)]
    for number, key in enumerate(keys):
        yield NodeJoined(node=key, name=f"node-{number}", at_ms=1)
    version = unit = 0
    while True:
        yield VersionTrained(version=version, weights="w", stats=None, accuracy=-1.0, at_ms=unit)
        yield VersionPublished(
            version=version, manifest=bytes(32), weights="w", size=1, stats=None, accuracy=-1.0, at_ms=unit
        )
        done = []
        for _ in range(UNITS_A_VERSION):
            digest = hashlib.sha256(unit.to_bytes(8, "big")).digest()
            terms = RolloutLease(
                run_id=run.run_id,
                lease_id=digest[:16],
                unit_id=unit,
                node=keys[unit % nodes],
                policy_version=version,
                prompts=2,
                group_size=4,
                issued_at=unit,
                timeout_at=unit + 60_000,
                deadline_at=unit + 120_000,
            )
            yield LeaseIssued(lease=terms, instance=bytes(16))
            yield Submitted(submission_id=digest[::-1], lease_id=digest[:16], size=1_500, at_ms=unit)
            yield SubmissionJudged(
                submission_id=digest[::-1],
                verdict=GOOD,
                rewards=(0.0, 1.0) * 4,
                tokens=8,
                credit=1,
                blameless=False,
                at_ms=unit,
            )
            done.append(digest[::-1])
            unit += 1
        version += 1
        groups = 2 * len(done)
        yield BatchFormed(version=version, submissions=tuple(done), groups=groups, usable=groups, at_ms=unit)


def build(run: Run, entries: int, nodes: int) -> dict[str, float]:
    """The folder; returns seconds that its snapshots took."""
    lag = run.spec.rollout.max_lag
    journal, fold = Journal(run.journal_path), Fold.empty(lag)
    public = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
    snapshots = Snapshots(run.snapshot_folder, run.run_id)
    marks = sorted({max(1, entries - EVERY - TREE_HEAD_EVERY), max(1, entries - TREE_HEAD_EVERY), entries})
    batch: list[Event] = []
    fresh: list[bytes] = []
    took: dict[str, float] = {}

    def flush(publish: bool) -> None:
        size, root = len(fold.ledger), fold.ledger.root()
        head = sign(TreeHead(run_id=run.run_id, size=size, root=root, issued_at=1), run.identity)
        journal.commit([Write(events=list(batch), tree_head=(size, head) if publish else None)])
        batch.clear()
        if publish:
            point = Checkpoint(origin_of(run.run_id), size, root)
            public.grow(
                fold.ledger, Head(point, sign_checkpoint(point, run.identity).encode()), public.size, fresh
            )
            fresh.clear()
            fold.ledger.forget(size, public.node)

    for event in events_of(run, nodes):
        logged = advance(fold.state, fold.ledger, event)
        batch.append(event)
        if logged is not None:
            fresh.append(logged[2])
        size = len(fold.ledger)
        if logged is not None and size == marks[0]:
            marks.pop(0)
            if marks:  # the last ones are not published: a start replays them
                flush(publish=True)
            if not took:  # at the first mark, as a coordinator would have
                started = time.perf_counter()
                take_snapshot(journal, snapshots, public, lag)
                took["snapshot_of_all_s"] = time.perf_counter() - started
            if not marks:
                break
        if len(batch) >= AT_ONCE:
            flush(publish=len(fresh) >= AT_ONCE)
    flush(publish=False)
    journal.close()
    return took


def peak_mb() -> float:
    """Most memory that this process has had (not ``ru_maxrss``, which begins with the parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) / 1024


def start(folder: Path, replay: bool) -> dict[str, float]:
    """In this process: from the folder to a coordinator that may decide, sign and publish."""
    began = time.perf_counter()
    with opened(folder) as run:
        journal = Journal(run.journal_path)
        public = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
        core = Core(
            journal,
            run.spec,
            run.run_id,
            run.identity,
            wall_clock_ms,
            snapshots=None if replay else Snapshots(run.snapshot_folder, run.run_id),
            published=public.size,
        )
        LogBelt(core, run.identity, public)
        seconds = time.perf_counter() - began
        result = {
            "seconds": seconds,
            "entries": float(len(core.ledger)),
            "replayed": float(journal.length - core.begun_at),
            "peak_rss_mb": peak_mb(),
        }
        if not replay:
            result |= trio.run(_beside_a_snapshot, run.path)
        journal.close()
    return result


async def _beside_a_snapshot(folder: Path) -> dict[str, float]:
    """How long the event loop stood still while a child made a snapshot, and as long without one."""
    longest: list[float] = []

    async def watch() -> None:
        last = time.perf_counter()
        longest.append(0.0)
        while True:
            await trio.sleep(0.001)
            now = time.perf_counter()
            longest[-1], last = max(longest[-1], now - last - 0.001), now

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        began = time.perf_counter()
        await in_child(folder)()
        seconds = time.perf_counter() - began
        nursery.cancel_scope.cancel()
    with trio.move_on_after(seconds):
        await watch()
    return {
        "snapshot_s": seconds,
        "snapshot_pause_ms": longest[0] * 1e3,
        "pause_without_ms": longest[1] * 1e3,
    }


def measured(folder: Path, entries: int, nodes: int, replay: bool) -> dict[str, Any]:
    """Start in fresh processes; ``folder`` is an empty run folder that is filled first."""
    with opened(folder) as run:
        result: dict[str, Any] = {"entries": entries, "nodes": nodes, **build(run, entries, nodes)}
    for name, option in (("start", ""), *((("replay", "replay"),) if replay else ())):
        command = [sys.executable, "-m", "benchmarks.starts", str(folder), option]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        result[name] = json.loads(done.stdout)
    newest = max((folder / "snapshots").glob("*.bin"))
    result["snapshot_bytes"] = newest.stat().st_size
    return result


if __name__ == "__main__":
    print(json.dumps(start(Path(sys.argv[1]), sys.argv[2:3] == ["replay"])))
