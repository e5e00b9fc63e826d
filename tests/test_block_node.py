"""A volunteer's node in the block stage: what it trains reaches the coordinator, whatever dies in between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from block_support import make_pretrain_run
from swarm_support import virtual_ms

from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.core import in_place
from barnraise.coordinator.folder import open_run
from barnraise.coordinator.server import run_coordinator
from barnraise.coordinator.verifier import LocalVerifier
from barnraise.coordinator.workers import WorkerSetup
from barnraise.coordinator.workshop import LocalLearner
from barnraise.node.block_engine import BlockProgress, BlockTrained, BlockWork
from barnraise.node.block_trainer import TrainingStopped, train_unit
from barnraise.node.config import NodeConfig
from barnraise.node.daemon import run_node
from barnraise.node.handle import NodeHandle
from barnraise.node.receipts import read_receipts
from barnraise.node.torch_engine import TorchEngine
from barnraise.node.units import file_entry
from barnraise.protocol.errors import ChildError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Receipt
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.store import DiskStore
from barnraise.protocol.wire import decode
from barnraise.tui.status import overview


class PacedEngine(TorchEngine):
    """The real engine, in virtual time: a unit takes ``seconds``.

    ``halts``: after how many steps a start stands still, until it is cancelled; None: never.
    ``failures``: raised by a start once it has saved a state.
    """

    def __init__(self, seconds: float = 4.0) -> None:
        super().__init__("cpu", in_place=True)
        self.seconds = seconds
        self.halts: list[int | None] = []
        self.failures: list[Exception] = []
        self.works: list[BlockWork] = []
        self.began: list[int] = []  # the step that each start began at
        self.standing = trio.Event()

    async def train(
        self, spec: RunSpec, work: BlockWork, progress: Callable[[BlockProgress], None]
    ) -> BlockTrained:
        self.works.append(work)
        seen: list[BlockProgress] = []
        left = self.halts.pop(0) if self.halts else None

        def should_stop() -> bool:
            nonlocal left
            left = None if left is None else left - 1
            return left is not None and left < 0

        try:
            done = train_unit(spec, work, "cpu", "cpu", seen.append, should_stop)
        except TrainingStopped:
            self._tell(seen, progress)
            self.standing.set()
            await trio.sleep_forever()
        self._tell(seen[:1], progress)
        await trio.sleep(self.seconds)
        self._tell(seen[1:], progress)
        if self.failures:
            raise self.failures.pop(0)
        return done

    def _tell(self, seen: list[BlockProgress], progress: Callable[[BlockProgress], None]) -> None:
        if seen and len(self.began) < len(self.works):
            self.began.append(seen[0].steps)
        for event in seen:
            progress(event)


@dataclass
class Stage:
    """A pretraining run and its coordinator, in memory."""

    swarm: MemorySwarm
    address: str
    state: Callable[[], dict[str, Any]]
    folder: Path
    nursery: trio.Nursery
    peer_id: str
    corpus: bytes

    async def until(self, reached: Callable[[], bool], patience_s: float = 600.0) -> None:
        deadline = trio.current_time() + patience_s
        while not reached():
            assert trio.current_time() < deadline, self.state()
            await trio.sleep(0.1)


@dataclass
class Volunteer:
    handle: NodeHandle
    engine: PacedEngine
    home: Path
    scope: trio.CancelScope
    peer_id: str
    ended: trio.Event
    codes: list[int] = field(default_factory=list)

    @property
    def tree(self) -> dict[str, Any]:
        return self.handle.get_state()

    async def kill(self) -> None:
        """As kill -9, as far as the disk is concerned."""
        self.scope.cancel()
        await self.ended.wait()

    @property
    def units(self) -> list[Path]:
        return sorted(path for path in self.home.glob("runs/*/units/*") if not path.name.startswith("."))


@asynccontextmanager
async def stage(
    tmp_path: Path, verifier: type[LocalVerifier] = LocalVerifier, **pretrain: Any
) -> AsyncIterator[Stage]:
    path = make_pretrain_run(tmp_path / "run", virtual_ms(), **({"round_s": 600.0} | pretrain))
    memory = MemorySwarm(latency_s=0.01)
    with open_run(path) as run:
        setup = WorkerSetup(spec=run.spec, run_id=run.run_id, folder=str(path), threads=1)
        async with memory.network(run.identity.peer_id) as network, trio.open_nursery() as nursery:

            async def serve(task_status: Any) -> None:
                await run_coordinator(
                    *(run, network, verifier(setup), LocalLearner(setup)),
                    now_ms=virtual_ms,
                    rng=random.Random(0),
                    offload=in_place,
                    announce=lambda line: None,
                    control=False,
                    task_status=task_status,
                )

            state = await nursery.start(serve)
            assert run.spec.pretrain is not None
            corpus = run.spec.pretrain.corpus
            yield Stage(memory, network.addresses[0], state, path, nursery, network.peer_id, corpus)
            nursery.cancel_scope.cancel()


async def join(
    stage: Stage, home: Path, engine: PacedEngine | None = None, number: int = 1, **settings: Any
) -> Volunteer:
    """Start a node."""
    engine = engine or PacedEngine()
    identity = Identity.from_private_bytes(bytes([number]) * 32)
    config = NodeConfig(address=stage.address, data=home, key=home / "key", name=f"n{number}", **settings)
    scope, ended = trio.CancelScope(), trio.Event()
    codes: list[int] = []

    async def live(task_status: Any) -> None:
        with scope:
            async with stage.swarm.network(identity.peer_id) as network:
                codes.append(
                    await run_node(
                        *(config, network, engine, identity, virtual_ms),
                        random.Random(number),
                        task_status=task_status,
                    )
                )
        ended.set()

    handle = await stage.nursery.start(live)
    return Volunteer(handle, engine, home, scope, identity.peer_id, ended, codes)


@pytest.mark.parametrize("delta", ["float32", "bfloat16", "int8"])
async def test_two_volunteers_raise_a_model_from_blocks(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, delta: str
) -> None:
    async with stage(tmp_path, contributors=1, delta=delta) as it:
        nodes = [await join(it, tmp_path / f"node{n}", number=n, exit_when_complete=True) for n in (1, 2)]
        await it.until(lambda: all(node.codes for node in nodes))
    assert [node.codes for node in nodes] == [[0], [0]]
    assert it.state()["complete"]
    assert sum(node.tree["accepted"] for node in nodes) == 4
    assert all(node.tree["rejected"] == 0 for node in nodes)
    assert all(node.tree["credit"] > 0 for node in nodes)
    kept = [path for node in nodes for path in node.home.glob("runs/*/residuals/*")]
    assert bool(kept) == (delta == "int8")


async def test_a_node_fetches_the_scaffold_and_the_block_that_it_trains_and_no_other(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, came = DiskStore.put, dict[Path, Counter[bytes]]()

    def put(self: DiskStore, digest: bytes, data: bytes, *, checked: bool = False) -> None:
        came.setdefault(self.folder, Counter())[digest] += len(data)
        real(self, digest, data, checked=checked)

    monkeypatch.setattr(DiskStore, "put", put)
    four = {"blocks": 4, "scaffold_layers": 4, "rounds": 2, "contributors": 1}
    async with stage(tmp_path, **four) as it:
        nodes = [await join(it, tmp_path / f"n{number}", PacedEngine(20.0), number) for number in range(1, 5)]
        await it.until(lambda: it.state()["complete"])
        assert all(node.tree["rejected"] == 0 for node in nodes)
    assert {node.engine.works[0].block for node in nodes} == {0, 1, 2, 3}
    for node in nodes:
        first, second = node.engine.works
        assert second.block == first.block
        got = came[node.home / "store"]
        for version in (0, 1):  # the scaffold's shards are the same in both, and come once
            parts = sorted((it.folder / "checkpoints" / f"v{version:06d}").glob("model-*.safetensors"))
            assert len(parts) == 5
            fetched = [sum(got[digest] for digest in file_entry(path).shards) for path in parts]
            wanted = [1, *(number == first.block for number in range(4))]
            assert fetched == [path.stat().st_size * want for path, want in zip(parts, wanted, strict=True)]


async def test_a_node_that_gets_another_block_fetches_that_one_too(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, rounds=1, contributors=1) as it:
        node = await join(it, tmp_path / "node")
        await it.until(lambda: it.state()["complete"])
        assert [work.block for work in node.engine.works] in ([0, 1], [1, 0])
        assert node.tree["rejected"] == 0


async def test_after_the_blocks_the_same_nodes_generate(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path, versions=9, rounds=1, contributors=1, then_posttrain=True) as it:
        node = await join(it, tmp_path / "node")
        await it.until(lambda: node.tree["policy_version"] >= 2 and node.tree["accepted"] > 2)
        assert node.tree["rejected"] == 0
        assert node.tree["engine"] == "torch-cpu-float32"
        assert len(node.engine.works) == 2  # both blocks of the only round
        assert node.units == []


async def test_a_pause_keeps_the_unit_and_the_lease(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path) as it:
        engine = PacedEngine()
        engine.halts = [2]
        node = await join(it, tmp_path / "node", engine)
        await engine.standing.wait()
        await trio.sleep(0.5)
        assert node.tree["state"] == "training"
        unit = node.tree["unit"]
        assert (unit["kind"], unit["step"], unit["steps"], unit["saved"]) == ("block", 2, 6, 1)
        rows = dict(overview(node.tree, virtual_ms() / 1000))
        assert rows["unit"] == f"training block {unit['block']}, step 2 of 6, loss {unit['loss']:.2f}"
        await node.handle.commands["pause"]({"seconds": 20.0})
        await it.until(lambda: node.tree["state"] == "paused")
        assert "kept" in node.tree["reason"]
        await it.until(lambda: node.tree["accepted"] >= 1)
    first, second = engine.works[:2]
    assert first.lease_id == second.lease_id
    assert engine.began[:2] == [0, 2]
    assert node.tree["rejected"] == 0


async def test_an_engine_that_dies_again_and_again_gets_there(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path) as it:
        engine = PacedEngine()
        engine.failures = [ChildError("killed by signal 9")]
        node = await join(it, tmp_path / "node", engine)
        await it.until(lambda: node.tree["accepted"] >= 1)
    assert engine.works[0].lease_id == engine.works[1].lease_id
    assert engine.began[:2] == [0, 6]


async def test_a_killed_daemon_goes_on_with_its_unit(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path) as it:
        engine = PacedEngine()
        engine.halts = [5]
        node = await join(it, tmp_path / "node", engine)
        await engine.standing.wait()
        await node.kill()
        again = await join(it, tmp_path / "node")
        await it.until(lambda: again.tree["accepted"] >= 1)
    assert again.engine.works[0].lease_id == engine.works[0].lease_id
    assert again.engine.began[0] == 4
    assert again.tree["rejected"] == 0


async def test_a_finished_unit_outlives_its_daemon_and_is_sent_and_served_by_the_next(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path) as it:
        engine = PacedEngine()
        node = await join(it, tmp_path / "node", engine)
        await it.until(lambda: bool(engine.works))
        it.swarm.partition(node.peer_id, it.peer_id)
        await it.until(lambda: node.tree["pending"] == 1)
        await node.kill()
        (unit,) = node.units
        it.swarm.heal(node.peer_id, it.peer_id)
        idle = PacedEngine(seconds=1000.0)
        again = await join(it, tmp_path / "node", idle)
        await it.until(lambda: again.tree["accepted"] == 1)
        assert again.tree["pending"] == 0
        assert unit not in again.units
        await it.until(lambda: bool(idle.works))  # and takes the next
        assert idle.works[0].lease_id != engine.works[0].lease_id


async def test_a_disk_that_is_too_small_is_said_and_the_lease_goes_back(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with stage(tmp_path) as it:
        node = await join(it, tmp_path / "node", disk_bytes=250_000)
        await it.until(lambda: bool(node.tree["notices"]))
        text = node.tree["notices"][-1]["text"]
        assert "3 states and their difference" in text
        assert "--disk" in text
        await it.until(lambda: it.state()["leases_open"] == 0)
        assert node.engine.works == []
        assert node.tree["state"] == "waiting"
        assert node.units == []


async def test_a_corpus_that_cannot_be_had_is_waited_for(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DiskStore.size

    def without_corpus(store: DiskStore, digest: bytes) -> int | None:
        return None if digest == digests[0] and store.folder == theirs else real(store, digest)

    async with stage(tmp_path) as it:
        digests, theirs = [it.corpus], it.folder / "store"
        monkeypatch.setattr(DiskStore, "size", without_corpus)
        node = await join(it, tmp_path / "node")
        await it.until(lambda: bool(node.tree["notices"]))
        assert "the corpus could not be fetched" in node.tree["notices"][-1]["text"]
        assert it.state()["leases_open"] == 1
        digests[0] = b""
        await it.until(lambda: node.tree["accepted"] == 1)
    assert len({work.lease_id for work in node.engine.works[:1]}) == 1


class Careless(LocalVerifier):
    """Rejects the first unit that it sees, whatever it is; right about all others."""

    first = True

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        result = await super().verify_block(job)
        if not Careless.first:
            return result
        Careless.first = False
        verdict = msgspec.structs.replace(result.verdict, accepted=False, check="block-replay")
        return msgspec.structs.replace(result, verdict=verdict, tokens=0)


async def test_a_volunteer_appeals_against_a_wrong_verdict_on_a_block_and_is_paid(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    small = {"rounds": 1, "blocks": 1, "scaffold_layers": 2, "contributors": 1}
    Careless.first = True
    async with stage(tmp_path, Careless, **small) as world:
        ann = await join(world, tmp_path / "ann")
        await world.until(lambda: ann.tree["rejected"] == 1)
        await ann.handle.commands["pause"]({})
        assert len(ann.units) >= 1, "its files are kept for an appeal"
        reply = await ann.handle.commands["appeal"]({"receipt": "#" + str(_first_rejected(ann))})
        assert reply["ok"]
        await world.until(lambda: ann.tree["credit"] > 0)
        assert (ann.tree["rejected"], ann.tree["standing"]["strikes"]) == (0, 0)
        await ann.handle.commands["resume"]({})
        await world.until(lambda: world.state()["complete"])
        await world.until(lambda: not ann.units)


def _first_rejected(person: Volunteer) -> int:
    signed = read_receipts(next(person.home.glob("runs/*/receipts*")))
    return next(
        r.ledger_index for r in (decode(s.payload, Receipt) for s in signed) if not r.verdict.accepted
    )
