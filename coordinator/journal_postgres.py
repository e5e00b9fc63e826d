"""A journal's rows in PostgreSQL, by SQLAlchemy Core: a schema for each run, one writer at a time.

**Durable.** ``synchronous_commit`` is on for our sessions whatever the server's default, and a
server with ``fsync`` off is refused: what it acknowledges may be gone after a power cut.

**One writer.** Who writes holds an advisory lock for the length of its session, which the
server lets go of when the process dies. A session can also end without its process noticing,
and another coordinator may then have begun; so every transaction first turns the page of
``writer``, which names its coordinator (``epoch``) and counts transactions. One that was
superseded changes nothing.

**A lost connection** is made again for up to ``RETRY_S``. Whether the transaction under way came
true is what the count says: nothing is written twice, nothing is taken for written.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.exc import SQLAlchemyError

from barnraise.coordinator.journal_place import Place
from barnraise.coordinator.journal_store import COLUMNS, MANIFESTS_KEPT, Batch, EventRow, Row
from barnraise.coordinator.postgres_session import LOST, engine, is_lost, let_go, refusal, words
from barnraise.coordinator.postgres_tables import Tables
from barnraise.protocol.errors import RunFolderError, StorageError

log = logging.getLogger(__name__)

RETRY_S = 60.0  # for the server to come back
OPEN_S = 5.0  # at the start: for the session of a killed coordinator to end
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

T = TypeVar("T")


class _LockedError(Exception):
    """Somebody else's session has the lock; ``args[0]`` says whose."""


class PostgresStore:
    """``barnraise.coordinator.journal_store.Store`` in a schema of a PostgreSQL database (12 or newer)."""

    def __init__(self, place: Place, *, reading: bool = False) -> None:
        """``reading``: for reading only, beside the coordinator that writes it, from any machine."""
        self.place = place.shown
        self._reading_only = reading
        self._tables = Tables(place.schema)
        self._schema = place.schema
        self._engine = engine(place)
        self._looking = engine(place, isolation_level="AUTOCOMMIT")
        self._lock, self._reads_lock = threading.Lock(), threading.Lock()
        self._writer: sa.Connection | None = None
        self._reads: sa.Connection | None = None
        self._frozen: sa.Connection | None = None
        self._epoch = secrets.token_bytes(16)
        self._commits = -1  # none yet: the epoch is to be taken
        self._closed = False
        try:
            if reading:
                self._read(lambda db: self._need_tables(db), OPEN_S)
            else:
                with self._lock:
                    self._write(None, OPEN_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End both sessions; the lock goes with its own."""
        self._closed = True
        with self._lock:
            self._writer = let_go(self._writer)
        with self._reads_lock:
            self._reads = let_go(self._reads)
        self._engine.dispose()
        self._looking.dispose()

    # --- writing

    def write(self, batch: Batch) -> None:
        """One transaction, and one more if the connection was lost and it had not come true."""

        def fill(db: sa.Connection) -> None:
            for table in COLUMNS:
                self._insert(db, table, batch.rows(table))
            if batch.manifests:
                manifests = self._tables.all["manifests"]
                oldest = max(batch.manifests) - MANIFESTS_KEPT
                db.execute(sa.delete(manifests).where(manifests.c.version <= oldest))
            if batch.drops:
                payloads = self._tables.all["payloads"]
                gone = sa.cast(sa.bindparam("gone"), ARRAY(BYTEA))
                db.execute(
                    sa.delete(payloads).where(payloads.c.submission == sa.any_(gone)),
                    {"gone": list(batch.drops)},
                )

        with self._lock:
            self._write(fill, RETRY_S)

    def load(self, table: str, rows: Sequence[Row]) -> None:
        """Add rows of another store."""
        with self._lock:
            self._write(lambda db: self._insert(db, table, rows), RETRY_S)

    def clear(self, table: str) -> None:
        """Empty a table."""
        assert table != "events"
        with self._lock:
            self._write(lambda db: db.execute(sa.delete(self._tables.all[table])), RETRY_S)

    def _insert(self, db: sa.Connection, table: str, rows: Sequence[Row]) -> None:
        if rows:
            columns = zip(*rows, strict=True)
            values = {name: list(values) for name, values in zip(COLUMNS[table], columns, strict=True)}
            db.execute(self._tables.inserts[table], values)

    def _write(self, fill: Callable[[sa.Connection], Any] | None, patience: float) -> None:
        """Have ``fill`` happen once. ``self._lock`` is held."""
        if self._reading_only:
            raise StorageError(f"{self.place} was opened for reading only")
        end, tries, wanted = time.monotonic() + patience, 0, self._commits + 1
        while True:
            try:
                db, commits = self._session()
                if fill is not None and commits < wanted:
                    self._transact(db, fill)
                return
            except _LockedError as error:
                text, known = str(error), True
            except (SQLAlchemyError, *LOST) as error:
                self._writer = let_go(self._writer)
                if not is_lost(error):
                    raise refusal(self.place, error) from error
                text, known = words(error), False
            if self._closed or time.monotonic() >= end:
                if known:
                    raise RunFolderError(f"{text} is using {self.place}: stop it first")
                raise StorageError(
                    f"{self.place} cannot be reached ({text}): start the database again, or check the network"
                )
            if not tries:
                log.warning("%s: %s; trying again for %.0f s", self.place, text, patience)
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1

    def _transact(self, db: sa.Connection, fill: Callable[[sa.Connection], Any]) -> None:
        writer = self._tables.writer
        mine = (writer.c.epoch == self._epoch) & (writer.c.commits == self._commits)
        with db.begin():
            turned = db.execute(sa.update(writer).where(mine).values(commits=self._commits + 1))
            if turned.rowcount != 1:
                raise self._superseded()
            fill(db)
        self._commits += 1

    def _session(self) -> tuple[sa.Connection, int]:
        """The session that writes, made (again) if need be, and how many transactions came true."""
        if self._writer is not None:
            return self._writer, self._commits
        db = self._engine.connect()
        try:
            self._lock_out_others(db)
            with db.begin():
                commits = self._take(db)
        except BaseException:
            let_go(db)
            raise
        self._writer, self._commits = db, commits
        return db, commits

    def _take(self, db: sa.Connection) -> int:
        """Be the writer, or see that we still are."""
        writer = self._tables.writer
        if self._commits < 0:
            if db.execute(sa.text("SHOW fsync")).scalar() != "on":
                raise RunFolderError(
                    f"{self.place} has fsync off: what it acknowledges can be lost. "
                    "Turn it on in postgresql.conf"
                )
            db.execute(sa.schema.CreateSchema(self._schema, if_not_exists=True))
            self._tables.meta.create_all(db)
            first = pg_insert(writer).values(id=1, epoch=self._epoch, commits=0)
            again = {"epoch": self._epoch, "commits": 0}
            db.execute(first.on_conflict_do_update(index_elements=["id"], set_=again))
            return 0
        row = db.execute(sa.select(writer.c.epoch, writer.c.commits)).one_or_none()
        if row is None or bytes(row[0]) != self._epoch:
            raise self._superseded()
        return int(row[1])

    def _superseded(self) -> RunFolderError:
        return RunFolderError(
            f"another coordinator has begun to write to {self.place} while this one had lost its "
            "connection: only one may serve a run, stop one of the two"
        )

    def _lock_out_others(self, db: sa.Connection) -> None:
        key = int.from_bytes(
            sha256(f"barnraise journal {self._schema}".encode()).digest()[:8], "big", signed=True
        )
        with db.begin():
            db.execute(sa.text("SET synchronous_commit = on"))
            if db.execute(sa.select(sa.func.pg_try_advisory_lock(key))).scalar():
                return
            holder = db.execute(
                sa.text(
                    "SELECT a.application_name, a.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
                    "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
                    "AND l.classid::bigint = :high AND l.objid::bigint = :low "
                    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                ),
                {"high": (key >> 32) & 0xFFFFFFFF, "low": key & 0xFFFFFFFF},
            ).first()
        who = "" if holder is None else f" ({holder[0] or 'a session'}, session {holder[1]} of the server)"
        raise _LockedError(f"another coordinator{who}")

    # --- reading

    def length(self) -> int:
        """How many events there are."""
        events = self._tables.all["events"]
        query = sa.select(sa.func.coalesce(sa.func.max(events.c.seq), -1) + 1)
        return int(self._all(query)[0][0])

    def events(self, start: int, end: int | None, limit: int) -> list[EventRow]:
        """Events by number."""
        events = self._tables.all["events"]
        query = sa.select(events).where(events.c.seq >= start).order_by(events.c.seq).limit(limit)
        rows = self._all(query if end is None else query.where(events.c.seq < end))
        return [(row[0], bytes(row[1]), row[2]) for row in rows]

    def versions(self, before: int, limit: int) -> list[bytes]:
        """Published versions, newest first."""
        events, versions = self._tables.all["events"], self._tables.all["versions"]
        query = (
            sa.select(events.c.data)
            .join(versions, versions.c.event == events.c.seq)
            .where(versions.c.version < before)
            .order_by(versions.c.version.desc())
            .limit(limit)
        )
        return [bytes(row[0]) for row in self._all(query)]

    def payloads(self, submissions: Sequence[bytes]) -> dict[bytes, bytes]:
        """Stored payloads."""
        payloads = self._tables.all["payloads"]
        wanted = sa.cast(sa.literal(list(submissions), ARRAY(BYTEA)), ARRAY(BYTEA))
        query = sa.select(payloads.c.submission, payloads.c.data).where(
            payloads.c.submission == sa.any_(wanted)
        )
        return {bytes(row[0]): bytes(row[1]) for row in self._all(query)} if submissions else {}

    def payload_ids(self, before_version: int) -> list[bytes]:
        """Submissions with a payload."""
        payloads = self._tables.all["payloads"]
        query = sa.select(payloads.c.submission).where(payloads.c.policy_version < before_version)
        return [bytes(row[0]) for row in self._all(query.order_by(payloads.c.submission))]

    def receipts(self, node: bytes, from_index: int, limit: int) -> list[bytes]:
        """A node's receipts."""
        receipts = self._tables.all["receipts"]
        query = (
            sa.select(receipts.c.data)
            .where(receipts.c.node == node, receipts.c.ledger_index >= from_index)
            .order_by(receipts.c.ledger_index)
            .limit(limit)
        )
        return [bytes(row[0]) for row in self._all(query)]

    def manifest(self, version: int) -> bytes | None:
        """A manifest."""
        manifests = self._tables.all["manifests"]
        rows = self._all(sa.select(manifests.c.data).where(manifests.c.version == version))
        return bytes(rows[0][0]) if rows else None

    def heads(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Tree heads."""
        heads = self._tables.all["heads"]
        query = sa.select(heads.c.size, heads.c.data).where(heads.c.size > after)
        rows = self._all(query.order_by(heads.c.size).limit(limit))
        return [(row[0], bytes(row[1])) for row in rows]

    def last_head(self) -> bytes | None:
        """The largest tree head."""
        heads = self._tables.all["heads"]
        rows = self._all(sa.select(heads.c.data).order_by(heads.c.size.desc()).limit(1))
        return bytes(rows[0][0]) if rows else None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A read transaction of its own session, ``REPEATABLE READ``. A lost connection ends it."""
        db = None
        try:
            try:
                db = self._engine.connect()
                db.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
                self._need_tables(db)
            except (SQLAlchemyError, *LOST) as error:
                raise refusal(self.place, error) from error
            self._frozen = db
            yield
        finally:
            self._frozen = let_go(db)

    def page(self, table: str, after: Any, limit: int) -> list[Row]:
        """Within ``frozen``."""
        found = self._tables.all[table]
        key = found.c[COLUMNS[table][0]]
        query = sa.select(found).order_by(key).limit(limit)
        assert self._frozen is not None
        try:
            rows = self._frozen.execute(query if after is None else query.where(key > after)).all()
        except (SQLAlchemyError, *LOST) as error:
            raise refusal(self.place, error) from error
        return [tuple(bytes(item) if isinstance(item, memoryview) else item for item in row) for row in rows]

    def _need_tables(self, db: sa.Connection) -> None:
        if not sa.inspect(db).has_table("events", schema=self._schema):
            raise RunFolderError(f"{self.place} has no journal: it is empty, or the wrong database")

    def _all(self, query: sa.Select[Any]) -> Sequence[Any]:
        return self._read(lambda db: db.execute(query).all(), RETRY_S)

    def _read(self, ask: Callable[[sa.Connection], T], patience: float) -> T:
        end, tries = time.monotonic() + patience, 0
        while True:
            with self._reads_lock:
                try:
                    if self._reads is None:
                        self._reads = self._looking.connect()
                    return ask(self._reads)
                except (SQLAlchemyError, *LOST) as error:
                    self._reads = let_go(self._reads)
                    if self._closed or not is_lost(error) or time.monotonic() >= end:
                        raise refusal(self.place, error) from error
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
