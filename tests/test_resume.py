"""After a pause of the run its nodes are back at work at once, each of them, and none while it lasts."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from cheats import Paced
from coordinator_support import coordinating, make_run, node
from daemon_support import Coordinator
from daemon_support import node as daemon
from swarm_support import Swarm, make_model, swarming
from trio.testing import MockClock

from barnraise.coordinator.core import Core
from barnraise.coordinator.operator_events import RunPaused, RunResumed
from barnraise.coordinator.steering import pause, resume
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import RESUMED, NoticePush


def at_work(core: Core) -> int:
    return len({item.terms.node for item in core.state.leases.values()})


async def idle(swarm: Swarm, core: Core) -> None:
    """All that was lent is back, and every node was told to wait."""
    await swarm.until(lambda: not core.state.leases)
    await trio.sleep(3)


@pytest.mark.parametrize("drawn", [0, 1, 2])
async def test_nodes_are_at_work_within_seconds_of_a_resume(
    tmp_path: Path, autojump_clock: MockClock, drawn: int
) -> None:
    model = make_model(tmp_path / "model")
    async with swarming(tmp_path / "swarm", model, seed=drawn, versions=50) as swarm:
        core: Core = swarm.state.args[0]  # type: ignore[attr-defined]
        for name in ("ann", "ben", "eve"):
            await swarm.join(name, Paced(1.0))
        await swarm.until(lambda: at_work(core) == 3)
        await pause(core, {"reason": "maintenance"})
        await idle(swarm, core)
        await trio.sleep(drawn * 11.0)  # within the half minute after which they would ask
        assert not core.state.leases
        await resume(core, {})
        resumed = trio.current_time()
        seen: set[bytes] = set()
        while len(seen) < 3:
            seen |= {item.terms.node for item in core.state.leases.values()}
            await trio.sleep(0.05)
        assert trio.current_time() - resumed < 4.0
        swarm.nursery.cancel_scope.cancel()


async def test_whoever_pauses_again_at_once_wakes_nobody(tmp_path: Path, autojump_clock: MockClock) -> None:
    swarm, folder = MemorySwarm(latency_s=0.01), make_run(tmp_path)
    async with coordinating(swarm, folder) as coordinator, node(swarm, coordinator) as ann:
        core = coordinator.state.args[0]
        await pause(core, {"reason": "one"})
        again = RunPaused(by="operator", reason="another", at_ms=core.now_ms())
        await core.record([RunResumed(at_ms=core.now_ms()), again])
        await trio.sleep(1)
        assert [notice.code for notice in ann.received(NoticePush)] == []
        await resume(core, {})
        await trio.sleep(1)
        assert [notice.code for notice in ann.received(NoticePush)] == [RESUMED]


async def test_a_node_that_is_told_so_often_asks_no_oftener_than_it_is_told(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    boss.refuse_lease = ("the run is paused", 600_000)
    async with boss.up(swarm) as address, daemon(swarm, tmp_path, address) as it:
        await it.until(lambda tree: bool(boss.asked))
        await trio.sleep(5)
        before = len(boss.asked)
        for _ in range(10):
            boss.push(NoticePush(code=RESUMED, message="the run goes on"))
        await trio.sleep(5)
        assert 1 <= len(boss.asked) - before <= 10
        assert not any("goes on" in notice["text"] for notice in it.tree["notices"]), "that is no warning"
        before = len(boss.asked)
        await trio.sleep(300)
        assert len(boss.asked) == before
