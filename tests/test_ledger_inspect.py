"""Inspecting a ledger: shown, ranked, told, proven, compared and kept, whatever the file holds."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path

import pytest
from test_ledger import (
    ANN,
    BAD,
    BEN,
    GOOD,
    RUN,
    SIGNED_SPEC,
    START,
    STORY,
    head_of,
    judged,
    submitted,
)

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.ledger import (
    BanLifted,
    ClawedBack,
    LedgerEntry,
    LedgerReport,
    NodeBanned,
    NodeJoined,
    Problem,
    Restored,
    verify_ledger,
)
from barnraise.protocol.ledger_file import open_ledger, write_ledger
from barnraise.protocol.ledger_proof import check_proof, decode_proof, encode_proof, make_proof
from barnraise.protocol.ledger_standings import DAY_MS, HALF_LIFE_MS, recent_average, standings
from barnraise.protocol.messages import Signed, TreeHead
from barnraise.protocol.signatures import check_here, claim_of, process_pool
from barnraise.tui import main as command_line
from barnraise.tui.ledger_verify import print_report

sys.path.append(str(Path(__file__).parents[1]))

WEEK = HALF_LIFE_MS


def call(*arguments: object) -> int:
    return command_line.main([str(item) for item in arguments])


def saved(path: Path, entries: list[LedgerEntry], heads: list[Signed] | None = None) -> Path:
    write_ledger(path, SIGNED_SPEC, [head_of(entries)] if heads is None else heads, entries)
    return path


def test_a_steady_node_comes_to_what_it_earns_a_day_and_halves_in_a_week() -> None:
    steady = [(day * DAY_MS, 100) for day in range(400)]
    now = 399 * DAY_MS
    average = recent_average(steady, now)
    assert math.isclose(average, 100, rel_tol=0.06)
    assert math.isclose(recent_average(steady, now + WEEK), average / 2)
    assert recent_average([(now + WEEK, 5)], now) == recent_average([(now, 5)], now)  # the future is now
    assert recent_average([(0, 2**53)], 2**53) == 0.0


def test_standings_add_up_to_the_balances_and_a_broken_entry_counts_for_nothing() -> None:
    found = standings([*STORY, judged(1, ANN, GOOD, 120)], now_ms=9)
    assert {key: node.credit for key, node in found.nodes.items()} == {ANN: 120, BEN: 160}
    assert found.broken == 1
    assert [node.name for node in found.ranked()] == ["ben", "ann"]
    ben = found.nodes[BEN]
    assert (ben.leased, ben.submitted, ben.accepted, ben.rejected) == (2, 2, 1, 1)
    assert found.nodes[ANN].closed == 1
    assert math.isclose(ben.recent, 160 * math.log(2) / 7, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("words", "indices"),
    [
        ((), range(16)),
        (("--node", "ann"), [2, 4, 6, 7, 8, 11]),
        (("--node", "ann", "--node", "ben", "--kind", "judged"), [8, 10, 15]),
        (("--kind", "lent"), [4, 5, 7, 11, 13]),
        (("--unit", "3"), [7, 11]),
        (("--version", "1"), [12, 13, 14, 15]),
        (("--since", "1970-01-01T00:00:00.004", "--until", "1970-01-01T00:00:00.005"), [13, 14, 15]),
        (("--limit", "2"), [14, 15]),
        (("--page", "2", "--page-size", "7"), range(7, 14)),
        (("--page", "9"), []),
    ],
    ids=["all", "node", "nodes-kind", "kind", "unit", "version", "time", "limit", "page", "past"],
)
def test_filters_show_what_they_say(
    words: tuple[str, ...], indices: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "l.bin", STORY)
    assert call("ledger", "show", file, *words, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == list(indices)


def test_a_closed_lease_says_whose_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(tmp_path / "l.bin", STORY)
    assert call("ledger", "show", file, "--kind", "leaseclosed") == 0
    assert f"expired      ann ..{peer_id_of(ANN)[-8:]}, lease 03030303" in capsys.readouterr().out


def test_a_node_is_found_by_id_beginning_end_or_name_and_doubt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "l.bin", [*START, NodeJoined(at_ms=3, node=b"c" * 32, name="ben")])
    peer = peer_id_of(ANN)
    for text in (peer, peer[-8:], f"..{peer[-6:]}", "ann"):
        assert call("ledger", "node", file, text, "--json") == 0
        assert json.loads(capsys.readouterr().out)["node"] == peer
    for text in ("ben", "12D3KooW", "nobody"):
        assert call("ledger", "node", file, text) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_unit_is_told_by_number_lease_or_submission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "l.bin", STORY)
    submission = submitted(2, BEN).submission_id.hex()
    for text in ("2", "020202020202", submission[:10]):
        assert call("ledger", "unit", file, text) == 0
        out = capsys.readouterr().out
        assert out.startswith("unit 2\n")
        assert "REJECTED" in out
        assert "SHA-256" in out
    assert call("ledger", "unit", file, "99") == 2
    assert call("ledger", "unit", file, "no!") == 2


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egnp=cmd|'/c'!A1"


def test_a_hostile_ledger_can_do_nothing_to_a_terminal_or_a_spreadsheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries: list[LedgerEntry] = [
        *START,
        NodeJoined(at_ms=2**53, node=b"c" * 32, name=HOSTILE[:64]),
        NodeJoined(at_ms=3, node=b"d" * 32, name="=1+1"),
        NodeBanned(at_ms=2**53, node=b"c" * 32, reason=HOSTILE, until=2**53),
        BanLifted(at_ms=4, node=b"d" * 32, reason="+1"),
    ]
    file = saved(tmp_path / "l.bin", entries)
    commands = [("show",), ("show", "--csv"), ("show", "--json"), ("top",), ("top", "--json")]
    for command, *options in commands:
        assert call("ledger", command, file, *options) == 0
        out = capsys.readouterr().out
        assert all(char.isprintable() or char == "\n" for char in out)
        assert "\u202e" not in out
        if "--csv" in options:
            cells = [cell for row in csv.reader(io.StringIO(out)) for cell in row]
            assert "'=1+1" in cells
            assert not any(cell[:1] in ("=", "+", "@") for cell in cells)
    assert call("ledger", "node", file, peer_id_of(b"c" * 32)[-8:]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_parquet_file_has_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = saved(tmp_path / "l.bin", STORY)
    assert call("ledger", "show", file, "--parquet", tmp_path / "l.parquet") == 0
    table = parquet.read_table(tmp_path / "l.parquet").to_pylist()
    assert [row["index"] for row in table] == list(range(16))
    assert table[15]["credit"] == 160
    assert table[15]["unit_id"] == 4


def test_without_pyarrow_parquet_is_refused_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = saved(tmp_path / "l.bin", STORY)
    assert call("ledger", "show", file, "--parquet", tmp_path / "l.parquet") == 1
    assert "pip install 'barnraise[parquet]'" in capsys.readouterr().err
    assert not (tmp_path / "l.parquet").exists()


def test_a_proof_is_made_checked_and_says_what_it_proves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "l.bin", STORY)
    assert call("ledger", "prove", file, 8) == 0
    proof = tmp_path / "proof"
    proof.write_text(capsys.readouterr().out)
    assert call("ledger", "check", proof, "--run", RUN.hex()[:8]) == 0
    said = capsys.readouterr().out
    assert "+120 Mflop" in said
    assert "not proven:" in said
    assert call("ledger", "check", proof, "--run", "00") == 1
    assert call("ledger", "prove", file, 16) == 2
    assert call("ledger", "check", tmp_path / "none") == 2


def test_no_changed_proof_proves_anything(tmp_path: Path) -> None:
    with open_ledger(saved(tmp_path / "l.bin", STORY)) as ledger:
        whole = encode_proof(make_proof(ledger.entries, ledger.heads, ledger.run_spec, 8))
    good = check_proof(decode_proof(whole))
    for at in range(0, len(whole), 7):
        for change in (b"", b"0", b"f"):
            changed = whole[:at] + change + whole[at + 1 :]
            try:
                proven = check_proof(decode_proof(changed))
            except Exception as error:
                assert type(error).__name__ in ("MalformedError", "SignatureError")  # noqa: PT017
            else:
                assert proven == good  # white space, or the same digit
    with pytest.raises(MalformedError):
        decode_proof(b"[" * 100_000)


def test_two_copies_are_the_same_one_longer_or_a_split_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other: list[LedgerEntry] = [*STORY[:15], judged(4, BEN, BAD, 0)]
    short, long = saved(tmp_path / "s.bin", STORY[:12]), saved(tmp_path / "l.bin", STORY)
    split = saved(tmp_path / "x.bin", other)
    forged = saved(tmp_path / "f.bin", other, [head_of(STORY)])
    for a, b, code, words in (
        (long, long, 0, "same: 16"),
        (short, long, 0, "B extends A: 12 equal entries, then 4 more"),
        (long, short, 0, "A extends B"),
        (long, split, 1, "the operator signed both"),
        (long, forged, 1, "no proof against the operator"),
    ):
        assert call("ledger", "diff", a, b) == code
        assert words in capsys.readouterr().out
    assert call("ledger", "diff", long, split, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["shared"], found["signed_by_operator"]) == (15, True)


def test_import_keeps_what_verifies_and_only_ever_adds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = saved(tmp_path / "s.bin", STORY[:12]), saved(tmp_path / "l.bin", STORY)
    split = saved(tmp_path / "x.bin", [*STORY[:10], judged(2, BEN, GOOD, 7)])
    wrong = saved(tmp_path / "w.bin", [*STORY, judged(4, BEN, GOOD, 160)])
    kept = tmp_path / "ledgers"
    assert call("ledger", "import", wrong, kept) == 1
    assert "judged-twice" in capsys.readouterr().out
    assert list(kept.iterdir()) == []
    for file in (short, long, short):
        assert call("ledger", "import", file, kept) == 0
    assert call("ledger", "import", split, kept) == 1
    assert "entry 10" in capsys.readouterr().out
    (only,) = kept.iterdir()
    assert only.read_bytes() == long.read_bytes()


def test_verify_says_between_which_heads_an_entry_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = [head_of(STORY[:size]) for size in (4, 8, 12, 16)]
    changed = [*STORY]
    changed[9] = submitted(2, BEN, content=77)
    file = saved(tmp_path / "l.bin", changed, heads)
    assert call("ledger", "verify", file) == 1
    assert "is one of 8 to 11" in capsys.readouterr().out


def test_signatures_are_checked_in_processes_as_they_are_here() -> None:
    heads = [head_of(STORY[: 1 + number % 16]) for number in range(1300)]
    heads[700] = Signed(payload=heads[700].payload, signer=heads[700].signer, signature=bytes(64))
    claims = [claim_of(head, TreeHead) for head in heads]
    told: list[int] = []
    with process_pool(2, worth=1, done=lambda done, of: told.append(done)) as check:
        found = check(claims)
        report = verify_ledger(STORY, heads, SIGNED_SPEC, (), check)
    assert found == check_here(claims)
    assert [number for number, good in enumerate(found) if not good] == [700]
    assert told[:3] == [512, 1024, 1300]
    assert [(p.rule, "tree head 700" in p.text) for p in report.problems] == [("head-signed", True)]


def test_claw_backs_in_a_circle_end_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = submitted(1, ANN).submission_id, submitted(2, BEN).submission_id
    circle: list[LedgerEntry] = [
        kind(
            at_ms=9,
            lease_id=bytes([number]) * 16,
            submission_id=submission,
            node=node,
            cause=cause,
            credit=2**53,
            evidence=bytes(32),
        )
        for kind in (ClawedBack, Restored)
        for number, node, submission, cause in ((1, ANN, one, two), (2, BEN, two, one), (1, ANN, one, one))
    ]
    file = saved(tmp_path / "l.bin", [*STORY, *circle])
    assert call("ledger", "verify", file) == 1
    said = capsys.readouterr().out
    assert [f"entry {index}: claw-back-owed" in said for index in (16, 17, 18)] == [True] * 3
    assert [f"entry {index}: restore-overturned" in said for index in (19, 20, 21)] == [True] * 3
    assert call("ledger", "unit", file, "1") == 0
    assert call("ledger", "top", file, "--json") == 0
    out = capsys.readouterr().out.splitlines()[-1]
    assert [node["credit"] for node in json.loads(out)["nodes"]] == [160, 120]


def test_a_ledger_cut_anywhere_is_wrong_or_unusable_and_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = saved(tmp_path / "l.bin", STORY).read_bytes()
    cut = tmp_path / "cut.bin"
    for end in range(0, len(whole), 211):
        cut.write_bytes(whole[:end])
        assert call("ledger", "verify", cut) == 1
        for command in (("show",), ("top",), ("node", "ann"), ("unit", "1"), ("prove", "1")):
            assert call("ledger", command[0], cut, *command[1:]) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err


def test_the_benchmark_measures_what_it_documents(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import ledger as benchmark

    benchmark.main(["--json", "--entries", "300", "--appends", "60", "--waiting", "8"])
    measured = json.loads(capsys.readouterr().out)
    assert benchmark.__doc__ is not None
    documented = {
        *(
            "append_per_s",
            "prove_ms",
            "check_ms",
            "verify_entries_per_s_per_core",
            "open_s",
            "bytes_per_entry",
        ),
        *("longest_pause_ms", "ed25519_per_s_per_core", "replay_s", "snapshot_pause_ms"),
    }
    assert documented <= measured.keys()
    assert all(name in benchmark.__doc__ for name in documented)


def test_of_many_problems_the_earliest_is_marked_and_few_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problems = [Problem(index, "chain", f"p{index}") for index in (*range(40, 90), 7)]
    report = LedgerReport(
        b"r" * 32, b"o" * 32, 99, b"h" * 32, {}, 0, 0, 0, (Problem(None, "root", "x"), *problems), unnamed=10
    )
    print_report(report)
    wrong = capsys.readouterr().out.partition("WRONG")[2].splitlines()
    assert wrong[0].endswith("entry 7: chain: p7")
    assert "look here" in wrong[1]
    assert len(wrong) < 25
    assert any("42 more problems" in line for line in wrong)
