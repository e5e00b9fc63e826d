"""A node's view of its hardware, in its state tree; a driver that comes up late is found (R11)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemon_support import Coordinator, ScriptedEngine, node
from trio.testing import MockClock

from barnraise.node.bench import Measured
from barnraise.node.devices import NodeFile, Signs, TorchDevice, TorchFacts
from barnraise.node.engine import OutOfMemory, Sized
from barnraise.node.hardware import MEASURED_FILE, SurveyedEngine, keep_measured, load_measured
from barnraise.protocol.memory_network import MemorySwarm

NOTHING = Signs()
DRIVER = Signs(files=(NodeFile("/dev/nvidia0", True),), driver="550.54")
BLIND = TorchFacts(version="2.13.0", cuda="12.8", cuda_error="driver is initialising")
CARD = TorchDevice("cuda", 0, "RTX 4090", (8, 9), 24 * 10**9, 20 * 10**9)
SIGHTED = TorchFacts(version="2.13.0", cuda="12.8", devices=(CARD,))


@dataclass
class Surveyed(ScriptedEngine):
    """Shows ``signs`` and ``torch`` as they are at each virtual moment."""

    signs: dict[float, Signs] = field(default_factory=lambda: {0.0: NOTHING})
    torch: dict[float, TorchFacts] = field(default_factory=lambda: {0.0: SIGHTED})
    asked: list[float] = field(default_factory=list)
    renewed: int = 0

    async def look(self) -> Signs:
        return at_present(self.signs)

    async def ask_torch(self) -> TorchFacts:
        import trio

        self.asked.append(trio.current_time())
        await trio.sleep(2.0)
        return at_present(self.torch)

    def renew(self) -> None:
        assert not self.busy, "in the middle of a unit"
        self.renewed += 1


def at_present(schedule: dict[float, Any]) -> Any:
    import trio

    return [value for moment, value in schedule.items() if moment <= trio.current_time()][-1]


async def test_r11_without_a_gpu_torch_is_not_even_asked_and_the_state_is_clear(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "barnraise.node")
    engine = Surveyed()
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: tree["accepted"] == 2)
    assert not engine.asked
    hardware = tree["hardware"]
    assert hardware["gpus"] == []
    assert hardware["cores"] >= 1
    assert 0 < hardware["memory_free"] <= hardware["memory_total"]
    assert hardware["tokens_per_s"] == tree["tokens_per_s"]
    assert "no usable GPU: the engine runs on the CPU" in caplog.text
    msgspec.msgpack.encode(tree)


async def test_r11_a_driver_that_comes_up_minutes_late_is_found_and_the_engine_moves_between_units(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    engine = Surveyed(signs={0.0: NOTHING, 95.0: DRIVER})
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: any(gpu["used"] for gpu in tree["hardware"].get("gpus", ())))
        assert tree["hardware"]["gpus"][0]["name"] == "RTX 4090"
        accepted = tree["accepted"]
        await it.until(lambda tree: engine.renewed == 1 and tree["accepted"] > accepted + 2)
    assert engine.loads == [0, 0], "loaded again, on the GPU"
    assert not boss.returned, "no unit was lost to it"


async def test_r11_a_driver_that_torch_cannot_open_at_first_is_tried_again_with_longer_and_longer_pauses(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    engine = Surveyed(signs={0.0: DRIVER}, torch={0.0: BLIND, 100.0: SIGHTED})
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: bool(tree["hardware"].get("gpus")))
        assert "driver is initialising" in tree["hardware"]["gpus"][0]["reason"]
        await it.until(lambda tree: tree["hardware"]["gpus"][0]["used"])
        await it.until(lambda tree: engine.renewed == 1)
    assert [round(moment / 10) for moment in engine.asked] == [0, 2, 6, 13]


async def test_r11_a_torch_without_gpu_support_is_asked_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    engine = Surveyed(signs={0.0: DRIVER}, torch={0.0: TorchFacts(version="2.13.0+cpu")})
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        await it.until(lambda tree: tree["accepted"] == 60, seconds=3000.0)
        assert "built without CUDA" in it.tree["hardware"]["gpus"][0]["reason"]
    assert len(engine.asked) == 1


async def test_r5_the_tree_says_how_the_last_unit_was_sized(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    class Sizing(Surveyed):
        async def generate(self, work: Any, progress: Any) -> Any:
            sized = Sized(at_once=64 >> work.shrink, most=256, each=1_000_000, free=10**9, halved=work.shrink)

            def both(made: Any) -> None:
                progress(msgspec.structs.replace(made, sized=sized))

            return await super().generate(work, both)

    engine = Sizing(failures=[OutOfMemory("too little")])
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        first = await it.until(lambda tree: bool(tree["hardware"].get("sized")))
        sized = first["hardware"]["sized"]
        assert sized == "64 of up to 256 sequences at once: 1.0 MB each, 1,000.0 MB were free"
        tree = await it.until(lambda tree: tree["accepted"] == 1)
    assert tree["hardware"]["sized"].startswith("32 of up to 256")
    assert tree["hardware"]["sized"].endswith("halved 1 time(s) as memory ran out")


def test_what_doctor_measured_is_kept_for_the_node_and_damage_is_no_matter(tmp_path: Path) -> None:
    measured = Measured(tokens=1000, seconds=5.0, weights=25_000_000, device="cpu", threads=2)
    assert load_measured(tmp_path) is None
    keep_measured(tmp_path, measured)
    assert load_measured(tmp_path) == measured
    (tmp_path / MEASURED_FILE).write_bytes(random.Random(0).randbytes(100))
    assert load_measured(tmp_path) is None
    keep_measured(tmp_path / "nowhere", measured)


def check_types() -> SurveyedEngine:
    from barnraise.node.engine_child import ChildEngine

    return ChildEngine()
