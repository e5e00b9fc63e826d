"""Two copies of one run's ledger: the same, one longer, or a history that was told in two ways.

Entries are compared as bytes, so that a shared prefix is one in the strict sense. Where
two histories part, the signed tree heads decide what that means: if the operator's key
signed both, it has told two stories, and the two heads are the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.ledger_entries import LedgerEntry, encode_entry
from barnraise.protocol.ledger_file import LedgerFile
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import TreeHead
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint

Relation = Literal["same", "prefix", "extension", "split"]


@dataclass(frozen=True)
class Comparison:
    """How ledger B stands to ledger A.

    Attributes:
        relation: ``same``, A is a ``prefix`` of B, A is an ``extension`` of B, or a ``split``.
        sizes: entries of A and of B.
        shared: how many leading entries are equal; where they part, the index of the first that differs.
        entries: the two at that index, where they part.
        heads: signed heads (or checkpoints) of A and B that both cover it and fit their entries: proof.
    """

    relation: Relation
    sizes: tuple[int, int]
    shared: int
    entries: tuple[LedgerEntry, LedgerEntry] | None = None
    heads: tuple[TreeHead | Head, TreeHead | Head] | None = None


def compare(a: LedgerFile, b: LedgerFile) -> Comparison:
    """Compare two open ledgers of one run; each is read once.

    Raises:
        SignatureError: a run spec is not to be believed.
        MalformedError: a file is damaged, or they are of different runs.
    """
    operator = open_run_spec(a.run_spec).operator
    open_run_spec(b.run_spec)
    if run_id_of(a.run_spec) != run_id_of(b.run_spec):
        raise MalformedError("these are the ledgers of two different runs")
    logs = (MerkleLog(), MerkleLog())
    shared, parted = 0, False
    differing: tuple[LedgerEntry, LedgerEntry] | None = None
    for one, other in zip_longest(_bytes(a.entries), _bytes(b.entries)):
        for log, item in zip(logs, (one, other), strict=True):
            if item is not None:
                log.append(item[1])
        if parted or one is None or other is None:
            continue
        if one[1] == other[1]:
            shared += 1
        else:
            parted, differing = True, (one[0], other[0])
    sizes = (len(logs[0]), len(logs[1]))
    if not parted:
        relation: Relation = (
            "same" if sizes[0] == sizes[1] else "prefix" if sizes[0] < sizes[1] else "extension"
        )
        return Comparison(relation, sizes, shared)
    run_id = run_id_of(a.run_spec)
    found = [
        _covering(ledger, log, operator, run_id, shared) for ledger, log in zip((a, b), logs, strict=True)
    ]
    heads = (found[0], found[1]) if found[0] is not None and found[1] is not None else None
    return Comparison("split", sizes, shared, differing, heads)


def _bytes(entries: Iterator[LedgerEntry]) -> Iterator[tuple[LedgerEntry, bytes]]:
    return ((entry, encode_entry(entry)) for entry in entries)


def _covering(
    ledger: LedgerFile, log: MerkleLog, operator: bytes, run_id: bytes, index: int
) -> TreeHead | Head | None:
    """The smallest head over entry ``index`` that the operator signed and the entries bear out."""
    best: TreeHead | Head | None = None
    if ledger.checkpoint is not None:
        with suppress(SignatureError, MalformedError):
            seen = open_checkpoint(ledger.checkpoint, log_key(run_id, operator))
            if index < seen.size <= len(log) and seen.root == log.root(seen.size):
                best = seen
    for signed in ledger.heads:
        try:
            head = open_signed(signed, TreeHead, operator)
        except (SignatureError, MalformedError):
            continue
        fits = head.run_id == run_id and index < head.size <= len(log) and head.root == log.root(head.size)
        if fits and (best is None or head.size < best.size):
            best = head
    return best
