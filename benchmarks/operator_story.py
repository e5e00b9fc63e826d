"""A run's ledger as ``benchmarks.operator`` makes it up, and its published files and index."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

from barnraise.coordinator.folder import Run
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.web.index_write import IndexWriter
from barnraise.coordinator.web.site import INDEX_FILE
from barnraise.protocol.ledger import (
    Judged,
    LeaseIssued,
    LedgerEntry,
    NodeBanned,
    NodeJoined,
    RunCreated,
    Submitted,
    encode_entry,
    evidence_of,
)
from barnraise.protocol.ledger import VersionPublished as VersionEntry
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Verdict
from barnraise.protocol.tlog_checkpoint import Checkpoint, Head, log_key, origin_of, sign_checkpoint

GOOD = Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message="")
BAD = Verdict(accepted=False, check="toploc", threshold=3.0, value=9.0, position="rollout 1", message="")
VERSIONS = 400
CHUNK = 20_000


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"node %d" % number).digest()


def ids(number: int) -> tuple[bytes, bytes]:
    digest = hashlib.sha256(number.to_bytes(8, "big")).digest()
    return digest[:16], digest[::-1]


def story(run_id: bytes, nodes: int, count: int, start_ms: int, every_ms: int) -> Iterator[LedgerEntry]:
    """``count`` entries: nodes join, versions come out, and units are lent, handed in and judged."""
    yield RunCreated(at_ms=start_ms, run_id=run_id)
    for number in range(nodes):
        yield NodeJoined(at_ms=start_ms, node=key_of(number), name=f"node-{number}")
    units = (count - nodes - 1 - VERSIONS) // 3
    good, bad = evidence_of(GOOD), evidence_of(BAD)
    version, made = -1, 1 + nodes
    for unit in range(units):
        at = start_ms + unit * every_ms
        if unit * VERSIONS // units > version:
            version += 1
            yield VersionEntry(at_ms=at, version=version, manifest=bytes(32))
            made += 1
        lease_id, submission_id = ids(unit)
        node = key_of(unit % nodes if unit % 2 else unit * unit % (nodes // 10))
        yield LeaseIssued(
            at_ms=at,
            lease_id=lease_id,
            unit_id=unit,
            node=node,
            policy_version=version,
            prompts=2,
            group_size=4,
        )
        yield Submitted(at_ms=at, lease_id=lease_id, submission_id=submission_id, node=node)
        fine = unit % 50 != 49
        yield Judged(
            at_ms=at,
            lease_id=lease_id,
            submission_id=submission_id,
            node=node,
            accepted=fine,
            check="all" if fine else "toploc",
            credit=800 + unit % 100 if fine else 0,
            evidence=good if fine else bad,
        )
        made += 3
    for number in range(count - made):
        yield NodeBanned(at_ms=at, node=key_of(number % nodes), reason="x", until=at + 1)


def publish(run: Run, nodes: int, count: int, now_ms: int) -> tuple[MerkleLog, float]:
    """The ledger as published files, and indexed; the seconds that indexing took."""
    every = 20_000
    start = now_ms - every * count // 3
    log, folder = MerkleLog(), LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
    writer = IndexWriter(run.path / INDEX_FILE)
    waiting: list[bytes] = []
    took = 0.0

    def flush() -> None:
        nonlocal took
        size = len(log)
        checkpoint = Checkpoint(origin_of(run.run_id), size, log.root())
        head = Head(checkpoint, sign_checkpoint(checkpoint, run.identity).encode())
        folder.grow(log, head, folder.size, waiting)
        began = time.perf_counter()
        for place in range(0, len(waiting), 4096):
            part = waiting[place : place + 4096]
            writer.add(part, (), log.root(writer.size + len(part)), 0)
        took += time.perf_counter() - began
        waiting.clear()

    for entry in story(run.run_id, nodes, count, start, every):
        data = encode_entry(entry)
        log.append(data)
        waiting.append(data)
        if len(waiting) >= CHUNK:
            flush()
    flush()
    writer.close()
    return log, took
