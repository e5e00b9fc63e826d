"""``barnraise report``: numbers, page and plots of a run, from its folder alone."""

from __future__ import annotations

import json
import sqlite3
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from coordinator_support import VERIFY, make_run, settings

from barnraise.coordinator.block_events import BlockJudged, BlockLeased, BlockSubmitted, RoundFormed
from barnraise.coordinator.block_workers import REPORT_FILE
from barnraise.coordinator.checks import accepted
from barnraise.coordinator.events import Event, NodeJoined, RunOpened, VersionPublished, VersionTrained
from barnraise.coordinator.folder import Run, create_pretrain_run, open_run
from barnraise.coordinator.journal import Journal, Payload, Write
from barnraise.coordinator.report_data import collect
from barnraise.coordinator.report_page import page
from barnraise.coordinator.report_plots import draw
from barnraise.coordinator.unit_notes import keep_notes
from barnraise.kernels.demo_model import write_tokenizer
from barnraise.protocol.envelope import content_id, sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import FileEntry
from barnraise.protocol.pretrain import BlockLease, BlockSubmission
from barnraise.tui import main as command_line
from tests.spec_support import pretrain_spec

ACCEPTED = accepted(384)
NAMES = (r"$\frac{$", "<i>node</i>")  # chosen by strangers
SEAM = {"relative_error": 0.7, "cosine": 0.6, "norm_ratio": 0.5, "cka": 0.9}


def pretrain_run(tmp_path: Path) -> Path:
    model, corpus = tmp_path / "model", tmp_path / "corpus"
    for folder in (model, corpus):
        folder.mkdir()
        write_tokenizer(folder)
    (model / "config.json").write_text(json.dumps({"vocab_size": 48, "eos_token_id": 1}))
    create_pretrain_run(
        tmp_path / "run",
        model,
        1000,
        corpus,
        pretrain_spec(),
        settings(versions=3),
        VERIFY,
        name="<b>run</b>",
        description="",
        model_name="tiny",
        seed=0,
        now_ms=0,
    )
    return tmp_path / "run"


def published(version: int, at_ms: int) -> list[Event]:
    return [
        VersionTrained(version=version, weights="", stats=None, accuracy=-1.0, at_ms=at_ms),
        VersionPublished(
            version=version, manifest=bytes(32), weights="", size=1, stats=None, accuracy=-1.0, at_ms=at_ms
        ),
    ]


def unit(
    run: Run, node: Identity, number: int, block: int, slot: int, times: tuple[int, int], train_ms: int
) -> tuple[Write, bytes]:
    """A unit of round 0, lent and handed in at ``times`` (ms), accepted."""
    lease = BlockLease(
        run_id=run.run_id,
        lease_id=bytes([number]) * 16,
        unit_id=number,
        node=node.public_key,
        policy_version=0,
        block=block,
        slot=slot,
        issued_at=times[0],
        timeout_at=10**9,
        deadline_at=10**9,
    )
    entry = FileEntry(path="x", size=1, sha256=bytes(32), shards=(bytes(32),))
    signed = sign(
        BlockSubmission(
            run_id=run.run_id,
            lease_id=lease.lease_id,
            policy_version=0,
            engine="torch",
            train_ms=train_ms,
            losses=(3.0, 2.5, 2.0),
            states=(entry,) * 3,
            delta=entry,
        ),
        node,
    )
    submission = content_id(signed)
    events: list[Event] = [
        BlockLeased(lease=lease, instance=bytes(16)),
        BlockSubmitted(submission_id=submission, lease_id=lease.lease_id, size=1, at_ms=times[1]),
        BlockJudged(
            submission_id=submission,
            verdict=ACCEPTED,
            tokens=384,
            credit=7,
            blameless=False,
            at_ms=times[1],
        ),
    ]
    return Write(events=events, payloads=[Payload(submission, 0, signed)]), submission


def note(folder: Path, **fields: Any) -> None:
    with (folder / REPORT_FILE).open("a") as file:
        file.write(json.dumps(fields) + "\n")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Scaffold, one round of three units by two nodes, recombination."""
    folder = pretrain_run(tmp_path)
    nodes = [Identity.generate() for _ in range(2)]
    with open_run(folder) as run:
        journal = Journal(run.journal_path)
        first: list[Event] = [RunOpened(run_id=run.run_id, operator=run.spec.operator, at_ms=1)]
        first += [NodeJoined(node=key.public_key, name=NAMES[n], at_ms=2) for n, key in enumerate(nodes)]
        journal.commit([Write(events=[*first, *published(0, 1000)])])
        writes, submissions = [], []
        for number, (block, slot, taken) in enumerate(((0, 0, 4000), (0, 1, 6000), (1, 0, 5000))):
            write, submission = unit(run, nodes[number % 2], number, block, slot, (1000, 9000), taken)
            writes.append(write)
            submissions.append(submission)
        closed = RoundFormed(version=1, submissions=tuple(submissions), at_ms=9000)
        journal.commit([*writes, Write(events=[closed, *published(1, 10_000)])])
        journal.close()
    training = {"losses": [4.0, 3.0], "seconds": 10.0, "tokens": 1000, "parameters": 500}
    note(folder, stage="scaffold", loss=3.0, perplexity=20.1, layers=2, **training)
    places = [[0, 0], [0, 1], [1, 0]]
    note(folder, stage="round", version=1, block_losses=[2.5, 2.6], contributions=places, seconds=0.5)
    with (folder / REPORT_FILE).open("a") as file:
        file.write('{"stage": "rou')  # a crash in mid-line
        file.write("\n")
    note(
        folder,
        stage="adaptation",
        version=3,
        cold=2.9,
        adapted=2.2,
        cold_perplexity=18.2,
        adapted_perplexity=9.03,
        seams_cold=[{"block": 0} | SEAM, {"block": 1} | SEAM],
        seams_adapted=[{"block": 0} | SEAM, {"block": 1} | SEAM],
        **training,
    )
    return folder


def test_the_numbers_add_up(finished: Path) -> None:
    report = collect(finished)
    assert [unit.losses for unit in report.units] == [[3.0, 2.5, 2.0]] * 3
    assert (report.cold_perplexity, report.adapted_perplexity) == (18.2, 9.03)
    assert report.block_flops == 3 * 7e6
    assert report.scaffold is not None
    assert report.scaffold.flops == 6 * 500 * 1000
    assert report.rounds[0].slowest_s == 6.0
    assert report.critical_path_s == 10 + 6 + 0.5 + 10
    assert report.serial_s == 10 + (4 + 6 + 5) + 0.5 + 10
    assert {member.name: member.units for member in report.members} == {NAMES[0]: 2, NAMES[1]: 1}
    assert report.absent == []


def test_the_page_stands_alone_and_escapes_what_strangers_wrote(finished: Path, capsys: Any) -> None:
    assert command_line.main(["report", str(finished)]) == 0
    text = (finished / "report" / "report.html").read_text()
    assert "<b>run</b>" not in text
    assert "&lt;b&gt;run&lt;/b&gt;" in text
    assert "<i>node" not in text
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append(tag)
            for name, value in attrs:
                assert name != "src" or (value or "").startswith("data:image/png;base64,")

    Reader().feed(text)
    assert seen.count("img") == 5  # all but the rewards
    assert not {"script", "link", "iframe"} & set(seen)
    for name in ("losses", "perplexity", "seams", "compute", "wall-clock"):
        assert (finished / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "18.200 cold, 9.030 adapted" in capsys.readouterr().out


def test_the_same_numbers_come_as_json(finished: Path, tmp_path: Path, capsys: Any) -> None:
    assert command_line.main(["report", str(finished), "--out", str(tmp_path / "page"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cold_perplexity"] == 18.2
    assert told["seams_cold"][0]["cosine"] == 0.6
    assert Path(told["page"]).is_file()
    assert not (finished / "report").exists()


def test_it_reads_beside_a_coordinator_and_writes_nothing_there(finished: Path, tmp_path: Path) -> None:
    with open_run(finished) as run:
        journal = Journal(run.journal_path)  # holds the database open, as a coordinator does
        before = journal.length
        assert command_line.main(["report", str(finished), "--out", str(tmp_path / "page")]) == 0
        assert journal.length == before
        journal.close()


def test_what_dropped_submissions_told_is_noted_before(finished: Path) -> None:
    before = collect(finished).units
    with open_run(finished) as run:
        journal = Journal(run.journal_path)
        dropped = journal.payload_ids(1)
        keep_notes(journal, finished, dropped)
        journal.commit([Write(drop_payloads=dropped)])
        journal.close()
    assert len(dropped) == 3
    assert collect(finished).units == before


def test_dropped_submissions_leave_the_times_by_our_clock(finished: Path) -> None:
    with sqlite3.connect(finished / "state.sqlite") as database:
        database.execute("DELETE FROM payloads")
    report = collect(finished)
    assert report.rounds[0].slowest_s == 8.0  # from lease to submission
    assert any("no longer stored" in text for text in report.absent)
    assert report.rounds[0].block_losses == [2.5, 2.6]


def test_a_run_that_has_not_begun_says_so(tmp_path: Path) -> None:
    report = collect(pretrain_run(tmp_path))
    assert any("has not begun" in text for text in report.absent)
    assert "not yet" in page(report, {})


def test_a_run_of_rewards_alone_says_what_is_absent(tmp_path: Path, capsys: Any) -> None:
    assert command_line.main(["report", str(make_run(tmp_path)), "--out", str(tmp_path / "page")]) == 0
    assert "does not pretrain" in capsys.readouterr().out


def test_rewards_have_a_curve_and_what_they_came_to(tmp_path: Path) -> None:
    report = collect(make_run(tmp_path))
    report.rewards, report.accuracy = [(1, 0.1), (2, 0.5)], [(0, 0.05), (2, 0.91)]
    plots = draw(report, tmp_path)
    assert list(plots) == ["rewards"]
    assert "0.910" in page(report, plots)


def test_no_run_folder_is_bad_use(tmp_path: Path, capsys: Any) -> None:
    assert command_line.main(["report", str(tmp_path)]) == 2
    assert "no complete run folder" in capsys.readouterr().err
