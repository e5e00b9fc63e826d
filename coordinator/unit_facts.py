"""What the journal knows of a submission and the public ledger has by hash alone, or not at all.

The numbers of a verdict (the ledger has their hash) and the policy version that a
submission was used in. Read-only, beside a running coordinator or without one.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from barnraise.coordinator.block_events import BlockJudged, RoundFormed
from barnraise.coordinator.events import (
    AppealDecided,
    BatchFormed,
    SubmissionJudged,
    SubmissionsSkipped,
)
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_place import journal_path
from barnraise.protocol.messages import Verdict


@dataclass
class Facts:
    """Of one submission. ``used_in``: the version it went into; ``skipped``: no batch wanted it."""

    verdicts: list[Verdict] = field(default_factory=list)
    used_in: int | None = None
    skipped: bool = False


def facts_of(folder: Path, submissions: Collection[bytes]) -> dict[bytes, Facts]:
    """Facts of these submissions, from one pass over a run folder's journal.

    Raises:
        RunFolderError, StorageError: no journal there, or a damaged one.
    """
    found = {submission: Facts() for submission in submissions}
    with closing(Journal(journal_path(folder), reading=True)) as journal:
        for event in journal.events():
            if isinstance(event, SubmissionJudged | BlockJudged | AppealDecided):
                if event.submission_id in found:
                    found[event.submission_id].verdicts.append(event.verdict)
            elif isinstance(event, BatchFormed | RoundFormed):
                for submission in found.keys() & set(event.submissions):
                    found[submission].used_in = event.version
            elif isinstance(event, SubmissionsSkipped):
                for submission in found.keys() & set(event.submissions):
                    found[submission].skipped = True
    return found
