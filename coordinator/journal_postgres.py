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
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from barnraise.coordinator.journal_place import Place, without_password
from barnraise.coordinator.journal_store import COLUMNS, MANIFESTS_KEPT, Batch, EventRow, Row
from barnraise.protocol.errors import BarnraiseError, RunFolderError, StorageError

log = logging.getLogger(__name__)

RETRY_S = 60.0  # for the server to come back
OPEN_S = 5.0  # at the start: for the session of a killed coordinator to end
_CONNECT_S = 10
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_AWAY = ("08", "57P01", "57P02", "57P03")  # SQLSTATEs: no connection, shutting down, crashed, starting

T = TypeVar("T")
_Lost = (OSError, EOFError, struct.error)  # what a driver lets through when the other side is gone


class _LockedError(Exception):
    """Somebody else's session has the lock; ``args[0]`` says whose."""


class Tables:
    """The tables of a run, in its schema."""

    def __init__(self, schema: str) -> None:
        self.meta = sa.MetaData(schema=schema)
        self.writer = sa.Table(
            "writer",
            self.meta,
            sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
            sa.Column("epoch", BYTEA, nullable=False),
            sa.Column("commits", sa.BigInteger, nullable=False),
        )
        self.all = {name: self._table(name) for name in COLUMNS}
        sa.Index("receipt_by_node", self.all["receipts"].c.node, self.all["receipts"].c.ledger_index)
        sa.Index("payload_by_version", self.all["payloads"].c.policy_version)
        self.inserts = {name: self._insert(name) for name in COLUMNS}

    def _table(self, name: str) -> sa.Table:
        columns = []
        for place, column in enumerate(COLUMNS[name]):
            kind: Any = BYTEA if column in _BYTES else sa.BigInteger
            columns.append(
                sa.Column(column, kind, primary_key=not place, autoincrement=False, nullable=column == "crc")
            )
        return sa.Table(name, self.meta, *columns)

    def _insert(self, name: str) -> sa.Insert:
        """All rows in one statement: an array a column (a round trip a row would be the slowest part)."""
        table = self.all[name]
        arrays = [
            sa.cast(sa.bindparam(column.name), ARRAY(BYTEA if column.name in _BYTES else sa.BigInteger))
            for column in table.columns
        ]
        given = sa.func.unnest(*arrays).table_valued(*COLUMNS[name]).render_derived("given")
        rows = sa.select(*(given.c[column] for column in COLUMNS[name]))
        statement = pg_insert(table).from_select(list(COLUMNS[name]), rows)
        if name == "payloads":
            return statement.on_conflict_do_nothing()
        if name in ("events", "receipts"):
            return statement
        key, other = COLUMNS[name]
        return statement.on_conflict_do_update(index_elements=[key], set_={other: statement.excluded[other]})


_BYTES = frozenset(("data", "submission", "signer", "signature", "node"))


class PostgresStore:
    """``barnraise.coordinator.journal_store.Store`` in a schema of a PostgreSQL database (12 or newer)."""

    def __init__(self, place: Place, *, reading: bool = False) -> None:
        """``reading``: for reading only, beside the coordinator that writes it, from any machine."""
        self.place = place.shown
        self._reading_only = reading
        self._tables = Tables(place.schema)
        self._schema = place.schema
        self._engine = _engine(place)
        self._looking = _engine(place, isolation_level="AUTOCOMMIT")
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
            self._writer = _end(self._writer)
        with self._reads_lock:
            self._reads = _end(self._reads)
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
            except (SQLAlchemyError, *_Lost) as error:
                self._writer = _end(self._writer)
                if not _is_lost(error):
                    raise self._refusal(error) from error
                text, known = _words(error), False
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
            _end(db)
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
            except (SQLAlchemyError, *_Lost) as error:
                raise self._refusal(error) from error
            self._frozen = db
            yield
        finally:
            self._frozen = _end(db)

    def page(self, table: str, after: Any, limit: int) -> list[Row]:
        """Within ``frozen``."""
        found = self._tables.all[table]
        key = found.c[COLUMNS[table][0]]
        query = sa.select(found).order_by(key).limit(limit)
        assert self._frozen is not None
        try:
            rows = self._frozen.execute(query if after is None else query.where(key > after)).all()
        except (SQLAlchemyError, *_Lost) as error:
            raise self._refusal(error) from error
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
                except (SQLAlchemyError, *_Lost) as error:
                    self._reads = _end(self._reads)
                    if self._closed or not _is_lost(error) or time.monotonic() >= end:
                        raise self._refusal(error) from error
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1

    def _refusal(self, error: BaseException) -> BarnraiseError:
        code, text = _code(error), _words(error)
        if _is_lost(error):
            return StorageError(
                f"{self.place} cannot be reached ({text}): start the database again, or check the network"
            )
        if code.startswith("XX") or code == "23505":  # a page's checksum; a number that is taken
            return RunFolderError(f"{self.place} is damaged ({text}): restore it from a backup")
        if code.startswith("28") or code == "3D000":
            return RunFolderError(
                f"{self.place} lets nobody in ({text}): check user, database and password "
                "(in RUN/state.postgres, or in BARNRAISE_STORE_PASSWORD)"
            )
        return StorageError(f"cannot write {self.place} ({text}): check the server's disk and permissions")


def _engine(place: Place, **settings: Any) -> sa.Engine:
    """By pg8000 unless the URL names psycopg. A socket's folder is ``?host=/run/postgresql``, as for psql."""
    parts = urlsplit(without_password(place.url))
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    name = f"barnraise coordinator on {socket.gethostname()}, process {os.getpid()}"[:63]
    psycopg = parts.scheme.endswith("+psycopg")
    arguments: dict[str, Any] = {"application_name": name}
    if psycopg:
        arguments |= {"client_encoding": "utf8", "connect_timeout": _CONNECT_S}
        arguments |= {"keepalives_idle": 30, "keepalives_count": 3, **options}
    else:
        arguments |= {"timeout": _CONNECT_S, "tcp_keepalive": True}
        folder, mode = options.get("host", ""), options.get("sslmode", "prefer")
        if folder.startswith("/"):
            arguments["unix_sock"] = f"{folder}/.s.PGSQL.{parts.port or 5432}"
        elif mode in ("require", "verify-ca", "verify-full"):
            context = ssl.create_default_context(cafile=options.get("sslrootcert"))
            context.check_hostname = mode == "verify-full"
            if mode == "require":
                context.verify_mode = ssl.CERT_NONE  # as libpq: encrypted, whoever it is
            arguments["ssl_context"] = context
        elif folder and not parts.hostname:
            arguments["host"] = folder
    password = place.password
    if password is not None:
        arguments["password"] = password
    scheme = "postgresql+psycopg" if psycopg else "postgresql+pg8000"
    url = urlunsplit((scheme, parts.netloc, parts.path, "", ""))
    return sa.create_engine(url, poolclass=NullPool, connect_args=arguments, hide_parameters=True, **settings)


def _end(db: sa.Connection | None) -> sa.Connection | None:
    """Let go of a session; gives None, to be put in its place."""
    if db is not None:
        with suppress(SQLAlchemyError, *_Lost):
            db.invalidate()  # not rolled back over a connection that may be gone
        with suppress(SQLAlchemyError, *_Lost):
            db.close()
    return None


def _code(error: BaseException) -> str:
    """The server's SQLSTATE; ``""``: these are not the server's words."""
    cause = getattr(error, "orig", None) or error
    found = getattr(cause, "sqlstate", None)
    if found is None and cause.args and isinstance(cause.args[0], dict):  # pg8000
        found = cause.args[0].get("C")
    return str(found or "")


def _words(error: BaseException) -> str:
    cause = getattr(error, "orig", None) or error
    if cause.args and isinstance(cause.args[0], dict):
        return str(cause.args[0].get("M", "no reason given"))
    return " ".join(str(cause).split())[:300] or type(cause).__name__


def _is_lost(error: BaseException) -> bool:
    """The connection is gone or never was, as opposed to a statement that was refused."""
    if isinstance(error, _Lost):
        return True
    code = _code(error)
    if code:
        return code.startswith(_AWAY[0]) or code in _AWAY
    if not isinstance(error, DBAPIError):
        return False
    names = {kind.__name__ for kind in type(error.orig).__mro__}
    return error.connection_invalidated or bool(names & {"InterfaceError", "OperationalError"})
