"""The real coordinator and real node daemons on one in-memory network: killed, restarted, cheated on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
import trio.testing
from coordinator_support import FakeVerifier, coordinating, make_run, virtual_ms

from barnraise.node.config import NodeConfig
from barnraise.node.daemon import run_node
from barnraise.node.engine import EngineInfo, Generated, Progress, Work
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Rollout
from barnraise.protocol.spec import RunSpec


@dataclass
class Engine:
    """Takes ``seconds`` per unit; the verifier double believes engines called ``good``."""

    name: str = "good"
    seconds: float = 2.0
    works: list[Work] = field(default_factory=list)

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        assert (folder / "model.safetensors").exists()
        await trio.sleep(0.2)
        return EngineInfo(name=self.name, device="none", memory_bytes=0)

    async def generate(self, work: Work, progress: Callable[[Progress], None]) -> Generated:
        self.works.append(work)
        await trio.sleep(self.seconds)
        made = tuple(
            Rollout(prompt=p, sample=s, tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0", proofs=b"")
            for p in range(work.prompts)
            for s in range(work.group_size)
        )
        # Noise in the timing gives a repetition another content id, as it would in life.
        return Generated(rollouts=made, seconds=self.seconds + len(self.works) / 1000, tokens=len(made))

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def nodes(
    swarm: MemorySwarm, tmp_path: Path, addresses: tuple[str, ...], engines: list[Engine]
) -> AsyncIterator[tuple[dict[int, int], list[Callable[[], dict[str, Any]]]]]:
    """Daemons that end with the run; yields their exit codes as they come and their state trees."""
    codes: dict[int, int] = {}
    trees: list[Callable[[], dict[str, Any]]] = []

    async def live(number: int, engine: Engine, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        identity = Identity.from_private_bytes(bytes([number + 1]) * 32)
        config = NodeConfig(
            address=addresses[0],
            more_addresses=addresses[1:],
            data=tmp_path / f"node{number}",
            key=tmp_path / f"node{number}.key",
            name=f"node{number}",
            exit_when_complete=True,
        )
        rng = random.Random(number)
        async with swarm.network(identity.peer_id) as network:
            codes[number] = await run_node(
                config, network, engine, identity, virtual_ms, rng, task_status=task_status
            )

    async with trio.open_nursery() as nursery:
        for number, engine in enumerate(engines):
            handle = await nursery.start(live, number, engine)
            trees.append(handle.get_state)
        yield codes, trees
        nursery.cancel_scope.cancel()


async def until(reached: Callable[[], bool], seconds: float = 600.0) -> None:
    with trio.fail_after(seconds):
        while not reached():
            await trio.sleep(0.1)


async def test_a_run_completes_across_a_killed_coordinator_and_no_work_is_done_twice(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    folder = make_run(tmp_path, versions=6, groups_per_version=6, max_groups_per_version=12, max_lag=2)
    swarm = MemorySwarm(latency_s=0.02)
    engines = [Engine(seconds=1.0), Engine(seconds=2.5), Engine("bad", 2.0)]
    async with trio.open_nursery() as nursery:
        first = trio.CancelScope()

        async def serve(task_status: Any) -> None:
            with first:
                async with coordinating(swarm, folder) as coordinator:
                    task_status.started(coordinator)
                    await trio.sleep_forever()

        coordinator = await nursery.start(serve)
        peer = coordinator.run.identity.peer_id
        later = f"/memory/{2 + len(engines)}/p2p/{peer}"
        async with nodes(swarm, tmp_path, (coordinator.address, later), engines) as (codes, trees):
            await until(lambda: coordinator.state()["policy_version"] >= 2)
            swarm.crash(peer)
            first.cancel()
            await until(lambda: all(tree()["state"] == "offline" for tree in trees[:2]))
            async with coordinating(swarm, folder, seed=1) as again:
                assert again.address == later
                await until(lambda: len(codes) == len(engines))
                state = again.state()
    assert set(codes.values()) == {0}
    assert state["complete"]
    for number, tree in enumerate(trees):
        mine = next(node for node in state["nodes"] if node["name"] == f"node{number}")
        shown = tree()
        assert (shown["accepted"], shown["rejected"]) == (mine["accepted"], mine["rejected"])
        assert shown["credit"] == mine["credit"]
        worked = Counter(work.lease_id for work in engines[number].works)
        assert max(worked.values()) == 1
    assert state["rejections"].keys() == {"toploc"}
    assert trees[2]()["accepted"] == 0
    assert len(engines[2].works) < len(engines[0].works)


async def test_a_slow_verifier_slows_nodes_down_without_an_error(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    folder = make_run(tmp_path, versions=2)
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder, FakeVerifier(delay_s=20.0)) as coordinator:
        async with nodes(swarm, tmp_path, (coordinator.address,), [Engine(), Engine()]) as (codes, trees):
            await until(lambda: len(codes) == 2)
            assert not [n for tree in trees for n in tree()["notices"] if n["level"] == "error"]
        assert coordinator.state()["complete"]
