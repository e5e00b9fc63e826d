"""What the journal knows of a submission and the public ledger has by hash alone, or not at all.

The numbers of a verdict (the ledger has their hash) and the policy version that a
submission was used in. Read-only, beside a running coordinator or without one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from barnraise.coordinator.block_events import BlockJudged, RoundFormed
from barnraise.coordinator.events import (
    AppealDecided,
    BatchFormed,
    SubmissionJudged,
    SubmissionsSkipped,
    decode_event,
)
from barnraise.protocol.errors import RunFolderError
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
        RunFolderError: no journal there, or a damaged one.
    """
    path = folder / "state.sqlite"
    found = {submission: Facts() for submission in submissions}
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0)
        ) as database:
            for (data,) in database.execute("SELECT data FROM events ORDER BY seq"):
                event = decode_event(data)
                if isinstance(event, SubmissionJudged | BlockJudged | AppealDecided):
                    if event.submission_id in found:
                        found[event.submission_id].verdicts.append(event.verdict)
                elif isinstance(event, BatchFormed | RoundFormed):
                    for submission in found.keys() & set(event.submissions):
                        found[submission].used_in = event.version
                elif isinstance(event, SubmissionsSkipped):
                    for submission in found.keys() & set(event.submissions):
                        found[submission].skipped = True
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}): restore it from a backup") from error
    return found
