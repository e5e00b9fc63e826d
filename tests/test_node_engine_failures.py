"""An engine that fails costs neither the node nor, where it can be helped, the unit."""

from __future__ import annotations

import os
from pathlib import Path

import trio
import trio.testing
from daemon_support import Coordinator, ScriptedEngine, node

from barnraise.node.engine import OutOfMemory
from barnraise.node.versions import FRESH_S
from barnraise.protocol.errors import ChildError
from barnraise.protocol.manifest import WEIGHTS_FILE
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


async def test_a_version_that_the_disk_spoiled_is_fetched_again_before_an_engine_loads_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """It was whole when the first engine loaded it; with a wrong bit in it, honest work would be rejected."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    engine = ScriptedEngine()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        (weights,) = tmp_path.rglob(f"v000000/{WEIGHTS_FILE}")
        sound = weights.read_bytes()
        before = weights.stat()
        with weights.open("r+b") as file:
            file.write(bytes([sound[0] ^ 1]))
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # disks do not touch it
        engine.failures += [ChildError("the engine was killed")]
        await trio.sleep(FRESH_S)
        loads = len(engine.loads)
        tree = await it.until(lambda tree: tree["accepted"] >= 3)
        assert weights.read_bytes() == sound
        assert len(engine.loads) == loads + 1
        assert any("was damaged on the disk" in notice["text"] for notice in tree["notices"])
        assert [returned[1] for returned in boss.returned] == ["version 0 was damaged on the disk"]
