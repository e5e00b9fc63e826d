"""A run's journal from SQLite to PostgreSQL, or back; the run folder then names the new place.

What is moved from stays as it was. The move is one rename at the very end, after every row
was compared; until then the run is where it was, and doing it again goes on from there.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from barnraise.coordinator.folder import open_run
from barnraise.coordinator.journal import Journal, open_postgres
from barnraise.coordinator.journal_copy import Copied, Progress, copy_journal, quiet
from barnraise.coordinator.journal_place import (
    POSTGRES,
    SQLITE,
    Place,
    journal_begun,
    journal_path,
    place_for,
    read_place,
    write_place,
)
from barnraise.coordinator.journal_sqlite import SqliteStore
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import RunFolderError, StorageError


class Migrated(NamedTuple):
    """``moved``: False if the run was there already. ``left``: where it was before, unchanged."""

    moved: bool
    place: str
    left: str
    copied: Copied | None


def name_store(folder: Path, url: str, run_id: bytes) -> Place:
    """Have a run that has not begun keep its journal in the PostgreSQL database at ``url``.

    Tries it: the database is there, lets us in, and may be written to.

    Raises:
        RunFolderError, StorageError: it does not; nothing was changed.
    """
    place = place_for(url, run_id)
    store = open_postgres(place)
    try:
        if store.length():
            raise RunFolderError(f"{place.shown} holds events already: use 'coordinator migrate'")
    finally:
        store.close()
    write_place(folder, place)
    return place


def migrate(folder: Path, to: str, progress: Progress = quiet) -> Migrated:
    """Move the journal of the run in ``folder``. Blocking; minutes for millions of events.

    Args:
        to: ``postgresql://USER@HOST/DATABASE``, or ``sqlite``: back into the run folder.

    Raises:
        RunFolderError: a coordinator serves the run, or the target holds another history, or the
            journal is damaged. The run is where it was.
        StorageError: one of the two refuses, or is away; done again, it goes on.
    """
    with open_run(folder) as run:
        source_path = journal_path(folder)
        if not journal_begun(folder):
            raise RunFolderError(f"{folder} has no journal yet: name the store with 'run init --store'")
        now_postgres = source_path.name == POSTGRES
        here = read_place(source_path).shown if now_postgres else str(source_path)
        place = None if to == "sqlite" else place_for(to, run.run_id)
        if here == (str(folder / SQLITE) if place is None else place.shown):
            return Migrated(False, here, here, None)
        # A database is opened for writing, so that a coordinator elsewhere is noticed; a file is locked.
        with closing(Journal(source_path, reading=not now_postgres)) as source:
            target = SqliteStore(folder / SQLITE) if place is None else open_postgres(place)
            with closing(target):
                copied = copy_journal(source.store, target, progress)
                there = target.place
        if place is not None:
            write_place(folder, place)
        else:
            try:
                source_path.replace(source_path.with_name(f"{POSTGRES}.left"))
                sync_folder(folder)
            except OSError as error:
                raise StorageError(f"cannot rename {source_path} ({error.strerror})") from error
        return Migrated(True, there, here, copied)
