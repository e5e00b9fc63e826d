"""A daemon that watches its machine: suspended within two seconds, with a reason, and back again (R14)."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from daemon_support import EPOCH_MS, Coordinator, ScriptedEngine, node
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node.chosen import NAMES, checked, load_chosen, settled
from barnraise.node.config import DEFAULT_DISK_BYTES, NodeConfig
from barnraise.node.engine import EngineInfo, EngineLimits
from barnraise.node.guard import merged
from barnraise.node.machine import Seen, Wanted
from barnraise.node.presence import Presence
from barnraise.node.rules import Suspension
from barnraise.node.traffic import Limits
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.spec import RunSpec

GIB = 2**30
IDLE = Presence("x11", 5000.0, "x11: last input at 08:00:00")
THERE = Presence("x11", 1.0, "x11: last input at 09:00:00")


@dataclass
class Scene:
    """A machine as the test has it."""

    seen: Seen = field(
        default_factory=lambda: Seen(IDLE, on_battery=False, memory_total=16 * GIB, memory_free=9 * GIB)
    )
    wanted: list[Wanted] = field(default_factory=list)

    async def read(self, wanted: Wanted) -> Seen:
        await trio.lowlevel.checkpoint()
        self.wanted.append(wanted)
        return self.seen

    def shows(self, **changes: Any) -> None:
        self.seen = replace(self.seen, **changes)


@dataclass
class LimitedEngine(ScriptedEngine):
    """Notes what it was limited to; says that it computes on ``kind``."""

    kind: str = "cpu"
    limits: list[EngineLimits] = field(default_factory=list)
    closed_at: list[float] = field(default_factory=list)
    pid: int = 4321

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        info = await super().load(spec, folder, version)
        return EngineInfo(name=f"torch-{self.kind}-float32", device=info.device, memory_bytes=GIB)

    async def limit(self, limits: EngineLimits) -> None:
        self.limits.append(limits)

    async def close(self) -> None:
        await super().close()
        self.closed_at.append(trio.current_time())


async def test_r14_you_have_your_machine_back_within_two_seconds_and_it_goes_on_by_itself(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss, scene, engine = MemorySwarm(), Coordinator(tmp_path / "boss"), Scene(), LimitedEngine()
    engine.seconds = 30.0
    boss.publish()
    async with (
        boss.up(swarm) as address,
        node(swarm, tmp_path, address, engine, sensors=scene) as it,
    ):
        await it.handle.commands["limits"]({"when": "idle", "idle_s": 60})
        await it.until(lambda tree: tree["state"] == "generating")
        assert it.tree["presence"] == {
            "source": "x11",
            "idle_s": 5000.0,
            "in_use": False,
            "text": "x11: last input at 08:00:00",
        }
        await trio.sleep(5)
        here = trio.current_time()
        scene.shows(presence=THERE)
        tree = await it.until(lambda tree: tree["state"] == "paused" and bool(engine.stopped_at), 2.0)
        assert engine.stopped_at[0] - here <= 2.0
        assert tree["presence"]["in_use"]
        assert "you use the machine" in tree["reason"]
        assert tree["until_ms"] == pytest.approx(EPOCH_MS + 1000 * (here + 59), abs=1000)
        assert [entry["reason"] for entry in tree["suspended"]] == [tree["reason"]]
        assert "--when always" in tree["suspended"][0]["cure"]
        assert tree["suspended"][0]["until_ms"] is not None
        await it.until(lambda tree: tree["connected"] and bool(boss.returned), 5)
        assert boss.returned[0][1] == "suspended by the machine's rules"  # and not why
        await trio.sleep(100)
        assert len(boss.asked) == 1
        assert not engine.busy
        scene.shows(presence=IDLE)
        tree = await it.until(lambda tree: tree["state"] == "generating", 10)
        assert tree["suspended"] == []
        assert engine.loads == [0]  # it had stayed loaded


async def test_r14_a_rule_is_changed_while_it_holds_and_lets_go_at_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss, scene = MemorySwarm(), Coordinator(tmp_path / "boss"), Scene()
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, sensors=scene) as it:
        scene.shows(on_battery=True)
        tree = await it.until(lambda tree: tree["state"] == "paused")
        assert tree["reason"] == "the machine runs on battery"
        resumed = await it.handle.commands["resume"]({})
        assert "stays suspended: the machine runs on battery; plug it in" in resumed["text"]
        now = trio.current_time()
        reply = await it.handle.commands["limits"]({"on_battery": True})
        assert reply["limits"]["on_battery"] is True
        await it.until(lambda tree: tree["state"] != "paused", 0.1)
        assert trio.current_time() - now < 0.2


async def test_r14_the_gpu_rests_beside_you_and_versions_come_in_all_the_same(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss, scene = MemorySwarm(), Coordinator(tmp_path / "boss"), Scene()
    boss.publish()
    engine = LimitedEngine(kind="cuda")
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine, sensors=scene) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        assert scene.wanted[-1] == Wanted((), True, 4321)
        scene.shows(presence=THERE)
        await it.until(lambda tree: tree["state"] == "paused", 2.0)
        boss.publish()
        await it.until(lambda tree: tree["have_version"] == 1, 30)
        assert engine.loads == [0]
        scene.shows(presence=IDLE, gpu_temperature=90.0)
        tree = await it.until(lambda tree: "hot" in tree["reason"], 5)
        assert tree["state"] == "paused"
        scene.shows(gpu_temperature=60.0)
        await it.until(lambda tree: tree["policy_version"] == 1, 60)


async def test_r14_short_memory_ends_the_engine_and_it_starts_again_when_there_is_room(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss, scene, engine = MemorySwarm(), Coordinator(tmp_path / "boss"), Scene(), LimitedEngine()
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine, sensors=scene) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        scene.shows(memory_free=200 * 2**20, engine_memory=2 * GIB)
        at = trio.current_time()
        tree = await it.until(lambda tree: tree["state"] == "paused" and bool(engine.closed_at), 5)
        assert engine.closed_at[0] - at <= 2.0
        assert "memory is short" in tree["reason"]
        assert tree["engine_memory"] == 0
        scene.shows(memory_free=9 * GIB, engine_memory=0)
        await it.until(lambda tree: tree["accepted"] >= 2, 120)
        assert engine.loads == [0, 0]


async def test_r14_limits_for_in_use_and_idle_reach_the_engine_while_it_works(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss, scene, engine = MemorySwarm(), Coordinator(tmp_path / "boss"), Scene(), LimitedEngine()
    boss.publish()
    async with (
        boss.up(swarm) as address,
        node(swarm, tmp_path, address, engine, sensors=scene, threads=6) as it,
    ):
        await it.until(lambda tree: tree["state"] == "generating")
        assert engine.limits[-1] == EngineLimits(threads=6, memory=int(0.9 * 16 * GIB), gpu_memory=0.9)
        scene.shows(presence=THERE)
        await trio.sleep(1)
        assert it.tree["state"] != "paused"
        assert engine.limits[-1] == EngineLimits(threads=3, memory=8 * GIB, gpu_memory=0.9)
        await it.handle.commands["limits"]({"threads_in_use": 1, "memory_in_use": 0.25, "disk": 10**9})
        assert engine.limits[-1] == EngineLimits(threads=1, memory=4 * GIB, gpu_memory=0.9)
        assert it.handle._ctx.store.quota_bytes == 10**9
        told = len(engine.limits)
        await trio.sleep(60)
        assert len(engine.limits) == told


async def test_r14_a_model_that_needs_more_than_it_may_have_is_refused_with_the_reason(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss, scene, engine = MemorySwarm(), Coordinator(tmp_path / "boss"), Scene(), LimitedEngine()
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine, sensors=scene) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        scene.shows(memory_total=10**5)
        tree = await it.until(lambda tree: tree["state"] == "paused", 5)
        assert "may take" in tree["reason"]
        assert "limits set --memory" in tree["suspended"][0]["cure"]


async def test_what_is_set_for_a_while_ends_by_itself(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss, scene = MemorySwarm(), Coordinator(tmp_path / "boss"), Scene()
    scene.shows(programs=frozenset({"game"}))
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, sensors=scene) as it:
        until = EPOCH_MS + round(trio.current_time() * 1000) + 60_000
        await it.handle.commands["limits"]({"programs": ["game"], "until_ms": until})
        tree = await it.until(lambda tree: tree["state"] == "paused", 2)
        assert tree["reason"] == "game is running"
        assert (tree["limits"]["until_ms"], tree["limits"]["for_now"]) == (until, ["programs"])
        await trio.sleep(58)
        assert it.tree["state"] == "paused"
        await it.until(lambda tree: tree["state"] != "paused", 5)
        assert it.tree["limits"]["programs"] == []
        assert load_chosen(it.config.limits_path)[1] is None


async def test_every_rule_survives_a_restart(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    swarm, boss, scene = MemorySwarm(), Coordinator(tmp_path / "boss"), Scene()
    boss.publish()
    wished = {
        "up": 5e6,
        "down": None,
        "monthly": 10**12,
        "disk": 5 * 10**9,
        "when": "idle",
        "idle_s": 300.0,
        "hours": ["22:00-07:00"],
        "on_battery": True,
        "gpu_in_use": True,
        "programs": ["game", "Editor"],
        "threads_idle": 7,
        "threads_in_use": 2,
        "memory_idle": 0.8,
        "memory_in_use": 0.25,
        "gpu_memory": 0.5,
        "gpu_temperature": None,
    }
    assert wished.keys() == NAMES
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address, sensors=scene) as it:
            await it.handle.commands["limits"](wished)
        async with node(swarm, tmp_path, address, sensors=scene) as it:
            assert {name: it.tree["limits"][name] for name in wished} == wished
            assert it.tree["limits"]["until_ms"] is None


async def test_a_machine_that_cannot_be_looked_at_is_said_once_and_lends_itself_all_the_same(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    class Broken:
        async def read(self, wanted: Wanted) -> Seen:
            await trio.lowlevel.checkpoint()
            raise RuntimeError("the driver went away")

    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, sensors=Broken()) as it:
        tree = await it.until(lambda tree: tree["accepted"] == 2)
        said = [notice["text"] for notice in tree["notices"]]
        assert [text for text in said if "driver" in text] == [
            "this machine cannot be looked at: the driver went away; rules that need it do not hold"
        ]
        assert tree["presence"]["source"] == "none"


async def test_without_sensors_the_tree_says_that_nothing_is_known(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        tree = await it.until(lambda tree: tree["accepted"] == 1)
        assert tree["presence"] == {
            "source": "none",
            "idle_s": None,
            "in_use": False,
            "text": "not looked at yet",
        }
        assert tree["suspended"] == []


def test_several_causes_are_one_hold_named_after_the_first() -> None:
    gpu = Suspension("gpu", "you are here", "-", until=150.0, transfers=True)
    memory = Suspension("memory", "memory is short", "-", transfers=True, free=True)
    quota = Suspension("quota", "the quota is spent", "-", until=900.0, finish=True)
    assert merged([], 0.0, 100.0) is None
    both = merged([gpu, memory], 10.0, 100.0)
    assert both is not None
    assert (both.reason, both.until, both.stop, both.transfers, both.free) == (
        "you are here",
        60.0,
        True,
        True,
        True,
    )
    last = merged([quota], 10.0, 100.0)
    assert last is not None
    assert (last.stop, last.transfers) == (False, False)
    mixed = merged([gpu, quota], 10.0, 100.0)
    assert mixed is not None
    assert (mixed.stop, mixed.transfers) == (True, False)


# --- what is chosen


def config(folder: Path, **more: Any) -> NodeConfig:
    return NodeConfig(address="/a", data=folder, key=folder / "key", **more)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "takes"),
        ({"colour": 1}, "knows no colour"),
        ({"when": "sometimes"}, "'always' or 'idle'"),
        ({"idle_s": 1}, "10 to 86400"),
        ({"hours": "22:00-07:00"}, "22:00-07:00"),
        ({"hours": ["22-7"]}, "22:00-07:00"),
        ({"hours": ["24:00-01:00"]}, "22:00-07:00"),
        ({"on_battery": 1}, "true or false"),
        ({"programs": ["x" * 65]}, "64"),
        ({"threads_idle": 0}, "1 to 1024"),
        ({"threads_idle": True}, "1 to 1024"),
        ({"memory_idle": 1.5}, "of the RAM"),
        ({"memory_in_use": float("nan")}, "of the RAM"),
        ({"gpu_temperature": 500}, "30 to 120"),
        ({"disk": 5}, "100 MB"),
        ({"up": 1}, "no usable cap"),
        ({"until_ms": 5}, "a moment to come"),
        ({"until_ms": 2**60, "when": "idle"}, "a year away"),
        ({"until_ms": None}, "nothing was set for a while"),
    ],
    ids=str,
)
async def test_an_unusable_rule_is_refused_and_says_what_is_usable(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    limits = Limits(config(tmp_path))
    before = limits.tree(0)
    with pytest.raises(RefusedError, match=said.replace("(", r"\(")):
        limits.change(arguments, 10)
    assert limits.tree(0) == before
    assert not (tmp_path / "limits.json").exists()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(NAMES)) | st.text(max_size=5), VALUES, max_size=4))
def test_whatever_is_sent_is_usable_or_refused(arguments: dict[str, Any]) -> None:
    try:
        values = checked(arguments)
    except RefusedError:
        return
    assert values.keys() == arguments.keys()
    json.dumps(values, allow_nan=False)


async def test_what_is_set_for_a_while_gives_way_to_what_is_set_for_good(tmp_path: Path) -> None:
    limits = Limits(config(tmp_path))
    limits.change({"memory_idle": 0.5, "when": "idle", "until_ms": 5000}, 1000)
    limits.change({"memory_idle": 0.7}, 1000)
    assert (limits.rules.memory_idle, limits.rules.when) == (0.7, "idle")
    assert limits.tree(0)["for_now"] == ["when"]
    again = Limits(config(tmp_path))
    assert (again.rules.memory_idle, again.rules.when) == (0.7, "idle")
    assert again.expire(4999) == ""
    assert "when" in again.expire(5000)
    assert (again.rules.memory_idle, again.rules.when) == (0.7, "always")


async def test_what_is_set_for_a_while_can_be_ended_or_prolonged(tmp_path: Path) -> None:
    limits = Limits(config(tmp_path, up_bytes_s=1e6))
    limits.change({"up": 5e6, "until_ms": 5000}, 1000)
    assert limits.up.rate == 5e6
    limits.change({"until_ms": 9000}, 1000)
    assert limits.expire(5000) == ""
    limits.change({"until_ms": None}, 5000)
    assert limits.up.rate == 1e6
    assert limits.tree(0)["until_ms"] is None


async def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "limits.json").write_text('{"format":1,"up":5000000.0,"down":null,"monthly":500000000000}\n')
    limits = Limits(config(tmp_path))
    assert limits.warning == ""
    assert (limits.up.rate, limits.rules.monthly, limits.rules.when) == (5e6, 5 * 10**11, "always")


@pytest.mark.parametrize(
    "damage",
    [
        b'{"meanwhile": {"until_ms": 5, "changes": {"colour": 1}}}',
        b'{"meanwhile": {"until_ms": 5, "changes": {"when": "never"}}}',
        b'{"when": "never"}',
        b'{"hours": ["24:00-25:00"]}',
    ],
    ids=["name", "value", "when", "hours"],
)
async def test_rules_that_cannot_be_understood_are_not_guessed(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "limits.json").write_bytes(damage)
    limits = Limits(config(tmp_path))
    assert "do not hold" in limits.warning
    assert limits.rules.when == "always"


async def test_options_left_open_are_filled_from_what_was_set(tmp_path: Path) -> None:
    plain = settled(config(tmp_path))
    assert plain.disk_bytes == DEFAULT_DISK_BYTES
    assert plain.threads >= 1
    Limits(plain).change({"disk": 10**9, "threads_idle": 3}, int(time.time() * 1000))
    again = settled(config(tmp_path))
    assert (again.disk_bytes, again.threads) == (10**9, 3)
    said = settled(config(tmp_path, disk_bytes=2 * 10**9, threads=1))
    assert (said.disk_bytes, said.threads) == (2 * 10**9, 1)
