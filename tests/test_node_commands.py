"""What a volunteer may say to a daemon at work, and how soon it obeys."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from daemon_support import Coordinator, node

from barnraise.protocol.errors import RefusedError
from barnraise.protocol.memory_network import MemorySwarm


async def test_pause_stops_the_engine_and_returns_the_lease_within_two_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R13."""
    swarm, boss = MemorySwarm(latency_s=0.05), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["state"] == "generating")
        asked = trio.current_time()
        await it.handle.commands["pause"]({"seconds": 100})
        tree = await it.until(lambda tree: tree["state"] == "paused" and bool(boss.returned))
        assert it.engine.stopped_at[0] - asked <= 2.0
        assert boss.returned[0][2] - asked <= 2.0
        assert tree["then"] == "resumes"
        await trio.sleep(90)
        assert not it.engine.busy
        assert it.tree["connected"]
        assert boss.beats[-1].state == "paused"
        await it.until(lambda tree: tree["accepted"] == 1)
        await it.handle.commands["pause"]({})
        await it.handle.commands["resume"]({})
        await it.until(lambda tree: tree["accepted"] == 3)
        with pytest.raises(RefusedError):
            await it.handle.commands["pause"]({"seconds": "1h"})


async def test_finish_delivers_the_unit_at_work_and_ends(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["state"] == "generating")
        await it.handle.commands["finish"]({})
        assert await it.until_ended(20.0) == 0
        assert len(boss.submissions) == 1
        assert not boss.leases
        assert it.engine.closed


async def test_leave_returns_the_lease_and_ends_within_two_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(latency_s=0.05), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["state"] == "generating")
        asked = trio.current_time()
        await it.handle.commands["leave"]({})
        assert await it.until_ended(20.0) == 0
        assert it.ended_at[0] - asked <= 2.0
        assert len(boss.returned) == 1


async def test_a_complete_run_ends_the_node_that_was_told_to(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss", versions=1)
    boss.publish()
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address, exit_when_complete=True) as it:
            await it.until(lambda tree: tree["accepted"] == 1)
            boss.publish()
            assert await it.until_ended(30.0) == 0
        async with node(swarm, tmp_path, address) as it:
            tree = await it.until(lambda tree: tree["have_version"] == 1)
            await trio.sleep(600)
            tree = it.tree
            assert tree["state"] == "complete"
            assert tree["complete"]
            assert not it.exit_codes
