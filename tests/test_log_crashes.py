"""Journal, published log, snapshots and checkpoint together: killed at any step, and with bits flipped."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from coordinator_support import coordinating, make_run, node

from barnraise.coordinator import server, snapshot_belt
from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.events import NodeJoined
from barnraise.coordinator.folder import Run, open_run
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.log_belt import LogBelt
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.snapshot import Snapshots
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import TreeHead
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint
from barnraise.protocol.tlog_tiles import TileTree
from tests.server_support import head_is, volunteer
from tests.test_ledger_inspect import call

Clock = trio.testing.MockClock
Released = dict[int, bytes]  # size: root, of every head that may have left the process
TRACKED = ("state.sqlite*", "log/**/*", "snapshots/*")


def tracked(folder: Path) -> dict[str, bytes]:
    paths = {path for pattern in TRACKED for path in folder.glob(pattern) if path.is_file()}
    return {
        str(path.relative_to(folder)): zlib.compress(path.read_bytes(), 1)
        for path in paths
        if not path.name.endswith("-shm")
    }


@dataclass
class Moment:
    """What is on the disk when the process is killed, and what it had said by then."""

    what: str
    files: dict[str, bytes]
    released: Released
    entries: int  # acknowledged

    def restore(self, folder: Path) -> None:
        for name in tracked(folder):
            (folder / name).unlink()
        for name in ("state.sqlite-shm", "state.sqlite-wal"):
            (folder / name).unlink(missing_ok=True)
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(zlib.decompress(data))


@dataclass
class Recorder:
    folder: Path
    moments: list[Moment] = field(default_factory=list)
    released: Released = field(default_factory=dict)
    entries: list[bytes] = field(default_factory=list)
    over: bool = False

    def point(self, what: str) -> None:
        self.moments.append(Moment(what, tracked(self.folder), dict(self.released), len(self.entries)))

    def committed(self, writes: list[Write]) -> None:
        for write in writes:
            self.entries.extend(write.entries)
            if write.tree_head is not None:
                signed = write.tree_head[1]
                head = open_signed(signed, TreeHead, signed.signer)
                assert self.released.setdefault(head.size, head.root) == head.root


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(snapshot_belt, "EVERY", 8)
    monkeypatch.setattr(server, "TREE_HEAD_EVERY_S", 0.5)
    folder = make_run(tmp_path, versions=5)
    found = Recorder(folder)
    commit, replace = Journal.commit, Path.replace

    def committing(self: Journal, writes: Any) -> None:
        if found.over:
            commit(self, writes)
            return
        found.point("before a commit")
        commit(self, writes)
        found.committed(list(writes))
        found.point("after a commit")

    def replacing(self: Path, target: Path) -> Path:
        if found.over or folder not in self.parents:
            return replace(self, target)
        found.point(f"before {target.name}")
        result = replace(self, target)
        found.point(f"after {target.name}")
        return result

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(Journal, "commit", committing)
    monkeypatch.setattr(Path, "replace", replacing)
    return found


def parts(run: Run, journal: Journal) -> tuple[Core, LogBelt, LogFolder]:
    """As ``run_coordinator`` puts them together."""
    out_there = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
    known = Snapshots(run.snapshot_folder, run.run_id)
    core = Core(
        journal,
        run.spec,
        run.run_id,
        run.identity,
        lambda: 9_000_000,
        in_place,
        snapshots=known,
        published=out_there.size,
    )
    return core, LogBelt(core, run.identity, out_there, run.signed_spec), out_there


async def go_on(folder: Path) -> tuple[list[bytes], Head, MerkleLog]:
    """Start again, let something else happen, sign and publish it: what a stranger then reads."""
    with open_run(folder) as run, closing(Journal(run.journal_path)) as journal:
        core, belt, out_there = parts(run, journal)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            nursery.start_soon(belt.run)
            await core.open()
            await core.record([NodeJoined(node=b"!" * 32, name="another history", at_ms=9_000_000)])
            await core.sign_tree_head()
            while out_there.size < len(core.ledger):
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        entries, log = list(core.entries_from(0)), MerkleLog()
        for entry in entries:
            log.append(entry)
        head = open_checkpoint(
            (folder / "log/checkpoint").read_bytes(), log_key(run.run_id, run.spec.operator)
        )
    return entries, head, log


async def a_few_versions(folder: Path) -> None:
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator, trio.open_nursery() as nursery:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            nursery.start_soon(volunteer, ann, coordinator)
            nursery.start_soon(volunteer, bob, coordinator)
            await head_is(coordinator, 4)
            nursery.cancel_scope.cancel()


async def test_killed_at_any_durable_step_it_goes_on_and_signs_no_second_history(
    recorder: Recorder, autojump_clock: Clock
) -> None:
    await a_few_versions(recorder.folder)
    moments, recorder.over = recorder.moments, True
    assert len(moments) > 200, len(moments)
    kinds = {moment.what for moment in moments}
    assert {"before a commit", "after a commit", "before checkpoint", "after checkpoint"} <= kinds
    assert any(what.endswith(".bin") for what in kinds)  # a snapshot
    for before, moment in pairwise(moments):
        if (before.files, before.released, before.entries) != (
            moment.files,
            moment.released,
            moment.entries,
        ):
            moment.restore(recorder.folder)
            await says_no_other(recorder, moment)


async def says_no_other(recorder: Recorder, moment: Moment) -> None:
    """Go on from what is on the disk: nothing acknowledged is lost, nothing that was said is contradicted."""
    entries, head, log = await go_on(recorder.folder)
    assert entries[: moment.entries] == recorder.entries[: moment.entries], moment.what
    assert (head.size, head.root) == (len(log), log.root())
    for size, root in moment.released.items():
        assert log.root(size) == root, (moment.what, size)
    tree = TileTree(head.size, lambda tile: (recorder.folder / "log" / tile.path).read_bytes())
    assert [tree.entry(index) for index in range(head.size)] == entries


@pytest.mark.parametrize("mark", [True, False], ids=["mark", "no-mark"])
async def test_cut_after_it_was_published_it_refuses_rather_than_signing_another_history(
    recorder: Recorder, autojump_clock: Clock, mark: bool
) -> None:
    """A disk loses the end of what it had promised. ``mark``: with the count of what was acknowledged."""
    await a_few_versions(recorder.folder)
    moment, recorder.over = recorder.moments[-1], True
    wal = zlib.decompress(moment.files["state.sqlite-wal"])
    refused = 0
    for at in range(0, len(wal), len(wal) // 40):
        moment.restore(recorder.folder)
        (recorder.folder / "state.sqlite-wal").write_bytes(wal[:at])
        if not mark:
            (recorder.folder / "state.sqlite.mark").unlink()
        try:
            await says_no_other(recorder, moment)
        except RunFolderError:
            refused += 1
    assert refused >= 35


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(bytes(data))


async def a_small_run(folder: Path) -> None:
    """With everything that is published on the disk, and the journal in one file."""
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator, node(swarm, coordinator, b"a") as ann:
        await head_is(coordinator, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(volunteer, ann, coordinator)
            await head_is(coordinator, 1)
            nursery.cancel_scope.cancel()
        await trio.sleep(2)


def in_an_event(folder: Path) -> tuple[Path, int]:
    data = (folder / "state.sqlite").read_bytes()
    return folder / "state.sqlite", data.rindex(b"SubmissionJudged") + 40


def widest(partial: Path) -> Path:
    return max(partial.iterdir(), key=lambda path: int(path.name))


PLACES: dict[str, Callable[[Path], tuple[Path, int]]] = {
    "journal": in_an_event,
    "hash tile": lambda folder: (widest(folder / "log/tile/0/000.p"), 37),
    "entries": lambda folder: (widest(folder / "log/tile/entries/000.p"), 50),
    "checkpoint": lambda folder: (folder / "log/checkpoint", 30),
    "checkpoint's root": lambda folder: (folder / "log/checkpoint", 100),
    "mark": lambda folder: (folder / "state.sqlite.mark", 3),
    "mark's sum": lambda folder: (folder / "state.sqlite.mark", 9),
    "checkpoint's signature": lambda folder: (folder / "log/checkpoint", -20),
}


@pytest.mark.parametrize("place", PLACES)
async def test_one_flipped_bit_is_found_by_verify_and_at_the_start(
    place: str,
    tmp_path: Path,
    autojump_clock: Clock,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make_run(tmp_path)
    await a_small_run(folder)
    assert call("ledger", "verify", folder) == 0
    path, at = PLACES[place](folder)
    before = path.read_bytes()
    flip(path, at)
    capsys.readouterr()
    assert call("ledger", "verify", folder) == 1
    said = capsys.readouterr()
    assert path.name in said.out + said.err
    caplog.clear()
    if place in ("hash tile", "entries"):  # mended, and said
        await go_on(folder)
        assert "written again" in caplog.text
        assert path.read_bytes() == before
        assert call("ledger", "verify", folder) == 0
        return
    if place.startswith("mark"):  # said, and written anew
        await go_on(folder)
        assert path.name in caplog.text
        assert call("ledger", "verify", folder) == 0
        return
    with pytest.raises(RunFolderError, match=path.name):  # with the cure
        await go_on(folder)


async def test_a_tile_that_a_full_disk_kept_from_being_mended_is_mended_once_there_is_room(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run(tmp_path)
    await a_small_run(folder)
    flip(*PLACES["entries"](folder))
    mend, attempts = LogFolder.mend, []

    def mending(self: LogFolder, *arguments: Any) -> None:
        attempts.append(trio.current_time())
        if len(attempts) < 3:
            raise StorageError("cannot write a tile (No space left on device)")
        mend(self, *arguments)

    monkeypatch.setattr(LogFolder, "mend", mending)
    with open_run(folder) as run, closing(Journal(run.journal_path)) as journal:
        core, belt, _ = parts(run, journal)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            nursery.start_soon(belt.run)
            await trio.sleep(60)
            nursery.cancel_scope.cancel()
    assert len(attempts) == 3
    assert "written again" in caplog.text
    assert call("ledger", "verify", folder) == 0
