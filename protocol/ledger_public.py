"""What was published of a ledger, held against the ledger itself: checkpoints, and its static files.

An audit (``barnraise.protocol.ledger``) has the whole log's hashes in the end; these
functions look at what somebody else holds of the same log, and say what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from barnraise.protocol.cosignature import node_cosignatures, node_witness
from barnraise.protocol.errors import BarnraiseError, MalformedError
from barnraise.protocol.ledger_problems import Problem
from barnraise.protocol.merkle import MerkleLog, leaf_hash
from barnraise.protocol.notes import Ed25519Key, parse_note
from barnraise.protocol.tlog_checkpoint import open_checkpoint
from barnraise.protocol.tlog_tiles import ENTRIES, FULL, Tile, hash_tile, tiles_for, unbundle

CLOCKS_MS = 600_000  # by how much the clocks of honest people differ at most
Read = Callable[[str], bytes | None]
"""Gives the file at a log's path, or None."""


@dataclass(frozen=True)
class Published:
    """A checkpoint that somebody holds: ``note`` as it was found, ``source`` in words for a person."""

    note: bytes
    source: str


@dataclass
class Held:
    """What came of holding checkpoints against a ledger: how many fit, and how many are of more entries."""

    fitting: int = 0
    newer: int = 0


def hold_against(
    published: Sequence[Published], key: Ed25519Key, log: MerkleLog, signed_ms: int, held: Held
) -> Iterator[Problem]:
    """Say which checkpoints this log cannot have.

    One of more entries than are here is newer, unless a node says that it saw it before ``signed_ms``
    (ms since the Unix epoch: when the ledger's own newest head was signed): then entries are missing.
    """
    for item in published:
        try:
            head = open_checkpoint(item.note, key)
        except BarnraiseError as error:
            yield Problem(None, "checkpoint-signed", f"the checkpoint of {item.source}: {error}")
            continue
        seen = node_cosignatures(head.checkpoint.text, parse_note(item.note).signatures)
        if head.size <= len(log):
            if log.root(head.size) == head.root:
                held.fitting += 1
            else:
                yield Problem(
                    None,
                    "two-ledgers",
                    f"the operator signed a checkpoint of {head.size} entries, held by {item.source}, with "
                    "another root than the first of this ledger have, which it signed as well: keep both as "
                    "evidence",
                )
        elif earlier := [name for name, at in seen.items() if at * 1000 < signed_ms - CLOCKS_MS]:
            yield Problem(
                None,
                "entries-missing",
                f"the operator signed a checkpoint of {head.size} entries, held by {item.source}, which "
                f"{earlier[0]} says that it saw before this ledger of {len(log)} was signed: it was cut, or "
                "set back (unless that node's word or clock is wrong)",
            )
        else:
            held.newer += 1


def look_at_files(read: Read, note: bytes | None, key: Ed25519Key, log: MerkleLog) -> Iterator[Problem]:
    """Say which static files of a run are not this log's; nothing where nothing was published.

    ``note``: the run's checkpoint as it was before the log was read, which may have grown since.
    """
    if note is None:
        return
    try:
        head = open_checkpoint(note, key)
        signatures = parse_note(note).signatures
    except BarnraiseError as error:
        yield Problem(None, "file-damaged", f"log/checkpoint: {error}")
        return
    good = node_cosignatures(head.checkpoint.text, signatures)
    for item in signatures:
        if node_witness(item.name) is not None and item.name not in good:
            yield Problem(
                None, "file-damaged", f"log/checkpoint: a line of {item.name} is not its cosignature"
            )
    if head.size > len(log) or log.root(head.size) != head.root:
        yield Problem(
            None,
            "two-ledgers",
            f"log/checkpoint is of {head.size} entries that are not those of the journal: one of the two is "
            "an old copy, or was altered",
        )
        return
    for tile in tiles_for(head.size):
        if not _holds(read, tile, log):
            yield Problem(
                None,
                "file-damaged",
                f"log/{tile.path} is missing or damaged: a start of the coordinator mends it",
            )


def _holds(read: Read, tile: Tile, log: MerkleLog) -> bool:
    data = read(tile.path)
    if data is None and tile != tile.whole:
        data = read(tile.whole.path)  # it was filled up meanwhile
    if data is None:
        return False
    if tile.level != ENTRIES:
        return data[: tile.limit] == hash_tile(log, tile)
    try:
        entries = unbundle(data)[: tile.width]
    except MalformedError:
        return False
    hashes = b"".join(leaf_hash(entry) for entry in entries)
    return hashes == log.hashes(0, tile.index * FULL, tile.width)
