"""The journal: events and the bytes they speak of, in one SQLite file.

``commit`` writes everything it is given in one transaction, synced to the disk
before it returns (WAL, ``synchronous=FULL``): after it, a reply may leave. The
database also keeps the payloads of submissions until they are of no more use,
signed receipts, manifests and tree heads. Synchronous; one writer at a time,
enforced by a lock, so that it may be called from worker threads.

Two things guard against disks that lie. Every event has a CRC-32 of its number and bytes
(rows of older journals have none). And ``state.sqlite.mark`` says how many events have
been acknowledged: SQLite takes a damaged tail of its write-ahead log for an unfinished
transaction and drops it in silence, and a coordinator that went on from there would
sign other entries under numbers that are taken. The mark is not synced, so after a power
cut it may say less than the truth, never more.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import msgspec

from barnraise.coordinator.events import Event, VersionPublished, decode_event, encode_event
from barnraise.protocol import wire
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.messages import Signed

MANIFESTS_KEPT = 8

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


@dataclass(frozen=True, slots=True)
class Payload:
    """A submission as it was signed, to be stored under its content id."""

    submission_id: bytes
    policy_version: int
    signed: Signed


@dataclass(frozen=True, slots=True)
class StoredReceipt:
    """A signed receipt, findable by node and ledger index."""

    ledger_index: int
    node: bytes
    signed: Signed


@dataclass(slots=True)
class Write:
    """What one decision wants to be durable together."""

    events: Sequence[Event] = ()
    payloads: Sequence[Payload] = ()
    receipts: Sequence[StoredReceipt] = ()
    manifest: tuple[int, Signed] | None = None
    tree_head: tuple[int, Signed] | None = None
    drop_payloads: Sequence[bytes] = field(default_factory=tuple)
    entries: Sequence[bytes] = ()  # of the ledger, as the events give them; not stored


class Journal:
    """``RUN/state.sqlite``. Open it under the run folder's lock only.

    Raises:
        RunFolderError: the file is not a journal of this version.
        StorageError: the disk refuses.
    """

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        """``reading``: for reading only, beside the coordinator that writes it, in any process."""
        self.path = path
        self._lock = threading.Lock()
        self._reads_lock = threading.Lock()
        try:
            if reading:
                self._db = self._reads = _reader(path)
                self._next = self._db.execute("SELECT coalesce(max(seq), -1) + 1 FROM events").fetchone()[0]
                return
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA wal_autocheckpoint=4000")
            self._db.executescript(_SCHEMA)
            self._find_versions()
            if all(column[1] != "crc" for column in self._db.execute("PRAGMA table_info(events)")):
                self._db.execute("ALTER TABLE events ADD COLUMN crc INTEGER")
            acknowledged = _read_mark(path)  # first: a coordinator beside us may go on
            self._next = self._db.execute("SELECT coalesce(max(seq), -1) + 1 FROM events").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise _journal_error(path, error) from error
        if self._next < acknowledged:
            self._db.close()
            raise RunFolderError(
                f"{path} has lost events {self._next} to {acknowledged - 1}, which were acknowledged (a "
                "damaged disk, or an old copy): restore a newer copy. Going on would contradict what was "
                f"signed; to do so all the same, delete {_mark_path(path)}"
            )
        self._reads = _reader(path)  # a look at what is durable does not wait for the commit under way

    def close(self) -> None:
        """Close the file; safe to call twice."""
        with self._reads_lock:
            self._reads.close()
        with self._lock:
            self._db.close()

    def commit(self, writes: Sequence[Write]) -> None:
        """Make ``writes`` durable, all or none. Blocking: one fsync.

        Raises:
            StorageError: the disk refused; nothing was written.
        """
        with self._lock:
            seq = self._next
            try:
                self._db.execute("BEGIN IMMEDIATE")
                for write in writes:
                    for event in write.events:
                        data = encode_event(event)
                        self._db.execute("INSERT INTO events VALUES (?, ?, ?)", (seq, data, _crc(seq, data)))
                        if isinstance(event, VersionPublished):
                            self._db.execute(
                                "INSERT OR REPLACE INTO versions VALUES (?, ?)", (event.version, seq)
                            )
                        seq += 1
                    self._store(write)
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise _journal_error(self.path, error) from error
            if seq != self._next:
                self._next = seq
                _write_mark(self.path, seq)

    def _store(self, write: Write) -> None:
        for payload in write.payloads:
            signed = payload.signed
            self._db.execute(
                "INSERT OR IGNORE INTO payloads VALUES (?, ?, ?, ?, ?)",
                (
                    payload.submission_id,
                    payload.policy_version,
                    signed.signer,
                    signed.signature,
                    signed.payload,
                ),
            )
        for receipt in write.receipts:
            self._db.execute(
                "INSERT INTO receipts VALUES (?, ?, ?)",
                (receipt.ledger_index, receipt.node, wire.encode(receipt.signed)),
            )
        if write.manifest is not None:
            version, signed = write.manifest
            self._db.execute("INSERT OR REPLACE INTO manifests VALUES (?, ?)", (version, wire.encode(signed)))
            self._db.execute("DELETE FROM manifests WHERE version <= ?", (version - MANIFESTS_KEPT,))
        if write.tree_head is not None:
            size, signed = write.tree_head
            self._db.execute("INSERT OR REPLACE INTO heads VALUES (?, ?)", (size, wire.encode(signed)))
        for submission_id in write.drop_payloads:
            self._db.execute("DELETE FROM payloads WHERE submission = ?", (submission_id,))

    @property
    def length(self) -> int:
        """How many events are durable."""
        length: int = self._next
        return length

    def events(self, start: int = 0) -> Iterator[Event]:
        """Replay the durable events from number ``start`` on.

        Raises:
            RunFolderError: the journal is damaged or of another version.
        """
        expected = start
        while True:
            with self._lock, self._reading():
                rows = self._db.execute(
                    "SELECT seq, data, crc FROM events WHERE seq >= ? ORDER BY seq LIMIT 5000", (expected,)
                ).fetchall()
            if not rows:
                return
            for seq, data, crc in rows:
                self._check_row(expected, seq, data, crc)
                try:
                    yield decode_event(data)
                except msgspec.MsgspecError as error:
                    raise RunFolderError(
                        f"{self.path}: event {seq} cannot be read ({error}); it is damaged or was written "
                        "by another version of barnraise: run that version, or restore a backup"
                    ) from error
                expected += 1

    def _find_versions(self) -> None:
        """Of a journal from before there was a table of them."""
        if (
            self._db.execute("SELECT 1 FROM versions UNION SELECT 1 FROM manifests LIMIT 1").fetchone()
            is None
        ):
            return
        if self._db.execute("SELECT 1 FROM versions LIMIT 1").fetchone() is not None:
            return
        found = []
        for seq, data in self._db.execute(
            "SELECT seq, data FROM events WHERE instr(data, ?)", (VersionPublished.__name__.encode(),)
        ):
            with suppress(msgspec.MsgspecError):  # whoever replays it will say so
                event = decode_event(data)
                if isinstance(event, VersionPublished):
                    found.append((event.version, seq))
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO versions VALUES (?, ?)", found)
        self._db.execute("COMMIT")

    def versions(self, before: int, limit: int) -> list[VersionPublished]:
        """Published versions below number ``before``, newest first: the state keeps only the newest."""
        with self._lock, self._reading():
            rows = self._db.execute(
                "SELECT events.data FROM versions JOIN events ON events.seq = versions.event "
                "WHERE version < ? ORDER BY version DESC LIMIT ?",
                (before, limit),
            ).fetchall()
        events = (decode_event(row[0]) for row in rows)
        return [event for event in events if isinstance(event, VersionPublished)]

    def event_hash(self, seq: int) -> bytes | None:
        """SHA-256 of the stored bytes of event ``seq``; None: there is no such event."""
        with self._lock, self._reading():
            row = self._db.execute("SELECT data FROM events WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else hashlib.sha256(row[0]).digest()

    def check_events(self, start: int, end: int) -> None:
        """Compare the stored bytes of events ``start`` to ``end`` (not included) with their checksums.

        Raises:
            RunFolderError: one is missing or damaged.
        """
        with self._lock, self._reading():
            rows = self._db.execute(
                "SELECT seq, data, crc FROM events WHERE seq >= ? AND seq < ? ORDER BY seq", (start, end)
            ).fetchall()
        for expected, (seq, data, crc) in enumerate(rows, start):
            self._check_row(expected, seq, data, crc)
        if len(rows) < end - start:
            raise self._missing(start + len(rows))

    def _check_row(self, expected: int, seq: int, data: bytes, crc: int | None) -> None:
        if seq != expected:
            raise self._missing(expected)
        if crc is not None and (not isinstance(data, bytes) or crc != _crc(seq, data)):
            raise RunFolderError(
                f"{self.path}: event {seq} is damaged (its checksum differs): restore the file "
                "from a backup, and check the disk"
            )

    def _missing(self, seq: int) -> RunFolderError:
        return RunFolderError(f"{self.path}: event {seq} is missing; restore the file from a backup")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:  # a page of the file is damaged
            raise _journal_error(self.path, error) from error

    def payloads(self, submission_ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """The signed payload bytes of those submissions that are still stored."""
        found: dict[bytes, bytes] = {}
        with self._reads_lock:
            for submission_id in submission_ids:
                row = self._reads.execute(
                    "SELECT data FROM payloads WHERE submission = ?", (submission_id,)
                ).fetchone()
                if row is not None:
                    found[submission_id] = row[0]
        return found

    def payload_ids(self, before_version: int) -> list[bytes]:
        """Submissions at policy versions under ``before_version`` whose payloads are stored."""
        with self._reads_lock:
            rows = self._reads.execute(
                "SELECT submission FROM payloads WHERE policy_version < ?", (before_version,)
            )
            return [row[0] for row in rows]

    def receipts(self, node: bytes, from_index: int, limit: int) -> tuple[Signed, ...]:
        """Signed receipts of ``node`` with a ledger index of at least ``from_index``, oldest first."""
        with self._reads_lock:
            rows = self._reads.execute(
                "SELECT data FROM receipts WHERE node = ? AND ledger_index >= ? "
                "ORDER BY ledger_index LIMIT ?",
                (node, from_index, limit),
            ).fetchall()
        return tuple(wire.decode(row[0], Signed) for row in rows)

    def manifest(self, version: int) -> Signed | None:
        """The signed manifest of a recent version."""
        with self._lock:
            row = self._db.execute("SELECT data FROM manifests WHERE version = ?", (version,)).fetchone()
        return None if row is None else wire.decode(row[0], Signed)

    def tree_heads(self) -> list[Signed]:
        """Every signed tree head, smallest first."""
        with self._lock:
            rows = self._db.execute("SELECT data FROM heads ORDER BY size").fetchall()
        return [wire.decode(row[0], Signed) for row in rows]

    def last_tree_head(self) -> Signed | None:
        """The largest signed tree head."""
        with self._lock:
            row = self._db.execute("SELECT data FROM heads ORDER BY size DESC LIMIT 1").fetchone()
        return None if row is None else wire.decode(row[0], Signed)


def _reader(path: Path) -> sqlite3.Connection:
    source = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(source, uri=True, check_same_thread=False, timeout=10.0)


def _crc(seq: int, data: bytes) -> int:
    return crc32(data, crc32(seq.to_bytes(8, "big")))


def _mark_path(path: Path) -> Path:
    return path.with_name(path.name + ".mark")


def _read_mark(path: Path) -> int:
    """How many events were acknowledged at least; 0 where no readable mark is."""
    try:
        data = _mark_path(path).read_bytes()
    except OSError:
        return 0
    whole = len(data) == 12 and crc32(data[:8]).to_bytes(4, "big") == data[8:]
    return int.from_bytes(data[:8], "big") if whole else 0


def _write_mark(path: Path, length: int) -> None:
    """Never fails a commit, which is durable by now: without its mark only a check is lost."""
    data = length.to_bytes(8, "big")
    with suppress(OSError):
        _mark_path(path).write_bytes(data + crc32(data).to_bytes(4, "big"))


def _journal_error(path: Path, error: sqlite3.Error) -> RunFolderError | StorageError:
    text = str(error)
    if isinstance(error, sqlite3.OperationalError):
        return StorageError(
            f"cannot write {path} ({text}): free some disk space in {path.parent}, or check its permissions"
        )
    return RunFolderError(f"{path} is damaged ({text}): restore it from a backup")
