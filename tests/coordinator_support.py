"""Shared by the coordinator's tests: a small run folder, cheap workers, a scripted node."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio

from barnraise.coordinator.audit import Pressure
from barnraise.coordinator.core import in_place
from barnraise.coordinator.folder import Run, Settings, create_run, open_run
from barnraise.coordinator.newcomers import NewcomerLimits
from barnraise.coordinator.presets import demo
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.server import run_coordinator
from barnraise.coordinator.workers import (
    Judged,
    Trained,
    TrainJob,
    TrainStats,
    Verifier,
    VerifyJob,
    checkpoint_folder,
)
from barnraise.protocol import wire
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.errors import ChildError, PeerError, RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemoryNetwork, MemorySwarm
from barnraise.protocol.messages import (
    SESSION_PROTOCOL,
    Acknowledged,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaseRequest,
    Message,
    Rollout,
    RolloutLease,
    RolloutSubmission,
    Signed,
    SubmitRequest,
    Verdict,
)
from barnraise.protocol.session import Session
from barnraise.protocol.spec import RolloutSpec
from tests.spec_support import EXACT as VERIFY

R = TypeVar("R", bound=Message)

ROLLOUT = RolloutSpec(
    prompts_per_unit=2,
    group_size=2,
    groups_per_version=4,
    max_groups_per_version=8,
    max_lag=1,
    versions=3,
    timeout_s=60.0,
    deadline_s=120.0,
)


def settings(**rollout: Any) -> Settings:
    base = demo()
    changed: dict[str, Any] = {
        name: getattr(base, name)
        for name in ("environment", "sampling", "grpo", "evaluation", "weights_dtype", "compute_dtype")
    }
    return Settings(rollout=msgspec.structs.replace(ROLLOUT, **rollout), **changed)


def write_model(folder: Path) -> Path:
    """The smallest folder that passes for a model: nobody here ever runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 40, "eos_token_id": 1}))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [5000, 100], "data_offsets": [0, 20_000]}}).encode()
    data = random.Random(0).randbytes(20_000)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


def make_run(tmp_path: Path, name: str = "run", **rollout: Any) -> Path:
    folder = tmp_path / name
    create_run(
        folder,
        write_model(tmp_path / "model"),
        settings(**rollout),
        VERIFY,
        name="test run",
        description="",
        model_name="tiny",
        seed=1,
        now_ms=1_000,
        identity=Identity.from_private_bytes(b"o" * 32),
    )
    return folder


@dataclass
class FakeVerifier:
    """Accepts what says ``good`` as its engine; rewards alternate, so that every group is usable."""

    delay_s: float = 0.5
    poison: bytes = b""
    batches: list[int] = field(default_factory=list)
    fail_times: int = 0
    slots: int = 1

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        await trio.sleep(self.delay_s)
        self.batches.append(len(jobs))
        if self.fail_times:
            self.fail_times -= 1
            raise ChildError("the verifier died: out of memory")
        if any(self.poison and self.poison in job.payload for job in jobs):
            raise ChildError("the verifier died: signal 11")
        return tuple(self._judge(job) for job in jobs)

    def _judge(self, job: VerifyJob) -> Judged:
        work = wire.decode(job.payload, RolloutSubmission)
        good = work.engine.startswith("good") or not job.model_check
        verdict = Verdict(
            accepted=good,
            check=("all" if job.model_check else "unaudited") if good else "toploc",
            threshold=10.0,
            value=1.0 if good else 99.0,
            position="" if good else "rollout 0 chunk 0",
            message="",
        )
        count = job.lease.prompts * job.lease.group_size
        rewards = tuple(float(i % 2) for i in range(count)) if work.engine != "good-flat" else (0.0,) * count
        return Judged(
            submission_id=job.submission_id,
            verdict=verdict,
            rewards=rewards if good else (),
            tokens=len(work.rollouts),
        )

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


@dataclass
class FakeLearner:
    """Writes a checkpoint folder with changed weights; repeats itself safely."""

    folder: Path
    delay_s: float = 2.0
    jobs: list[TrainJob] = field(default_factory=list)
    fail_times: int = 0

    async def initial(self) -> Trained:
        await trio.sleep(self.delay_s)
        weights = checkpoint_folder(self.folder, 0) / "model.safetensors"
        return Trained(version=0, weights=str(weights), stats=None, accuracy=0.1)

    async def train(self, job: TrainJob) -> Trained:
        self.jobs.append(job)
        await trio.sleep(self.delay_s)
        if self.fail_times:
            self.fail_times -= 1
            raise ChildError("the learner died: out of memory")
        target = checkpoint_folder(self.folder, job.version)
        target.mkdir(exist_ok=True)
        for source in checkpoint_folder(self.folder, job.version - 1).iterdir():
            (target / source.name).write_bytes(source.read_bytes())
        weights = target / "model.safetensors"
        (target / "optimizer.safetensors").write_bytes(b"momentum")
        weights.write_bytes(weights.read_bytes()[:-8] + job.version.to_bytes(8, "big"))
        rewards = [reward for part in job.parts for reward in part.rewards]
        stats = TrainStats(
            reward_mean=sum(rewards) / len(rewards),
            groups=sum(part.lease.prompts for part in job.parts),
            groups_used=sum(part.lease.prompts for part in job.parts),
            loss=0.0,
            grad_norm=1.0,
            clip_fraction=0.0,
            ratio_max=1.0,
            entropy=1.0,
            kl=0.0,
            lag_mean=0.0,
            seconds=self.delay_s,
        )
        return Trained(version=job.version, weights=str(weights), stats=stats, accuracy=0.1 * job.version)

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


def virtual_ms() -> int:
    return 1_000_000 + round(trio.current_time() * 1000)


@dataclass
class Coordinator:
    """A coordinator under test."""

    run: Run
    verifier: FakeVerifier
    learner: FakeLearner
    network: MemoryNetwork
    state: Callable[[], dict[str, Any]]
    lines: list[str]
    scope: trio.CancelScope

    @property
    def address(self) -> str:
        return self.network.addresses[0]


@asynccontextmanager
async def coordinating(
    swarm: MemorySwarm,
    folder: Path,
    verifier: Verifier | None = None,
    learner: FakeLearner | None = None,
    seed: int = 0,
    mirrors: tuple[str, ...] = (),
    pressure: Pressure | None = None,
    keep: Keep = Keep(),
    newcomers: NewcomerLimits = NewcomerLimits(),
) -> AsyncIterator[Coordinator]:
    """Run the coordinator of ``folder`` in memory for the length of the block."""
    verifier = verifier or FakeVerifier()
    learner = learner or FakeLearner(folder)
    lines: list[str] = []
    with open_run(folder) as run:
        async with swarm.network(run.identity.peer_id) as network, trio.open_nursery() as nursery:
            serve = partial(
                run_coordinator,
                run,
                network,
                verifier,
                learner,
                now_ms=virtual_ms,
                rng=random.Random(seed),
                offload=in_place,
                announce=lines.append,
                control=False,
                shard_size=4096,
                mirrors=mirrors,
                pressure=pressure,
                keep=keep,
                newcomers=newcomers,
            )
            state = await nursery.start(serve)
            yield Coordinator(run, verifier, learner, network, state, lines, nursery.cancel_scope)
            nursery.cancel_scope.cancel()


@dataclass
class ScriptedNode:
    """A node that does what a test tells it, over the real session protocol."""

    identity: Identity
    session: Session
    run_id: bytes
    operator: bytes
    version: int = 0
    pushes: list[Message] = field(default_factory=list)

    async def ask(self, build: Callable[[int], Message], reply: type[R]) -> R:
        return await self.session.request(build, reply)

    async def join(self, name: str = "ann", instance: bytes = b"i" * 16) -> JoinReply:
        return await self.ask(
            lambda number: JoinRequest(
                id=number,
                public_key=self.identity.public_key,
                instance=instance,
                name=name,
                engine="test",
                addresses=("/memory/9/p2p/x",),
            ),
            JoinReply,
        )

    async def lease_reply(self, version: int | None = None) -> LeaseReply:
        wanted = self.version if version is None else version
        return await self.ask(lambda number: LeaseRequest(id=number, policy_version=wanted), LeaseReply)

    async def lease(self, version: int | None = None) -> RolloutLease:
        """Ask until there is a lease; the operator's signature is checked."""
        while True:
            reply = await self.lease_reply(version)
            if reply.lease is not None:
                return open_signed(reply.lease, RolloutLease, self.operator)
            await trio.sleep(max(reply.retry_after_ms, 1) / 1000)

    async def submit(self, signed: Signed) -> Acknowledged:
        return await self.ask(lambda number: SubmitRequest(id=number, submission=signed), Acknowledged)

    def work(self, lease: RolloutLease, engine: str = "good", **changes: Any) -> RolloutSubmission:
        rollouts = tuple(
            Rollout(prompt=p, sample=s, tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0", proofs=b"")
            for p in range(lease.prompts)
            for s in range(lease.group_size)
        )
        fields: dict[str, Any] = {
            "run_id": lease.run_id,
            "lease_id": lease.lease_id,
            "policy_version": lease.policy_version,
            "engine": engine,
            "generate_ms": 5,
            "rollouts": rollouts,
        }
        return RolloutSubmission(**{**fields, **changes})

    def signed_work(self, lease: RolloutLease, engine: str = "good", **changes: Any) -> Signed:
        return sign(self.work(lease, engine, **changes), self.identity)

    def received(self, kind: type[R]) -> list[R]:
        return [message for message in self.pushes if isinstance(message, kind)]

    async def keep_beating(self) -> None:
        with suppress(PeerError, RefusedError):
            while True:
                await trio.sleep(10)
                await self.ask(
                    lambda number: HeartbeatRequest(id=number, have_version=self.version, state="idle"),
                    HeartbeatReply,
                )

    async def keep_pushes(self) -> None:
        async for message in self.session.pushes:
            self.pushes.append(message)


@asynccontextmanager
async def node(
    swarm: MemorySwarm, coordinator: Coordinator, seed: bytes = b"n", join: bool = True, outside: str = ""
) -> AsyncIterator[ScriptedNode]:
    """A joined node on a host of its own. ``outside``: the internet address that it comes from."""
    identity = Identity.from_private_bytes(seed * 32)
    async with swarm.network(identity.peer_id, outside=outside) as network:
        async with attached(network, coordinator, identity, join) as scripted:
            yield scripted


@asynccontextmanager
async def attached(
    network: MemoryNetwork, coordinator: Coordinator, identity: Identity, join: bool = True
) -> AsyncIterator[ScriptedNode]:
    """A session on a host that is there already."""
    async with trio.open_nursery() as nursery:
        peer = await network.connect(coordinator.address)
        session = Session(await network.open_stream(peer, SESSION_PROTOCOL))
        nursery.start_soon(session.run)
        scripted = ScriptedNode(
            identity, session, coordinator.run.run_id, coordinator.run.identity.public_key
        )
        nursery.start_soon(scripted.keep_pushes)
        if join:
            await scripted.join()
            nursery.start_soon(scripted.keep_beating)
        yield scripted
        await session.close()
        nursery.cancel_scope.cancel()


@contextmanager
def opened(folder: Path) -> Iterator[Run]:
    with open_run(folder) as run:
        yield run
