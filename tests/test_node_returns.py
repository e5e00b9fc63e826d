"""What a daemon makes up for: killed coordinators, its own restart, missed receipts, a full disk afar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from daemon_support import Coordinator, node

from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm


async def test_work_is_sent_again_after_the_coordinator_was_killed_before_it_acknowledged(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R2, R17."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    killed = trio.Event()
    again = f"/memory/3/p2p/{boss.identity.peer_id}"

    async def die() -> None:
        killed.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        first = trio.CancelScope()

        async def serve(task_status: Any) -> None:
            with first:
                async with boss.up(swarm) as address:
                    task_status.started(address)
                    await trio.sleep_forever()

        address = await nursery.start(serve)
        async with node(swarm, tmp_path, address, more_addresses=(again,)) as it:
            await it.until(lambda tree: tree["accepted"] == 1)
            boss.before_ack = die
            await killed.wait()
            await trio.sleep(1.0)
            swarm.crash(boss.identity.peer_id)
            first.cancel()
            tree = await it.until(lambda tree: tree["state"] == "offline")
            assert "tries again" in tree["then"]
            assert tree["policy_version"] == 0
            await trio.sleep(40.0)
            assert address in it.tree["reason"]
            assert again in it.tree["reason"]
            assert it.tree["pending"] == 2  # the one in doubt, and the one made meanwhile
            async with boss.up(swarm) as address:
                assert address == again
                tree = await it.until(lambda tree: tree["accepted"] >= 4)
        doubtful = boss.received[1]
        assert boss.received.count(doubtful) == 2
        assert len(boss.submissions) == len(set(boss.submissions))
        assert len(boss.joins) == 2
        assert boss.joins[0].instance == boss.joins[1].instance
        nursery.cancel_scope.cancel()


async def test_a_restarted_node_sends_what_it_had_signed_and_gives_its_lease_back(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R4, R6, R17."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    identity = Identity.generate()
    hold = trio.Event()
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address, identity=identity) as it:
            boss.before_ack = hold.wait
            await it.until(lambda tree: tree["pending"] == 1 and tree["state"] == "generating")
            await trio.sleep(1.0)
        assert len(boss.received) == 1
        lease = it.engine.works[1].lease_id
        async with node(swarm, tmp_path, address, identity=identity) as it:
            tree = await it.until(lambda tree: tree["accepted"] >= 1)
            assert boss.received[0] == boss.received[1]
            assert [r[:2] for r in boss.returned] == [(lease, "the node was restarted")]
            await it.until(lambda tree: tree["accepted"] >= 3)
            hold.set()
    assert not any((tmp_path / "node").glob(".tmp*"))
    assert tree["credit"] >= 100


async def test_receipts_missed_while_away_are_fetched_and_summed_up_in_one_line(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """R16."""
    caplog.set_level("INFO", "barnraise.node")
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    identity = Identity.generate()
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address, identity=identity) as it:
            await it.until(lambda tree: tree["accepted"] == 2)
        for number in range(5):
            boss.receipts.append(boss.receipt(bytes(16), bytes([number]) * 32))
        boss.refuse_lease = ("none left", 1000)
        told = caplog.text.count("unit accepted: 100 Mflop of credit earned")
        async with node(swarm, tmp_path, address, identity=identity) as it:
            tree = await it.until(lambda tree: tree["accepted"] == len(boss.receipts))
            assert tree["credit"] == 100 * len(boss.receipts)
            await trio.sleep(1.0)
        assert caplog.text.count("unit accepted") == told == 2
        assert "verdicts came meanwhile" in caplog.text


async def test_a_full_disk_at_the_coordinator_costs_no_work(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()

    async def full() -> None:
        boss.submissions.clear()
        boss.leases[boss.received_lease] = boss.lent[boss.received_lease]
        raise RefusedError("storage-full", "the coordinator's disk is full")

    boss.before_ack = full
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
    assert boss.received[0] == boss.received[1]
