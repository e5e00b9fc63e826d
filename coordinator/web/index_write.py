"""Keeps ``RUN/web.sqlite`` up with the ledger: one row an entry, one a node with all that it did."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from barnraise.coordinator.web.index_schema import KIND, OTHER, SPAN_BITS, connect, key_of
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.ledger_entries import (
    BlockLeased,
    ClawedBack,
    LeaseIssued,
    LedgerEntry,
    Restored,
    Submitted,
    VersionPublished,
    decode_entry,
)
from barnraise.protocol.ledger_standings import HALF_LIFE_MS, Standing, count
from barnraise.protocol.wire import printable

_REMEMBERED: Final = 65_536  # leases; older ones are looked up
_NODES_KEPT: Final = 16_384  # standings and numbers in memory; others are looked up
_STANDING: Final = tuple(
    field.name for field in fields(Standing) if field.name not in ("node", "names", "recent")
)
_COLUMNS: Final = ("no", "key", "peer", "name", "names", *_STANDING, "recent")
_UPSERT: Final = (
    f"INSERT OR REPLACE INTO nodes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
)

Use = tuple[bytes, int]
"""A submission, and the version that it was used in; -1: no batch wanted it."""


def scaled(credit: int, earned_ms: int, epoch_ms: int) -> float:
    """What credit adds to the stored average: as of the ledger's first entry, so that no order changes."""
    return credit * math.exp2(min(1000.0, (earned_ms - epoch_ms) / HALF_LIFE_MS))


class IndexWriter:
    """The one writer. Blocking; one call at a time.

    Attributes:
        size: how many entries are in it. root: of the ledger of that size.
        events: how many of the journal's events were looked through.

    Raises (all of it):
        sqlite3.Error: the file is damaged, of another release, or the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self._db = connect(path)
        self.size, self.root, self.events, self._epoch = self._db.execute(
            "SELECT size, root, events, epoch FROM meta"
        ).fetchone()
        self._leases: dict[int, tuple[int | None, int | None, int | None]] = {}
        self._numbers: dict[bytes, int] = {}
        self._standings: dict[int, Standing] = {}
        self._changed: set[int] = set()
        row = self._db.execute("SELECT coalesce(max(no), 0) FROM nodes").fetchone()
        self._next_node: int = row[0] + 1

    def close(self) -> None:
        self._db.close()

    def add(self, entries: Sequence[bytes], uses: Iterable[Use], root: bytes, events: int) -> None:
        """Note the entries from number ``size`` on, all or none.

        ``root``: of the ledger with them. ``events``: how many of the journal's are done with them.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._rows(entries)
            for submission, version in uses:
                self._db.execute("INSERT OR REPLACE INTO uses VALUES (?, ?)", (key_of(submission), version))
            for number in self._changed:
                self._put(number, self._standings[number])
            size, row = self.size + len(entries), (root, events, self._epoch)
            self._db.execute("UPDATE meta SET size = ?, root = ?, events = ?, epoch = ?", (size, *row))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._forget()
            raise
        self.size, self.root, self.events = size, root, events
        self._changed.clear()
        if len(self._leases) > _REMEMBERED or len(self._numbers) > _NODES_KEPT:
            self._forget()

    def _forget(self) -> None:
        for known in (self._leases, self._numbers, self._standings, self._changed):
            known.clear()
        row = self._db.execute("SELECT coalesce(max(no), 0) FROM nodes").fetchone()
        self._next_node = row[0] + 1

    def _rows(self, entries: Sequence[bytes]) -> None:
        spans: dict[int, tuple[int, int]] = {}
        versions: dict[int, tuple[int, int]] = {}
        for index, data in enumerate(entries, self.size):
            entry = decode_entry(data)
            if not index:
                self._epoch = entry.at_ms
            node, unit, version, lease = self._place(entry)
            if node is not None:
                self._count(node, entry, lease)
            at = entry.at_ms
            self._db.execute(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (index, at, KIND.get(type(entry).__name__, OTHER), node, unit, version, lease, _ref(entry)),
            )
            low, high = spans.get(index >> SPAN_BITS, (at, at))
            spans[index >> SPAN_BITS] = min(low, at), max(high, at)
            if version is not None:
                versions[version] = versions.get(version, (index, index))[0], index
        for block, span in spans.items():
            self._db.execute(
                "INSERT INTO spans VALUES (?, ?, ?) ON CONFLICT (block) DO UPDATE SET "
                "lo = min(lo, excluded.lo), hi = max(hi, excluded.hi)",
                (block, *span),
            )
        for number, span in versions.items():
            self._db.execute(
                "INSERT INTO versions VALUES (?, ?, ?) ON CONFLICT (version) DO UPDATE SET "
                "first = min(first, excluded.first), last = max(last, excluded.last)",
                (number, *span),
            )

    def _place(self, entry: LedgerEntry) -> tuple[int | None, int | None, int | None, int | None]:
        """Node's number, unit, version and lease of an entry: its own, or its lease's."""
        key: bytes | None = getattr(entry, "node", None)
        lease_id: bytes | None = getattr(entry, "lease_id", None)
        node = None if key is None else self._number(key)
        lease = None if lease_id is None else key_of(lease_id)
        if isinstance(entry, LeaseIssued | BlockLeased):
            assert lease is not None
            self._leases.setdefault(lease, (node, entry.unit_id, entry.policy_version))
            return node, entry.unit_id, entry.policy_version, lease
        if isinstance(entry, VersionPublished):
            return None, None, entry.version, None
        if lease is None:
            return node, None, None, None
        known = self._leases.get(lease)
        if known is None:
            row = self._db.execute(
                "SELECT node, unit, version FROM entries WHERE lease = ? ORDER BY idx LIMIT 1", (lease,)
            ).fetchone()
            known = self._leases[lease] = (None, None, None) if row is None else row
        return known[0] if node is None else node, known[1], known[2], lease

    def _number(self, key: bytes) -> int:
        number = self._numbers.get(key)
        if number is None:
            row = self._db.execute("SELECT no FROM nodes WHERE key = ?", (key,)).fetchone()
            if row is None:
                number, self._next_node = self._next_node, self._next_node + 1
                self._standings[number] = Standing(key, 0, 0)
                self._changed.add(number)
            else:
                number = row[0]
            self._numbers[key] = number
        return number

    def _count(self, number: int, entry: LedgerEntry, lease: int | None) -> None:
        standing = self._standings.get(number)
        if standing is None:
            standing = self._standings[number] = self._get(number)
        if not standing.joined_ms:
            standing.joined_ms = entry.at_ms

        def earn(node: Standing, submission_id: bytes, at_ms: int, credit: int) -> None:
            moved = isinstance(entry, ClawedBack | Restored)  # it counts as of when it was earned
            earned = self._earned(lease) if moved else None
            node.credit += credit
            node.recent += scaled(credit, at_ms if earned is None else earned, self._epoch)
            if not node.credit:
                node.recent = 0.0  # nothing is left but rounding

        count(standing, entry, earn)
        self._changed.add(number)

    def _earned(self, lease: int | None) -> int | None:
        row = self._db.execute(
            "SELECT at_ms FROM entries WHERE lease = ? AND +kind IN (?, ?) ORDER BY idx LIMIT 1",
            (lease, KIND["Judged"], KIND["Reviewed"]),
        ).fetchone()
        return None if row is None else row[0]

    def _get(self, number: int) -> Standing:
        row = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM nodes WHERE no = ?", (number,)).fetchone()
        return standing_of(row)

    def _put(self, number: int, node: Standing) -> None:
        self._db.execute(
            _UPSERT,
            (
                number,
                node.node,
                peer_id_of(node.node),
                printable(node.name, 64),
                json.dumps(node.names),
                *(getattr(node, name) for name in _STANDING),
                node.recent,
            ),
        )


COLUMNS: Final = ", ".join(_COLUMNS)


def standing_of(row: Sequence[object]) -> Standing:
    """A row of ``COLUMNS`` as a standing, ``recent`` as it is stored."""
    values = dict(zip(_COLUMNS, row, strict=True))
    kept = {name: values[name] for name in (*_STANDING, "recent")}
    return Standing(node=values["key"], names=json.loads(str(values["names"])), **kept)  # type: ignore[arg-type]


def _ref(entry: LedgerEntry) -> int | None:
    if isinstance(entry, Submitted):
        return key_of(entry.submission_id)
    return key_of(entry.cause) if isinstance(entry, ClawedBack | Restored) else None
