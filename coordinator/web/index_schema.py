"""``RUN/web.sqlite``: where each ledger entry belongs, so that a page finds its rows without reading the log.

Derived from the ledger and the journal alone; it may be deleted at any time and is made again.
The entries themselves are not in it (``RUN/log`` has them), nor anything that the ledger has not,
but for one: which version a submission was used in.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

VERSION: Final = 1
SPAN_BITS: Final = 12  # of entries whose earliest and latest moment are kept together

# Numbers stay what they are: files have them. From RARE on a kind has an index of its own.
KIND: Final[dict[str, int]] = {
    "LeaseIssued": 0,
    "BlockLeased": 1,
    "Submitted": 2,
    "Judged": 3,
    "LeaseClosed": 4,
    "RunCreated": 16,
    "NodeJoined": 17,
    "VersionPublished": 18,
    "AuditCommitted": 19,
    "AuditRevealed": 20,
    "ClawedBack": 21,
    "Appealed": 22,
    "Reviewed": 23,
    "Restored": 24,
    "NodeBanned": 25,
    "BanLifted": 26,
    "Amended": 27,
    "RolledBack": 28,
}
OTHER: Final = 63  # kinds of a later release
RARE: Final = 16

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    size INTEGER NOT NULL, root BLOB NOT NULL, events INTEGER NOT NULL, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entries (idx INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, kind INTEGER NOT NULL,
    node INTEGER, unit INTEGER, version INTEGER, lease INTEGER, ref INTEGER);
CREATE INDEX IF NOT EXISTS by_node ON entries (node) WHERE node IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_unit ON entries (unit) WHERE unit IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_lease ON entries (lease) WHERE lease IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_ref ON entries (ref) WHERE ref IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_kind ON entries (kind) WHERE kind >= {RARE};
CREATE TABLE IF NOT EXISTS spans (block INTEGER PRIMARY KEY, lo INTEGER NOT NULL, hi INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY, first INTEGER NOT NULL,
    last INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS uses (submission INTEGER PRIMARY KEY, version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (no INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, peer TEXT NOT NULL,
    name TEXT NOT NULL, names TEXT NOT NULL, joined_ms INTEGER NOT NULL, last_ms INTEGER NOT NULL,
    leased INTEGER NOT NULL, closed INTEGER NOT NULL, submitted INTEGER NOT NULL, accepted INTEGER NOT NULL,
    unaudited INTEGER NOT NULL, rejected INTEGER NOT NULL, appeals INTEGER NOT NULL,
    overturned INTEGER NOT NULL, clawed_back INTEGER NOT NULL, banned_until INTEGER NOT NULL,
    ban_reason TEXT NOT NULL, credit INTEGER NOT NULL, recent REAL NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS node_by_peer ON nodes (peer);
CREATE INDEX IF NOT EXISTS node_by_name ON nodes (name);
CREATE INDEX IF NOT EXISTS node_by_credit ON nodes (credit);
CREATE INDEX IF NOT EXISTS node_by_recent ON nodes (recent);
"""


def key_of(identifier: bytes) -> int:
    """The first 8 bytes of a lease's or submission's id, in its order, as SQLite's integer."""
    return int.from_bytes(identifier[:8], "big") - 2**63


def keys_between(prefix: str) -> tuple[int, int]:
    """The least and the largest ``key_of`` of ids that begin with these hex digits."""
    digits = prefix[:16]
    return (
        int(digits.ljust(16, "0"), 16) - 2**63,
        int(digits.ljust(16, "f"), 16) - 2**63,
    )


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for writing, made if need be.

    A power cut may lose its newest rows, never its consistency: they are derived again.

    Raises:
        sqlite3.Error: no such file can be made, or it is damaged.
    """
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    database.execute("PRAGMA cache_size=-16384")
    found = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    if found is not None:
        row = database.execute("SELECT version FROM meta").fetchone()
        if row is None or row[0] != VERSION:
            database.close()
            raise sqlite3.DatabaseError("the index is of another release")
    database.executescript(_SCHEMA)
    database.execute("INSERT OR IGNORE INTO meta VALUES (1, ?, 0, x'', 0, 0)", (VERSION,))
    return database


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open the file beside its writer, unable to change it.

    Raises:
        sqlite3.Error: it is not there, or damaged.
    """
    database = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=1.0,
    )
    database.execute("PRAGMA query_only=1")
    database.execute("PRAGMA cache_size=-8192")
    return database
