"""``RUN -> ledger.bin``: the public ledger of a run folder, while its coordinator runs or not."""

from __future__ import annotations

import time
from pathlib import Path

from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_place import journal_path
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.identity import load_identity


def export_run(folder: Path, target: Path) -> None:
    """Write a run folder's ledger to ``target``, under a tree head signed now that covers all of it.

    Raises:
        RunFolderError: no run folder, or nothing has happened in it yet.
        KeyFileError: the run's key cannot be read.
        StorageError: the disk refused.
    """
    spec, signed, _ = read_spec(folder)
    identity = load_identity(folder / "run.key")
    path = journal_path(folder)
    if not path.is_file():
        raise RunFolderError(
            f"{folder} has no ledger yet: it begins when `barnraise coordinator run {folder}` first runs"
        )
    journal = Journal(path, reading=True)
    try:
        export_ledger(journal, signed, spec.rollout.max_lag, identity, time.time_ns() // 1_000_000, target)
    finally:
        journal.close()
