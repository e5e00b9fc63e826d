"""A unit's story from a run folder: with the numbers of its verdict and the version that it went into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coordinator_history import history
from coordinator_support import make_run

from barnraise.coordinator.events import BatchFormed, LeaseIssued, SubmissionJudged, Submitted
from barnraise.coordinator.journal import Journal, Write
from barnraise.protocol import ledger_file
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.ledger_file import verify_ledger_file, write_ledger
from barnraise.protocol.ledger_uses import Uses
from barnraise.tui import main as command_line
from tests.test_ledger import ANN, BEN, OPERATOR, RUN, SIGNED_SPEC, STORY, STRANGER, head_of, submitted

ONE, REFUSED = submitted(1, ANN).submission_id, submitted(2, BEN).submission_id


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
    file = tmp_path / "ledger.bin"
    assert command_line.main(["ledger", "export", str(folder), str(file)]) == 0
    assert {problem.rule for problem in verify_ledger_file(file).problems} == {"own-run"}  # a made-up history
    capsys.readouterr()
    assert command_line.main(["ledger", "unit", str(file), used.hex()[:16]]) == 0
    assert f"used in policy version {batch.version}" in capsys.readouterr().out
    refused = next(e for e in events if isinstance(e, SubmissionJudged) and not e.verdict.accepted)

    assert command_line.main(["ledger", "unit", str(folder), used.hex()[:16], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["unit"] == unit
    assert told["uses"][used.hex()] == {"used_in_version": batch.version, "skipped": False}
    assert command_line.main(["ledger", "unit", str(folder), used.hex()[:16]]) == 0
    assert f"used in policy version {batch.version}" in capsys.readouterr().out
    assert command_line.main(["ledger", "unit", str(folder), refused.submission_id.hex()[:16]]) == 0
    assert f"check {refused.verdict.check}: value 2, threshold 1" in capsys.readouterr().out


LIES = {
    "use-signed": [sign(Uses(run_id=RUN, version=1, submissions=(ONE,)), STRANGER)],
    "use-of-run": [sign(Uses(run_id=bytes(32), version=1, submissions=(ONE,)), OPERATOR)],
    "use-published": [sign(Uses(run_id=RUN, version=9, submissions=(ONE,)), OPERATOR)],
    "use-accepted": [sign(Uses(run_id=RUN, version=1, submissions=(REFUSED,)), OPERATOR)],
    "use-once": [sign(Uses(run_id=RUN, version=version, submissions=(ONE,)), OPERATOR) for version in (0, 1)],
}


@pytest.mark.parametrize("rule", LIES)
def test_what_the_operator_says_of_use_is_held_against_the_ledger(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "l.bin"
    true = [sign(Uses(run_id=RUN, version=1, submissions=(ONE,)), OPERATOR)]
    for uses, found in ((true, []), (LIES[rule], [rule])):
        write_ledger(path, SIGNED_SPEC, [head_of(STORY)], STORY, uses)
        assert [problem.rule for problem in verify_ledger_file(path).problems] == found


def test_a_file_full_of_uses_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "MAX_USES", 1000)
    use = sign(Uses(run_id=RUN, version=1, submissions=(ONE,)), OPERATOR)
    write_ledger(tmp_path / "l.bin", SIGNED_SPEC, [head_of(STORY)], STORY, [use] * 10)
    with pytest.raises(MalformedError, match="no ledger does"):
        verify_ledger_file(tmp_path / "l.bin")
