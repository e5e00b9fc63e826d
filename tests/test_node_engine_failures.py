"""An engine that fails costs neither the node nor, where it can be helped, the unit."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing
from daemon_support import Coordinator, ScriptedEngine, node

from barnraise.node.engine import OutOfMemory
from barnraise.protocol.errors import ChildError
from barnraise.protocol.memory_network import MemorySwarm


async def test_out_of_memory_is_retried_smaller_once_and_the_node_lives(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    engine = ScriptedEngine(failures=[OutOfMemory("8 GB wanted")])
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        assert [work.shrink for work in engine.works[:2]] == [0, 1]
        assert engine.works[0].lease_id == engine.works[1].lease_id
        engine.failures += [OutOfMemory("still"), OutOfMemory("still")]
        await it.until(lambda tree: len(boss.returned) == 1)
        assert "out of memory" in boss.returned[0][1]
        await it.until(lambda tree: tree["accepted"] >= 3)


async def test_a_killed_engine_is_reported_and_loaded_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R5."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    engine = ScriptedEngine(failures=[ChildError("the engine was killed: out of memory")])
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: tree["accepted"] == 1)
    assert engine.loads == [0, 0]
    assert engine.works[1].shrink == 1
    assert any("out of memory" in notice["text"] for notice in tree["notices"])
    assert not boss.returned


async def test_an_engine_that_cannot_load_is_tried_again_and_the_reason_shown(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    engine = ScriptedEngine(load_failures=[ChildError("no such kernel"), RuntimeError("odd")])
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: "no such kernel" in tree["reason"])
        assert tree["then"] == "tries again"
        await it.until(lambda tree: tree["accepted"] == 1)
