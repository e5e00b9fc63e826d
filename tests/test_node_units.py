"""Units of work from lease to credit, and the versions they are made with, in virtual time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from daemon_support import SPEED, Coordinator, node

from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import (
    HeadPush,
)


async def test_units_are_leased_generated_submitted_and_credited(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        tree = await it.until(lambda tree: tree["accepted"] == 3)
    assert tree["credit"] == 300
    assert tree["policy_version"] == tree["head_version"] == 0
    assert tree["engine"] == "scripted"
    assert tree["tokens_per_s"] == round(8 / SPEED, 1)
    assert tree["bytes_in"] > 20_000
    assert tree["last_verdict"]["accepted"]
    assert boss.joins[0].name == "n"
    assert {work.node for work in it.engine.works} == {it.identity.public_key}
    assert boss.beats[-1].have_version == 0
    msgspec.msgpack.encode(tree)


async def test_uploads_overlap_the_next_unit(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    stalled = trio.Event()

    async def slow() -> None:
        stalled.set()
        await trio.sleep(2 * SPEED + 1)

    boss.before_ack = slow
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await stalled.wait()
        await trio.sleep(2.0)
        assert it.tree["state"] == "generating"
        await trio.sleep(2.0)
        assert it.tree["state"] == "uploading"
        assert it.tree["pending"] == 2
        assert len(it.engine.works) == 2
        await it.until(lambda tree: tree["accepted"] == 3)


async def test_a_lease_that_comes_again_is_never_worked_on_twice(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        boss.resend = next(iter(boss.lent.values()))
        await it.until(lambda tree: tree["accepted"] == 4)
        assert boss.resend is None
    worked = [work.lease_id for work in it.engine.works]
    assert len(worked) == len(set(worked))


async def test_a_new_head_is_fetched_while_generating_and_used_for_the_next_unit(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["unit"] is not None and tree["unit"]["completions"] == 2)
        boss.publish()
        boss.publish()
        tree = await it.until(lambda tree: tree["have_version"] == 2)
        assert tree["state"] == "generating"
        assert tree["policy_version"] == 0
        await it.until(lambda tree: tree["policy_version"] == 2)
        await it.until(lambda tree: tree["accepted"] == 2)
    assert it.engine.loads in ([0, 2], [0, 1, 2])
    assert it.engine.works[0].policy_version == 0
    assert it.engine.works[1].policy_version == 2


async def test_a_lost_push_of_a_head_is_made_up_for_by_heartbeats(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["policy_version"] == 0)
        boss.heads.append(boss.manifest(1))
        await it.until(lambda tree: tree["policy_version"] == 1, 15.0)


async def test_lease_refusals_are_obeyed(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss", refuse_lease=("enough is lent", 20_000))
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: "enough is lent" in tree["reason"])
        await trio.sleep(100)
    gaps = [b - a for a, b in zip(boss.asked, boss.asked[1:], strict=False)]
    assert gaps
    assert all(20.0 <= gap <= 26.0 for gap in gaps)


async def test_a_manifest_signed_by_another_key_is_refused_and_work_goes_on(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        boss.push(HeadPush(head=boss.manifest(9, Identity.generate())))
        tree = await it.until(lambda tree: tree["accepted"] == 3)
    assert tree["head_version"] == 0
    assert any("manifest" in notice["text"] for notice in tree["notices"])


async def test_a_refused_submission_is_dropped_and_the_reason_shown(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["unit"] is not None)
        boss.leases.clear()
        tree = await it.until(lambda tree: tree["accepted"] == 1)
    assert any("unknown-lease" in notice["text"] for notice in tree["notices"])
    assert len(boss.received) == 2


async def test_a_rejection_names_check_threshold_value_and_place(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """R18."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss", accept=False)
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        tree = await it.until(lambda tree: tree["rejected"] == 1)
    assert tree["last_verdict"]["check"] == "toploc"
    line = next(r.getMessage() for r in caplog.records if "rejected" in r.getMessage())
    for part in ("toploc", "97.5", "10", "rollout 3 chunk 0"):
        assert part in line
