"""A pretraining run on the in-memory network, and volunteers who really train."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
import trio.testing
from block_stage_support import Unit, make_pretrain_run, setup_of, train_unit
from coordinator_support import Coordinator, ScriptedNode, attached, coordinating

from barnraise.coordinator.journal import Journal
from barnraise.coordinator.state import State, fold
from barnraise.coordinator.verifier import LocalVerifier
from barnraise.coordinator.workshop import LocalLearner
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemoryNetwork, MemorySwarm
from barnraise.protocol.messages import (
    MAX_SHARD,
    SHARD_PROTOCOL,
    Acknowledged,
    AppealRequest,
    Receipt,
    ReceiptPush,
)
from barnraise.protocol.pretrain import BlockLease, BlockSubmission
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.store import DiskStore

Clock = trio.testing.MockClock
Make = Callable[[Any, BlockLease], Unit]


@dataclass
class Volunteer:
    """A stand-in for a node: it really trains, commits to its states, and serves them."""

    folder: Path  # the run's, from which it reads the version and the corpus
    home: Path
    network: MemoryNetwork
    scripted: ScriptedNode
    store: DiskStore
    make: Make = train_unit
    serves: bool = True
    given: list[BlockLease] = field(default_factory=list)

    async def lease(self) -> BlockLease:
        """Ask, at whichever version is the head, until there is a block lease."""
        while True:
            versions = sorted(path.name for path in (self.folder / "checkpoints").glob("v*"))
            for name in reversed(versions):
                reply = await self.scripted.lease_reply(int(name[1:]))
                if reply.lease is not None:
                    terms = open_signed(reply.lease, BlockLease, self.scripted.operator)
                    self.given.append(terms)
                    return terms
            await trio.sleep(0.5)

    def train(self, lease: BlockLease, **changes: Any) -> BlockSubmission:
        unit = self.make(setup_of(self.folder), lease)
        folder = self.home / lease.lease_id.hex()
        work = unit.submission(lease, folder, **changes)
        for entry in (*work.states, work.delta):
            path = folder / entry.path
            places = [
                (digest, number * MAX_SHARD, min(MAX_SHARD, entry.size - number * MAX_SHARD))
                for number, digest in enumerate(entry.shards)
            ]
            if self.serves and path.is_file():
                self.store.adopt(path, places)
        return work

    async def submit(self, work: BlockSubmission) -> Acknowledged:
        return await self.scripted.submit(sign(work, self.scripted.identity))

    async def one(self, **changes: Any) -> BlockLease:
        """One unit, from lease to acknowledgement."""
        lease = await self.lease()
        await trio.sleep(1)
        await self.submit(self.train(lease, **changes))
        return lease

    def receipts(self) -> list[Receipt]:
        pushes = self.scripted.received(ReceiptPush)
        return [open_signed(push.receipt, Receipt, self.scripted.operator) for push in pushes]

    async def verdict(self) -> Any:
        with trio.fail_after(10_000):
            while not self.receipts():
                await trio.sleep(0.5)
        return self.receipts()[-1].verdict


@asynccontextmanager
async def volunteer(
    swarm: MemorySwarm, coordinator: Coordinator, tmp_path: Path, seed: bytes, **changes: Any
) -> AsyncIterator[Volunteer]:
    identity = Identity.from_private_bytes(seed * 32)
    home = tmp_path / f"home-{seed.hex()}"
    async with swarm.network(identity.peer_id) as network:
        store = DiskStore(home / "store")
        network.set_handler(SHARD_PROTOCOL, serve_shards(store))
        async with attached(network, coordinator, identity) as scripted:
            yield Volunteer(coordinator.run.path, home, network, scripted, store, **changes)


@asynccontextmanager
async def running(swarm: MemorySwarm, folder: Path, **changes: Any) -> AsyncIterator[Coordinator]:
    setup = setup_of(folder)
    parts: dict[str, Any] = {"verifier": LocalVerifier(setup), "learner": LocalLearner(setup)} | changes
    async with coordinating(swarm, folder, **parts) as coordinator:
        yield coordinator


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20_000):
        while not condition():
            await trio.sleep(0.2)


async def work(person: Volunteer) -> None:
    while True:
        await person.one()


def events_of(folder: Path, kind: str) -> list[Any]:
    journal = Journal(folder / "state.sqlite")
    try:
        return [event for event in journal.events() if type(event).__name__ == kind]
    finally:
        journal.close()


def folded(folder: Path) -> State:
    journal = Journal(folder / "state.sqlite")
    try:
        return fold(journal.events(), 2)
    finally:
        journal.close()


@asynccontextmanager
async def stage(
    tmp_path: Path, people: int = 1, pretrain: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[tuple[Coordinator, list[Volunteer]]]:
    """A run whose version 0 is published, and volunteers who have joined."""
    folder = make_pretrain_run(tmp_path, **({"rounds": 1, "contributors": 1} | (pretrain or {})))
    swarm = MemorySwarm(latency_s=0.01)
    async with running(swarm, folder, **changes) as coordinator:
        async with trio.open_nursery() as nursery:
            found: list[Volunteer] = []

            async def join(seed: bytes, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
                async with volunteer(swarm, coordinator, tmp_path, seed) as person:
                    found.append(person)
                    task_status.started()
                    await trio.sleep_forever()

            for number in range(people):
                await nursery.start(join, bytes([65 + number]))
            await until(lambda: coordinator.state()["policy_version"] == 0)
            yield coordinator, found
            nursery.cancel_scope.cancel()


def appealing(person: Volunteer, number: int = 0) -> Callable[[int], AppealRequest]:
    receipt = person.scripted.received(ReceiptPush)[number].receipt
    return lambda request: AppealRequest(id=request, receipt=receipt, submission=None)
