"""One journal's rows into another store, whichever two they are, and the proof that they are the same.

The source is read at one moment, beside whoever writes it. What the target has already must be
the source's beginning, so a copy that was broken off goes on where it was. Events are compared
by their bytes and their own checksums, all other rows by their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import NamedTuple

import msgspec

from barnraise.coordinator.journal_store import COLUMNS, Row, Store, event_crc
from barnraise.protocol import wire
from barnraise.protocol.errors import MalformedError, RunFolderError
from barnraise.protocol.messages import Signed, TreeHead

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, of how much (0: not known)."""

_AT_ONCE = {"payloads": 100, "receipts": 1000}  # rows; a payload may be a megabyte
_MANY = 2000


class Copied(NamedTuple):
    """What both stores hold. ``digest``: SHA-256 over every event's number (8 bytes), length (4), bytes."""

    events: int
    rows: int
    copied: int
    digest: bytes
    head_size: int
    head_root: bytes


def quiet(what: str, done: int, total: int) -> None:
    """Progress for nobody."""


def copy_journal(source: Store, target: Store, progress: Progress = quiet) -> Copied:
    """Make ``target`` hold what ``source`` holds at this moment; nobody else may write to it. Blocking.

    Raises:
        RunFolderError: the source is damaged, or the target holds another history, or a longer one.
        StorageError: one of the two refuses; done again, it goes on from there.
    """
    with source.frozen():
        have = target.length()
        total = _follows(source, target, have)
        copied = 0
        for rows in _pages(source, "events", have - 1 if have else None):
            for seq, data, crc in rows:
                if seq != have or (crc is not None and crc != event_crc(seq, data)):
                    raise RunFolderError(f"{source.place}: event {have} is damaged: restore it from a backup")
                have += 1
            target.load("events", rows)
            copied += len(rows)
            progress("copying events", have, total)
        for table in COLUMNS:
            if table != "events":
                target.clear(table)  # small, or it changes: what is dropped here must be dropped there
                done = 0
                for rows in _pages(source, table):
                    target.load(table, rows)
                    done += len(rows)
                    progress(f"copying {table}", done, 0)
                copied += done
        return compare(source, target, copied, progress)


def compare(source: Store, target: Store, copied: int = 0, progress: Progress = quiet) -> Copied:
    """Read both again and make sure that they hold the same. ``source`` is frozen.

    Raises:
        RunFolderError: they do not.
    """
    digest, rows, events, newest = sha256(), 0, 0, b""
    with target.frozen():
        for table in COLUMNS:
            theirs = _rows(target, table)
            for mine in _rows(source, table):
                other = next(theirs, None)
                if other != mine:
                    what = f"row {mine[0]!r} of {table}"
                    raise RunFolderError(
                        f"{target.place} differs from {source.place} at {what}: copy it again"
                    )
                rows += 1
                if table == "events":
                    digest.update(_framed(mine[0], mine[1]))
                    events += 1
                elif table == "heads":
                    newest = mine[1]
                if not rows % _MANY:
                    progress(f"comparing {table}", rows, 0)
            if next(theirs, None) is not None:
                raise RunFolderError(
                    f"{target.place} has more rows of {table} than {source.place}: copy again"
                )
    size, root = _head(newest)
    return Copied(events, rows, copied, digest.digest(), size, root)


def digest_of(store: Store) -> tuple[int, bytes]:
    """How many events it holds, and ``Copied.digest``; each event's checksum is looked at, too.

    Raises:
        RunFolderError: one is missing or damaged.
    """
    digest, events = sha256(), 0
    with store.frozen():
        for seq, data, crc in _rows(store, "events"):
            if seq != events or (crc is not None and crc != event_crc(seq, data)):
                raise RunFolderError(f"{store.place}: event {events} is missing or damaged")
            digest.update(_framed(seq, data))
            events += 1
    return events, digest.digest()


def _framed(seq: int, data: bytes) -> bytes:
    """What ``Copied.digest`` takes of an event."""
    return seq.to_bytes(8, "big") + len(data).to_bytes(4, "big") + data


def _follows(source: Store, target: Store, have: int) -> int:
    """That what the target has is the source's beginning; how many events the source has."""
    tail = source.page("events", have - 2, 1) if have > 1 else source.page("events", None, 1)
    if have:
        newest = target.events(have - 1, have, 1)
        if not tail or not newest or tail[0][:2] != newest[0][:2]:
            raise RunFolderError(
                f"{target.place} holds {have} events that are not the beginning of {source.place}: it is "
                "another history, or a newer one. Nothing was changed; choose another place"
            )
    return max(have, source.length())


def _head(newest: bytes) -> tuple[int, bytes]:
    if not newest:
        return 0, b""
    try:
        head = wire.decode(wire.decode(newest, Signed).payload, TreeHead)
    except (MalformedError, msgspec.MsgspecError) as error:
        raise RunFolderError(f"the newest tree head is damaged ({error})") from error
    return head.size, head.root


def _pages(store: Store, table: str, after: object = None) -> Iterator[list[Row]]:
    while rows := store.page(table, after, _AT_ONCE.get(table, _MANY)):
        yield rows
        after = rows[-1][0]


def _rows(store: Store, table: str) -> Iterator[Row]:
    for rows in _pages(store, table):
        yield from rows
