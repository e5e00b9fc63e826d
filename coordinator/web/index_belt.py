"""Feeds ``RUN/web.sqlite``: what happens now, and after a start what it had missed.

Nothing waits for it, and whatever goes wrong with it stays here: a damaged index is made
anew from the published log, a full disk is tried again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import trio

from barnraise.coordinator.block_events import RoundFormed
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import BatchFormed, Event, SubmissionsSkipped, decode_event
from barnraise.coordinator.journal import Write, open_store
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.web.entries import Entries
from barnraise.coordinator.web.index_write import IndexWriter, Use
from barnraise.protocol.errors import BarnraiseError, StorageError

log = logging.getLogger(__name__)

EVERY_S = 0.5  # between writes: many entries share one
CHUNK = 4096  # entries, or events, a write
RETRY_S = 30.0
_USING = (b"BatchFormed", b"RoundFormed", b"SubmissionsSkipped")


class IndexBelt:
    """Make it before anything is recorded, then ``run`` it.

    Attributes:
        entries: the ledger's entries by number.
        size: how many entries are in the index; below ``known`` it is still catching up.
        known: how many entries are durable.
        trouble: why it does not get on, or empty.
    """

    def __init__(self, core: Core, folder: LogFolder, path: Path) -> None:
        self._core = core
        self._path = path
        self.known = len(core.ledger)
        self.size = 0
        self.trouble = ""
        self.entries = Entries(folder, self.known)
        self._first = self.known  # of the entries that wait
        self._waiting: list[bytes] = []
        self._uses: list[Use] = []
        self._events_first = self._events = core.journal.length  # looked through before those that wait
        self._fresh = trio.Event()
        core.listeners.append(self._note)

    def _note(self, write: Write) -> None:
        for data in write.entries:
            self.entries.note(self.known, data)
            self._waiting.append(data)
            self.known += 1
        for event in write.events:
            self._uses.extend(uses_of(event))
        self._events += len(write.events)
        self._fresh.set()

    async def run(self) -> None:
        """Keep the index up to date, for ever, whatever happens to it."""
        anew = -RETRY_S  # when it was made anew last
        while True:
            try:
                await self._keep_up()
            except Exception as error:  # the run does not depend on it, and must not end with it
                self.size = 0
                if _is_damage(error) and trio.current_time() - anew >= RETRY_S:
                    log.warning("%s is made anew: %s", self._path.name, error)
                    anew = trio.current_time()
                    await self._core.offload(partial(_delete, self._path))
                    continue
                self.trouble = f"the page's index: {error}"
                known = isinstance(error, sqlite3.Error | OSError | BarnraiseError)
                log.warning("%s; trying again in %g s", self.trouble, RETRY_S, exc_info=not known)
                await trio.sleep(RETRY_S)

    async def _keep_up(self) -> None:
        writer = await self._core.offload(self._open)
        try:
            while True:
                self.size = writer.size
                self._fresh = trio.Event()
                if writer.size < self._first:
                    await self._catch_up(writer)
                elif writer.events < self._events_first:
                    await self._look_through(writer)
                else:
                    await self._add(writer)
                    self.trouble = ""
                    if not self._waiting:
                        await self._fresh.wait()
                    await trio.sleep(EVERY_S)
        finally:
            writer.close()

    def _open(self) -> IndexWriter:
        writer = IndexWriter(self._path)
        ledger, size = self._core.ledger, writer.size
        if size > self.known or (size and ledger.root(size) != writer.root):
            writer.close()
            raise sqlite3.DatabaseError("it is of another history")
        if writer.events > self._events:
            writer.close()
            raise sqlite3.DatabaseError("it knows of events that never happened")
        return writer

    async def _catch_up(self, writer: IndexWriter) -> None:
        """The next of the entries from before this start, as soon as they are published."""
        folder = self.entries.folder
        if folder.size <= writer.size:
            if self._core.head[0] <= writer.size:
                with suppress(StorageError):  # the next head will do
                    await self._core.sign_tree_head()
            await trio.sleep(EVERY_S)
            return
        most = min(CHUNK, self._first - writer.size)

        def work() -> None:
            data = list(self.entries.published(writer.size, most))
            root = self._core.ledger.root(writer.size + len(data))
            writer.add(data, (), root, writer.events)

        await self._core.offload(work)
        await trio.lowlevel.checkpoint()

    async def _look_through(self, writer: IndexWriter) -> None:
        """The next of the events from before this start, for what the ledger has not: uses."""
        start, end = writer.events, min(writer.events + CHUNK, self._events_first)
        path, root = self._core.journal.path, writer.root
        await self._core.offload(lambda: writer.add((), _past_uses(path, start, end), root, end))
        await trio.lowlevel.checkpoint()

    async def _add(self, writer: IndexWriter) -> None:
        entries, uses = self._waiting[:CHUNK], self._uses
        if not entries and not uses:
            return
        whole = len(entries) == len(self._waiting)
        skipped = writer.size - self._first  # were in the index before (it was read twice)
        entries = entries[max(0, skipped) :]
        size = writer.size + len(entries)
        root = self._core.ledger.root(size)
        events = self._events if whole else writer.events
        given = list(uses) if whole else []
        await self._core.offload(lambda: writer.add(entries, given, root, events))
        if whole:
            del self._uses[: len(given)]
            self._events_first = events
        done = writer.size - self._first
        del self._waiting[:done]
        self._first += done
        self.size = writer.size
        self.entries.forget(writer.size)


def uses_of(event: Event) -> Iterator[Use]:
    """What an event says of the use of submissions."""
    if isinstance(event, BatchFormed | RoundFormed):
        yield from ((submission, event.version) for submission in event.submissions)
    elif isinstance(event, SubmissionsSkipped):
        yield from ((submission, -1) for submission in event.submissions)


def _past_uses(path: Path, start: int, end: int) -> Iterator[Use]:
    """From journalled events [start, end)."""
    with closing(open_store(path, reading=True)) as store:
        rows = store.events(start, end, end - start)
    for _, data, _ in rows:
        if any(name in data[:40] for name in _USING):
            yield from uses_of(decode_event(data))


def _is_damage(error: Exception) -> bool:
    """A damaged or foreign file, not a disk that refuses: that is an OperationalError."""
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).unlink()
