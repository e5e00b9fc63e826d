"""The one question before a run is joined: shown from the signed spec, asked once, answered by anybody."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from daemon_support import Coordinator, run_spec
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_support import asked
from msgspec.structs import replace
from spec_support import pretrain_spec

from barnraise.node.needs import Field, Machine, description, needs
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity, fingerprint
from barnraise.protocol.memory_network import MemorySwarm

ME = Identity.generate()


def machine(**more: object) -> Machine:
    values: dict[str, object] = {"disk": 20 * 10**9, "free": 10**11, "threads": 4}
    return Machine(Path("/data"), "/ip4/203.0.113.7/tcp/1/p2p/x", **{**values, **more})  # type: ignore[arg-type]


async def test_nothing_is_fetched_before_the_person_agrees_and_they_are_asked_once(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address:
        async with asked(swarm, tmp_path / "node", address, ME) as it:
            tree = await it.until(lambda tree: tree["consent"] is not None)
            assert tree["state"] == "waiting"
            assert "consent" in tree["reason"]
            assert tree["consent"]["run_id"] == boss.run_id.hex()
            shown = dict(map(tuple, tree["consent"]["fields"]))
            assert fingerprint(boss.identity.public_key) in shown["run by"]
            await trio.sleep(100)
            assert it.tree["bytes_in"] < 20_000  # less than the weights
            assert it.tree["head_version"] == -1
            assert it.engine.loads == []
            await it.handle.commands["agree"]({"run_id": boss.run_id.hex()})
            tree = await it.until(lambda tree: tree["accepted"] == 1)
            assert tree["consent"] is None
        async with asked(swarm, tmp_path / "node", address, ME) as it:
            await it.until(lambda tree: tree["units_done"] > 0)
            assert it.tree["consent"] is None


async def test_who_declines_ends_the_node_with_its_exit_code(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, asked(swarm, tmp_path / "node", address, ME) as it:
        await it.until(lambda tree: tree["consent"] is not None)
        with pytest.raises(RefusedError, match=boss.run_id.hex()):
            await it.handle.commands["decline"]({"run_id": "00"})
        with pytest.raises(RefusedError):
            await it.handle.commands["agree"]({})
        await it.handle.commands["decline"]({"run_id": boss.run_id.hex()})
        assert await it.until_ended() == 5
        assert it.engine.loads == []


async def test_an_answer_to_nothing_is_refused(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, asked(swarm, tmp_path / "node", address, ME, None) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        with pytest.raises(RefusedError, match="no consent"):
            await it.handle.commands["agree"]({"run_id": boss.run_id.hex()})


async def test_the_terminal_and_a_viewer_may_both_be_asked_and_the_first_answer_counts(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    left: list[str] = []

    async def at_the_terminal(fields: list[Field]) -> bool:
        try:
            await trio.sleep(1000)
        finally:
            left.append("asked no more")
        return False

    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address:
        async with asked(swarm, tmp_path / "node", address, ME, at_the_terminal) as it:
            await it.until(lambda tree: tree["consent"] is not None)
            await it.handle.commands["agree"]({"run_id": boss.run_id.hex()})
            await it.until(lambda tree: tree["accepted"] == 1)
    assert left == ["asked no more"]


def test_the_description_says_model_size_disk_memory_phase_and_who() -> None:
    operator = Identity.generate()
    spec = run_spec(operator)
    spec = replace(spec, model=replace(spec.model, parameters=135_000_000, weights_dtype="bfloat16"))
    shown = dict(description(spec, bytes(32), machine()))
    assert "135,000,000 parameters" in shown["model"]
    assert "270.0 MB" in shown["download"]
    assert "1.1 GB" in shown["disk"]  # three versions are kept, one is on its way
    assert "NOT ENOUGH" not in shown["disk"]
    assert "810.0 MB" in shown["memory"]
    assert "post-training" in shown["phase"]
    assert fingerprint(operator.public_key) in shown["run by"]
    assert "4 threads" in shown["your part"]


@pytest.mark.parametrize(("free", "disk"), [(10**6, 10**12), (10**12, 10**6)], ids=["full", "capped"])
def test_a_disk_that_is_too_small_is_said_before_joining(free: int, disk: int) -> None:
    shown = dict(description(run_spec(ME), bytes(32), machine(free=free, disk=disk)))
    assert "NOT ENOUGH" in shown["disk"]
    assert "are free" in shown["disk"]
    assert "free" not in dict(description(run_spec(ME), bytes(32), machine(free=None)))["disk"]


def test_pretraining_asks_for_room_for_a_block_s_states_and_moments() -> None:
    later = needs(run_spec(ME))
    spec = replace(run_spec(ME), pretrain=pretrain_spec(), phase="pretrain")
    asks = needs(spec)
    assert asks.disk > later.disk
    assert asks.memory > later.memory
    shown = dict(description(spec, bytes(32), machine()))
    assert "blocks" in shown["phase"]
    assert "trains one of" in shown["your part"]


@given(st.text(max_size=64), st.text(max_size=600))
def test_a_stranger_s_text_never_steers_the_terminal(name: str, about: str) -> None:
    spec = replace(run_spec(ME), name=name, description=about)
    for label, text in description(spec, bytes(32), machine()):
        assert label.isprintable()
        assert "\x1b" not in text
        assert "\n" not in text
