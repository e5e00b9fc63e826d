"""What keeping a run with a long history costs: backup, restore, export, start, rollback.

A part of ``python -m benchmarks.operator``; ``measure`` is called by it. The run is made by the
coordinator's own core, journal and published log: ``nodes`` that joined, ``entries`` of the
ledger (three for each unit) with their events and signed receipts, a version for every 1/400 of
it, payloads of the newest ``PAYLOADS`` submissions, and real checkpoints of ``model_mb`` of weights
and as much of optimiser state. Backup, restore and export are the commands, each in a process of
its own; the coordinator of the rollback has ``nodes`` sessions and publishes for real (hashes,
patch, shards, signature). ``peak_mb``: resident memory at most.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import trio
from msgspec.structs import replace

from barnraise.coordinator.checkpoints import OPTIMIZER_FILE, WEIGHTS_FILE, Record, save_checkpoint
from barnraise.coordinator.core import Core, in_thread
from barnraise.coordinator.events import (
    BatchFormed,
    Event,
    LeaseIssued,
    NodeJoined,
    SubmissionJudged,
    Submitted,
    VersionPublished,
    VersionTrained,
)
from barnraise.coordinator.folder import Run, create_run, open_run
from barnraise.coordinator.hub import Hub, Live
from barnraise.coordinator.journal import Journal, Payload
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.server import run_coordinator, wall_clock_ms
from barnraise.coordinator.snapshot import Snapshots, take_snapshot
from barnraise.coordinator.steering import roll_back
from barnraise.coordinator.workers import Trained, checkpoint_folder
from barnraise.protocol.envelope import content_id
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import RolloutLease, Signed, Verdict
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, origin_of, sign_checkpoint
from benchmarks.coordinator_world import Accepting
from tests.coordinator_support import FakeLearner, settings
from tests.spec_support import EXACT

VERSIONS = 400
CHUNK = 2_000  # units
PAYLOADS = 2_000
PAYLOAD_BYTES = 23_000
REAL = 4  # newest versions that are real
MB = 1_000_000
GOOD = Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message="")
Session = Callable[[], Any]


class Done(NamedTuple):
    """What a process came to."""

    seconds: float
    peak_mb: float
    said: dict[str, Any]


def measure(
    scratch: Path, nodes: int, entries: int, model_mb: float, key_of: Callable[[int], bytes], session: Session
) -> dict[str, Any]:
    """All of it, in ``scratch``, which needs about five times the run."""
    folder = scratch / "kept"
    _make(scratch, folder, model_mb)
    began = time.perf_counter()
    trio.run(_history, folder, nodes, entries, key_of)
    found: dict[str, Any] = {"history_made_in_s": time.perf_counter() - began}
    found |= trio.run(_served, folder, scratch, nodes, key_of, session)
    parts = {name: _size(folder / name) for name in ("state.sqlite", "log", "checkpoints", "snapshots")}
    found["run_mb"] = {name: size / MB for name, size in parts.items()}
    backup = scratch / "backup"
    again = trio.run(_command, ["coordinator", "backup", str(folder), str(scratch / "idle"), "--json"])
    found |= {"backup_idle_s": again.seconds}
    for name, options in (("restore", []), ("restore_same_run", ["--same-run"])):
        source = scratch / "idle" if options else backup  # nothing was acknowledged after that one
        target = scratch / name
        done = trio.run(_command, ["coordinator", "restore", str(source), str(target), "--json", *options])
        found |= {f"{name}_s": done.seconds, f"{name}_peak_mb": done.peak_mb}
    done = trio.run(_command, ["ledger", "export", str(folder), str(scratch / "ledger.bin")])
    found |= {"export_s": done.seconds, "export_peak_mb": done.peak_mb}
    found["export_mb"] = (scratch / "ledger.bin").stat().st_size / MB
    found["start_after_restore_s"] = _start(scratch / "restore_same_run")
    return found


async def _command(arguments: list[str]) -> Done:
    """Run ``barnraise`` with them; raises RuntimeError if it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    begin = "import sys; from barnraise.tui.main import main; code = main(sys.argv[1:])"
    report = "print(*[line for line in open('/proc/self/status') if 'VmHWM' in line], file=sys.stderr)"
    command = [sys.executable, "-P", "-c", f"{begin}; {report}; sys.exit(code)", *arguments]
    began = time.perf_counter()
    done = await trio.run_process(
        command, capture_stdout=True, capture_stderr=True, env=environment, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"barnraise {' '.join(arguments)}: {done.stderr.decode()}")
    said = json.loads(done.stdout) if done.stdout.startswith(b"{") else {}
    return Done(seconds, int(done.stderr.split()[-2]) * 1024 / MB, said)


def _make(scratch: Path, folder: Path, model_mb: float) -> None:
    model = scratch / "kept-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 40, "eos_token_id": 1}))
    (model / "tokenizer.json").write_text("{}")
    _write_weights(model / WEIGHTS_FILE, model_mb, 0)
    create_run(
        folder,
        model,
        replace_fields(
            settings(versions=60_000, max_lag=8, groups_per_version=65_536, max_groups_per_version=65_536),
            weights_dtype="bfloat16",
        ),
        EXACT,
        name="kept",
        description="",
        model_name="made up",
        seed=1,
        now_ms=1_000,
        identity=Identity.from_private_bytes(b"o" * 32),
    )


def _write_weights(path: Path, megabytes: float, version: int) -> None:
    """bfloat16 noise, of which a version changes one value in a hundred."""
    count = max(1000, int(megabytes * MB / 2))
    values = np.random.default_rng(1).integers(0, 2**16, count, dtype=np.uint16)
    values[version % 100 :: 100] ^= 1
    header = json.dumps({"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + values.tobytes())


async def _history(folder: Path, nodes: int, entries: int, key_of: Callable[[int], bytes]) -> None:
    """The events of such a run, one version after the other, published and with a snapshot as they go on."""
    with open_run(folder) as run, closing(Journal(run.journal_path)) as journal:
        now = wall_clock_ms() - entries * 10
        clock = [now]
        core = Core(journal, run.spec, run.run_id, run.identity, lambda: clock[0], in_thread)
        public = _Public(core, run)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            core.listeners.append(public.hear)
            await core.open()
            await core.record([_published(0, clock[0])])
            for start in range(0, nodes, CHUNK):
                numbers = range(start, min(nodes, start + CHUNK))
                joined = [NodeJoined(node=key_of(n), name=f"node-{n}", at_ms=clock[0]) for n in numbers]
                await core.record(joined)
            await _work(core, public, clock, nodes, entries, key_of)
            nursery.cancel_scope.cancel()
    with open_run(folder) as run, closing(Journal(run.journal_path, reading=True)) as journal:
        out_there = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
        take_snapshot(
            journal, Snapshots(run.snapshot_folder, run.run_id), out_there, run.spec.rollout.max_lag
        )


async def _work(
    core: Core,
    public: _Public,
    clock: list[int],
    nodes: int,
    entries: int,
    key_of: Callable[[int], bytes],
) -> None:
    units = (entries - len(core.ledger) - VERSIONS) // 3
    each, rng = max(1, units // VERSIONS), random.Random(1)
    for version in range(1, VERSIONS + 1):
        last = version == VERSIONS
        numbers = range((version - 1) * each, units if last else version * each)
        used: list[bytes] = []
        for start in range(0, len(numbers), CHUNK):
            part = numbers[start : start + CHUNK]
            clock[0] += 10 * len(part)
            payloads = [_payload(core, rng) for number in part if number >= units - PAYLOADS]
            ids = [rng.randbytes(32) for _ in range(len(part) - len(payloads))]
            ids += [payload.submission_id for payload in payloads]
            leases = [_lease(core, rng, key_of(number % nodes)) for number in part]
            for place, lease in enumerate(leases):
                leases[place] = replace(lease, unit_id=core.state.next_unit + place)
            await core.record([LeaseIssued(lease=lease, instance=bytes(16)) for lease in leases])
            pairs = list(zip(leases, ids, strict=True))
            size, at = PAYLOAD_BYTES, clock[0]
            stored = [
                Submitted(submission_id=key, lease_id=lease.lease_id, size=size, at_ms=at)
                for lease, key in pairs
            ]
            await core.record(stored, payloads=payloads)
            await core.record([_judged(key, lease, at) for lease, key in pairs])
            used += ids
        if last:
            break  # the newest work waits for its batch
        at = clock[0]
        formed = BatchFormed(version=version, submissions=tuple(used), groups=len(used), usable=1, at_ms=at)
        trained = VersionTrained(version=version, weights="w", stats=None, accuracy=-1.0, at_ms=at)
        await core.record([formed, trained, _published(version, at)])
        await core.sign_tree_head()
        await trio.to_thread.run_sync(public.publish)


def _lease(core: Core, rng: random.Random, node: bytes) -> RolloutLease:
    now = core.now_ms()
    return RolloutLease(
        run_id=core.run_id,
        lease_id=rng.randbytes(16),
        unit_id=0,
        node=node,
        policy_version=core.state.head,
        prompts=2,
        group_size=2,
        issued_at=now,
        timeout_at=now + 60_000,
        deadline_at=now + 120_000,
    )


def _judged(submission_id: bytes, lease: RolloutLease, at: int) -> Event:
    rewards = (0.0, 1.0) * lease.prompts
    return SubmissionJudged(
        submission_id=submission_id,
        verdict=GOOD,
        rewards=rewards,
        tokens=240,
        credit=812,
        blameless=False,
        at_ms=at,
    )


def _payload(core: Core, rng: random.Random) -> Payload:
    signed = Signed(payload=rng.randbytes(PAYLOAD_BYTES), signer=bytes(32), signature=bytes(64))
    return Payload(content_id(signed), core.state.head, signed)


def _published(version: int, at: int) -> VersionPublished:
    return VersionPublished(
        version=version, manifest=bytes(32), weights="w", size=1, stats=None, accuracy=-1.0, at_ms=at
    )


class _Public:
    """The run's published log, which follows what is durable."""

    def __init__(self, core: Core, run: Run) -> None:
        self._core, self._run = core, run
        self._folder = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
        self._waiting: list[bytes] = []

    def hear(self, write: Any) -> None:
        self._waiting += write.entries

    def publish(self) -> None:
        """Put out all that the newest tree head covers: everything."""
        log, run = self._core.ledger, self._run
        checkpoint = Checkpoint(origin_of(run.run_id), len(log), log.root())
        head = Head(checkpoint, sign_checkpoint(checkpoint, run.identity).encode())
        self._folder.grow(log, head, self._folder.size, self._waiting)
        self._waiting.clear()


@asynccontextmanager
async def _coordinator(run: Run) -> AsyncIterator[tuple[Core, Hub, float]]:
    """The run's real coordinator; how long its start took."""
    async with MemorySwarm().network(run.identity.peer_id) as network, trio.open_nursery() as nursery:
        began = time.perf_counter()
        state = await nursery.start(
            partial(
                run_coordinator,
                run,
                network,
                Accepting(),
                FakeLearner(run.path),
                announce=lambda line: None,
                control=False,
            )
        )
        yield state.args[0], state.args[1], time.perf_counter() - began
        nursery.cancel_scope.cancel()


async def _served(
    folder: Path, scratch: Path, nodes: int, key_of: Callable[[int], bytes], session: Session
) -> dict[str, Any]:
    """Start, versions, a backup under load, a rollback."""
    found: dict[str, Any] = {}
    with open_run(folder) as run:
        async with _coordinator(run) as (core, hub, took):
            found["start_s"] = took
            for number in range(nodes):
                live = Live(session=session(), peer_id="", connected_at=0, key=key_of(number))
                live.state, live.have_version = "generating", core.state.head
                hub.by_key[live.key] = live
            publishing = [await _version(core, run) for _ in range(REAL)]
            found["publish_s"] = publishing[-1]
            async with trio.open_nursery() as nursery:
                load = _Units(core, nodes, key_of)
                nursery.start_soon(load.run)
                nursery.start_soon(load.watch)
                await trio.sleep(2)
                load.taken, load.longest, began = 0, 0.0, time.perf_counter()
                done = await _command(
                    ["coordinator", "backup", str(folder), str(scratch / "backup"), "--json"]
                )
                found |= {
                    "backup_s": done.seconds,
                    "backup_peak_mb": done.peak_mb,
                    "backup_mb": done.said["size"] / MB,
                    "backup_events": done.said["events"],
                    "backup_ledger": done.said["ledger_size"],
                    "backup_units_per_s": load.taken / (time.perf_counter() - began),
                    "backup_longest_pause_ms": load.longest * 1e3,
                }
                nursery.cancel_scope.cancel()
            await trio.sleep(1)
            head = core.state.head
            began = time.perf_counter()
            await roll_back(core, run.path, {"version": head - 1, "reason": "the reward collapsed"})
            found["rollback_ordered_s"] = time.perf_counter() - began
            while core.state.head == head:
                changed = core.changed
                await changed.wait()
            found["rollback_s"] = time.perf_counter() - began
    return found


async def _version(core: Core, run: Run) -> float:
    """A version as the learner hands it over; seconds until it is published."""
    version = core.state.made + 1
    bare = Trained(version=version, weights=WEIGHTS_FILE, stats=None, accuracy=0.1)
    size = (checkpoint_folder(run.path, 0) / WEIGHTS_FILE).stat().st_size / MB

    def write(folder: Path) -> None:
        _write_weights(folder / WEIGHTS_FILE, size, version)
        _write_weights(folder / OPTIMIZER_FILE, size, version)

    record = Record(version=version, step=version, trained=bare)
    await trio.to_thread.run_sync(save_checkpoint, run.path, record, write)
    now = core.now_ms()
    part = tuple(core.state.pool)[:2]
    weights = str((checkpoint_folder(run.path, version) / WEIGHTS_FILE).relative_to(run.path))
    began = time.perf_counter()
    await core.record(
        [
            BatchFormed(version=version, submissions=part, groups=4, usable=4, at_ms=now),
            VersionTrained(version=version, weights=weights, stats=None, accuracy=0.1, at_ms=now),
        ]
    )
    while core.state.head < version:
        await core.changed.wait()
    return time.perf_counter() - began


class _Units:
    """Units at ``RATE`` a second: lent, handed in, and judged by the coordinator, each durable."""

    RATE = 100.0

    def __init__(self, core: Core, nodes: int, key_of: Callable[[int], bytes]) -> None:
        self._core, self._nodes, self._key_of = core, nodes, key_of
        self._rng = random.Random(2)
        self.taken, self.longest = 0, 0.0

    async def run(self) -> None:
        began, started = trio.current_time(), 0
        async with trio.open_nursery() as nursery:
            while True:
                due = int((trio.current_time() - began) * self.RATE)
                for number in range(started, min(due, self.taken + started + 500)):
                    nursery.start_soon(self._unit, number)
                    started += 1
                await trio.sleep(0.01)

    async def _unit(self, number: int) -> None:
        core = self._core
        lease = _lease(core, self._rng, self._key_of(number % self._nodes))
        lease = replace(lease, unit_id=core.state.next_unit)
        payload = _payload(core, self._rng)
        key, at = payload.submission_id, core.now_ms()
        await core.record([LeaseIssued(lease=lease, instance=bytes(16))])
        stored = Submitted(submission_id=key, lease_id=lease.lease_id, size=PAYLOAD_BYTES, at_ms=at)
        await core.record([stored], payloads=[payload])
        self.taken += 1

    async def watch(self) -> None:
        last = time.perf_counter()
        while True:
            await trio.sleep(0.001)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last - 0.001), now


def _start(folder: Path) -> float:
    """Seconds until a restored run's journal is folded: it has no snapshot."""
    with open_run(folder) as run, closing(Journal(run.journal_path)) as journal:
        began = time.perf_counter()
        Core(journal, run.spec, run.run_id, run.identity, wall_clock_ms)
        return time.perf_counter() - began


def _size(path: Path) -> int:
    files: Iterator[Path] = iter([path]) if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
