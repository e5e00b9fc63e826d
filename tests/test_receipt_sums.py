"""What a node's receipts add up to: the same as by a walk over all, without one (R16)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_receipts import book, receipt, signed

from barnraise.node import verdicts
from barnraise.node.kept import KeptWork
from barnraise.node.pending import PendingWork
from barnraise.node.receipt_words import latest, outcome
from barnraise.node.receipts import ReceiptBook, Totals, _record
from barnraise.node.state import Facts, midnight_ms
from barnraise.node.units import Kept, Units
from barnraise.protocol.messages import Signed
from barnraise.protocol.standing import CLAWED_BACK
from barnraise.protocol.store import DiskStore

NOW = 1_800_000_000_000
MIDNIGHT = midnight_ms(NOW)
FEW = st.integers(0, 5)


def made(draw: tuple[int, int, int, int, int]) -> Signed:
    """One of few receipts, so that indices, submissions and leases meet again."""
    index, submission, kind, credit, hours = draw
    plain = receipt(index, accepted=kind > 0)
    verdict = plain.verdict
    if kind == 2:
        verdict = type(verdict)(
            accepted=True, check=CLAWED_BACK, threshold=0.0, value=1.0, position="", message=""
        )
    return signed(
        index,
        lease_id=bytes([submission % 3] * 16),
        submission_id=bytes([submission] * 32),
        verdict=verdict,
        credit=credit,
        issued_at=MIDNIGHT + (hours - 2) * 3_600_000,
    )


def by_walking(it: ReceiptBook, moment: int) -> tuple[Totals, int]:
    counted = latest(it.receipts()).values()
    rejected = sum(outcome(one) == "rejected" for one in counted)
    totals = Totals(len(counted) - rejected, rejected, sum(one.credit for one in counted))
    earlier = latest(one for one in it.receipts() if one.issued_at < moment)
    return totals, sum(one.credit for one in earlier.values())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.tuples(st.integers(0, 12), FEW, st.integers(0, 2), FEW, FEW),
            st.sampled_from([MIDNIGHT, MIDNIGHT, MIDNIGHT, MIDNIGHT + 3_600_000]),
        ),
        max_size=25,
    )
)
def test_sums_are_those_of_a_walk_in_whatever_order_receipts_come(
    steps: list[tuple[tuple[int, int, int, int, int], int]],
) -> None:
    with TemporaryDirectory() as folder:
        it = book(Path(folder))
        for draw, moment in steps:
            it.add(made(draw))
            totals, before = by_walking(it, moment)
            assert (it.totals, it.credit_before(moment)) == (totals, before)
            assert it.next_index == it.receipts()[-1].ledger_index + 1
            for number in {draw[1] % 3 for draw, _ in steps}:
                lease_id = bytes([number] * 16)
                verdicts = [one.verdict.accepted for one in it.receipts() if one.lease_id == lease_id]
                assert it.verdicts(lease_id) == verdicts
        again = book(Path(folder))
        assert again.totals == it.totals
        assert again.conflicts == it.conflicts


def instructions(of: Callable[[], object]) -> int:
    """How many bytecode instructions a call takes: a busy machine does not change that."""
    count = 0

    def traced(frame: FrameType, what: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += what == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        of()
    finally:
        sys.settrace(before)
    return count


def context(folder: Path, it: ReceiptBook) -> Any:
    """As much of a node as a receipt concerns."""
    store = DiskStore(folder / "store")
    return SimpleNamespace(
        receipts=it,
        receipts_refused="",
        pending=PendingWork(folder / "pending", bytes(32), bytes(32)),
        kept=KeptWork(folder / "kept"),
        units=Units(folder, store, bytes(32), bytes(32)),
        state=SimpleNamespace(uploading=b""),
        judged=deque(),
        feed=lambda event: None,
        facts=Facts("anna", "peer"),
        clock=SimpleNamespace(wall_ms=lambda: NOW),
        say=lambda text, level: pytest.fail(text),
    )


def work_of_one_more(folder: Path, have: int) -> int:
    """What taking a block unit's receipt costs a node that has so many, of today and of yesterday."""
    folder.mkdir()
    day = 86_400_000
    with (folder / "receipts.bin").open("wb") as file:
        for index in range(have):
            file.write(_record(signed(index, index % 3 != 0, issued_at=NOW - index % 2 * day)))
    it = book(folder)
    it.credit_before(MIDNIGHT)
    ctx, new = context(folder, it), signed(have, accepted=False, issued_at=NOW)
    ctx.units.kept[receipt(have).lease_id] = Kept(bytes(32), 0, SimpleNamespace())
    work = instructions(lambda: verdicts.take(ctx, new))
    assert ctx.units.rejected == {receipt(have).lease_id}
    assert ctx.facts.accepted + ctx.facts.rejected == have + 1
    return work


def test_one_more_receipt_costs_the_same_after_ten_and_after_a_thousand(tmp_path: Path) -> None:
    few, many = work_of_one_more(tmp_path / "few", 10), work_of_one_more(tmp_path / "many", 1000)
    assert many < few + 200


def test_a_conflicting_receipt_for_another_lease_gives_that_lease_no_verdict(tmp_path: Path) -> None:
    it = book(tmp_path)
    ctx, lease_id = context(tmp_path, it), bytes([7] * 16)
    ctx.units.kept[lease_id] = Kept(bytes(32), 0, SimpleNamespace())
    assert verdicts.take(ctx, signed(1)) is not None
    assert verdicts.take(ctx, signed(1, lease_id=lease_id)) is not None
    assert len(it.conflicts) == 1
    assert lease_id in ctx.units.kept
    assert not ctx.units.rejected
