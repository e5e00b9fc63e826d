"""``RUN -> ledger.bin``: the public ledger of a run folder, while its coordinator runs or not."""

from __future__ import annotations

import time
from pathlib import Path

from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import entries_of
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.identity import Identity, load_identity
from barnraise.protocol.ledger import encode_entry
from barnraise.protocol.ledger_file import write_ledger
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Signed, TreeHead
from barnraise.protocol.runid import run_id


def export_run(folder: Path, target: Path) -> None:
    """Write a run folder's ledger to ``target``, under a tree head signed now that covers all of it.

    Raises:
        RunFolderError: no run folder, or nothing has happened in it yet.
        KeyFileError: the run's key cannot be read.
        StorageError: the disk refused.
    """
    spec, signed, _ = read_spec(folder)
    identity = load_identity(folder / "run.key")
    path = folder / "state.sqlite"
    if not path.is_file():
        raise RunFolderError(
            f"{folder} has no ledger yet: it begins when `barnraise coordinator run {folder}` first runs"
        )
    journal = Journal(path)
    try:
        write_journal(journal, signed, spec.rollout.max_lag, identity, time.time_ns() // 1_000_000, target)
    finally:
        journal.close()


def write_journal(
    journal: Journal, signed_spec: Signed, max_lag: int, identity: Identity, now_ms: int, target: Path
) -> None:
    """Write what is durable in ``journal`` as a ledger file. Blocking."""
    heads = journal.tree_heads()  # first: the journal may grow meanwhile, a head must not cover more
    log = MerkleLog()
    entries = list(entries_of(journal.events(), max_lag))
    for entry in entries:
        log.append(encode_entry(entry))
    newest = TreeHead(run_id=run_id(signed_spec), size=len(log), root=log.root(), issued_at=now_ms)
    write_ledger(target, signed_spec, [*heads, sign(newest, identity)], entries)
