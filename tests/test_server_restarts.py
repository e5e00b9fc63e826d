"""Restarts, damaged files and full disks of a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from coordinator_support import (
    FakeLearner,
    FakeVerifier,
    coordinating,
    make_run,
    node,
)
from server_support import Clock, audited, head_is, stage, until, volunteer

from barnraise.coordinator.journal import Journal
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.errors import RefusedError, RunFolderError
from barnraise.protocol.manifest import check_manifest, manifest_shards
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.shards import ShardClient


async def test_a_restart_keeps_leases_verdicts_and_the_batch_under_way(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_run(tmp_path, versions=2)
    swarm = MemorySwarm()
    async with coordinating(swarm, folder, FakeVerifier(), FakeLearner(folder)) as coordinator:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            for worker in (ann, bob):
                await worker.submit(worker.signed_work(await worker.lease()))
            await until(lambda: coordinator.state()["state"] == "training")
            held = await ann.lease()
            stored = ann.signed_work(held)
            await ann.submit(stored)  # durable, not judged
            open_lease = await bob.lease()
            before = coordinator.state()
    learner = FakeLearner(folder)
    async with coordinating(swarm, folder, learner=learner, seed=1) as coordinator:
        assert coordinator.state()["policy_version"] == 0
        assert coordinator.state()["accepted"] == before["accepted"]
        assert coordinator.state()["queue"] == 1
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            assert (await ann.submit(stored)).duplicate
            await until(lambda: coordinator.state()["accepted"] == before["accepted"] + 1)
            assert not (await bob.submit(bob.signed_work(open_lease))).duplicate
            await head_is(coordinator, 1)
            assert learner.jobs[0].version == 1
            assert len(learner.jobs[0].parts) == 2
            await volunteer(ann, coordinator)
        report = audited(tmp_path, coordinator, folder)
    assert report.ok, report.problems


async def test_after_a_restart_the_head_is_served_again(tmp_path: Path, autojump_clock: Clock) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
    async with coordinating(swarm, folder) as coordinator, node(swarm, coordinator) as ann:
        head = (await ann.join()).head
        assert head is not None
        manifest = check_manifest(head, coordinator.run.spec, coordinator.run.run_id)
        client = ShardClient(swarm._hosts[ann.identity.peer_id], coordinator.network.peer_id)
        for digest, size in manifest_shards(manifest):
            assert await client.fetch(digest, size) is not None
        await client.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
async def test_a_restart_with_a_damaged_head_says_so_instead_of_standing_still(
    tmp_path: Path, autojump_clock: Clock, damage: str
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
    path = checkpoint_folder(folder, 0) / "model.safetensors"
    data = path.read_bytes()
    match damage:
        case "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "truncated":
            path.write_bytes(data[:100])
        case "removed":
            (path.parent / "tokenizer.json").unlink()
    with pytest.RaisesGroup(
        pytest.RaisesExc(RunFolderError, match="of the newest version.*any node"),
        flatten_subgroups=True,
        allow_unwrapped=True,
    ):
        async with coordinating(swarm, folder):
            pass


async def test_an_altered_asset_is_never_published(tmp_path: Path, autojump_clock: Clock) -> None:
    folder = make_run(tmp_path)
    (checkpoint_folder(folder, 0) / "tokenizer.json").write_text('{"other": 1}')
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await trio.sleep(10)
        assert coordinator.state()["policy_version"] == -1
        assert "not the file that the run spec names" in coordinator.state()["reason"]


async def test_a_full_disk_is_said_to_the_node_and_its_work_is_taken_later(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = {"pages": 1_000_000}
    commit = Journal.commit

    def limited(self: Journal, writes: Any) -> None:
        self.store.db.execute(f"PRAGMA max_page_count = {limit['pages']}")
        commit(self, writes)

    monkeypatch.setattr(Journal, "commit", limited)
    async with stage(tmp_path) as (_, coordinator, ann):
        lease = await ann.lease()
        work = ann.signed_work(lease, engine="good")
        limit["pages"] = 1
        big = ann.signed_work(lease)
        rollouts = tuple(
            msgspec.structs.replace(rollout, tokens=b"\1\0\0\0" * 5000)
            for rollout in ann.work(lease).rollouts
        )
        big = ann.signed_work(lease, rollouts=rollouts)
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(big)
        assert refusal.value.code == "storage-full"
        assert str(tmp_path) not in str(refusal.value)
        assert "free some disk space" in coordinator.state()["reason"]
        limit["pages"] = 1_000_000
        assert not (await ann.submit(work)).duplicate
        await until(lambda: coordinator.state()["accepted"] == 1)
        assert "free some disk space" not in coordinator.state()["reason"]


async def after_a_restart(tmp_path: Path, down_s: float, wait_s: float, asks: bool) -> object:
    """What a node is told that took a lease of 30 s, honoured for 60 s, before the coordinator was away."""
    folder = make_run(tmp_path, name=f"{down_s}-{wait_s}-{asks}", timeout_s=30.0, deadline_s=60.0)
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator) as ann:
            lent = await ann.lease()
    await trio.sleep(down_s)
    async with coordinating(swarm, folder, seed=1) as coordinator:
        await trio.sleep(wait_s)
        async with node(swarm, coordinator) as ann:
            if not asks:
                try:
                    await ann.submit(ann.signed_work(lent))
                except RefusedError as error:
                    return error.code
                return "taken"
            again = await ann.lease()
            assert trio.current_time() * 1000 + 1_000_000 < again.timeout_at
            assert again.unit_id == lent.unit_id
            return again.lease_id == lent.lease_id


@pytest.mark.parametrize(
    ("down_s", "answer", "same"),
    [(20.0, "taken", True), (40.0, "taken", False), (59.8, "taken", False), (70.0, "expired-lease", False)],
)
async def test_the_first_moments_after_a_restart_are_like_any_other(
    tmp_path: Path, autojump_clock: Clock, down_s: float, answer: str, same: bool
) -> None:
    """What ended meanwhile has ended, whether a timer has run since or not."""
    for wait_s in (0.0, 2.0) if down_s != 59.8 else (0.0,):
        assert await after_a_restart(tmp_path, down_s, wait_s, asks=False) == answer
        assert await after_a_restart(tmp_path, down_s, wait_s, asks=True) is same
