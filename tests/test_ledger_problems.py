"""A damaged ledger: what is wrong with it stands out from what only follows; two wrongs stay two."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from test_ledger import (
    ANN,
    BEN,
    GOOD,
    OPERATOR,
    RUN,
    SIGNED_SPEC,
    head_of,
    judged,
    lease,
    published,
    receipt_of,
    submitted,
)

from barnraise.protocol.envelope import sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import LedgerEntry, NodeJoined, RunCreated, encode_entry, verify_ledger
from barnraise.protocol.ledger_file import write_ledger
from barnraise.protocol.ledger_problems import MAX_PROBLEMS, in_order
from barnraise.protocol.messages import Signed
from barnraise.tui import main as command_line

UNITS = range(1, 51)
LONG: list[LedgerEntry] = [
    RunCreated(at_ms=1, run_id=RUN),
    published(0),
    NodeJoined(at_ms=2, node=ANN, name="ann"),
    NodeJoined(at_ms=2, node=BEN, name="ben"),
    *chain.from_iterable(
        (lease(unit, ANN), submitted(unit, ANN), judged(unit, ANN, GOOD, 100)) for unit in UNITS
    ),
]
HEADS = [head_of(LONG[:size]) for size in range(4, len(LONG) + 1)]
RECEIPTS = [sign(receipt_of(4 + 3 * unit - 1, LONG), OPERATOR) for unit in UNITS]


def roots(
    entries: list[LedgerEntry], heads: list[Signed], receipts: list[Signed]
) -> list[tuple[object, str]]:
    report = verify_ledger(entries, heads, SIGNED_SPEC, receipts)
    assert not report.ok
    assert sum(1 + following for _, following in in_order(report.problems, report.size)) == len(
        report.problems
    )
    return [(problem.index, problem.rule) for problem, _ in in_order(report.problems, report.size)]


def without(index: int) -> list[LedgerEntry]:
    return LONG[:index] + LONG[index + 1 :]


def changed(index: int, entry: LedgerEntry) -> list[LedgerEntry]:
    return [*LONG[:index], entry, *LONG[index + 1 :]]


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        (without(2), [(3, "joined-first"), (None, "head-root")]),
        (without(1), [(3, "version-published"), (None, "head-root")]),
        (without(7), [(7, "lease-first"), (None, "head-root")]),
        (changed(8, submitted(200, ANN)), [(8, "lease-first"), (9, "submission-first"), (None, "head-root")]),
        (changed(9, judged(2, ANN, GOOD, 10**9)), [(9, "credit-bounded"), (None, "head-root")]),
        (changed(9, judged(2, ANN, GOOD, 99)), [(None, "head-root")]),
        (LONG[:60], [(None, "entries-missing")]),
    ],
    ids=["node", "version", "lease", "other-lease", "credit", "less-credit", "cut"],
)
def test_one_damage_is_one_problem_and_what_the_signed_heads_say_of_it(
    entries: list[LedgerEntry], found: list[tuple[object, str]]
) -> None:
    assert roots(entries, HEADS, RECEIPTS) == found


def test_what_no_head_disputes_and_no_lease_shares_is_never_folded() -> None:
    twice = [*LONG, judged(1, ANN, GOOD, 100), judged(1, ANN, GOOD, 100), judged(2, ANN, GOOD, 100)]
    index = len(LONG)
    found = roots(twice, [head_of(twice)], RECEIPTS)
    assert found == [(index, "judged-twice"), (index + 1, "judged-twice"), (index + 2, "judged-twice")]
    denied = changed(9, judged(2, ANN, GOOD, 1))
    denied[12] = judged(3, ANN, GOOD, 1)
    found = roots(denied, [head_of(denied)], RECEIPTS)
    assert found == [(9, "receipt-matches"), (12, "receipt-matches")], "the operator signed both: evidence"
    late = changed(9, judged(2, ANN, GOOD, 1))
    late[30] = judged(9, ANN, GOOD, 1)
    heads = [head_of(late[:20]), *HEADS[20:]]
    found = roots(late, heads, RECEIPTS)
    assert found == [(9, "receipt-matches"), (None, "head-root")], "what a good head covers is evidence still"


def test_heads_of_another_operator_are_one_problem() -> None:
    heads = [head_of(LONG[:size], Identity.from_private_bytes(b"s" * 32)) for size in range(4, 154)]
    assert roots(LONG, [*heads, HEADS[-1]], []) == [(None, "head-signed")]
    torn = [Signed(payload=head.payload, signer=head.signer, signature=bytes(64)) for head in HEADS[:2]]
    assert roots(LONG, [*torn, HEADS[-1]], []) == [(None, "head-signed")] * 2


def corrupt(data: bytes) -> bytes:
    at = data.index(encode_entry(LONG[60])) + 1
    return data[:at] + b"\xff" + data[at + 1 :]


@pytest.mark.parametrize("damage", [corrupt, lambda data: data[: len(data) * 2 // 3]], ids=["flipped", "cut"])
def test_verify_shows_the_cause_and_counts_the_rest_which_json_has(
    damage: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ledger.bin"
    write_ledger(file, SIGNED_SPEC, HEADS, LONG)
    file.write_bytes(damage(file.read_bytes()))
    assert command_line.main(["ledger", "verify", str(file)]) == 1
    out = capsys.readouterr().out.splitlines()
    wrong = [number for number, line in enumerate(out) if line.startswith("WRONG")]
    assert len(wrong) == 1
    assert ": readable: " in out[wrong[0]]
    assert command_line.main(["ledger", "verify", str(file), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert len(problems) > 40
    assert f"and {len(problems) - 1} more that follow from it" in out[wrong[0] + 1]
    assert [problem["follows_from"] for problem in problems] == [None, *[0] * (len(problems) - 1)]
    assert problems[0]["rule"] == "readable"


def test_a_hostile_ledger_of_endless_problems_is_folded_in_bounded_time() -> None:
    wrong = [lease(1 + number % 200, bytes([number % 256, number // 256]) * 16) for number in range(5000)]
    report = verify_ledger([*LONG, *wrong], HEADS, SIGNED_SPEC)
    assert len(report.problems) == MAX_PROBLEMS
    assert report.unnamed > 3000
    assert len(in_order(report.problems, report.size)) > 500
