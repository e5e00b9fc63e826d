"""Questions to ``RUN/web.sqlite``: each bounded in rows and in time, however long the history is."""

from __future__ import annotations

import math
import queue
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from barnraise.coordinator.web.index_schema import (
    KIND,
    OTHER,
    RARE,
    SPAN_BITS,
    connect_to_read,
    key_of,
    keys_between,
)
from barnraise.coordinator.web.index_write import COLUMNS, standing_of
from barnraise.protocol.ledger_places import Filter
from barnraise.protocol.ledger_standings import HALF_LIFE_MS, Standing, decay

READERS: Final = 3
BUDGET_S: Final = 0.1  # of one search; it then says how far it came
UNIT_ROWS: Final = 500
_FIRST_WINDOW: Final = 8192  # entries
_LARGEST_WINDOW: Final = 262_144


@dataclass(frozen=True, slots=True)
class Row:
    """Where an entry belongs."""

    index: int
    node: bytes | None
    name: str
    unit: int | None
    version: int | None


@dataclass(frozen=True, slots=True)
class Page:
    """Rows, newest first. ``seen``: entries [low, high) were looked through; ``whole``: to the log's end."""

    rows: tuple[Row, ...]
    low: int
    high: int
    older: bool  # there may be more below ``low``
    newer: bool


class IndexReader:
    """Answers in any thread, ``READERS`` at a time; others wait.

    Raises (all of it):
        sqlite3.Error: the file is not there yet, or damaged.
    """

    def __init__(self, path: Path, readers: int = READERS) -> None:
        self._path = path
        self._idle: queue.SimpleQueue[sqlite3.Connection | None] = queue.SimpleQueue()
        for _ in range(readers):
            self._idle.put(None)

    def close(self) -> None:
        """Close what is idle; nothing may be asked any more."""
        while not self._idle.empty():
            database = self._idle.get()
            if database is not None:
                database.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        database = self._idle.get()
        try:
            if database is None:
                database = connect_to_read(self._path)
            yield database
        except sqlite3.Error:
            if database is not None:
                database.close()  # the file may have been made anew
                database = None
            raise
        finally:
            self._idle.put(database)

    def size(self) -> int:
        """How many entries are in it."""
        with self._reading() as db:
            found: int = db.execute("SELECT size FROM meta").fetchone()[0]
            return found

    def search(
        self,
        wanted: Filter,
        limit: int,
        *,
        before: int | None = None,
        after: int | None = None,
        budget_s: float = BUDGET_S,
    ) -> Page:
        """The newest ``limit`` entries that pass, below ``before`` if given; or the first from ``after``."""
        with self._reading() as db:
            size = db.execute("SELECT size FROM meta").fetchone()[0]
            low, high = _bounds(db, wanted, size)
            if after is not None:
                low = max(low, after)
            elif before is not None:
                high = min(high, before)
            where, values = _conditions(db, wanted)
            if where is None or low >= high:
                return Page((), low, low, older=False, newer=False)
            upwards = after is not None
            found, reached = _walk(db, where, values, low, high, limit, upwards, budget_s)
        if upwards:
            more, found = len(found) > limit, found[:limit]
            top = (found[-1].index + 1 if more else reached) if found else reached
            return Page(tuple(reversed(found)), low, top, older=low > 0, newer=more or reached < high)
        more, found = len(found) > limit, found[:limit]
        bottom = found[-1].index if more else reached
        newer = before is not None and before < size
        return Page(tuple(found), bottom, high, older=more or reached > low, newer=newer)

    def unit(self, number: int) -> list[Row]:
        """A unit's entries and what was taken back because of it, oldest first; ``UNIT_ROWS`` at most."""
        with self._reading() as db:
            rows = _rows(db, "e.unit = ?", (number,))
            submissions = db.execute(
                "SELECT ref FROM entries WHERE unit = ? AND +kind = ? LIMIT ?",
                (number, KIND["Submitted"], UNIT_ROWS),
            ).fetchall()
            for (submission,) in submissions:
                caused = (KIND["ClawedBack"], KIND["Restored"])
                rows += _rows(db, "e.ref = ? AND +e.kind IN (?, ?)", (submission, *caused))
        unique = {row.index: row for row in rows}
        return [unique[index] for index in sorted(unique)][:UNIT_ROWS]

    def units_named(self, prefix: str) -> list[int]:
        """Units of leases and submissions whose ids begin with these hex digits; six at most."""
        low, high = keys_between(prefix)
        with self._reading() as db:
            rows = db.execute(
                "SELECT DISTINCT unit FROM (SELECT unit FROM entries WHERE lease BETWEEN ? AND ? "
                "AND unit IS NOT NULL UNION ALL SELECT unit FROM entries WHERE ref BETWEEN ? AND ? "
                "AND +kind = ? AND unit IS NOT NULL) LIMIT 6",
                (low, high, low, high, KIND["Submitted"]),
            )
            return sorted(row[0] for row in rows)

    def used_in(self, submissions: Sequence[bytes]) -> dict[bytes, int]:
        """Which version each was used in; -1: no batch wanted it. Those that still wait are left out."""
        found = {}
        with self._reading() as db:
            for submission in submissions:
                row = db.execute(
                    "SELECT version FROM uses WHERE submission = ?", (key_of(submission),)
                ).fetchone()
                if row is not None:
                    found[submission] = row[0]
        return found

    def nodes(self, by: str, offset: int, limit: int, now_ms: int) -> tuple[int, list[Standing]]:
        """How many nodes there are, and ``limit`` of them by ``credit`` or ``recent`` from ``offset`` on."""
        if by not in ("credit", "recent"):
            raise ValueError("nodes are ranked by credit or by recent")
        with self._reading() as db:
            total, epoch = db.execute("SELECT (SELECT count(*) FROM nodes), epoch FROM meta").fetchone()
            rows = db.execute(
                f"SELECT {COLUMNS} FROM nodes ORDER BY {by} DESC, no LIMIT ? OFFSET ?", (limit, offset)
            ).fetchall()
        return total, [_aged(standing_of(row), now_ms, epoch) for row in rows]

    def find_nodes(self, text: str, now_ms: int, limit: int = 6) -> list[Standing]:
        """Nodes of that peer id, that end or beginning of one, or that name; the first of these that fits."""
        plain = text.strip().removeprefix("..")
        escaped = plain.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        tries: list[tuple[str, str]] = [("peer = ?", plain)]
        if 4 <= len(plain) <= 64:
            tries += [("peer LIKE ? ESCAPE '\\'", f"%{escaped}"), ("peer LIKE ? ESCAPE '\\'", f"{escaped}%")]
        tries.append(("name = ?", text.strip()))
        with self._reading() as db:
            epoch = db.execute("SELECT epoch FROM meta").fetchone()[0]
            for where, value in tries:
                rows = db.execute(f"SELECT {COLUMNS} FROM nodes WHERE {where} LIMIT ?", (value, limit))
                fitting = [row for row in rows.fetchall() if _case_fits(str(row[2]), where, value)]
                if fitting:
                    return [_aged(standing_of(row), now_ms, epoch) for row in fitting]
        return []

    def rank(self, node: Standing) -> tuple[int, int]:
        """Its place by credit (from 1; equal ones share it), and how many nodes there are."""
        with self._reading() as db:
            row = db.execute(
                "SELECT (SELECT count(*) FROM nodes WHERE credit > ?), (SELECT count(*) FROM nodes)",
                (node.credit,),
            ).fetchone()
        return row[0] + 1, row[1]


def _case_fits(peer: str, where: str, value: str) -> bool:
    """LIKE takes upper for lower case; peer ids do not."""
    return "LIKE" not in where or value.strip("%").replace("\\", "") in peer


def _aged(node: Standing, now_ms: int, epoch_ms: int) -> Standing:
    """The average as of now, credit a day."""
    now = max(now_ms, node.last_ms)
    node.recent *= math.exp2(-min(1000.0, (now - epoch_ms) / HALF_LIFE_MS)) * decay(0)
    return node


def _bounds(db: sqlite3.Connection, wanted: Filter, size: int) -> tuple[int, int]:
    """No entry outside of [low, high) passes: by version and by time."""
    low, high = 0, size
    if wanted.version is not None:
        row = db.execute("SELECT first, last FROM versions WHERE version = ?", (wanted.version,)).fetchone()
        low, high = (0, 0) if row is None else (row[0], row[1] + 1)
    if wanted.since is not None:
        row = db.execute("SELECT min(block) FROM spans WHERE hi >= ?", (wanted.since,)).fetchone()
        low = size if row[0] is None else max(low, row[0] << SPAN_BITS)
    if wanted.until is not None:
        row = db.execute("SELECT max(block) FROM spans WHERE lo < ?", (wanted.until,)).fetchone()
        high = 0 if row[0] is None else min(high, (row[0] + 1) << SPAN_BITS)
    return low, min(high, size)


def _conditions(db: sqlite3.Connection, wanted: Filter) -> tuple[str | None, list[Any]]:
    """An SQL condition that uses one index; None: nothing can pass. A plus keeps SQLite from another one."""
    parts: list[str] = []
    values: list[Any] = []
    chosen = False
    if wanted.unit is not None:
        parts.append("e.unit = ?")
        values.append(wanted.unit)
        chosen = True
    if wanted.nodes is not None:
        numbers = [
            row[0]
            for key in wanted.nodes
            if (row := db.execute("SELECT no FROM nodes WHERE key = ?", (key,)).fetchone()) is not None
        ]
        if not numbers:
            return None, []
        marks = ", ".join("?" * len(numbers))
        parts.append(f"+e.node IN ({marks})" if chosen else f"e.node IN ({marks})")
        values += numbers
        chosen = True
    if wanted.kinds is not None:
        kinds = [KIND.get(name, OTHER) for name in wanted.kinds]
        marks = ", ".join("?" * len(kinds))
        if chosen or min(kinds) < RARE:
            parts.append(f"+e.kind IN ({marks})")
        else:
            parts.append(f"e.kind IN ({marks}) AND e.kind >= {RARE}")
        values += kinds
    for column, value in (
        ("+e.version = ?", wanted.version),
        ("+e.at_ms >= ?", wanted.since),
        ("+e.at_ms < ?", wanted.until),
    ):
        if value is not None:
            parts.append(column)
            values.append(value)
    return " AND ".join(parts) if parts else "1", values


def _walk(
    db: sqlite3.Connection,
    where: str,
    values: list[Any],
    low: int,
    high: int,
    limit: int,
    upwards: bool,
    budget_s: float,
) -> tuple[list[Row], int]:
    """Up to ``limit`` and one rows, in windows that grow, and how far it came."""
    found: list[Row] = []
    window, ends = _FIRST_WINDOW, time.monotonic() + budget_s
    place = low if upwards else high
    while (place < high) if upwards else (place > low):
        first, last = (place, min(high, place + window)) if upwards else (max(low, place - window), place)
        order = "ASC" if upwards else "DESC"
        found += _rows(
            db,
            f"{where} AND e.idx >= ? AND e.idx < ?",
            (*values, first, last),
            f"ORDER BY e.idx {order} LIMIT {limit + 1 - len(found)}",
        )
        place = last if upwards else first
        if len(found) > limit or time.monotonic() > ends:
            break
        window = min(window * 4, _LARGEST_WINDOW)
    return found, place


def _rows(
    db: sqlite3.Connection, where: str, values: Sequence[Any], tail: str = f"ORDER BY e.idx LIMIT {UNIT_ROWS}"
) -> list[Row]:
    rows = db.execute(
        "SELECT e.idx, n.key, coalesce(n.name, ''), e.unit, e.version "
        f"FROM entries e LEFT JOIN nodes n ON n.no = e.node WHERE {where} {tail}",
        values,
    )
    return [Row(*row) for row in rows.fetchall()]
