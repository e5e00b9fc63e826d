from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.node.receipts import ReceiptBook, Totals, read_receipts
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import MalformedError, SignatureError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import Receipt, Signed, Verdict

OPERATOR = Identity.generate()
RUN = b"r" * 32
NODE = b"n" * 32


def receipt(index: int, accepted: bool = True, **changes: object) -> Receipt:
    plain = Receipt(
        run_id=RUN,
        node=NODE,
        lease_id=index.to_bytes(16, "big"),
        submission_id=index.to_bytes(32, "big"),
        verdict=Verdict(
            accepted=accepted,
            check="all" if accepted else "toploc",
            threshold=1.0,
            value=0.5,
            position="",
            message="",
        ),
        credit=100 if accepted else 0,
        ledger_index=index,
        issued_at=index,
    )
    return msgspec.structs.replace(plain, **changes)


def signed(index: int, accepted: bool = True, **changes: object) -> Signed:
    return sign(receipt(index, accepted, **changes), OPERATOR)


def book(folder: Path) -> ReceiptBook:
    return ReceiptBook(folder / "receipts.bin", OPERATOR.public_key, RUN, NODE)


def test_receipts_survive_a_restart_and_add_up(tmp_path: Path) -> None:
    first = book(tmp_path)
    assert first.next_index == 0
    assert first.totals == Totals(0, 0, 0)
    assert first.add(signed(3)) == receipt(3)
    assert first.add_all([signed(7, accepted=False), signed(9)]) == [receipt(7, accepted=False), receipt(9)]
    again = book(tmp_path)
    assert again.receipts() == [receipt(3), receipt(7, accepted=False), receipt(9)]
    assert again.next_index == 10
    assert again.totals == Totals(2, 1, 200)
    assert again.audit() == 3
    assert not again.repaired
    assert read_receipts(again.path) == [signed(3), signed(7, accepted=False), signed(9)]


def test_the_same_receipt_again_changes_nothing(tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(signed(1))
    size = kept.path.stat().st_size
    assert kept.add(signed(1)) is None
    assert kept.add_all([signed(1), signed(1)]) == []
    assert kept.path.stat().st_size == size
    assert kept.add_all([signed(2), signed(2)]) == [receipt(2)]


def test_a_receipt_by_another_key_run_or_node_is_not_kept(tmp_path: Path) -> None:
    kept = book(tmp_path)
    with pytest.raises(SignatureError):
        kept.add(sign(receipt(1), Identity.generate()))
    with pytest.raises(SignatureError):
        kept.add(msgspec.structs.replace(signed(1), payload=signed(2).payload))
    with pytest.raises(MalformedError, match="another run"):
        kept.add(signed(1, run_id=b"x" * 32))
    with pytest.raises(MalformedError, match="another node"):
        kept.add_all([signed(1), signed(2, node=b"x" * 32)])  # all or nothing
    assert not kept.path.exists()
    assert kept.next_index == 0


def test_two_receipts_for_one_ledger_index_are_kept_as_evidence(tmp_path: Path) -> None:
    kept = book(tmp_path)
    kept.add(signed(1))
    assert kept.add(signed(1, credit=5)) == receipt(1, credit=5)
    assert kept.add(signed(1, credit=5)) is None
    again = book(tmp_path)
    assert again.conflicts == [(receipt(1), receipt(1, credit=5))]
    assert again.totals.credit == 100
    assert again.audit() == 2


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 3000), junk=st.sampled_from([b"", b"\0" * 64]))
def test_a_tail_torn_by_a_crash_costs_only_the_unfinished_receipt(cut: int, junk: bytes) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        kept = book(folder)
        ends = [0]
        for index in range(5):
            kept.add(signed(index))
            ends.append(kept.path.stat().st_size)
        cut = min(cut, ends[-1])
        kept.path.write_bytes(kept.path.read_bytes()[:cut] + (junk if cut in ends else b""))
        whole = max(position for position, end in enumerate(ends) if end <= cut)
        again = book(folder)
        assert again.next_index == whole
        assert bool(again.repaired) == (cut not in ends or bool(junk))
        again.add_all([signed(index) for index in range(5)])
        assert book(folder).receipts() == [receipt(index) for index in range(5)]
        assert not list(folder.glob("*.damaged-*"))


@settings(max_examples=25, deadline=None)
@given(position=st.integers(0, 1500), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_and_the_whole_file_set_aside(position: int, bit: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        kept = book(folder)
        ends = [0]
        for index in range(5):
            kept.add(signed(index))
            ends.append(kept.path.stat().st_size)
        data = bytearray(kept.path.read_bytes())
        position %= len(data)
        data[position] ^= 1 << bit
        kept.path.write_bytes(bytes(data))
        with pytest.raises(MalformedError, match="damaged"):
            read_receipts(kept.path)
        again = book(folder)
        good = max(number for number, end in enumerate(ends) if end <= position)
        assert [r.ledger_index for r in again.receipts()] == list(range(good))
        assert again.repaired
        again.add_all([signed(index) for index in range(5)])
        assert book(folder).audit() == 5


def test_another_nodes_file_is_set_aside_not_mixed_in(tmp_path: Path) -> None:
    book(tmp_path).add(signed(1))
    other = ReceiptBook(tmp_path / "receipts.bin", OPERATOR.public_key, RUN, b"o" * 32)
    assert other.receipts() == []
    assert "kept as" in other.repaired
    assert read_receipts(tmp_path / "receipts.bin.damaged-1") == [signed(1)]


@pytest.mark.parametrize("step", range(3))
def test_what_is_set_aside_is_on_the_disk_before_anything_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    kept = book(tmp_path)
    kept.add_all([signed(index) for index in range(3)])
    damaged = bytearray(kept.path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    kept.path.write_bytes(damaged)
    flushed: list[int] = []
    flush = os.fsync

    def cut(descriptor: int) -> None:
        if len(flushed) == step:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)
        flushed.append(os.fstat(descriptor).st_ino)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", cut)
        with pytest.raises(StorageError):
            book(tmp_path)
    aside = [path for path in tmp_path.glob("*.damaged-*") if path.stat().st_ino in flushed]
    safe = [path.read_bytes() for path in aside] if tmp_path.stat().st_ino in flushed else []
    assert bytes(damaged) in [kept.path.read_bytes(), *safe]
    assert [item.ledger_index for item in book(tmp_path).receipts()] == [0]


def test_a_full_disk_keeps_the_book_consistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = book(tmp_path)
    kept.add(signed(1))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match="bytes are needed there"):
            kept.add(signed(2))
    assert kept.next_index == 2
    assert read_receipts(kept.path) == [signed(1)]
    assert kept.add(signed(2)) == receipt(2)
    assert book(tmp_path).next_index == 3


def test_an_unreadable_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "receipts.bin").mkdir()
    with pytest.raises(StorageError, match="cannot read the receipts"):
        book(tmp_path)
    with pytest.raises(StorageError, match="cannot read the receipts"):
        read_receipts(tmp_path / "absent")
