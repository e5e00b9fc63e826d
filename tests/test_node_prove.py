"""Command ``prove``: a node's receipts, followed through the run's public log up to a cosigned head."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_ledger import BAD, STORY, published, receipt_of
from tlog_support import log_of, tile_bytes

from barnraise.node import prove as module
from barnraise.node.prove import _needed, hold_against_log, prove
from barnraise.protocol.errors import BarnraiseError, MalformedError
from barnraise.protocol.ledger import encode_entry
from barnraise.protocol.messages import Receipt
from barnraise.protocol.tlog_tiles import ENTRIES, FULL, Tile

ENTRIES_OF_RUN = [*STORY, *(published(version) for version in range(1, 700))]
DATA = [encode_entry(entry) for entry in ENTRIES_OF_RUN]
LOG = log_of(DATA)
MINE = [receipt_of(8), receipt_of(10, verdict=BAD), receipt_of(15)]


def tiles(size: int, data: list[bytes] = DATA) -> dict[Tile, bytes]:
    """What a command at entry 8 asks for, no more."""
    log = log_of(data[:size])
    return {tile: tile_bytes(log, data[:size], tile) for tile in _needed(8, size)}


@pytest.mark.parametrize("size", [16, FULL, FULL + 1, 700])
def test_receipts_are_followed_up_to_the_head_by_one_bundle(size: int) -> None:
    asked = tiles(size)
    assert sum(tile.level == ENTRIES for tile in asked) == 1
    assert hold_against_log(MINE, size, LOG.root(size), asked) == ([8, 10, 15], [])


def test_a_receipt_that_the_log_contradicts_is_named_with_what_differs() -> None:
    richer = msgspec.structs.replace(receipt_of(8), credit=999)
    nothing = msgspec.structs.replace(receipt_of(15), ledger_index=3)
    proven, wrong = hold_against_log([richer, nothing, MINE[1]], 700, LOG.root(700), tiles(700))
    assert proven == [10]
    assert [index for index, _ in wrong] == [8, 3]
    assert "otherwise: credit" in wrong[0][1]
    assert "no verdict" in wrong[1][1]


@pytest.mark.parametrize("place", [8, 300, 699], ids=["own", "sibling", "last"])
def test_a_log_that_does_not_lead_to_the_head_proves_nothing(place: int) -> None:
    other = [*DATA]
    other[place] = encode_entry(published(9_999))
    with pytest.raises(MalformedError):
        hold_against_log([receipt_of(8)], 700, LOG.root(700), tiles(700, other))
    forged = tiles(700)
    bundle = next(tile for tile in forged if tile.level == ENTRIES)
    forged[bundle] = tiles(700, [*other[:8], DATA[10], *other[9:]])[bundle]
    with pytest.raises(MalformedError):  # the bundle is not what the hashes are of
        hold_against_log([receipt_of(8)], 700, LOG.root(700), forged)


def node(receipts: list[Receipt] = MINE, size: int = 700, **changes: Any) -> Any:
    head = {"size": size, "root": LOG.root(size).hex() if size else ""}
    parts: dict[str, Any] = {
        "receipts": SimpleNamespace(receipts=lambda: receipts),
        "facts": SimpleNamespace(witness=head),
        "session": object(),
        "coordinator": "12D3",
        "network": None,
    }
    return SimpleNamespace(**parts | changes)


def serving(gone: str = "none") -> Any:
    """A coordinator that has these tiles, but for those with ``gone`` in their path."""

    async def fetch(network: Any, peer_id: str, paths: Sequence[str]) -> list[bytes | None]:
        known = {tile.path: data for tile, data in tiles(700).items() if gone not in tile.path}
        known |= {tile.whole.path: data for tile, data in tiles(700).items() if tile != tile.whole}
        return [known.get(path) for path in paths]

    return fetch


@pytest.mark.parametrize("gone", ["none", ".p/"], ids=["all", "grown"])
async def test_the_command_proves_what_shares_a_bundle(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch_files", serving(gone))
    answer = await prove(node(), {"index": 8})
    assert answer["ok"]
    assert answer["proven"] == [8, 10, 15]
    assert answer["text"] == "3 of 3 receipts are in the log of 700 entries as they say"
    bad = await prove(node([msgspec.structs.replace(receipt_of(8), credit=1)]), {"index": 8})
    assert not bad["ok"]
    assert "#8: the log says otherwise: credit" in bad["text"]


async def test_tiles_that_are_nowhere_are_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch_files", serving("tile"))
    monkeypatch.setattr(Tile, "whole", property(lambda tile: tile))
    with pytest.raises(BarnraiseError, match="when this node saw the next head"):
        await prove(node(), {"index": 8})


@pytest.mark.parametrize(
    ("ctx", "index", "why"),
    [
        (node(), 9, "no receipt #9"),
        (node(), True, "must be a receipt's ledger index"),
        (node(), -1, "must be a receipt's ledger index"),
        (node(size=0), 8, "seen no head"),
        (node(size=12), 15, "newer than the newest head"),
        (node(session=None), 8, "not connected"),
        (node([]), 8, "no receipt #8"),
    ],
    ids=["unknown", "bool", "negative", "no-head", "newer", "offline", "not-joined"],
)
async def test_what_cannot_be_proven_now_says_why(ctx: Any, index: Any, why: str) -> None:
    with pytest.raises(BarnraiseError, match=why):
        await prove(ctx, {"index": index})
