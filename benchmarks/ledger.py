"""What the ledger costs: appending, proving, checking, verifying, opening.

    python -m benchmarks.ledger [--json] [--entries 1000000] [--appends 20000] [--waiting 256] [--parts ...]

``append_per_s``: entries per second that are durable (through the coordinator's own core: decided, applied,
hashed, journaled with one fsync per group, acknowledged), with ``waiting`` callers at a time; the verdicts
among them carry a signed receipt. ``longest_pause_ms``: how long the event loop stood still at most.
``prove_ms``, ``check_ms``: an inclusion proof in a log of ``entries``, made, and checked together with its
tree head's signature (medians). ``verify_entries_per_s_per_core``: a whole ledger file audited in one process
(read, rules, balances, tree), with a receipt for each verdict; ``ed25519_per_s_per_core``: bare signature
checks in the same run, by which to judge it.
``open_s``: the coordinator's own start at ``entries`` entries in a fresh process, until it may decide and
sign, from a snapshot as old as one can get (``benchmarks.starts``); ``replay_s``: the same without one; with
peak memory of both, and of a start at a tenth of the entries. ``snapshot_pause_ms``: how long the event loop
stood still while a child made a snapshot (``pause_without_ms``: as long without one).
``bytes_per_entry``: of the exported file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

from barnraise.coordinator.core import Core
from barnraise.coordinator.events import LeaseIssued as LeaseIssuedEvent
from barnraise.coordinator.events import NodeJoined as NodeJoinedEvent
from barnraise.coordinator.events import SubmissionJudged
from barnraise.coordinator.events import Submitted as SubmittedEvent
from barnraise.coordinator.events import VersionPublished as VersionPublishedEvent
from barnraise.coordinator.journal import Journal
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import (
    Judged,
    LeaseIssued,
    LedgerEntry,
    NodeJoined,
    RunCreated,
    Submitted,
    VersionPublished,
    encode_entry,
    evidence_of,
)
from barnraise.protocol.ledger_file import verify_ledger_file, write_ledger
from barnraise.protocol.merkle import MerkleLog, verify_inclusion
from barnraise.protocol.messages import Receipt, RolloutLease, Signed, TreeHead, Verdict
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.signatures import check_here, claim_of
from benchmarks.starts import measured
from tests.coordinator_support import make_run, opened

GOOD = Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message="")
NODES = 64
STARTING_NODES = 10_000
PARTS = ("append", "tree", "verify", "open")


def ids(number: int) -> tuple[bytes, bytes]:
    """A lease's and a submission's id."""
    digest = hashlib.sha256(number.to_bytes(8, "big")).digest()
    return digest[:16], digest[::-1]


def story(run_id: bytes, count: int) -> Iterator[LedgerEntry]:
    """``count`` entries that follow the rules: three for each unit, from ``NODES`` nodes."""
    keys = [hashlib.sha256(b"node %d" % number).digest() for number in range(NODES)]
    start: list[LedgerEntry] = [
        RunCreated(at_ms=1, run_id=run_id),
        VersionPublished(at_ms=1, version=0, manifest=bytes(32)),
        *(NodeJoined(at_ms=2, node=key, name=f"node-{number}") for number, key in enumerate(keys)),
    ]
    yield from start[:count]
    evidence = evidence_of(GOOD)
    for number in range(max(0, count - len(start))):
        unit, step = divmod(number, 3)
        lease_id, submission_id = ids(unit)
        node, at = keys[unit % NODES], 1_700_000_000_000 + number
        if step == 0:
            yield LeaseIssued(
                at_ms=at,
                lease_id=lease_id,
                unit_id=unit,
                node=node,
                policy_version=0,
                prompts=2,
                group_size=4,
            )
        elif step == 1:
            yield Submitted(at_ms=at, lease_id=lease_id, submission_id=submission_id, node=node)
        else:
            yield Judged(
                at_ms=at,
                lease_id=lease_id,
                submission_id=submission_id,
                node=node,
                accepted=True,
                check="all",
                credit=1,
                evidence=evidence,
            )


async def appending(folder: Path, appends: int, waiting: int) -> dict[str, Any]:
    """Durable appends through the real core and journal, and the event loop's longest pause."""
    with opened(make_run(folder)) as run:
        journal = Journal(run.journal_path)
        core = Core(journal, run.spec, run.run_id, run.identity, lambda: time.time_ns() // 1_000_000)
        units = iter(range(appends // 3))
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            last = time.perf_counter()
            while True:
                await trio.sleep(0.001)
                now = time.perf_counter()
                longest, last = max(longest, now - last - 0.001), now

        async def work(node: bytes) -> None:
            for unit in units:
                lease_id, submission_id = ids(unit)
                now = core.now_ms()
                terms = RolloutLease(
                    run_id=run.run_id,
                    lease_id=lease_id,
                    unit_id=core.state.next_unit,
                    node=node,
                    policy_version=0,
                    prompts=2,
                    group_size=4,
                    issued_at=now,
                    timeout_at=now + 60_000,
                    deadline_at=now + 120_000,
                )
                await core.record([LeaseIssuedEvent(lease=terms, instance=bytes(16))])
                done = SubmittedEvent(submission_id=submission_id, lease_id=lease_id, size=1, at_ms=now)
                await core.record([done])
                judged = SubmissionJudged(
                    submission_id=submission_id,
                    verdict=GOOD,
                    rewards=(0.0, 1.0) * 4,
                    tokens=8,
                    credit=1,
                    blameless=False,
                    at_ms=now,
                )
                await core.record([judged])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            await core.open()
            published = VersionPublishedEvent(
                version=0, manifest=bytes(32), weights="w", size=1, stats=None, accuracy=-1.0, at_ms=1
            )
            keys = [hashlib.sha256(b"node %d" % number).digest() for number in range(waiting)]
            joined = [NodeJoinedEvent(node=key, name="n", at_ms=1) for key in keys]
            await core.record([published, *joined])
            nursery.start_soon(watch)
            started = time.perf_counter()
            async with trio.open_nursery() as workers:
                for key in keys:
                    workers.start_soon(work, key)
            seconds = time.perf_counter() - started
            nursery.cancel_scope.cancel()
        journal.close()
    return {
        "append_per_s": appends // 3 * 3 / seconds,
        "longest_pause_ms": longest * 1e3,
    }


def proving(log: MerkleLog, leaves: dict[int, bytes], head: Signed, operator: bytes) -> dict[str, float]:
    """Medians over the given entries, in ms."""
    made, checked = [], []
    for index, leaf in leaves.items():
        started = time.perf_counter()
        path = log.inclusion_proof(index)
        made.append(time.perf_counter() - started)
        started = time.perf_counter()
        signed = open_signed(head, TreeHead, operator)
        assert verify_inclusion(leaf, index, signed.size, path, signed.root)
        checked.append(time.perf_counter() - started)
    return {"prove_ms": statistics.median(made) * 1e3, "check_ms": statistics.median(checked) * 1e3}


def opening(folder: Path, entries: int) -> dict[str, Any]:
    """The coordinator's start, with all the entries and with a tenth of them."""
    few = measured(make_run(folder, "few"), entries // 10, STARTING_NODES, replay=False)
    many = measured(make_run(folder, "many"), entries, STARTING_NODES, replay=True)
    start = many["start"]
    return {
        "open_s": start["seconds"],
        "open_replayed": start["replayed"],
        "open_peak_mb": start["peak_rss_mb"],
        "open_s_at_a_tenth": few["start"]["seconds"],
        "open_peak_mb_at_a_tenth": few["start"]["peak_rss_mb"],
        "replay_s": many["replay"]["seconds"],
        "replay_peak_mb": many["replay"]["peak_rss_mb"],
        "snapshot_s": start["snapshot_s"],
        "snapshot_of_all_s": many["snapshot_of_all_s"],
        "snapshot_bytes": many["snapshot_bytes"],
        "snapshot_pause_ms": start["snapshot_pause_ms"],
        "pause_without_ms": start["pause_without_ms"],
    }


def tree(folder: Path, entries: int) -> dict[str, Any]:
    """Proofs in a large log, and its exported file."""
    with opened(make_run(folder, "tree")) as run:
        spec, identity = run.signed_spec, run.identity
    run_id = run_id_of(spec)
    log, leaves, wanted = MerkleLog(), {}, set(random.Random(1).sample(range(entries), min(entries, 500)))
    for index, entry in enumerate(story(run_id, entries)):
        leaf = encode_entry(entry)
        log.append(leaf)
        if index in wanted:
            leaves[index] = leaf
    signed = sign(TreeHead(run_id=run_id, size=len(log), root=log.root(), issued_at=1), identity)
    result: dict[str, Any] = proving(log, leaves, signed, identity.public_key)
    target = folder / "ledger.bin"
    write_ledger(target, spec, [signed], story(run_id, entries))
    return result | {"bytes_per_entry": target.stat().st_size / entries}


def audited(folder: Path, entries: int) -> dict[str, float]:
    """The audit of a part, in a run of its own."""
    with opened(make_run(folder, "audit")) as run:
        spec, identity = run.signed_spec, run.identity
    return verifying(folder, spec, identity, run_id_of(spec), min(entries, 100_000))


def measure(entries: int, appends: int, waiting: int, parts: list[str]) -> dict[str, Any]:
    """The parts asked for, in a scratch folder."""
    result: dict[str, Any] = {}
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="barnraise-ledger-bench-") as scratch:
            folder = Path(scratch)
            match part:
                case "append":
                    result |= trio.run(appending, folder, appends, waiting)
                case "tree":
                    result |= tree(folder, entries)
                case "verify":
                    result |= audited(folder, entries)
                case "open":
                    result |= opening(folder, entries)
    result["conditions"] = {
        "entries": entries,
        "appends": appends,
        "waiting": waiting,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
    return result


def verifying(folder: Path, spec: Signed, identity: Identity, run_id: bytes, count: int) -> dict[str, float]:
    """A whole audit in one process, without receipts and with one for each verdict; processor time."""
    entries = list(story(run_id, count))
    log = MerkleLog()
    for entry in entries:
        log.append(encode_entry(entry))
    head = sign(TreeHead(run_id=run_id, size=count, root=log.root(), issued_at=1), identity)
    target = folder / "part.bin"
    write_ledger(target, spec, [head], entries)
    receipts = [
        sign(
            Receipt(
                run_id=run_id,
                node=entry.node,
                lease_id=entry.lease_id,
                submission_id=entry.submission_id,
                verdict=GOOD,
                credit=entry.credit,
                ledger_index=index,
                issued_at=1,
            ),
            identity,
        )
        for index, entry in enumerate(entries)
        if isinstance(entry, Judged)
    ]
    started = time.process_time()
    assert verify_ledger_file(target).ok
    bare = time.process_time() - started
    started = time.process_time()
    assert verify_ledger_file(target, receipts).ok
    full = time.process_time() - started
    claims = [claim_of(receipt, Receipt) for receipt in receipts[:5000]]
    started = time.process_time()
    assert all(check_here(claims))
    signatures = time.process_time() - started
    return {
        "verify_entries_per_s_per_core": count / full,
        "verify_without_receipts_per_s_per_core": count / bare,
        "ed25519_per_s_per_core": len(claims) / signatures,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the ledger costs.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries of the large log")
    parser.add_argument("--appends", type=int, default=20_000, help="entries appended durably")
    parser.add_argument(
        "--waiting", type=int, default=256, help="callers that wait for their append at a time"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which to measure")
    options = parser.parse_args(arguments)
    result = measure(options.entries, options.appends, options.waiting, options.parts)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name:40} {value if isinstance(value, dict) else f'{value:,.3f}'}")


if __name__ == "__main__":
    main()
