"""Whom a daemon joins, whom it refuses, and what it shows while nobody answers."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from daemon_support import Coordinator, ScriptedEngine, node, run_spec

from barnraise.node import attend
from barnraise.protocol import hello
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import (
    HELLO_PROTOCOL,
    NoticePush,
)
from barnraise.protocol.network import Stream


async def test_a_duplicate_key_notice_is_shown(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R9."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        boss.push(NoticePush(code="duplicate-key", message="another machine uses this key"))
        tree = await it.until(lambda tree: tree["duplicate_key"])
    assert any("another machine uses this key" in notice["text"] for notice in tree["notices"])


async def test_a_node_whose_key_another_machine_took_stays_away_instead_of_fighting(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R9."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        boss.push(NoticePush(code="duplicate-key", message="another node has just joined with this key"))
        await trio.sleep(2.0)
        for session in list(boss.sessions):
            session.close("replaced")
        tree = await it.until(lambda tree: not tree["connected"])
        await trio.sleep(290.0)
        assert len(boss.joins) == 1
        assert "another machine uses this key" in it.tree["reason"]
        await it.until(lambda tree: tree["connected"], 320.0)
        assert tree["duplicate_key"]


async def test_a_node_that_took_over_its_key_comes_straight_back_when_the_coordinator_is_gone_a_moment_later(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Restarted after a crash of which the coordinator had not heard yet; then that crashes, too."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        boss.push(NoticePush(code="duplicate-key-kept", message="its session was ended"))
        await it.until(lambda tree: tree["duplicate_key"])
        for session in list(boss.sessions):
            session.close("killed")
        await it.until(lambda tree: not tree["connected"])
        await it.until(lambda tree: tree["connected"], 10.0)
        assert len(boss.joins) == 2


async def test_a_version_refusal_ends_with_the_cure_and_its_exit_code(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R20."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    real = hello.our_hello()

    async def newer(stream: Stream) -> None:
        await trio.sleep(0)
        reader = hello.MessageReader(stream, (hello.Hello,))
        await reader.receive()
        reply = hello.HelloReply(
            major=real.major + 1, minor=0, software="barnraise 9", compatible=False, message="too old"
        )
        await hello.send_message(stream, reply)

    async with boss.up(swarm) as address:
        assert boss.network is not None
        boss.network.set_handler(HELLO_PROTOCOL, newer)
        async with node(swarm, tmp_path, address) as it:
            assert await it.until_ended(30.0) == attend.EXIT_VERSION
            assert "pip install --upgrade barnraise" in it.tree["reason"]


async def test_a_run_whose_key_changed_is_refused(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address) as it:
            await it.until(lambda tree: tree["accepted"] == 1)
        thief = Identity.generate()
        boss.spec = sign(run_spec(thief), thief)
        async with node(swarm, tmp_path, address) as it:
            assert await it.until_ended(30.0) == attend.EXIT_UNTRUSTED
            assert "key changed" in it.tree["reason"]


async def test_an_unsigned_spec_is_never_joined(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.spec = msgspec.structs.replace(boss.spec, signature=bytes(64))
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        tree = await it.until(lambda tree: "signature" in tree["reason"])
        assert tree["then"] == "tries again"


async def test_a_refused_join_is_retried_and_shown(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    boss.join_error = RefusedError("full", "no seat is free")
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: "no seat is free" in tree["reason"])
        boss.join_error = None
        await it.until(lambda tree: tree["accepted"] == 1)


async def test_a_skewed_clock_is_measured_and_deadlines_are_judged_with_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R26."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss", clock_ahead_ms=-10 * 60_000)
    boss.publish()
    engine = ScriptedEngine(seconds=1000.0)
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: tree["state"] == "generating")
        assert tree["clock_offset_ms"] == -600_000
        assert any("10 min ahead of" in notice["text"] for notice in tree["notices"])
        started = trio.current_time()
        while not engine.stopped_at:
            await trio.sleep(1.0)
        assert 119 <= engine.stopped_at[0] - started <= 121


async def test_no_state_is_silent_for_more_than_thirty_seconds(
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    """R2, R3."""
    caplog.set_level("INFO", "barnraise.node")
    swarm = MemorySwarm()
    nobody = Identity.generate().peer_id
    lines: list[tuple[float, str]] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((trio.current_time(), record.getMessage()))

    watch = Watch()
    request.addfinalizer(lambda: logging.getLogger("barnraise.node").removeHandler(watch))
    logging.getLogger("barnraise.node").addHandler(watch)
    async with node(swarm, tmp_path, f"/memory/9/p2p/{nobody}") as it:
        start = trio.current_time()
        await trio.sleep(600)
        assert it.tree["state"] == "connecting"
    times = [start, *(t for t, _ in lines), trio.current_time()]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 30.5
    assert any(nobody in text and "nobody answers" in text for _, text in lines)
    soon = [text for moment, text in lines if moment < start + 20 and nobody in text]
    assert [text.partition(":")[0] for text in soon] == [
        f"connecting to /memory/9/p2p/{nobody}",
        "no session with the coordinator (try 1)",
    ]
    assert any("tries again in" in text for _, text in lines)
