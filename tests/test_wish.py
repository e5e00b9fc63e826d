"""A pause holds through crashes and shutdowns of the machine until somebody takes it back."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from daemon_support import EPOCH_MS, Coordinator
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_support import asked

from barnraise.node.mode import Wish, load_wish, save_wish
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm

ME = Identity.generate()


async def test_a_pause_outlives_kill_9_and_a_shutdown_and_ends_when_it_was_to(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address:
        async with asked(swarm, tmp_path / "node", address, ME, None) as it:
            await it.until(lambda tree: tree["accepted"] == 1)
            await it.handle.commands["pause"]({"seconds": 1000})
            await it.until(lambda tree: tree["state"] == "paused")
            resumes = EPOCH_MS + round((trio.current_time() + 1000) * 1000)
        async with asked(swarm, tmp_path / "node", address, ME, None) as it:  # after a crash
            tree = await it.until(lambda tree: tree["connected"])
            assert tree["state"] == "paused"
            assert abs(tree["until_ms"] - resumes) < 1000
            it.handle.end()  # the machine shuts down
            assert await it.until_ended() == 0
        async with asked(swarm, tmp_path / "node", address, ME, None) as it:
            await it.until(lambda tree: tree["connected"])
            await trio.sleep(900)
            assert it.engine.works == []
            await it.until(lambda tree: tree["units_done"] > 0)
            assert EPOCH_MS + trio.current_time() * 1000 >= resumes


@pytest.mark.parametrize("command", ["resume", "leave"])
async def test_what_the_person_does_next_ends_the_pause_for_good(
    command: str, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address:
        async with asked(swarm, tmp_path / "node", address, ME, None) as it:
            await it.until(lambda tree: tree["connected"])
            await it.handle.commands["pause"]({})
            await it.handle.commands["pause"]({})  # again: nothing changes
            await it.handle.commands[command]({})
            await trio.sleep(1)
        async with asked(swarm, tmp_path / "node", address, ME, None) as it:
            tree = await it.until(lambda tree: tree["units_done"] > 0)
            assert tree["mode"] == "run"


async def test_a_node_that_was_to_finish_and_crashed_ends_at_its_next_start(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address:
        async with asked(swarm, tmp_path / "node", address, ME, None) as it:
            await it.until(lambda tree: tree["state"] == "generating")
            await it.handle.commands["finish"]({})
        async with asked(swarm, tmp_path / "node", address, ME, None) as it:
            assert await it.until_ended() == 0
            assert it.engine.works == []
        async with asked(swarm, tmp_path / "node", address, ME, None) as it:  # fulfilled, so forgotten
            await it.until(lambda tree: tree["units_done"] > 0)


@given(st.sampled_from(["pause", "finish"]), st.none() | st.integers(1, 2**53))
def test_what_is_kept_is_read_again(tmp_path_factory, mode, until) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("wish") / "mode.json"
    save_wish(path, Wish(mode, until))
    assert load_wish(path, 0) == Wish(mode, until)
    if until is not None:
        assert load_wish(path, until) is None
    save_wish(path, None)
    save_wish(path, None)
    assert load_wish(path, 0) is None


@pytest.mark.parametrize("damage", [b"", b"{", b'{"mode":"run"}', b"\xff\xfe", b"[]"])
def test_a_wish_that_cannot_be_read_pauses_to_be_on_the_safe_side(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "mode.json"
    path.write_bytes(damage)
    assert load_wish(path, 0) == Wish("pause")
