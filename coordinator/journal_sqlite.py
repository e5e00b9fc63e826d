"""A journal's rows in one SQLite file: write-ahead log, ``synchronous=FULL``, one fsync a transaction."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from barnraise.coordinator.events import VersionPublished, decode_event
from barnraise.coordinator.journal_store import COLUMNS, MANIFESTS_KEPT, Batch, EventRow, Row
from barnraise.protocol.errors import RunFolderError, StorageError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS payloads (
    submission BLOB NOT NULL, policy_version INTEGER NOT NULL, signer BLOB NOT NULL,
    signature BLOB NOT NULL, data BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS payload_by_submission ON payloads (submission);
CREATE TABLE IF NOT EXISTS receipts (
    ledger_index INTEGER PRIMARY KEY, node BLOB NOT NULL, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS receipt_by_node ON receipts (node, ledger_index);
CREATE TABLE IF NOT EXISTS manifests (version INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY, event INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS heads (size INTEGER PRIMARY KEY, data BLOB NOT NULL);
"""

# A version, manifest or head that is written again replaces itself; a payload is its id's only content.
_INSERT = {
    table: f"INSERT {'' if table in ('events', 'receipts') else clause} INTO {table} "
    f"({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    for table, columns in COLUMNS.items()
    for clause in ["OR IGNORE" if table == "payloads" else "OR REPLACE"]
}


class SqliteStore:
    """``barnraise.coordinator.journal_store.Store`` in a file; open it under the run folder's lock only.

    Attributes:
        db: the connection that writes (and reads what is replayed).
    """

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        """``reading``: for reading only, beside whoever writes it, in any process."""
        self.path = path
        self.place = str(path)
        self._lock = threading.Lock()
        self._reads_lock = threading.Lock()
        self._crc = "crc"
        with self._reading():
            if reading:
                self.db = self._reads = _reader(path)
                if not self._has_crc():
                    self._crc = "NULL"
                return
            self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=FULL")
            self.db.execute("PRAGMA wal_autocheckpoint=4000")
            self.db.executescript(_SCHEMA)
            self._find_versions()
            if not self._has_crc():
                self.db.execute("ALTER TABLE events ADD COLUMN crc INTEGER")
            self._reads = _reader(path)  # a look at what is durable does not wait for the commit under way

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with self._reads_lock:
            self._reads.close()
        with self._lock:
            self.db.close()

    def in_one_file(self) -> None:
        """Leave everything in the one file, which no reader changes then. Once closed, and for good."""
        with self._reading(), closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=DELETE")

    def write(self, batch: Batch) -> None:
        """One transaction, one fsync."""
        with self._writing() as db:
            for table in COLUMNS:
                if rows := batch.rows(table):
                    db.executemany(_INSERT[table], rows)
            if batch.manifests:
                db.execute(
                    "DELETE FROM manifests WHERE version <= ?", (max(batch.manifests) - MANIFESTS_KEPT,)
                )
            if batch.drops:
                db.executemany("DELETE FROM payloads WHERE submission = ?", [(item,) for item in batch.drops])

    def length(self) -> int:
        """How many events there are."""
        (found,) = self._all("SELECT coalesce(max(seq), -1) + 1 FROM events")[0]
        return int(found)

    def events(self, start: int, end: int | None, limit: int) -> list[EventRow]:
        """Events by number."""
        return self._all(
            f"SELECT seq, data, {self._crc} FROM events WHERE seq >= ? AND seq < ? ORDER BY seq LIMIT ?",
            (start, (1 << 62) if end is None else end, limit),
        )

    def versions(self, before: int, limit: int) -> list[bytes]:
        """Published versions, newest first."""
        rows = self._all(
            "SELECT events.data FROM versions JOIN events ON events.seq = versions.event "
            "WHERE version < ? ORDER BY version DESC LIMIT ?",
            (before, limit),
        )
        return [row[0] for row in rows]

    def payloads(self, submissions: Sequence[bytes]) -> dict[bytes, bytes]:
        """Stored payloads."""
        found: dict[bytes, bytes] = {}
        with self._reads_lock:
            for submission in submissions:
                row = self._reads.execute(
                    "SELECT data FROM payloads WHERE submission = ?", (submission,)
                ).fetchone()
                if row is not None:
                    found[submission] = row[0]
        return found

    def payload_ids(self, before_version: int) -> list[bytes]:
        """Submissions with a payload."""
        with self._reads_lock:
            rows = self._reads.execute(
                "SELECT submission FROM payloads WHERE policy_version < ?", (before_version,)
            )
            return [row[0] for row in rows]

    def receipts(self, node: bytes, from_index: int, limit: int) -> list[bytes]:
        """A node's receipts."""
        with self._reads_lock:
            rows = self._reads.execute(
                "SELECT data FROM receipts WHERE node = ? AND ledger_index >= ? "
                "ORDER BY ledger_index LIMIT ?",
                (node, from_index, limit),
            )
            return [row[0] for row in rows]

    def manifest(self, version: int) -> bytes | None:
        """A manifest."""
        rows = self._all("SELECT data FROM manifests WHERE version = ?", (version,))
        return rows[0][0] if rows else None

    def heads(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Tree heads."""
        statement = "SELECT size, data FROM heads WHERE size > ? ORDER BY size LIMIT ?"
        return self._all(statement, (after, limit))

    def last_head(self) -> bytes | None:
        """The largest tree head."""
        rows = self._all("SELECT data FROM heads ORDER BY size DESC LIMIT 1")
        return rows[0][0] if rows else None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A read transaction: the write-ahead log keeps what it sees."""
        with self._reads_lock:
            self._reads.execute("BEGIN")
            try:
                with self._reading():
                    self._reads.execute("SELECT 1 FROM events LIMIT 1").fetchone()
                yield
            finally:
                self._reads.execute("ROLLBACK")

    def page(self, table: str, after: Any, limit: int) -> list[Row]:
        """Within ``frozen``."""
        key, *_ = names = COLUMNS[table]
        columns = ", ".join(self._crc if name == "crc" else name for name in names)
        where, values = ("", ()) if after is None else (f"WHERE {key} > ?", (after,))
        with self._reading():
            return self._reads.execute(
                f"SELECT {columns} FROM {table} {where} ORDER BY {key} LIMIT ?", (*values, limit)
            ).fetchall()

    def load(self, table: str, rows: Sequence[Row]) -> None:
        """Add rows of another store."""
        with self._writing() as db:
            db.executemany(_INSERT[table], rows)

    def clear(self, table: str) -> None:
        """Empty a table."""
        assert table != "events"
        with self._writing() as db:
            db.execute(f"DELETE FROM {table}")

    def _all(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._lock, self._reading():
            return self.db.execute(statement, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._reading():
            try:
                self.db.execute("BEGIN IMMEDIATE")
                yield self.db
                self.db.execute("COMMIT")
            except sqlite3.Error:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _journal_error(self.path, error) from error

    def _has_crc(self) -> bool:
        columns = self.db.execute("PRAGMA table_info(events)").fetchall()
        return not columns or any(column[1] == "crc" for column in columns)

    def _find_versions(self) -> None:
        """Of a journal from before there was a table of them."""
        if self.db.execute("SELECT 1 FROM versions UNION SELECT 1 FROM manifests LIMIT 1").fetchone() is None:
            return
        if self.db.execute("SELECT 1 FROM versions LIMIT 1").fetchone() is not None:
            return
        found = []
        for seq, data in self.db.execute(
            "SELECT seq, data FROM events WHERE instr(data, ?)", (VersionPublished.__name__.encode(),)
        ):
            with suppress(msgspec.MsgspecError):  # whoever replays it will say so
                event = decode_event(data)
                if isinstance(event, VersionPublished):
                    found.append((event.version, seq))
        self.db.execute("BEGIN")
        self.db.executemany(_INSERT["versions"], found)
        self.db.execute("COMMIT")


def _reader(path: Path) -> sqlite3.Connection:
    source = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(source, uri=True, check_same_thread=False, timeout=10.0, isolation_level=None)


def _journal_error(path: Path, error: sqlite3.Error) -> RunFolderError | StorageError:
    text = str(error)
    if isinstance(error, sqlite3.OperationalError):
        return StorageError(
            f"cannot write {path} ({text}): free some disk space in {path.parent}, or check its permissions"
        )
    return RunFolderError(f"{path} is damaged ({text}): restore it from a backup")
