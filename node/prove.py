"""Command ``prove``: hold own receipts against the run's public log, below the head that this node cosigned.

Each entry's hash is followed up to the root of that head, so that what comes out does not
rest on the coordinator's word. Entries come in bundles of 256: those receipts of a bundle
are all held against it, for one bundle and one tile a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from barnraise.node.context import Context
from barnraise.protocol.errors import BarnraiseError, MalformedError, RefusedError
from barnraise.protocol.ledger import (
    ClawedBack,
    Judged,
    Restored,
    Reviewed,
    decode_entry,
    receipt_differs,
)
from barnraise.protocol.log_stream import fetch_files
from barnraise.protocol.merkle import verify_inclusion
from barnraise.protocol.messages import Receipt
from barnraise.protocol.network import Network
from barnraise.protocol.tlog_tiles import ENTRIES, FULL, Tile, TileTree, tile_of


async def prove(ctx: Context, arguments: dict[str, Any]) -> dict[str, Any]:
    """Prove the receipts that share a bundle with entry ``index``.

    Returns:
        ``ok``, ``text``, ``size`` and ``root`` (hex) of the head, ``proven``: indices of entries that are in
        the log as the receipts say, ``wrong``: pairs of index and text.

    Raises:
        BarnraiseError: no such receipt, no head yet, a head that is older, not connected; the text says why.
    """
    index = arguments.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 2**53:
        raise RefusedError("bad-argument", "index must be a receipt's ledger index")
    receipts = [] if ctx.receipts is None else ctx.receipts.receipts()
    if all(receipt.ledger_index != index for receipt in receipts):
        raise BarnraiseError(f"this node has no receipt #{index}")
    head = ctx.facts.witness or {}
    size, root = int(head.get("size", 0)), bytes.fromhex(str(head.get("root", "")))
    if not size:
        raise BarnraiseError("this node has seen no head of the ledger yet: it asks once a minute")
    if index >= size:
        raise BarnraiseError(
            f"entry {index} is newer than the newest head that this node saw ({size} entries): "
            "try again in a minute"
        )
    if ctx.session is None or not ctx.coordinator:
        raise BarnraiseError("not connected to the coordinator, which has the log: try again when it is back")
    bundle = index // FULL
    chosen = [r for r in receipts if r.ledger_index // FULL == bundle and r.ledger_index < size]
    tiles = await _fetch(ctx.network, ctx.coordinator, _needed(index, size))
    proven, wrong = hold_against_log(chosen, size, root, tiles)
    text = f"{len(proven)} of {len(chosen)} receipts are in the log of {size:,} entries as they say"
    return {
        "ok": not wrong,
        "text": text + (f"; #{wrong[0][0]}: {wrong[0][1]}" if wrong else ""),
        "size": size,
        "root": root.hex(),
        "proven": proven,
        "wrong": wrong,
    }


def hold_against_log(
    receipts: Sequence[Receipt], size: int, root: bytes, tiles: dict[Tile, bytes]
) -> tuple[list[int], list[list[Any]]]:
    """Which receipts a log of ``size`` entries and that root holds, by anybody's tiles; why not the others.

    Raises:
        MalformedError: the tiles are not of that log, which says nothing about the receipts.
    """
    tree = TileTree(size, tiles.__getitem__)
    proven: list[int] = []
    wrong: list[list[Any]] = []
    for receipt in receipts:
        index = receipt.ledger_index
        data = tree.entry(index)
        if not verify_inclusion(data, index, size, tree.inclusion_proof(index), root):
            raise MalformedError("the coordinator sent a log that does not lead to the head that it signed")
        entry = decode_entry(data)
        if not isinstance(entry, Judged | Reviewed | ClawedBack | Restored):
            wrong.append([index, "that entry of the log is no verdict: keep the receipt, it proves it"])
        elif differing := receipt_differs(receipt, entry):
            wrong.append([index, f"the log says otherwise: {', '.join(differing)}; keep the receipt"])
        else:
            proven.append(index)
    return proven, wrong


def _needed(index: int, size: int) -> list[Tile]:
    """The bundle of an entry, and the hash tiles between all its entries and the root."""
    asked: dict[Tile, None] = {tile_of(ENTRIES, index // FULL, size): None}

    def note(tile: Tile) -> bytes:
        asked[tile] = None
        return bytes(tile.limit)

    tree = TileTree(size, note)
    tree.leaf(index)
    tree.inclusion_proof(index)
    return list(asked)


async def _fetch(network: Network, peer_id: str, tiles: Sequence[Tile]) -> dict[Tile, bytes]:
    found = dict(zip(tiles, await fetch_files(network, peer_id, [tile.path for tile in tiles]), strict=True))
    gone = [tile for tile in tiles if found[tile] is None]
    instead = await fetch_files(network, peer_id, [tile.whole.path for tile in gone]) if gone else []
    whole = dict(zip(gone, instead, strict=True))
    tiles_of_log: dict[Tile, bytes] = {}
    for tile in tiles:
        data = found[tile] or whole.get(tile)
        if data is None:
            raise BarnraiseError(
                "the coordinator has the log's newest tiles only: try again when this node saw the next head"
            )
        tiles_of_log[tile] = data
    return tiles_of_log
