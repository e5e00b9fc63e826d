"""What a node survives: kills in every state, sleep, clocks that jump, a network or coordinator that goes.

In memory and in virtual time, with a real disk. Units of blocks and their kills are in
``test_block_node``, real processes in ``test_resilience_processes``, full disks in ``test_full_disk``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from daemon_support import Coordinator, Node, ScriptedEngine, node

from barnraise.node.receipts import read_receipts
from barnraise.protocol.errors import ChildError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Receipt
from barnraise.protocol.wire import decode

Tree = dict[str, Any]
HOUR = 3600.0


def nothing_is_lost(boss: Coordinator, it: Node) -> None:
    """Every verdict is kept, and no unit counts twice."""
    (book,) = it.config.data.glob("runs/*/receipts.bin")
    kept = [decode(signed.payload, Receipt).submission_id for signed in read_receipts(book)]
    assert len(kept) == len(set(kept))
    assert set(kept) == {decode(signed.payload, Receipt).submission_id for signed in boss.receipts}
    assert set(kept) <= set(boss.submissions)
    leases = [work.lease_id for work in boss.submissions.values()]
    assert len(leases) == len(set(leases))


@pytest.mark.parametrize("state", ["fetching", "loading", "generating", "uploading", "paused", "offline"])
async def test_r6_a_daemon_killed_in_any_state_comes_back_and_loses_at_most_the_unit_at_work(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, state: str
) -> None:
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    identity, hold = Identity.generate(), trio.Event()
    reached: dict[str, Callable[[Tree], bool]] = {
        "uploading": lambda tree: tree["pending"] == 1 and bool(boss.received),
        "fetching": lambda tree: tree["fetch"] is not None and tree["fetch"]["done"] > 0,
    }
    async with boss.up(swarm) as address:
        if state == "fetching":
            swarm.link(identity.peer_id, boss.identity.peer_id, latency_s=0.01, bandwidth=4000.0)
        if state == "uploading":
            boss.before_ack = hold.wait
        async with node(swarm, tmp_path, address, identity=identity) as it:
            if state == "paused":
                await it.until(lambda tree: tree["state"] == "generating")
                await it.handle.commands["pause"]({})
            if state == "offline":
                await it.until(lambda tree: tree["state"] == "generating")
                swarm.partition(identity.peer_id, boss.identity.peer_id)
                await it.until(lambda tree: tree["pending"] > 0 and not tree["connected"])
            await it.until(reached.get(state, lambda tree: tree["state"] == state))
            begun = set(boss.lent)
        swarm.heal(identity.peer_id, boss.identity.peer_id)
        async with node(swarm, tmp_path, address, identity=identity) as it:
            if state == "paused":
                await trio.sleep(60)
                assert it.tree["state"] == "paused"
                await it.handle.commands["resume"]({})
            hold.set()
            await it.until(lambda tree: tree["accepted"] >= 3)
            lost = begun - {work.lease_id for work in boss.submissions.values()}
            assert len(lost) <= 1
            assert {lease for lease, *_ in boss.returned} >= lost
            nothing_is_lost(boss, it)
            assert not list(it.config.data.rglob(".tmp-*"))


@pytest.mark.parametrize("state", ["loading", "generating"])
async def test_r5_an_engine_killed_at_any_moment_costs_its_unit_one_more_try(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, state: str
) -> None:
    death = ChildError("engine was killed by signal 9 (often the system running out of memory)")
    engine = ScriptedEngine()
    (engine.load_failures if state == "loading" else engine.failures).append(death)
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: tree["accepted"] >= 2)
        assert any("killed by signal 9" in notice["text"] for notice in tree["notices"])
        assert engine.loads == [0, 0]
        nothing_is_lost(boss, it)
        assert boss.returned == []


class Lid:
    """A machine whose lid is closed: the wall runs on, its own clock does not."""

    def __init__(self, boss: Coordinator) -> None:
        self.slept = 0.0
        self.set_by = 0.0
        self._boss = boss

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self._boss.clock_ahead_ms += round(seconds * 1000)

    def ahead(self) -> float:
        return self.slept + self.set_by


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
async def test_r26_a_night_s_sleep_is_told_as_sleep_and_the_expired_unit_is_dropped(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, told: bool
) -> None:
    """R26: with a system that tells of its sleep, and with one that does not."""
    swarm, boss, engine = MemorySwarm(), Coordinator(tmp_path / "boss"), ScriptedEngine(seconds=50.0)
    boss.publish()
    lid = Lid(boss)
    clocks: dict[str, Any] = {"wall_ahead": lid.ahead, "asleep": (lambda: lid.slept) if told else None}
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine, **clocks) as it:
        await it.until(lambda tree: tree["state"] == "generating")
        await trio.sleep(10)
        lines: list[str] = []
        it.handle._ctx.say = _kept(it, lines)  # type: ignore[method-assign]
        boss.leases.clear()  # given to somebody else meanwhile
        woken = trio.current_time()
        lid.sleep(8 * HOUR)
        tree = await it.until(lambda tree: bool(engine.stopped_at))
        assert engine.stopped_at[0] - woken < (3 if told else 15)
        tree = await it.until(lambda tree: tree["accepted"] >= 1 and tree["connected"])
        texts = lines + [notice["text"] for notice in tree["notices"]]
        assert sum("slept for" in text and "8 h" in text for text in texts) >= 1
        assert not any("clock is" in text and "deadlines" in text for text in texts)
        assert not any("was set by" in text for text in texts)
        if told:
            assert any("expired meanwhile, which is no fault" in text for text in lines)
            assert not any("clock is fine" in text for text in texts)  # said once
        assert tree["clock_offset_ms"] == pytest.approx(0, abs=100)
        assert boss.returned == []  # it had expired: nobody waits for it
        nothing_is_lost(boss, it)


def _kept(it: Node, lines: list[str]) -> Callable[..., None]:
    say = it.handle._ctx.say

    def both(text: str, *more: Any, **data: Any) -> None:
        lines.append(text)
        say(text, *more, **data)

    return both


async def test_r13_a_pause_for_two_hours_ends_after_two_hours_asleep_or_awake(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    lid = Lid(boss)
    async with (
        boss.up(swarm) as address,
        node(swarm, tmp_path, address, wall_ahead=lid.ahead, asleep=lambda: lid.slept) as it,
    ):
        await it.until(lambda tree: tree["accepted"] == 1)
        await it.handle.commands["pause"]({"seconds": 2 * HOUR})
        ends = it.tree["until_ms"]
        await trio.sleep(0.5 * HOUR)
        lid.sleep(HOUR)
        await trio.sleep(5)
        assert it.tree["state"] == "paused"
        assert it.tree["until_ms"] == pytest.approx(ends, abs=2000)
        await trio.sleep(0.5 * HOUR - 20)
        assert it.tree["state"] == "paused"
        await it.until(lambda tree: tree["mode"] == "run", 20)
        await it.until(lambda tree: tree["accepted"] == 2)


async def test_r26_a_clock_that_is_set_by_hours_is_told_as_that_and_no_unit_is_lost(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss, engine = MemorySwarm(), Coordinator(tmp_path / "boss"), ScriptedEngine(seconds=60.0)
    boss.publish()
    lid = Lid(boss)
    async with (
        boss.up(swarm) as address,
        node(swarm, tmp_path, address, engine, wall_ahead=lid.ahead, asleep=lambda: lid.slept) as it,
    ):
        for hours in (5, -8):
            before = len(boss.submissions)
            await it.until(lambda tree: tree["state"] == "generating")
            await trio.sleep(5)
            lid.set_by += hours * HOUR
            tree = await it.until(lambda tree, before=before: len(boss.submissions) > before)  # type: ignore[misc]
            texts = [notice["text"] for notice in tree["notices"]]
            assert any(f"clock was set by {'-' if hours < 0 else ''}{abs(hours)} h" in text for text in texts)
            assert not any("slept" in text for text in texts)
        assert tree["clock_offset_ms"] == pytest.approx(3 * HOUR * 1000, abs=100)
        assert engine.stopped_at == []
        assert boss.returned == []


async def test_r26_a_process_that_stood_still_for_hours_goes_on_at_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A frozen container, SIGSTOP, a system whose clock counts sleep: the node's own clock jumps too."""
    swarm, boss, engine = MemorySwarm(), Coordinator(tmp_path / "boss"), ScriptedEngine(seconds=30.0)
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        await it.until(lambda tree: tree["state"] == "generating")
        lines: list[str] = []
        it.handle._ctx.say = _kept(it, lines)  # type: ignore[method-assign]
        autojump_clock.jump(3 * HOUR)
        woken = trio.current_time()
        tree = await it.until(lambda tree: tree["accepted"] >= 1 and tree["connected"])
        assert trio.current_time() - woken < 120
        assert any("stood still for 3 h" in text or "stood still for 2 h 59" in text for text in lines)
        assert not any("clock" in notice["text"] for notice in tree["notices"])
        nothing_is_lost(boss, it)


async def test_r3_ten_minutes_without_network_cost_nothing_but_time(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R2, R3, R6: what was finished meanwhile is sent afterwards; every state says what it waits for."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    identity = Identity.generate()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, identity=identity) as it:
        await it.until(lambda tree: tree["accepted"] == 1 and tree["state"] == "generating")
        swarm.partition(identity.peer_id, boss.identity.peer_id)
        cut = trio.current_time()
        tree = await it.until(lambda tree: tree["state"] == "offline")
        assert trio.current_time() - cut < 60
        while trio.current_time() < cut + 600:
            await trio.sleep(1)
            tree = it.tree
            assert tree["reason"]
            assert tree["state"] in ("offline", "generating"), tree
            if tree["state"] == "offline" and tree["until_ms"] is not None:
                assert "tries again" in tree["then"]
        assert it.tree["pending"] >= 1
        swarm.heal(identity.peer_id, boss.identity.peer_id)
        healed, had = trio.current_time(), tree["accepted"]
        tree = await it.until(lambda tree: tree["accepted"] >= had + 2)
        assert trio.current_time() - healed < 120
        assert len(it.handle._ctx.engine.loads) == 1  # type: ignore[attr-defined]
        nothing_is_lost(boss, it)


async def test_r2_a_coordinator_that_is_gone_for_an_hour_is_found_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R2, R4: tried again and again, with longer pauses; the unit that expired meanwhile is dropped."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    identity = Identity.generate()
    places = [f"/memory/{n}/p2p/{boss.identity.peer_id}" for n in (1, 3)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(boss.up(swarm))
        async with node(swarm, tmp_path, places[0], identity=identity, more_addresses=(places[1],)) as it:
            await it.until(lambda tree: tree["accepted"] == 2 and tree["state"] == "generating")
            swarm.crash(boss.identity.peer_id)
            await it.until(lambda tree: tree["state"] == "offline")
            await trio.sleep(HOUR)
            tree = it.tree
            assert tree["state"] == "offline"
            assert all(place in tree["reason"] for place in places)
            assert not it.exit_codes
            boss.leases.clear()
            async with boss.up(swarm) as address:
                assert address == places[1]
                back = trio.current_time()
                await it.until(lambda tree: tree["connected"], 65)
                await it.until(lambda tree: tree["accepted"] >= 4)
                assert trio.current_time() - back < 120
                nothing_is_lost(boss, it)


async def test_r9_two_nodes_with_one_key_do_not_fight_and_the_first_comes_back_when_the_other_leaves(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R4, R9: the coordinator tells the one that was there; it stays away, and returns by itself."""
    from barnraise.protocol.messages import NoticePush

    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        (session,) = boss.sessions
        boss.push(NoticePush(code="duplicate-key", message="another node uses this key"))
        await trio.sleep(0.1)
        session.close("another session with this key")
        tree = await it.until(lambda tree: tree["state"] == "offline")
        assert "give each one its own (--key FILE)" in tree["reason"]
        await trio.sleep(250)
        assert not it.tree["connected"]
        await it.until(lambda tree: tree["connected"], 400)
        await it.until(lambda tree: tree["accepted"] >= 2)
