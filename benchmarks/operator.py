"""What an operator waits for: pages, JSON and metrics of a run with a long history, under load.

    python -m benchmarks.operator [--json] [--nodes 10000] [--entries 1000000] [--rate 500] [--requests 400]

A run is made up: ``nodes`` that joined and have a session, a ledger of ``entries`` (three for each unit) that
is published and indexed as a coordinator does it, 400 versions with curves. The coordinator's own core and
journal then take ``rate`` units a second (lent, handed in, judged with a signed receipt; each durable before
the next step), while a client in another process asks over loopback, one request at a time, each on a
connection of its own.

``dashboard_first_byte_ms``: from connecting to the first byte of the overview, 99th percentile;
``metrics_ms``: the same to the last byte of ``/metrics``. ``pages_ms``: 99th percentile to the first byte of
every page asked for; ``idle``: these figures without load. ``units_per_s``: what the core really took
meanwhile. ``index_entries_per_s`` and ``index_bytes_per_entry``: making ``RUN/web.sqlite``.
``longest_pause_ms``: how long the event loop stood still at most.

``backup_s``, ``restore_s``, ``rollback_s`` and what belongs to them are of a run of that size with its
journal, receipts and checkpoints, made anew
(``benchmarks.operator_keeping``); ``--only`` leaves one half out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from barnraise.coordinator.core import Core, in_thread
from barnraise.coordinator.events import LeaseIssued as LeaseIssuedEvent
from barnraise.coordinator.events import NodeJoined as NodeJoinedEvent
from barnraise.coordinator.events import SubmissionJudged, VersionPublished
from barnraise.coordinator.events import Submitted as SubmittedEvent
from barnraise.coordinator.folder import Run
from barnraise.coordinator.hub import Hub, Live
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.log_belt import LogBelt
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.state import VersionInfo
from barnraise.coordinator.status import state_tree
from barnraise.coordinator.web.listen import Bind, open_listeners, urls_of
from barnraise.coordinator.web.service import WebService
from barnraise.coordinator.web.site import INDEX_FILE
from barnraise.coordinator.workers import TrainStats
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import RolloutLease
from barnraise.protocol.tlog_checkpoint import log_key

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from coordinator_support import make_run, opened

from benchmarks.operator_keeping import measure as keeping
from benchmarks.operator_story import GOOD, VERSIONS, ids, key_of, publish


class Nobody:
    """A session that hears nothing."""

    def push(self, message: object) -> bool:
        return True

    def close(self, reason: str) -> None:
        pass


class NoNetwork:
    addresses = ("/ip4/203.0.113.7/tcp/4001",)
    bytes_in = bytes_out = 0


async def measured(run: Run, log: MerkleLog, args: argparse.Namespace) -> dict[str, Any]:
    """The page of that run, asked without load and with it."""
    journal, hub, progress = Journal(run.journal_path), Hub(), Progress(learner="collecting")
    core = Core(journal, run.spec, run.run_id, run.identity, lambda: time.time_ns() // 1_000_000, in_thread)
    out_there = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(core.run)
        await core.open()
        first = VersionPublished(
            version=0, manifest=bytes(32), weights="w", size=1, stats=None, accuracy=-1.0, at_ms=1
        )
        await core.record([first])
        for start in range(0, args.nodes, 500):
            numbers = range(start, min(start + 500, args.nodes))
            await core.record([NodeJoinedEvent(node=key_of(n), name=f"node-{n}", at_ms=2) for n in numbers])
        # The history is in the ledger and its files alone: what a start would fold from the journal.
        core.ledger, core.head = log, (len(log), log.root())
        history(core)
        for number in range(args.nodes):
            live = Live(session=Nobody(), peer_id="", connected_at=0, key=key_of(number))
            live.state, live.have_version = "generating", core.state.head
            hub.by_key[live.key] = live
        public_log = LogBelt(core, run.identity, out_there, run.signed_spec)
        network: Any = NoNetwork()

        def state() -> dict[str, Any]:
            return state_tree(core, hub, progress, network, 0, None, run.path, public_log, with_nodes=False)

        service = WebService(core, hub, out_there, run.path, state)
        listeners = open_listeners(Bind("127.0.0.1", 0, fall_back=False))
        nursery.start_soon(public_log.run)
        nursery.start_soon(service.run, listeners)
        (url,) = urls_of(listeners)
        idle = await asked(url, args)
        load = _Load(core, args)
        nursery.start_soon(load.run)
        nursery.start_soon(load.watch)
        await trio.sleep(2.0)
        began, taken = time.perf_counter(), load.taken
        load.longest = 0.0
        under_load = await asked(url, args)
        rate = (load.taken - taken) / (time.perf_counter() - began)
        behind = service.site.index.known - service.site.index.size
        nursery.cancel_scope.cancel()
    journal.close()
    return {
        "dashboard_first_byte_ms": under_load["/"],
        "metrics_ms": under_load["/metrics"],
        "pages_ms": under_load,
        "idle": {"dashboard_first_byte_ms": idle["/"], "metrics_ms": idle["/metrics"], "pages_ms": idle},
        "units_per_s": rate,
        "index_behind": behind,
        "longest_pause_ms": load.longest * 1e3,
    }


def history(core: Core) -> None:
    """Versions with their curves, as the state has them."""
    stats = TrainStats(
        reward_mean=0.5,
        groups=8,
        groups_used=6,
        loss=0.0,
        grad_norm=1.0,
        clip_fraction=0.0,
        ratio_max=1.0,
        entropy=1.0,
        kl=0.0,
        lag_mean=0.0,
        seconds=1.0,
    )
    core.state.head = VERSIONS - 1
    core.state.next_unit = 10_000_000
    core.state.versions = [
        VersionInfo(number, bytes(32), "w", 1, stats, number / VERSIONS, number) for number in range(VERSIONS)
    ]


class _Load:
    """Units at a steady rate, by many callers."""

    def __init__(self, core: Core, args: argparse.Namespace) -> None:
        self._core, self._args = core, args
        self.taken = 0
        self.longest = 0.0

    async def run(self) -> None:
        began, started = trio.current_time(), 0
        async with trio.open_nursery() as nursery:
            while True:
                due = int((trio.current_time() - began) * self._args.rate)
                while started < due and started - self.taken < 2000:
                    nursery.start_soon(self._unit, started)
                    started += 1
                await trio.sleep(0.01)

    async def _unit(self, number: int) -> None:
        core = self._core
        lease_id, submission_id = ids(50_000_000 + number)
        now = core.now_ms()
        terms = RolloutLease(
            run_id=core.run_id,
            lease_id=lease_id,
            unit_id=core.state.next_unit,
            node=key_of(number % self._args.nodes),
            policy_version=core.state.head,
            prompts=2,
            group_size=4,
            issued_at=now,
            timeout_at=now + 60_000,
            deadline_at=now + 120_000,
        )
        await core.record([LeaseIssuedEvent(lease=terms, instance=bytes(16))])
        await core.record(
            [SubmittedEvent(submission_id=submission_id, lease_id=lease_id, size=23_000, at_ms=core.now_ms())]
        )
        await core.record(
            [
                SubmissionJudged(
                    submission_id=submission_id,
                    verdict=GOOD,
                    rewards=(0.0, 1.0) * 4,
                    tokens=240,
                    credit=812,
                    blameless=False,
                    at_ms=core.now_ms(),
                )
            ]
        )
        self.taken += 1

    async def watch(self) -> None:
        last = time.perf_counter()
        while True:
            await trio.sleep(0.001)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last - 0.001), now


async def asked(url: str, args: argparse.Namespace) -> dict[str, float]:
    """99th percentiles in ms by path, as a client in another process sees them."""
    node = peer_id_of(key_of(args.nodes // 2))
    paths = [
        *("/", "/metrics", "/nodes", f"/nodes?by=recent&page={args.nodes // 100}", f"/nodes/{node}"),
        *("/ledger", f"/ledger?node={node}", "/ledger?kind=nodebanned", "/ledger?version=200&kind=judged"),
        *(
            f"/ledger?node={node}&kind=nodebanned",
            "/ledger?since=30d&until=29d",
            f"/units/{args.entries // 10}",
            "/versions",
        ),
        *("/api/v1/run", "/api/v1/ledger?limit=500", "/log/checkpoint", "/nodes?q=node-77"),
    ]
    client = [sys.executable, "-P", "-m", "benchmarks.operator", "--client", url, *paths]
    command = [*client, "--requests", str(args.requests)]
    paths_too = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = await trio.run_process(command, capture_stdout=True, env=paths_too)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def ask(host: str, port: int, path: str) -> tuple[float, float]:
    """Seconds to the first and to the last byte of a reply, on a connection of its own."""
    began = time.perf_counter()
    with socket.create_connection((host, port), timeout=60) as stream:
        stream.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        data = stream.recv(65_536)
        first = time.perf_counter() - began
        assert data.startswith((b"HTTP/1.1 200", b"HTTP/1.1 303")), data[:200]
        with suppress(ConnectionResetError):
            while data:
                data = stream.recv(65_536)
    return first, time.perf_counter() - began


def client(url: str, paths: list[str], requests: int) -> None:
    host, port = url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    times: dict[str, list[float]] = {path: [] for path in paths}
    for number in range(requests):
        for path in paths:
            if number and path not in ("/", "/metrics") and number % 4:
                continue  # the two that are promised are asked for more often
            first, last = ask(host, int(port), path)
            times[path].append((last if path == "/metrics" else first) * 1e3)
    print(json.dumps({path: percentile(found) for path, found in times.items()}))


def percentile(found: list[float], share: float = 0.99) -> float:
    return sorted(found)[min(len(found) - 1, int(share * len(found)))]


def pages(scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of the web page."""
    with opened(make_run(scratch, versions=VERSIONS)) as run:
        began = time.perf_counter()
        log, indexing = publish(run, args.nodes, args.entries, time.time_ns() // 1_000_000)
        made = time.perf_counter() - began
        index_bytes = (run.path / INDEX_FILE).stat().st_size
        found = trio.run(measured, run, log, args)
    return found | {
        "index_entries_per_s": args.entries / indexing,
        "index_bytes_per_entry": index_bytes / args.entries,
        "made_in_s": made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=500.0, help="units a second")
    parser.add_argument(
        "--requests", type=int, default=400, help="for the overview and the metrics, each time"
    )
    parser.add_argument("--model-mb", type=float, default=100.0, help="weights, for backup and rollback")
    parser.add_argument("--only", choices=["pages", "keeping"], help="half of it")
    parser.add_argument("--client", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client(args.client[0], args.client[1:], args.requests)
        return
    found: dict[str, Any] = {"nodes": args.nodes, "entries": args.entries}
    with tempfile.TemporaryDirectory(prefix="barnraise-operator-") as scratch:
        if args.only != "keeping":
            found |= pages(Path(scratch), args)
        if args.only != "pages":
            found |= keeping(Path(scratch), args.nodes, args.entries, args.model_mb, key_of, Nobody)
    found |= {
        "conditions": {
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "machine": platform.machine(),
            "requests": args.requests,
            "asked_rate": args.rate,
        },
    }
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
