"""What a journal needs of a database, whichever it is: rows in, durably and all or none; rows out.

Two are built: SQLite in one file (``journal_sqlite``) and PostgreSQL (``journal_postgres``).
What the rows mean (encoding, checksums, what was acknowledged) is ``journal``'s alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol
from zlib import crc32

MANIFESTS_KEPT = 8

Row = tuple[Any, ...]
EventRow = tuple[int, bytes, int | None]
"""Number, bytes, checksum (None in journals from before there were checksums)."""

COLUMNS: dict[str, tuple[str, ...]] = {
    "events": ("seq", "data", "crc"),
    "versions": ("version", "event"),
    "payloads": ("submission", "policy_version", "signer", "signature", "data"),
    "receipts": ("ledger_index", "node", "data"),
    "manifests": ("version", "data"),
    "heads": ("size", "data"),
}
"""Every table and its columns, the key first: ``events`` first of all, for all others speak of them."""


def event_crc(seq: int, data: bytes) -> int:
    """CRC-32 of an event's number (8 bytes, big-endian) and its bytes."""
    return crc32(data, crc32(seq.to_bytes(8, "big")))


@dataclass(slots=True)
class Batch:
    """Rows of one transaction. ``drops``: submissions whose payloads go."""

    events: list[EventRow] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    payloads: dict[bytes, Row] = field(default_factory=dict)
    receipts: list[Row] = field(default_factory=list)
    manifests: dict[int, bytes] = field(default_factory=dict)
    heads: dict[int, bytes] = field(default_factory=dict)
    drops: dict[bytes, None] = field(default_factory=dict)

    def rows(self, table: str) -> list[Row]:
        """What goes into ``table``."""
        found = getattr(self, table)
        if isinstance(found, list):
            return found
        return list(found.values() if table == "payloads" else found.items())


class Store(Protocol):
    """One run's database. Blocking, and safe to call from several threads.

    Attributes:
        place: where it is, for messages; never with a password.

    Every method raises StorageError where the database refuses or is away, and RunFolderError
    where it is damaged or somebody else's.
    """

    place: str

    def close(self) -> None:
        """Let go of it, and of the right to write; safe to call twice."""

    def write(self, batch: Batch) -> None:
        """Make a batch durable before returning, all of it or (with an error) none of it."""

    def length(self) -> int:
        """How many events are durable; one more than the last number."""

    def events(self, start: int, end: int | None, limit: int) -> list[EventRow]:
        """Events from ``start`` on, to before ``end``, in order, ``limit`` at most."""

    def versions(self, before: int, limit: int) -> list[bytes]:
        """The events of published versions below ``before``, newest first."""

    def payloads(self, submissions: Sequence[bytes]) -> dict[bytes, bytes]:
        """Stored payloads, without waiting for a write under way."""

    def payload_ids(self, before_version: int) -> list[bytes]:
        """Submissions of policy versions below ``before_version`` with a stored payload."""

    def receipts(self, node: bytes, from_index: int, limit: int) -> list[bytes]:
        """Receipts of ``node`` with a ledger index of at least ``from_index``, in order."""

    def manifest(self, version: int) -> bytes | None:
        """A manifest, as it was stored."""

    def heads(self, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Size and bytes of tree heads of more than ``after`` entries, smallest first, ``limit`` at most."""

    def last_head(self) -> bytes | None:
        """The largest tree head."""

    def frozen(self) -> AbstractContextManager[None]:
        """While it lasts, ``page`` (in this thread alone) sees one moment of the database."""

    def page(self, table: str, after: Any, limit: int) -> list[Row]:
        """Rows of a table with a key above ``after`` (None: all), by key, ``limit`` at most."""

    def load(self, table: str, rows: Sequence[Row]) -> None:
        """Add rows as they came out of another store's ``page``, durably."""

    def clear(self, table: str) -> None:
        """Remove every row of a table; never of ``events``."""
