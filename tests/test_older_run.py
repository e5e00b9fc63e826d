"""A run that an older release kept (commit 05f6377) opens here, says the same, and goes on.

``data/run-05f6377.tar.xz`` was written by that commit's own coordinator: the tests' tiny
model, two versions by two volunteers, snapshots and tiles. Its key is the tests' fixed
one and guards nothing.
"""

from __future__ import annotations

import base64
import logging
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
import trio
from coordinator_support import coordinating, node, opened
from server_support import Clock, audited, volunteer

from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.snapshot import Snapshots, encode_state
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.tlog_checkpoint import log_key

ARCHIVE = Path(__file__).parent / "data" / "run-05f6377.tar.xz"
RUN_ID = "445c03efc88a1520ec8cd776241ba1c027e104804ec9b8fd0865a2ee9c75901f"
SIZE, ROOT = 28, "fxOJCQB1H1hL0rru4FfevFRNMVfP9hnZnIWNVDjKixY="  # of the checkpoint that release signed


@pytest.fixture
def older(tmp_path: Path) -> Path:
    folder = tmp_path / "older"
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


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
