"""A run moves from SQLite to PostgreSQL and back, whole, and is never in two places."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio.testing
from coordinator_support import coordinating, make_run, node, opened

from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_copy import copy_journal
from barnraise.coordinator.journal_place import journal_path, place_for, read_place
from barnraise.coordinator.journal_sqlite import SqliteStore
from barnraise.coordinator.migrate import migrate, name_store
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.memory_network import MemorySwarm
from tests.postgres_support import Server
from tests.server_support import head_is, volunteer
from tests.test_older_run import RELEASES, kept_by

Clock = trio.testing.MockClock


@pytest.fixture
def database(postgres: Server) -> str:
    """The URL of a database without any run: those of these tests have one id."""
    for (name,) in postgres.ask("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'barnraise%'"):
        postgres.ask(f"DROP SCHEMA {name} CASCADE")
    return postgres.url


async def some_versions(folder: Path, until: int) -> None:
    """Serve the run until so many versions are published."""
    swarm = MemorySwarm()
    async with coordinating(swarm, folder, seed=until) as coordinator, trio.open_nursery() as nursery:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            nursery.start_soon(volunteer, ann, coordinator)
            nursery.start_soon(volunteer, bob, coordinator)
            await head_is(coordinator, until)
            nursery.cancel_scope.cancel()


def everything(folder: Path) -> tuple[Any, ...]:
    with closing(Journal(journal_path(folder), reading=True)) as journal:
        head = journal.last_tree_head()
        return [journal.event_hash(seq) for seq in range(journal.length)], head, list(journal.events())


async def test_a_run_goes_to_postgres_goes_on_there_and_comes_back(
    tmp_path: Path, database: str, autojump_clock: Clock
) -> None:
    folder = make_run(tmp_path, versions=4)
    await some_versions(folder, 1)
    before = everything(folder)
    sqlite = folder / "state.sqlite"
    untouched = sqlite.read_bytes()
    told: list[str] = []
    done = migrate(folder, database, lambda what, done, total: told.append(what))
    assert done.moved
    assert done.copied is not None
    assert done.copied.events == len(before[0])
    assert "copying events" in told
    assert everything(folder) == before  # same hashes, same tree head
    assert sqlite.read_bytes() == untouched
    assert not migrate(folder, database).moved
    await some_versions(folder, 2)
    longer = everything(folder)
    assert longer[0][: len(before[0])] == before[0]
    assert len(longer[0]) > len(before[0])
    (folder / "state.postgres").rename(folder / "elsewhere")
    with pytest.raises(RunFolderError, match="has lost events"):  # the old file does not go on by itself
        Journal(journal_path(folder))
    (folder / "elsewhere").rename(folder / "state.postgres")
    assert migrate(folder, "sqlite").copied
    assert journal_path(folder) == sqlite
    assert everything(folder) == longer
    await some_versions(folder, 3)
    assert migrate(folder, database).moved  # and there again, on from what is there
    assert everything(folder)[0][: len(longer[0])] == longer[0]


async def test_a_copy_that_was_broken_off_goes_on_and_one_of_another_history_is_refused(
    tmp_path: Path, database: str, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.coordinator.journal_copy._MANY", 10)
    folder = make_run(tmp_path)
    await some_versions(folder, 1)

    def stop(what: str, done: int, total: int) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrate(folder, database, stop)
    assert journal_path(folder).name == "state.sqlite"  # still there
    done = migrate(folder, database)
    assert done.copied is not None
    assert 0 < done.copied.copied < done.copied.rows
    other = tmp_path / "other"
    other.mkdir()
    with closing(Journal(journal_path(folder), reading=True)) as source:
        with closing(SqliteStore(other / "state.sqlite")) as target:
            target.load("events", [(0, b"something else", None)])
            with pytest.raises(RunFolderError, match="another history, or a newer one"):
                copy_journal(source.store, target)


@pytest.mark.parametrize("kind", ["posttrain", "pretrain"])
def test_an_older_releases_run_moves_as_it_is(tmp_path: Path, database: str, kind: str) -> None:
    folder, said = kept_by(RELEASES[0], kind, tmp_path)
    before = everything(folder)
    assert migrate(folder, database).moved
    assert everything(folder) == before
    with opened(folder) as run, closing(Journal(run.journal_path)) as journal:
        core = Core(journal, run.spec, run.run_id, run.identity, lambda: 1, in_place)
    assert {"size": len(core.ledger), "root": core.ledger.root().hex()} == said["ledger"]


def test_a_run_that_is_served_is_not_moved(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with opened(folder), pytest.raises(RunFolderError, match=r"another coordinator .* is using"):
        migrate(folder, "postgresql://me@host/runs")


def test_a_run_can_begin_in_postgres(tmp_path: Path, database: str) -> None:
    folder = make_run(tmp_path)
    with opened(folder) as run:
        place = name_store(folder, database, run.run_id)
        assert read_place(folder / "state.postgres") == place
        assert run.journal_path.name == "state.postgres"
        with closing(Journal(run.journal_path)) as journal:
            assert journal.length == 0
    assert place == place_for(database, run.run_id)
