"""A unit's story from a run folder: with the numbers of its verdict and the version that it went into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from barnraise.coordinator.events import BatchFormed, LeaseIssued, SubmissionJudged, Submitted
from barnraise.coordinator.journal import Journal, Write
from barnraise.tui import main as command_line
from tests.coordinator_history import history
from tests.coordinator_support import make_run


def test_a_run_folder_tells_what_the_public_ledger_has_by_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = history(seed=3, length=400)
    folder = make_run(tmp_path)
    journal = Journal(folder / "state.sqlite")
    journal.commit([Write(events=events)])
    journal.close()
    batch = next(event for event in events if isinstance(event, BatchFormed))
    used = batch.submissions[0]
    lease_id = next(e.lease_id for e in events if isinstance(e, Submitted) and e.submission_id == used)
    unit = next(
        e.lease.unit_id for e in events if isinstance(e, LeaseIssued) and e.lease.lease_id == lease_id
    )
    refused = next(e for e in events if isinstance(e, SubmissionJudged) and not e.verdict.accepted)

    assert command_line.main(["ledger", "unit", str(folder), used.hex()[:16], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unit"] == unit
    assert told["uses"][used.hex()] == {"used_in_version": batch.version, "skipped": False}
    assert command_line.main(["ledger", "unit", str(folder), used.hex()[:16]]) == 0
    assert f"used in policy version {batch.version}" in capsys.readouterr().out
    assert command_line.main(["ledger", "unit", str(folder), refused.submission_id.hex()[:16]]) == 0
    assert f"check {refused.verdict.check}: value 2, threshold 1" in capsys.readouterr().out
