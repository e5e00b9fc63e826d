"""A run folder's ledger as one file, whether or not its coordinator is running."""

from __future__ import annotations

import time
from pathlib import Path

from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.identity import load_identity


def export_run(folder: Path, target: Path) -> None:
    """Write the ledger of the run in ``folder`` to ``target``, under a tree head signed now.

    Raises:
        RunFolderError: no run folder, or its coordinator never ran.
        KeyFileError: the run's key cannot be read.
        StorageError: the disk refused.
    """
    spec, signed, _ = read_spec(folder)
    if not (folder / "state.sqlite").is_file():
        raise RunFolderError(
            f"{folder} has no journal yet: its coordinator never ran ('barnraise coordinator run {folder}')"
        )
    identity = load_identity(folder / "run.key")
    journal = Journal(folder / "state.sqlite")
    try:
        export_ledger(journal, signed, spec.rollout.max_lag, identity, time.time_ns() // 1_000_000, target)
    finally:
        journal.close()
