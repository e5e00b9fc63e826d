"""A whole swarm in this process and in virtual time: everything is real but the wire and the processes.

The coordinator's server, the nodes' daemons, the torch engine, the verifier and the
learner are the ones that a volunteer meets, on a tiny model. Only the network is in
memory, and nothing runs beside the event loop, so that a run repeats.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.core import in_place
from barnraise.coordinator.export import export_run
from barnraise.coordinator.folder import Run, create_run, open_run
from barnraise.coordinator.presets import demo
from barnraise.coordinator.server import run_coordinator
from barnraise.coordinator.verifier import LocalVerifier
from barnraise.coordinator.workers import Trained, TrainJob, WorkerSetup
from barnraise.coordinator.workshop import LocalLearner
from barnraise.kernels.demo_model import Recipe, create_demo_model
from barnraise.node.config import NodeConfig
from barnraise.node.daemon import run_node
from barnraise.node.engine import Engine
from barnraise.node.handle import NodeHandle
from barnraise.node.receipts import read_receipts
from barnraise.protocol import ledger
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger_file import open_ledger, verify_ledger_file
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Receipt
from barnraise.protocol.wire import decode

torch.set_num_threads(1)  # models this small lose by threads

# A model made in a second: it answers in the right form, and places a letter right now and then.
SMALL = Recipe(
    width=32,
    heads=2,
    key_value_heads=1,
    layers=2,
    feed_forward=64,
    letters=3,
    learning_rate=5e-3,
    ramp_steps=5,
    max_steps=60,
    first_check=1000,
)
ROLLOUT = {
    "prompts_per_unit": 2,
    "group_size": 4,
    "groups_per_version": 4,
    "max_groups_per_version": 8,
    "max_lag": 2,
    "versions": 3,
    "timeout_s": 30.0,
    "deadline_s": 90.0,
}
OPERATOR = Identity.from_private_bytes(b"o" * 32)
PATIENCE_S = 1800.0  # virtual


def virtual_ms() -> int:
    return 1_700_000_000_000 + round(trio.current_time() * 1000)


def made_models() -> Path:
    """Where models are kept that all workers of a run share (see ``conftest``)."""
    return Path(os.environ["BARNRAISE_TEST_MODELS"])


def make_model(folder: Path, seed: int = 0) -> Path:
    """A small model, warmed up by the first test that asks for its seed and copied to the others."""
    with (made_models() / f"{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        create_demo_model(folder, seed, cache=made_models(), recipe=SMALL)
    return folder


def make_run(folder: Path, model: Path, now_ms: int, **rollout: Any) -> Path:
    """Three letters of three, each right place rewarded: groups nearly always disagree."""
    base = demo()
    settings = replace(
        base,
        environment=msgspec.structs.replace(
            base.environment, settings=json.dumps({"letters": 3, "alphabet": 3, "partial": True})
        ),
        sampling=msgspec.structs.replace(base.sampling, max_new_tokens=5),
        rollout=msgspec.structs.replace(base.rollout, **{**ROLLOUT, **rollout}),
        grpo=msgspec.structs.replace(base.grpo, learning_rate=1e-3),
        evaluation=msgspec.structs.replace(base.evaluation, tasks=4, every=100),
    )
    create_run(
        folder,
        model,
        settings,
        default_verify_spec("float32"),
        name="swarm",
        description="",
        model_name="small",
        seed=0,
        now_ms=now_ms,
        identity=OPERATOR,
    )
    return folder


class PacedLearner:
    """The real learner; a version takes ``seconds`` of virtual time, and every job is remembered."""

    def __init__(self, setup: WorkerSetup, seconds: float) -> None:
        self._real = LocalLearner(setup)
        self._seconds = seconds
        self.jobs: list[TrainJob] = []

    async def initial(self) -> Trained:
        return await self._real.initial()

    async def train(self, job: TrainJob) -> Trained:
        self.jobs.append(job)
        await trio.sleep(self._seconds)
        return await self._real.train(job)

    async def close(self) -> None:
        await self._real.close()


@dataclass
class Member:
    """One volunteer. ``code`` is the exit code once its daemon has ended."""

    name: str
    identity: Identity
    engine: Engine
    data: Path
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    handle: NodeHandle | None = None
    code: int | None = None
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def tree(self) -> dict[str, Any]:
        assert self.handle is not None
        return self.handle.get_state()

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id


@dataclass
class Audit:
    """The public ledger, found sound, and what it says."""

    entries: list[ledger.LedgerEntry]
    balances: dict[str, int]
    verdicts: dict[str, Counter[str]]
    receipts: dict[str, list[Receipt]]

    def of(self, kind: type[Any]) -> list[Any]:
        return [entry for entry in self.entries if isinstance(entry, kind)]


@dataclass
class Swarm:
    """A run, its coordinator and whoever joins."""

    memory: MemorySwarm
    run: Run
    learner: PacedLearner
    address: str
    state: Callable[[], dict[str, Any]]
    nursery: trio.Nursery
    folder: Path
    members: dict[str, Member] = field(default_factory=dict)
    audit: Audit | None = None  # once the swarm is over

    @property
    def head(self) -> int:
        return int(self.state()["policy_version"])

    async def join(self, name: str, engine: Engine) -> Member:
        """Start a daemon, which ends by itself when the run is complete."""
        number = len(self.members)
        identity = Identity.from_private_bytes(bytes([number + 1]) * 32)
        member = Member(name, identity, engine, self.folder / name)
        self.members[name] = member
        member.handle = await self.nursery.start(self._live, member, number)
        return member

    async def _live(self, member: Member, number: int, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        config = NodeConfig(
            address=self.address,
            data=member.data,
            key=member.data / "node.key",
            name=member.name,
            exit_when_complete=True,
        )
        with member.scope:
            async with self.memory.network(member.peer_id) as network:
                member.code = await run_node(
                    *(config, network, member.engine, member.identity, virtual_ms),
                    random.Random(number),
                    task_status=task_status,
                )
        member.ended.set()

    async def until(self, reached: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        """Wait for a condition, in virtual time."""
        deadline = trio.current_time() + patience_s
        while not reached():
            if trio.current_time() > deadline:
                raise AssertionError(f"not reached within {patience_s} virtual seconds: {self.state()}")
            await trio.sleep(0.25)

    async def finish(self) -> None:
        """Wait until the run is complete and every daemon that is left has ended."""
        await self.until(lambda: all(member.ended.is_set() for member in self.members.values()))
        assert self.state()["complete"]


@asynccontextmanager
async def swarming(
    folder: Path, model: Path, *, seed: int = 0, learn_s: float = 1.0, latency_s: float = 0.02, **rollout: Any
) -> AsyncIterator[Swarm]:
    """A coordinator for the length of the block; then the ledger is exported and audited."""
    path = make_run(folder / "run", model, virtual_ms(), **rollout)
    memory = MemorySwarm(latency_s=latency_s)
    with open_run(path) as run:
        setup = WorkerSetup(spec=run.spec, run_id=run.run_id, folder=str(path), threads=1)
        learner = PacedLearner(setup, learn_s)
        async with memory.network(run.identity.peer_id) as network, trio.open_nursery() as nursery:
            serve = partial(
                run_coordinator,
                *(run, network, LocalVerifier(setup), learner),
                now_ms=virtual_ms,
                rng=random.Random(seed),
                offload=in_place,
                announce=lambda line: None,
                control=False,
                shard_size=64 * 1024,
            )
            state = await nursery.start(serve)
            swarm = Swarm(memory, run, learner, network.addresses[0], state, nursery, folder)
            yield swarm
            nursery.cancel_scope.cancel()
    swarm.audit = _audit(swarm)
    _check_jobs(swarm)


def _audit(swarm: Swarm) -> Audit:
    """Verify the exported ledger with every receipt that a node holds, as an outsider would."""
    target = swarm.folder / "ledger.bin"
    export_run(swarm.run.path, target)
    files = {
        name: path
        for name, member in swarm.members.items()
        for path in member.data.glob("runs/*/receipts.bin")
    }
    signed = {name: read_receipts(path) for name, path in files.items()}
    report = verify_ledger_file(target, [receipt for kept in signed.values() for receipt in kept])
    assert report.problems == ()
    with open_ledger(target) as opened:
        entries = list(opened.entries)
    names = {member.identity.public_key: name for name, member in swarm.members.items()}
    verdicts: dict[str, Counter[str]] = {name: Counter() for name in swarm.members}
    for entry in entries:
        if isinstance(entry, ledger.Judged):
            verdicts[names[entry.node]][entry.check] += 1
    audit = Audit(
        entries=entries,
        balances={names[node]: credit for node, credit in report.balances.items()},
        verdicts=verdicts,
        receipts={name: [decode(item.payload, Receipt) for item in kept] for name, kept in signed.items()},
    )
    # Credit is conserved: a balance is the sum of its verdicts, and nobody's receipts say more.
    credits: Counter[str] = Counter()
    for entry in audit.of(ledger.Judged):
        credits[names[entry.node]] += entry.credit
    assert {name: credits[name] for name in audit.balances} == audit.balances
    for name, receipts in audit.receipts.items():
        assert sum(receipt.credit for receipt in receipts) <= audit.balances[name]
    return audit


def _check_jobs(swarm: Swarm) -> None:
    """Every accepted unit was trained on at most once, within the allowed lag, and nothing else was."""
    assert swarm.audit is not None
    accepted = {entry.lease_id for entry in swarm.audit.of(ledger.Judged) if entry.accepted}
    jobs = {job.version: job for job in swarm.learner.jobs}
    assert len(jobs) == len(swarm.learner.jobs)
    used = [part.lease for job in jobs.values() for part in job.parts]
    assert len({lease.lease_id for lease in used}) == len(used)
    assert {lease.lease_id for lease in used} <= accepted
    for version, job in jobs.items():
        for part in job.parts:
            assert 0 <= version - 1 - part.lease.policy_version <= swarm.run.spec.rollout.max_lag
