"""The journal: events and the bytes they speak of, in one database of the run's own.

``commit`` writes everything it is given in one transaction, durable before it returns:
after it, a reply may leave. The database also keeps the payloads of submissions until they
are of no more use, signed receipts, manifests and tree heads. Synchronous; one writer at a
time, enforced by the store, so that it may be called from worker threads. Which database:
``RUN/state.sqlite``, or the PostgreSQL that ``RUN/state.postgres`` names (``journal_place``).

Two things guard against disks that lie. Every event has a CRC-32 of its number and bytes
(rows of older journals have none). And ``state.sqlite.mark`` says how many events have
been acknowledged: SQLite takes a damaged tail of its write-ahead log for an unfinished
transaction and drops it in silence, a database server may have been put back to an older
day, and a coordinator that went on from there would sign other entries under numbers that
are taken. The mark is not synced, so after a power cut it may say less than the truth,
never more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from barnraise.coordinator.events import Event, VersionPublished, decode_event, encode_event
from barnraise.coordinator.journal_mark import mark_path, read_mark, write_mark
from barnraise.coordinator.journal_place import POSTGRES, Place, read_place
from barnraise.coordinator.journal_sqlite import SqliteStore
from barnraise.coordinator.journal_store import MANIFESTS_KEPT, Batch, Store, event_crc
from barnraise.protocol import wire
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.messages import Signed

__all__ = ["MANIFESTS_KEPT", "Journal", "Payload", "StoredReceipt", "Write", "open_store"]

_AT_ONCE = 5000  # events or tree heads


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


def open_store(path: Path, *, reading: bool = False) -> Store:
    """The database behind a journal's path.

    Raises:
        RunFolderError: it is not a journal of this version, or is another coordinator's.
        StorageError: it refuses, or is away.
    """
    if path.name != POSTGRES:
        return SqliteStore(path, reading=reading)
    return open_postgres(read_place(path), reading=reading)


def open_postgres(place: Place, *, reading: bool = False) -> Store:
    """The database at ``place``. Raises as ``open_store``."""
    try:
        from barnraise.coordinator.journal_postgres import PostgresStore
    except ModuleNotFoundError as error:
        raise RunFolderError(
            f"the run's journal is in PostgreSQL ({place.shown}), and {error.name} is not installed: "
            "run `pip install barnraise[postgres]`"
        ) from error
    return PostgresStore(place, reading=reading)


class Journal:
    """A run's journal. Open it under the run folder's lock only.

    Attributes:
        path: the file that is it, or that names its database.
        place: where it is, for messages.

    Raises:
        RunFolderError: it is not a journal of this version.
        StorageError: the disk or the database refuses.
    """

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        """``reading``: for reading only, beside the coordinator that writes it, in any process."""
        self.path = path
        self.store = open_store(path, reading=reading)
        self.place = self.store.place
        self._unsure = False
        try:
            acknowledged = read_mark(path)  # first: a coordinator beside us may go on
            self._next = self.store.length()
            if self._next < acknowledged:
                raise RunFolderError(
                    f"{self.place} has lost events {self._next} to {acknowledged - 1}, which were "
                    "acknowledged (a damaged disk, or an old copy): restore a newer copy. Going on would "
                    f"contradict what was signed; to do so all the same, delete {mark_path(path)}"
                )
        except BaseException:
            self.store.close()
            raise

    def close(self) -> None:
        """Close the database; safe to call twice."""
        self.store.close()

    def commit(self, writes: Sequence[Write]) -> None:
        """Make ``writes`` durable, all or none. Blocking: one fsync.

        Raises:
            StorageError: the store refused; nothing was written. From a database that went away it
                means that nobody knows: ``length`` and ``events`` tell, as soon as it is back.
        """
        batch, seq = Batch(), self.length
        for write in writes:
            for event in write.events:
                data = encode_event(event)
                batch.events.append((seq, data, event_crc(seq, data)))
                if isinstance(event, VersionPublished):
                    batch.versions[event.version] = seq
                seq += 1
            _gather(write, batch)
        try:
            self.store.write(batch)
        except StorageError:
            self._unsure = True
            raise
        if batch.events:
            self._next = seq
            write_mark(self.path, seq)

    @property
    def length(self) -> int:
        """How many events are durable."""
        if self._unsure:
            self._next, self._unsure = self.store.length(), False
        return self._next

    def events(self, start: int = 0) -> Iterator[Event]:
        """Replay the durable events from number ``start`` on.

        Raises:
            RunFolderError: the journal is damaged or of another version.
        """
        expected = start
        while rows := self.store.events(expected, None, _AT_ONCE):
            for seq, data, crc in rows:
                self._check_row(expected, seq, data, crc)
                try:
                    yield decode_event(data)
                except msgspec.MsgspecError as error:
                    raise RunFolderError(
                        f"{self.place}: event {seq} cannot be read ({error}); it is damaged or was written "
                        "by another version of barnraise: run that version, or restore a backup"
                    ) from error
                expected += 1

    def versions(self, before: int, limit: int) -> list[VersionPublished]:
        """Published versions below number ``before``, newest first: the state keeps only the newest."""
        events = (decode_event(data) for data in self.store.versions(before, limit))
        return [event for event in events if isinstance(event, VersionPublished)]

    def published_at(self, version: int) -> int:
        """The number of the event that published ``version``; 0 where that is not known."""
        with self.store.frozen():
            rows = self.store.page("versions", version - 1, 1)
        return int(rows[0][1]) if rows and rows[0][0] == version else 0

    def event_hash(self, seq: int) -> bytes | None:
        """SHA-256 of the stored bytes of event ``seq``; None: there is no such event."""
        rows = self.store.events(seq, seq + 1, 1)
        return hashlib.sha256(rows[0][1]).digest() if rows else None

    def check_events(self, start: int, end: int) -> None:
        """Compare the stored bytes of events ``start`` to ``end`` (not included) with their checksums.

        Raises:
            RunFolderError: one is missing or damaged.
        """
        rows = self.store.events(start, end, end - start)
        for expected, (seq, data, crc) in enumerate(rows, start):
            self._check_row(expected, seq, data, crc)
        if len(rows) < end - start:
            raise self._missing(start + len(rows))

    def _check_row(self, expected: int, seq: int, data: bytes, crc: int | None) -> None:
        if seq != expected:
            raise self._missing(expected)
        if crc is not None and (not isinstance(data, bytes) or crc != event_crc(seq, data)):
            raise RunFolderError(
                f"{self.place}: event {seq} is damaged (its checksum differs): restore the file "
                "from a backup, and check the disk"
            )

    def _missing(self, seq: int) -> RunFolderError:
        return RunFolderError(f"{self.place}: event {seq} is missing; restore the file from a backup")

    def payloads(self, submission_ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """The signed payload bytes of those submissions that are still stored."""
        return self.store.payloads(submission_ids)

    def payload_ids(self, before_version: int) -> list[bytes]:
        """Submissions at policy versions under ``before_version`` whose payloads are stored."""
        return self.store.payload_ids(before_version)

    def receipts(self, node: bytes, from_index: int, limit: int) -> tuple[Signed, ...]:
        """Signed receipts of ``node`` with a ledger index of at least ``from_index``, oldest first."""
        return tuple(wire.decode(data, Signed) for data in self.store.receipts(node, from_index, limit))

    def manifest(self, version: int) -> Signed | None:
        """The signed manifest of a recent version."""
        data = self.store.manifest(version)
        return None if data is None else wire.decode(data, Signed)

    def tree_heads(self) -> Iterator[Signed]:
        """Every signed tree head, smallest first: one a minute makes half a million a year."""
        after = -1
        while rows := self.store.heads(after, _AT_ONCE):
            yield from (wire.decode(data, Signed) for _, data in rows)
            after = rows[-1][0]

    def last_tree_head(self) -> Signed | None:
        """The largest signed tree head."""
        found = self.store.last_head()
        return None if found is None else wire.decode(found, Signed)


def _gather(write: Write, batch: Batch) -> None:
    """Add to ``batch`` what is no event; a payload that is stored and dropped in one group is not there."""
    for payload in write.payloads:
        signed = payload.signed
        row = (payload.submission_id, payload.policy_version, signed.signer, signed.signature, signed.payload)
        batch.payloads.setdefault(payload.submission_id, row)
        batch.drops.pop(payload.submission_id, None)
    for receipt in write.receipts:
        batch.receipts.append((receipt.ledger_index, receipt.node, wire.encode(receipt.signed)))
    if write.manifest is not None:
        version, signed = write.manifest
        batch.manifests[version] = wire.encode(signed)
    if write.tree_head is not None:
        size, signed = write.tree_head
        batch.heads[size] = wire.encode(signed)
    for submission_id in write.drop_payloads:
        batch.payloads.pop(submission_id, None)
        batch.drops[submission_id] = None
