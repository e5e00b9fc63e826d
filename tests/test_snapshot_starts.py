"""Coordinators that begin with a snapshot: they go on exactly as if they had replayed everything."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from coordinator_support import coordinating, make_run, node, opened
from server_support import Clock, audited, head_is, until, volunteer

from barnraise.coordinator import snapshot_belt
from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.events import NodeJoined
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.snapshot import Snapshots, encode_state
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.tlog_checkpoint import log_key
from barnraise.protocol.tlog_tiles import tile_of

T = TypeVar("T")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_belt, "EVERY", 6)
    monkeypatch.setattr(snapshot_belt, "AT_STOP", 2)


async def a_version(folder: Path, swarm: MemorySwarm, version: int) -> None:
    async with coordinating(swarm, folder, seed=version) as coordinator, trio.open_nursery() as nursery:
        await head_is(coordinator, version - 1)
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            nursery.start_soon(volunteer, ann, coordinator)
            nursery.start_soon(volunteer, bob, coordinator)
            await head_is(coordinator, version)
            nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("often")
async def test_a_run_of_restarts_from_snapshots_ends_with_a_sound_ledger(
    tmp_path: Path, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder, swarm = make_run(tmp_path), MemorySwarm()
    for version in (1, 2):
        await a_version(folder, swarm, version)
        assert list((folder / "snapshots").glob("*.bin"))
    async with coordinating(swarm, folder, seed=3) as coordinator:
        await until(lambda: "before the snapshot are whole" in caplog.text)
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volunteer, ann, coordinator)
                nursery.start_soon(volunteer, bob, coordinator)
        assert coordinator.state()["complete"]
        report = audited(tmp_path, coordinator, folder)
    assert report.ok, report.problems
    with opened(folder) as run, closing(Journal(run.journal_path)) as journal:
        known = Snapshots(run.snapshot_folder, run.run_id)
        out_there = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
        assert out_there.intact()

        def core(**options: object) -> Core:
            make = (journal, run.spec, run.run_id, run.identity, lambda: 1, in_place)
            return Core(*make, snapshots=known, published=out_there.size, **options)  # type: ignore[arg-type]

        thin, whole = core(), core(replay=True)
        assert thin.begun_at > 0
        assert encode_state(thin.state) == encode_state(whole.state)
        assert (len(thin.ledger), thin.ledger.root()) == (len(whole.ledger), whole.ledger.root())
        assert caplog.text.count("agrees with the journal") == 2
    assert "is not used" not in caplog.text


@pytest.mark.usefixtures("often")
async def test_a_flipped_bit_before_the_snapshot_still_ends_the_coordinator_soon(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder, swarm = make_run(tmp_path), MemorySwarm()
    await a_version(folder, swarm, 1)
    with closing(sqlite3.connect(folder / "state.sqlite")) as database:
        (data,) = database.execute("SELECT data FROM events WHERE seq = 2").fetchone()
        database.execute("UPDATE events SET data = ? WHERE seq = 2", (data[:-1] + b"\x00",))
        database.commit()
    with pytest.RaisesGroup(
        pytest.RaisesExc(RunFolderError, match="event 2 is damaged"), flatten_subgroups=True
    ):
        async with coordinating(swarm, folder):
            await trio.sleep(5)


@pytest.mark.usefixtures("often")
async def test_a_cut_tile_is_mended_after_a_start_from_a_snapshot(
    tmp_path: Path, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    folder, swarm = make_run(tmp_path), MemorySwarm()
    await a_version(folder, swarm, 1)
    with opened(folder) as run:
        size = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator)).size
    tile = folder / "log" / tile_of(0, 0, size).path
    tile.write_bytes(b"")
    async with coordinating(swarm, folder) as coordinator:
        await until(lambda: "written again" in caplog.text)
        assert tile.read_bytes()
        report = audited(tmp_path, coordinator, folder)
        assert report.ok, report.problems


async def test_while_the_state_is_folded_again_everything_is_refused(tmp_path: Path) -> None:
    gate = trio.Event()
    gate.set()

    async def gated(work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        if "_replay" in repr(work):
            await gate.wait()
        return work()

    with opened(make_run(tmp_path)) as run, closing(Journal(run.journal_path)) as journal:
        core = Core(journal, run.spec, run.run_id, run.identity, lambda: 1, gated)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            await core.open()
            gate = trio.Event()
            commit, journal.commit = journal.commit, refuse  # type: ignore[method-assign]
            failed: list[str] = []

            async def record(number: int) -> None:
                try:
                    await core.record([NodeJoined(node=bytes([number]) * 32, name="x", at_ms=1)])
                except StorageError as error:
                    failed.append(f"{number} {error}")

            nursery.start_soon(record, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert failed == []  # it waits until the state is the true one
            await record(2)
            assert failed == ["2 the disk is full"]
            gate.set()
            await trio.testing.wait_all_tasks_blocked()
            assert failed == ["2 the disk is full", "1 the disk is full"]
            assert not core.state.nodes
            journal.commit = commit  # type: ignore[method-assign]
            await record(3)
            assert list(core.state.nodes) == [b"\3" * 32]
            nursery.cancel_scope.cancel()


def refuse(writes: object) -> None:
    raise StorageError("the disk is full")


@pytest.mark.usefixtures("often")
async def test_a_child_makes_the_snapshot_that_a_start_takes(tmp_path: Path, autojump_clock: Clock) -> None:
    folder, swarm = make_run(tmp_path), MemorySwarm()
    await a_version(folder, swarm, 1)
    made = sorted((folder / "snapshots").glob("*.bin"))
    same = made[-1].read_bytes()
    for path in made:
        path.unlink()
    program = [sys.executable, "-P", "-m", "barnraise.coordinator.snapshot_child"]
    done = subprocess.run([*program, str(folder)], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    (child,) = (folder / "snapshots").glob("*.bin")
    if child.name == made[-1].name:
        assert child.read_bytes() == same
    with opened(folder) as run, closing(Journal(run.journal_path)) as journal:
        assert Snapshots(run.snapshot_folder, run.run_id).newest(journal, 1 << 40) is not None
    (folder / "state.sqlite").write_bytes(b"")
    done = subprocess.run([*program, str(folder)], capture_output=True, check=False, timeout=60)
    assert done.returncode == 1
    assert b"state.sqlite" in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_a_snapshot_that_cannot_be_made_is_tried_again_and_stops_nothing(
    tmp_path: Path, autojump_clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_belt, "EVERY", 1)
    folder, swarm = make_run(tmp_path), MemorySwarm()
    (folder / "snapshots").write_bytes(b"a file is in the way")
    await a_version(folder, swarm, 1)
    assert "cannot write" in caplog.text
    (folder / "snapshots").unlink()
    await a_version(folder, swarm, 2)
    assert list((folder / "snapshots").glob("*.bin"))
