"""Runs that older releases kept open here, say the same, and go on.

``data/run-05f6377.tar.xz`` was written by that commit's own coordinator: the tests' tiny
model, two versions by two volunteers, snapshots and tiles. ``data/runs-*.tar.xz`` hold two runs
each, with every kind of event that their release knew (``data/older_runs.py`` made them). Their
key is the tests' fixed one and guards nothing.
"""

from __future__ import annotations

import base64
import json
import logging
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest
import trio
from coordinator_support import coordinating, node, opened
from server_support import Clock, audited, head_is, volunteer

from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.events import Event
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.snapshot import Snapshots, encode_state
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.tlog_checkpoint import log_key

DATA = Path(__file__).parent / "data"
ARCHIVE = DATA / "run-05f6377.tar.xz"
RELEASES = ["ac2439c"]
LATER_S = 50_000.0  # virtual: after everything that those runs hold
RUN_ID = "445c03efc88a1520ec8cd776241ba1c027e104804ec9b8fd0865a2ee9c75901f"
SIZE, ROOT = 28, "fxOJCQB1H1hL0rru4FfevFRNMVfP9hnZnIWNVDjKixY="  # of the checkpoint that release signed


@pytest.fixture
def older(tmp_path: Path) -> Path:
    return unpacked(ARCHIVE, tmp_path / "older")


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder


def kept_by(release: str, kind: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A run folder, and what its release said of it."""
    folder = unpacked(DATA / f"runs-{release}.tar.xz", tmp_path / release) / kind
    return folder, json.loads((folder / "said.json").read_text())


def test_an_older_run_keeps_its_id_and_its_tree_head_with_and_without_its_snapshots(older: Path) -> None:
    with opened(older) as run, closing(Journal(run.journal_path)) as journal:
        assert run.run_id.hex() == RUN_ID
        log = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
        assert log.intact()
        assert log.size == SIZE
        known = Snapshots(run.snapshot_folder, run.run_id)
        make = (journal, run.spec, run.run_id, run.identity, lambda: 1, in_place)
        cores = [
            Core(*make, snapshots=known, published=log.size),
            Core(*make, snapshots=known, published=log.size, replay=True),
        ]
    for core in cores:
        assert core.state.head == 2
        assert (len(core.ledger), base64.b64encode(core.ledger.root()).decode()) == (SIZE, ROOT)
    assert encode_state(cores[0].state) == encode_state(cores[1].state)
    assert cores[0].begun_at == 0  # another fold made these snapshots: they are set aside, nothing more
    assert list((older / "snapshots").glob("*.refused"))


async def test_an_older_run_goes_on_to_its_end_with_a_sound_ledger(
    older: Path, tmp_path: Path, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    swarm = MemorySwarm()
    async with coordinating(swarm, older, seed=3) as coordinator:
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volunteer, ann, coordinator)
                nursery.start_soon(volunteer, bob, coordinator)
        assert coordinator.state()["complete"]
        report = audited(tmp_path, coordinator, older)
    assert report.ok, report.problems


@pytest.mark.parametrize("kind", ["posttrain", "pretrain"])
@pytest.mark.parametrize("release", RELEASES)
def test_of_a_run_in_which_everything_happened_this_release_says_the_same(
    tmp_path: Path, release: str, kind: str
) -> None:
    folder, said = kept_by(release, kind, tmp_path)
    with opened(folder) as run, closing(Journal(run.journal_path)) as journal:
        log = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
        assert log.intact()
        core = Core(journal, run.spec, run.run_id, run.identity, lambda: 1, in_place, published=log.size)
        assert {type(event).__name__ for event in journal.events()} == set(said["kinds"])
        root = core.ledger.root(log.size)
    state = core.state
    assert (run.run_id.hex(), journal.length) == (said["run_id"], said["events"])
    assert {"size": len(core.ledger), "root": core.ledger.root().hex()} == said["ledger"]
    assert {"size": log.size, "root": base64.b64encode(root).decode()} == said["published"]
    assert (state.head, state.accepted, state.rejected) == (said["head"], said["accepted"], said["rejected"])
    assert state.rejections == said["rejections"]
    assert {key.hex(): node.credit for key, node in state.nodes.items()} == said["credit"]
    assert {key.hex(): node.banned_until for key, node in state.nodes.items()} == said["banned_until"]
    assert len(state.operations.amendments) == said["amendments"]
    assert sorted(key.hex() for key in state.operations.allowed) == said["allowed"]
    assert {key.hex(): item.status for key, item in state.blocks.work.items()} == said["blocks"]


@pytest.mark.parametrize("release", RELEASES)
def test_between_them_an_older_releases_runs_hold_every_kind_of_event_of_then(
    tmp_path: Path, release: str
) -> None:
    both = [set(kept_by(release, kind, tmp_path)[1]["kinds"]) for kind in ("posttrain", "pretrain")]
    today = {kind.__name__ for kind in get_args(Event)}
    assert both[0] | both[1] <= today
    if release == RELEASES[-1]:
        assert both[0] | both[1] == today, "a new kind of event: have tests/data/older_runs.py make one"


@pytest.mark.parametrize("release", RELEASES)
async def test_a_run_with_bans_appeals_and_a_rollback_goes_on_with_a_sound_ledger(
    tmp_path: Path, release: str, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    folder, said = kept_by(release, "posttrain", tmp_path)
    swarm = MemorySwarm()
    await trio.sleep(LATER_S)
    async with coordinating(swarm, folder, seed=3) as coordinator:
        assert coordinator.state()["admission"] == "invite"
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volunteer, ann, coordinator)
                nursery.start_soon(volunteer, bob, coordinator)
                await head_is(coordinator, said["head"] + 2)
                nursery.cancel_scope.cancel()
        run, target = coordinator.run, tmp_path / "ledger.bin"
        with closing(Journal(run.journal_path, reading=True)) as journal:
            lag, now = run.spec.rollout.max_lag, 2**40
            export_ledger(journal, run.signed_spec, lag, run.identity, now, target)
    report = verify_ledger_file(target)
    assert report.ok, report.problems
    assert report.size > said["ledger"]["size"]
    earned = {key.hex(): credit for key, credit in report.balances.items()}
    assert all(earned[key] >= credit for key, credit in said["credit"].items())
    assert sum(earned.values()) > sum(said["credit"].values())


@pytest.mark.parametrize("release", RELEASES)
async def test_a_run_that_pretrains_blocks_goes_on_with_its_next_round(
    tmp_path: Path, release: str, autojump_clock: Clock
) -> None:
    pytest.importorskip("torch")
    from block_swarm_support import running, work
    from block_swarm_support import volunteer as training

    folder, said = kept_by(release, "pretrain", tmp_path)
    swarm = MemorySwarm(latency_s=0.01)
    await trio.sleep(LATER_S)
    async with running(swarm, folder, seed=3) as coordinator:
        async with training(swarm, coordinator, tmp_path, b"C") as cyd, trio.open_nursery() as nursery:
            nursery.start_soon(work, cyd)
            await head_is(coordinator, said["head"] + 1)
            nursery.cancel_scope.cancel()
        report = audited(tmp_path, coordinator, folder)
    assert report.ok, report.problems
    assert report.size > said["ledger"]["size"]
