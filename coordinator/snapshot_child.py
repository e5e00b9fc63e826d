"""Makes one snapshot, beside a running coordinator: ``python -m barnraise.coordinator.snapshot_child RUN``.

In a process of its own, because folding is Python's work: in a thread it would take turns
with the event loop. It opens the journal for reading only, and can be killed at any moment.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_place import journal_path
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.snapshot import SNAPSHOTS, Snapshots, take_snapshot
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.tlog_checkpoint import log_key

NICE = 10


def make_snapshot(folder: Path) -> int | None:
    """Make the next snapshot of the run in ``folder``; how many events it covers, None if nothing is new.

    Raises:
        BarnraiseError: the folder cannot be read or written, or is damaged.
    """
    spec, _, run_id = read_spec(folder)
    public = LogFolder(folder / "log", log_key(run_id, spec.operator))
    with closing(Journal(journal_path(folder), reading=True)) as journal:
        return take_snapshot(journal, Snapshots(folder / SNAPSHOTS, run_id), public, spec.rollout.max_lag)


def main(arguments: list[str]) -> int:
    """Exit code 0, or 1 with the reason on standard error."""
    (folder,) = arguments
    os.nice(NICE)
    try:
        make_snapshot(Path(folder))
    except BarnraiseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
