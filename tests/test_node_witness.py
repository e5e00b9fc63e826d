from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from tlog_support import KEY, entries_of, head_of, log_of, tile_bytes

from barnraise.node import witness as belt
from barnraise.node.receipts import ReceiptBook
from barnraise.node.witness import PATIENCE_S, FetchTiles, Witness, compare_receipts
from barnraise.protocol.cosignature import node_cosignatures, witness_name
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import SignatureError, StorageError
from barnraise.protocol.evidence import check_evidence
from barnraise.protocol.identity import Identity
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.notes import Note, parse_note, parse_signatures
from barnraise.protocol.tlog_checkpoint import Checkpoint
from barnraise.protocol.tlog_tiles import Tile
from barnraise.protocol.witness import Conflict, Unproven
from barnraise.protocol.witness_store import WitnessStore
from tests.test_ledger import BEN, RUN, receipt_of
from tests.test_ledger import OPERATOR as RUN_OPERATOR

NODE = Identity.from_private_bytes(bytes([9]) * 32)
ALL, OTHERS = entries_of(300), [*entries_of(100), *entries_of(200, "!")]
LOG, FORK = log_of(ALL), log_of(OTHERS)  # the same first 100 entries


def serving(log: MerkleLog, size: int) -> FetchTiles:
    """What a log of that size gives."""

    async def fetch(tiles: Sequence[Tile]) -> dict[Tile, bytes] | None:
        await trio.lowlevel.checkpoint()
        small = log_of([ALL, OTHERS][log is FORK][:size])
        try:
            return {tile: tile_bytes(small, [], tile) for tile in tiles}
        except IndexError:
            return None

    return fetch


def witness_in(folder: Path) -> Witness:
    return Witness(folder, KEY, NODE)


def said(witness: Witness) -> Checkpoint | None:
    return None if witness.last is None else witness.last.checkpoint


async def test_a_node_cosigns_growth_once_and_remembers_it(tmp_path: Path) -> None:
    for size in (5, 120, 300):
        witness = witness_in(tmp_path)  # a restart in between
        note = head_of(LOG, size).note
        line, alarms = await witness.hear(note, serving(LOG, size), 1_700_000_000)
        assert alarms == []
        assert line is not None
        signatures = (*parse_note(note).signatures, *parse_signatures(line))
        assert node_cosignatures(parse_note(note).text, signatures) == {
            witness_name(NODE.peer_id): 1_700_000_000
        }
        cosigned = Note(parse_note(note).text, signatures).encode()
        assert witness.last is not None
        assert witness.last.note == cosigned  # so that who reads it sees since when
        assert await witness.hear(cosigned, serving(LOG, size), 1) == (None, [])
    assert said(witness) == head_of(LOG, 300).checkpoint
    assert await witness.hear(head_of(LOG, 40).note, serving(LOG, 300), 1) == (None, [])  # old news


@pytest.mark.parametrize(("first", "second"), [(200, 200), (150, 300), (128, 256), (300, 180)])
async def test_a_split_view_raises_an_alarm_with_both_heads(tmp_path: Path, first: int, second: int) -> None:
    witness = witness_in(tmp_path)
    await witness.hear(head_of(LOG, first).note, serving(LOG, first), 1)
    larger = (LOG, first) if first > second else (FORK, second)
    line, (alarm,) = await witness.hear(head_of(FORK, second).note, serving(*larger), 2)
    assert line is None
    assert "SPLIT VIEW" in alarm
    (path,) = tmp_path.glob("evidence-split-view-*.json")
    assert str(path) in alarm
    found = check_evidence(path.read_bytes())
    verdict = found.trouble
    assert found.key == KEY
    assert isinstance(verdict, Conflict)
    assert {verdict.smaller.root, verdict.larger.root} == {LOG.root(first), FORK.root(second)}
    # told once; and nothing more of this log is cosigned, after a restart neither
    assert await witness.hear(head_of(FORK, second).note, serving(*larger), 3) == (None, [])
    assert await witness_in(tmp_path).hear(head_of(LOG, 300).note, serving(LOG, 300), 4) == (None, [])


async def test_a_head_without_a_proof_waits_and_is_told_of_in_the_end(
    tmp_path: Path, autojump_clock: object
) -> None:
    witness = witness_in(tmp_path)
    mine, other = head_of(LOG, 150).note, head_of(FORK, 290).note
    assert (await witness.hear(mine, serving(LOG, 150), 1))[0] is not None
    assert await witness.hear(other, serving(LOG, 150), 2) == (None, [])  # from a peer: not there yet
    assert said(witness) == head_of(LOG, 150).checkpoint
    await trio.sleep(PATIENCE_S + 1)
    _, (alarm,) = await witness.hear(mine, serving(LOG, 150), 3)
    assert "gave no proof" in alarm
    (path,) = tmp_path.glob("evidence-unproven-*.json")
    assert isinstance(check_evidence(path.read_bytes()).trouble, Unproven)
    assert not witness.convicted


async def test_a_peers_head_is_judged_as_soon_as_the_coordinator_has_passed_it(tmp_path: Path) -> None:
    witness = witness_in(tmp_path)
    await witness.hear(head_of(LOG, 150).note, serving(LOG, 150), 1)
    assert await witness.hear(head_of(FORK, 250).note, serving(LOG, 150), 2) == (None, [])
    line, (alarm,) = await witness.hear(head_of(LOG, 300).note, serving(LOG, 300), 3)
    assert "SPLIT VIEW" in alarm
    assert line is None


async def test_false_tiles_neither_convict_nor_convince(tmp_path: Path) -> None:
    async def lie(tiles: Sequence[Tile]) -> dict[Tile, bytes]:
        await trio.lowlevel.checkpoint()
        return {tile: bytes(tile.limit) for tile in tiles}

    witness = witness_in(tmp_path)
    await witness.hear(head_of(LOG, 150).note, serving(LOG, 150), 1)
    assert await witness.hear(head_of(LOG, 300).note, lie, 2) == (None, [])
    assert said(witness) == head_of(LOG, 150).checkpoint
    assert (await witness.hear(head_of(LOG, 300).note, serving(LOG, 300), 3))[0] is not None


async def test_what_the_operator_did_not_sign_is_not_heard(tmp_path: Path) -> None:
    note = head_of(LOG, 5).note.replace(b"\n5\n", b"\n6\n")
    with pytest.raises(SignatureError):
        await witness_in(tmp_path).hear(note, serving(LOG, 5), 1)


def test_a_witness_without_its_memory_is_none(tmp_path: Path) -> None:
    WitnessStore(tmp_path).keep(KEY, head_of(LOG, 5))
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"")
    with pytest.raises(StorageError, match="says nothing"):
        witness_in(tmp_path)


def test_two_receipts_for_one_entry_are_told_once(tmp_path: Path) -> None:
    book = ReceiptBook(tmp_path / "receipts.bin", RUN_OPERATOR.public_key, RUN, BEN)
    first = receipt_of(15)
    book.add(sign(first, RUN_OPERATOR))
    book.add(sign(msgspec.structs.replace(first, credit=1), RUN_OPERATOR))
    said: list[str] = []
    ctx: Any = SimpleNamespace(receipts=book, say=lambda text, level: said.append(text))
    told: set[int] = set()
    for _ in range(2):
        compare_receipts(ctx, told)
    (alarm,) = said
    assert "two receipts for entry 15" in alarm
    assert str(book.path) in alarm


async def test_a_disk_that_stays_full_is_told_once_an_hour(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    """Peers are asked many times a minute, and each answer meets the same disk."""

    async def full(*what: object) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(belt, "fetch_files", full)
    told: list[str] = []
    ctx: Any = SimpleNamespace(network=None, coordinator="", say=lambda text, level: told.append(text))
    one: Any = SimpleNamespace(failed_at=None)
    for _ in range(int(2 * belt.SAY_AGAIN_S / 20) + 1):
        await belt._ask(ctx, one, "peer")
        await trio.sleep(20)
    assert len(told) == 3  # at once, and after each hour
