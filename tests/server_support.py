"""A coordinator with a version published and a node that has joined, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
import trio.testing
from coordinator_support import (
    Coordinator,
    FakeVerifier,
    ScriptedNode,
    coordinating,
    make_run,
    node,
)

from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.protocol.errors import PeerError
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.network import Stream

Clock = trio.testing.MockClock


@asynccontextmanager
async def stage(
    tmp_path: Path, verifier: FakeVerifier | None = None, **rollout: Any
) -> AsyncIterator[tuple[MemorySwarm, Coordinator, ScriptedNode]]:
    """A coordinator with version 0 published, and one joined node."""
    folder = make_run(tmp_path, **rollout)
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder, verifier) as coordinator:
        async with node(swarm, coordinator) as ann:
            await head_is(coordinator, 0)
            yield swarm, coordinator, ann


async def head_is(coordinator: Coordinator, version: int) -> None:
    with trio.fail_after(600):
        while coordinator.state()["policy_version"] < version:
            await trio.sleep(0.1)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(600):
        while not condition():
            await trio.sleep(0.1)


async def volunteer(scripted: ScriptedNode, coordinator: Coordinator) -> None:
    """Work as a real node would, until the run is complete."""
    while not coordinator.state()["complete"]:
        scripted.version = max(0, coordinator.state()["policy_version"])
        with trio.move_on_after(30):
            lease = await scripted.lease()
            await trio.sleep(1)
            await scripted.submit(scripted.signed_work(lease))


async def ended(stream: Stream) -> bool:
    """Read until the other side closes or resets."""
    try:
        while await stream.read(100):
            pass
    except PeerError:
        pass
    return True


def audited(tmp_path: Path, coordinator: Coordinator, folder: Path) -> Any:
    journal, run = Journal(folder / "state.sqlite"), coordinator.run
    export_ledger(journal, run.signed_spec, 1, run.identity, 9_000_000, tmp_path / "ledger.bin")
    journal.close()
    return verify_ledger_file(tmp_path / "ledger.bin")
