"""The whole daemon on the in-memory network, with a scripted coordinator and engine, in virtual time."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from spec_support import GRPO, VERIFY

from barnraise.node import attend
from barnraise.node.config import NodeConfig
from barnraise.node.consent import Approve
from barnraise.node.daemon import NodeHandle, run_node
from barnraise.node.engine import EngineInfo, Generated, OutOfMemory, Progress, Work
from barnraise.node.machine import Sensors
from barnraise.protocol import hello
from barnraise.protocol.envelope import content_id, open_signed, sign
from barnraise.protocol.errors import ChildError, RefusedError
from barnraise.protocol.hello import answer_hello
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import build_manifest
from barnraise.protocol.memory_network import MemoryNetwork, MemorySwarm
from barnraise.protocol.messages import (
    HELLO_PROTOCOL,
    SESSION_PROTOCOL,
    SHARD_PROTOCOL,
    Acknowledged,
    HeadPush,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    ManifestReply,
    ManifestRequest,
    Message,
    NoticePush,
    Receipt,
    ReceiptPush,
    ReceiptsReply,
    ReceiptsRequest,
    Rollout,
    RolloutLease,
    RolloutSubmission,
    Signed,
    SubmitRequest,
    Verdict,
)
from barnraise.protocol.network import Stream
from barnraise.protocol.runid import run_id
from barnraise.protocol.session import ServerSession
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.spec import (
    EnvironmentSpec,
    EvalSpec,
    ModelSpec,
    RolloutSpec,
    RunSpec,
    SamplingSpec,
)
from barnraise.protocol.store import DiskStore

EPOCH_MS = 1_800_000_000_000
CONFIG = b"{}"
SPEED = 3.0  # virtual seconds per unit


def run_spec(operator: Identity, versions: int = 50) -> RunSpec:
    model = ModelSpec(
        name="tiny",
        parameters=100_000,
        vocabulary=64,
        weights_dtype="float32",
        compute_dtype="float32",
        eos_token=0,
        assets={"config.json": sha256(CONFIG).digest()},
    )
    rollout = RolloutSpec(
        prompts_per_unit=2,
        group_size=4,
        groups_per_version=4,
        max_groups_per_version=8,
        max_lag=2,
        versions=versions,
        timeout_s=60.0,
        deadline_s=120.0,
    )
    return RunSpec(
        format=1,
        name="barn",
        description="",
        operator=operator.public_key,
        created_at=0,
        phase="posttrain",
        seed=1,
        model=model,
        environment=EnvironmentSpec(name="reverse", settings="{}", prompt_format="plain", system_prompt=""),
        sampling=SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8),
        rollout=rollout,
        grpo=GRPO,
        verify=VERIFY,
        evaluation=EvalSpec(tasks=8, every=1),
        admission="open",
    )


@dataclass
class Coordinator:
    """Answers as a coordinator would; what it has acknowledged survives its crashes."""

    folder: Path
    identity: Identity = field(default_factory=Identity.generate)
    versions: int = 50
    heads: list[Signed] = field(default_factory=list)
    submissions: dict[bytes, RolloutSubmission] = field(default_factory=dict)
    received: list[bytes] = field(default_factory=list)  # every arrival, duplicates included
    receipts: list[Signed] = field(default_factory=list)
    leases: dict[bytes, RolloutLease] = field(default_factory=dict)
    resend: RolloutLease | None = None
    lent: dict[bytes, RolloutLease] = field(default_factory=dict)
    received_lease: bytes = b""
    returned: list[tuple[bytes, str, float]] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    joins: list[JoinRequest] = field(default_factory=list)
    beats: list[HeartbeatRequest] = field(default_factory=list)
    sessions: set[ServerSession] = field(default_factory=set)
    network: MemoryNetwork | None = None
    clock_ahead_ms: int = 0
    judge: bool = True
    accept: bool = True
    refuse_lease: tuple[str, int] | None = None
    before_ack: Callable[[], Awaitable[None]] | None = None
    join_error: RefusedError | None = None

    def __post_init__(self) -> None:
        self.spec = sign(run_spec(self.identity, self.versions), self.identity)
        self.run_id = run_id(self.spec)
        self.store = DiskStore(self.folder / "store")

    def now(self) -> int:
        return EPOCH_MS + round(trio.current_time() * 1000) + self.clock_ahead_ms

    def manifest(self, version: int, signer: Identity | None = None) -> Signed:
        source = self.folder / f"source{version}"
        source.mkdir(parents=True, exist_ok=True)
        (source / "config.json").write_bytes(CONFIG)
        (source / "model.safetensors").write_bytes(random.Random(version).randbytes(20_000))
        files = {path.name: path for path in sorted(source.iterdir())}
        built = build_manifest(self.run_id, version, files, 4096, self.now(), self.store.put)
        return sign(built, signer or self.identity)

    def publish(self) -> int:
        version = len(self.heads)
        self.heads.append(self.manifest(version))
        self.push(HeadPush(head=self.heads[-1]))
        return version

    def push(self, message: Message) -> None:
        for session in self.sessions:
            session.push(message)

    async def session(self, stream: Stream) -> None:
        session = ServerSession(stream, lambda message: self.handle(message))
        self.sessions.add(session)
        try:
            await session.run()
        finally:
            self.sessions.discard(session)

    async def handle(self, message: Message) -> Message:
        match message:
            case JoinRequest(id=number):
                if self.join_error is not None:
                    raise self.join_error
                self.joins.append(message)
                head = self.heads[-1] if self.heads else None
                return JoinReply(id=number, run_spec=self.spec, head=head, now=self.now())
            case HeartbeatRequest(id=number):
                self.beats.append(message)
                return HeartbeatReply(id=number, now=self.now(), head_version=len(self.heads) - 1, peers=())
            case ManifestRequest(id=number):
                return ManifestReply(id=number, head=self.heads[-1] if self.heads else None)
            case LeaseRequest(id=number, policy_version=version):
                return self.lend(number, version)
            case LeaseReturn(id=number, lease_id=lease_id, reason=reason):
                self.returned.append((lease_id, reason, trio.current_time()))
                if self.leases.pop(lease_id, None) is None:
                    raise RefusedError("unknown-lease", "that lease is closed")
                return Acknowledged(id=number, duplicate=False)
            case SubmitRequest(id=number, submission=submission):
                return await self.accept_work(number, submission)
            case ReceiptsRequest(id=number, from_index=index):
                return ReceiptsReply(id=number, receipts=tuple(self.receipts[index : index + 2]))
        raise AssertionError(message)

    def lend(self, number: int, version: int) -> LeaseReply:
        self.asked.append(trio.current_time())
        if self.refuse_lease is not None:
            reason, retry = self.refuse_lease
            return LeaseReply(id=number, lease=None, reason=reason, retry_after_ms=retry)
        lease = RolloutLease(
            run_id=self.run_id,
            lease_id=len(self.asked).to_bytes(16, "big"),
            unit_id=len(self.asked),
            node=self.joins[-1].public_key,
            policy_version=version,
            prompts=2,
            group_size=4,
            issued_at=self.now(),
            timeout_at=self.now() + 60_000,
            deadline_at=self.now() + 120_000,
        )
        if self.resend is not None:
            lease, self.resend = self.resend, None
            return LeaseReply(id=number, lease=sign(lease, self.identity), reason="", retry_after_ms=0)
        self.leases[lease.lease_id] = self.lent[lease.lease_id] = lease
        return LeaseReply(id=number, lease=sign(lease, self.identity), reason="", retry_after_ms=0)

    async def accept_work(self, number: int, signed: Signed) -> Acknowledged:
        work = open_signed(signed, RolloutSubmission, self.joins[-1].public_key)
        submission_id = content_id(signed)
        self.received.append(submission_id)
        self.received_lease = work.lease_id
        duplicate = submission_id in self.submissions
        if not duplicate:
            if work.lease_id not in self.leases:
                raise RefusedError("unknown-lease", "that lease is not open")
            self.submissions[submission_id] = work
            del self.leases[work.lease_id]
        if self.before_ack is not None:
            hook, self.before_ack = self.before_ack, None
            await hook()
        if self.judge and not duplicate:
            self.receipts.append(self.receipt(work.lease_id, submission_id))
            self.push(ReceiptPush(receipt=self.receipts[-1]))
        return Acknowledged(id=number, duplicate=duplicate)

    def receipt(self, lease_id: bytes, submission_id: bytes) -> Signed:
        verdict = Verdict(
            accepted=self.accept,
            check="all" if self.accept else "toploc",
            threshold=10.0,
            value=1.0 if self.accept else 97.5,
            position="" if self.accept else "rollout 3 chunk 0",
            message="" if self.accept else "another model made this",
        )
        receipt = Receipt(
            run_id=self.run_id,
            node=self.joins[-1].public_key,
            lease_id=lease_id,
            submission_id=submission_id,
            verdict=verdict,
            credit=100 if self.accept else 0,
            ledger_index=len(self.receipts),
            issued_at=self.now(),
        )
        return sign(receipt, self.identity)

    @asynccontextmanager
    async def up(self, swarm: MemorySwarm) -> AsyncIterator[str]:
        """Serve on ``swarm`` while inside; yields the address."""
        async with swarm.network(self.identity.peer_id) as network:
            self.network = network
            network.set_handler(HELLO_PROTOCOL, answer_hello)
            network.set_handler(SESSION_PROTOCOL, self.session)
            network.set_handler(SHARD_PROTOCOL, serve_shards(self.store))
            yield network.addresses[0]


@dataclass
class ScriptedEngine:
    """Takes virtual time, makes fixed rollouts, fails when told to."""

    seconds: float = SPEED
    failures: list[Exception] = field(default_factory=list)
    load_failures: list[Exception] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    stopped_at: list[float] = field(default_factory=list)
    busy: bool = False
    closed: bool = False

    async def load(self, spec: RunSpec, folder: Path, version: int) -> EngineInfo:
        assert not self.busy
        assert (folder / "model.safetensors").stat().st_size == 20_000
        self.loads.append(version)
        await trio.sleep(0.5)
        if self.load_failures:
            raise self.load_failures.pop(0)
        return EngineInfo(name="scripted", device="none", memory_bytes=1)

    async def generate(self, work: Work, progress: Callable[[Progress], None]) -> Generated:
        assert not self.busy, "two generations at once"
        self.busy = True
        self.works.append(work)
        try:
            rows = work.prompts * work.group_size
            for row in range(rows):
                await trio.sleep(self.seconds / rows)
                progress(Progress(completions=row + 1, tokens=row + 1))
                if row == 1 and self.failures:
                    raise self.failures.pop(0)
        except trio.Cancelled:
            self.stopped_at.append(trio.current_time())
            raise
        finally:
            self.busy = False
        made = tuple(
            Rollout(prompt=p, sample=s, tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0", proofs=b"p" * 258)
            for p in range(work.prompts)
            for s in range(work.group_size)
        )
        return Generated(rollouts=made, seconds=self.seconds, tokens=rows)

    async def close(self) -> None:
        self.closed = True


@dataclass
class Node:
    handle: NodeHandle
    engine: ScriptedEngine
    config: NodeConfig
    identity: Identity
    exit_codes: list[int] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)

    @property
    def tree(self) -> dict[str, Any]:
        return self.handle.get_state()

    async def until(
        self, reached: Callable[[dict[str, Any]], bool], seconds: float = 300.0
    ) -> dict[str, Any]:
        with trio.move_on_after(seconds):
            seen = -1
            while not reached(self.tree):
                seen = await self.handle.changed.wait(seen)
            return self.tree
        pytest.fail(f"not reached within {seconds} s: {self.tree}")

    async def until_ended(self, seconds: float = 300.0) -> int:
        with trio.move_on_after(seconds):
            while not self.exit_codes:
                await trio.sleep(0.05)
            return self.exit_codes[0]
        pytest.fail(f"still running after {seconds} s: {self.tree}")


@asynccontextmanager
async def node(
    swarm: MemorySwarm,
    tmp_path: Path,
    address: str,
    engine: ScriptedEngine | None = None,
    identity: Identity | None = None,
    sensors: Sensors | None = None,
    asleep: Callable[[], float] | None = None,
    wall_ahead: Callable[[], float] = lambda: 0.0,
    approve: Approve | None = None,
    **settings: Any,
) -> AsyncIterator[Node]:
    """A running daemon, cancelled (as by kill -9, as far as the disk is concerned) on leaving."""
    places = {"data": tmp_path / "node", "key": tmp_path / "key"}
    config = NodeConfig(address=address, name="n", **{**places, **settings})
    identity = identity or Identity.generate()
    engine = engine or ScriptedEngine()
    async with swarm.network(identity.peer_id) as network, trio.open_nursery() as nursery:
        started: list[Node] = []

        async def live(task_status: Any) -> None:
            code = await run_node(
                config,
                network,
                engine,
                identity,
                lambda: EPOCH_MS + round((trio.current_time() + wall_ahead()) * 1000),
                random.Random(7),
                approve=approve,
                sensors=sensors,
                asleep=asleep,
                task_status=task_status,
            )
            started[0].exit_codes.append(code)
            started[0].ended_at.append(trio.current_time())

        started.append(Node(await nursery.start(live), engine, config, identity))
        yield started[0]
        nursery.cancel_scope.cancel()


async def test_units_are_leased_generated_submitted_and_credited(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        tree = await it.until(lambda tree: tree["accepted"] == 3)
    assert tree["credit"] == 300
    assert tree["policy_version"] == tree["head_version"] == 0
    assert tree["engine"] == "scripted"
    assert tree["tokens_per_s"] == round(8 / SPEED, 1)
    assert tree["bytes_in"] > 20_000
    assert tree["last_verdict"]["accepted"]
    assert boss.joins[0].name == "n"
    assert {work.node for work in it.engine.works} == {it.identity.public_key}
    assert boss.beats[-1].have_version == 0
    msgspec.msgpack.encode(tree)


async def test_uploads_overlap_the_next_unit(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    stalled = trio.Event()

    async def slow() -> None:
        stalled.set()
        await trio.sleep(2 * SPEED + 1)

    boss.before_ack = slow
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await stalled.wait()
        await trio.sleep(2.0)
        assert it.tree["state"] == "generating"
        await trio.sleep(2.0)
        assert it.tree["state"] == "uploading"
        assert it.tree["pending"] == 2
        assert len(it.engine.works) == 2
        await it.until(lambda tree: tree["accepted"] == 3)


async def test_a_lease_that_comes_again_is_never_worked_on_twice(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        boss.resend = next(iter(boss.lent.values()))
        await it.until(lambda tree: tree["accepted"] == 4)
        assert boss.resend is None
    worked = [work.lease_id for work in it.engine.works]
    assert len(worked) == len(set(worked))


async def test_work_is_sent_again_after_the_coordinator_was_killed_before_it_acknowledged(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R2, R17."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    killed = trio.Event()
    again = f"/memory/3/p2p/{boss.identity.peer_id}"

    async def die() -> None:
        killed.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        first = trio.CancelScope()

        async def serve(task_status: Any) -> None:
            with first:
                async with boss.up(swarm) as address:
                    task_status.started(address)
                    await trio.sleep_forever()

        address = await nursery.start(serve)
        async with node(swarm, tmp_path, address, more_addresses=(again,)) as it:
            await it.until(lambda tree: tree["accepted"] == 1)
            boss.before_ack = die
            await killed.wait()
            await trio.sleep(1.0)
            swarm.crash(boss.identity.peer_id)
            first.cancel()
            tree = await it.until(lambda tree: tree["state"] == "offline")
            assert "tries again" in tree["then"]
            assert tree["policy_version"] == 0
            await trio.sleep(40.0)
            assert address in it.tree["reason"]
            assert again in it.tree["reason"]
            assert it.tree["pending"] == 2  # the one in doubt, and the one made meanwhile
            async with boss.up(swarm) as address:
                assert address == again
                tree = await it.until(lambda tree: tree["accepted"] >= 4)
        doubtful = boss.received[1]
        assert boss.received.count(doubtful) == 2
        assert len(boss.submissions) == len(set(boss.submissions))
        assert len(boss.joins) == 2
        assert boss.joins[0].instance == boss.joins[1].instance
        nursery.cancel_scope.cancel()


async def test_a_restarted_node_sends_what_it_had_signed_and_gives_its_lease_back(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R4, R6, R17."""
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    identity = Identity.generate()
    hold = trio.Event()
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address, identity=identity) as it:
            boss.before_ack = hold.wait
            await it.until(lambda tree: tree["pending"] == 1 and tree["state"] == "generating")
            await trio.sleep(1.0)
        assert len(boss.received) == 1
        lease = it.engine.works[1].lease_id
        async with node(swarm, tmp_path, address, identity=identity) as it:
            tree = await it.until(lambda tree: tree["accepted"] >= 1)
            assert boss.received[0] == boss.received[1]
            assert [r[:2] for r in boss.returned] == [(lease, "the node was restarted")]
            await it.until(lambda tree: tree["accepted"] >= 3)
            hold.set()
    assert not any((tmp_path / "node").glob(".tmp*"))
    assert tree["credit"] >= 100


async def test_receipts_missed_while_away_are_fetched(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R16."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    identity = Identity.generate()
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address, identity=identity) as it:
            await it.until(lambda tree: tree["accepted"] == 2)
        for number in range(5):
            boss.receipts.append(boss.receipt(bytes(16), bytes([number]) * 32))
        boss.refuse_lease = ("none left", 1000)
        async with node(swarm, tmp_path, address, identity=identity) as it:
            tree = await it.until(lambda tree: tree["accepted"] == len(boss.receipts))
            assert tree["credit"] == 100 * len(boss.receipts)


async def test_a_new_head_is_fetched_while_generating_and_used_for_the_next_unit(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(latency_s=0.01), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["unit"] is not None and tree["unit"]["completions"] == 2)
        boss.publish()
        boss.publish()
        tree = await it.until(lambda tree: tree["have_version"] == 2)
        assert tree["state"] == "generating"
        assert tree["policy_version"] == 0
        await it.until(lambda tree: tree["policy_version"] == 2)
        await it.until(lambda tree: tree["accepted"] == 2)
    assert it.engine.loads in ([0, 2], [0, 1, 2])
    assert it.engine.works[0].policy_version == 0
    assert it.engine.works[1].policy_version == 2


async def test_a_lost_push_of_a_head_is_made_up_for_by_heartbeats(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["policy_version"] == 0)
        boss.heads.append(boss.manifest(1))
        await it.until(lambda tree: tree["policy_version"] == 1, 15.0)


async def test_pause_stops_the_engine_and_returns_the_lease_within_two_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R13."""
    swarm, boss = MemorySwarm(latency_s=0.05), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["state"] == "generating")
        asked = trio.current_time()
        await it.handle.commands["pause"]({"seconds": 100})
        tree = await it.until(lambda tree: tree["state"] == "paused" and bool(boss.returned))
        assert it.engine.stopped_at[0] - asked <= 2.0
        assert boss.returned[0][2] - asked <= 2.0
        assert tree["then"] == "resumes"
        await trio.sleep(90)
        assert not it.engine.busy
        assert it.tree["connected"]
        assert boss.beats[-1].state == "paused"
        await it.until(lambda tree: tree["accepted"] == 1)
        await it.handle.commands["pause"]({})
        await it.handle.commands["resume"]({})
        await it.until(lambda tree: tree["accepted"] == 3)
        with pytest.raises(RefusedError):
            await it.handle.commands["pause"]({"seconds": "1h"})


async def test_finish_delivers_the_unit_at_work_and_ends(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["state"] == "generating")
        await it.handle.commands["finish"]({})
        assert await it.until_ended(20.0) == 0
        assert len(boss.submissions) == 1
        assert not boss.leases
        assert it.engine.closed


async def test_leave_returns_the_lease_and_ends_within_two_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(latency_s=0.05), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["state"] == "generating")
        asked = trio.current_time()
        await it.handle.commands["leave"]({})
        assert await it.until_ended(20.0) == 0
        assert it.ended_at[0] - asked <= 2.0
        assert len(boss.returned) == 1


async def test_out_of_memory_is_retried_smaller_once_and_the_node_lives(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    engine = ScriptedEngine(failures=[OutOfMemory("8 GB wanted")])
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        assert [work.shrink for work in engine.works[:2]] == [0, 1]
        assert engine.works[0].lease_id == engine.works[1].lease_id
        engine.failures += [OutOfMemory("still"), OutOfMemory("still")]
        await it.until(lambda tree: len(boss.returned) == 1)
        assert "out of memory" in boss.returned[0][1]
        await it.until(lambda tree: tree["accepted"] >= 3)


async def test_a_killed_engine_is_reported_and_loaded_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R5."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    engine = ScriptedEngine(failures=[ChildError("the engine was killed: out of memory")])
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: tree["accepted"] == 1)
    assert engine.loads == [0, 0]
    assert engine.works[1].shrink == 1
    assert any("out of memory" in notice["text"] for notice in tree["notices"])
    assert not boss.returned


async def test_an_engine_that_cannot_load_is_tried_again_and_the_reason_shown(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    engine = ScriptedEngine(load_failures=[ChildError("no such kernel"), RuntimeError("odd")])
    async with boss.up(swarm) as address, node(swarm, tmp_path, address, engine) as it:
        tree = await it.until(lambda tree: "no such kernel" in tree["reason"])
        assert tree["then"] == "tries again"
        await it.until(lambda tree: tree["accepted"] == 1)


async def test_lease_refusals_are_obeyed(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss", refuse_lease=("enough is lent", 20_000))
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: "enough is lent" in tree["reason"])
        await trio.sleep(100)
    gaps = [b - a for a, b in zip(boss.asked, boss.asked[1:], strict=False)]
    assert gaps
    assert all(20.0 <= gap <= 26.0 for gap in gaps)


async def test_a_manifest_signed_by_another_key_is_refused_and_work_goes_on(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
        boss.push(HeadPush(head=boss.manifest(9, Identity.generate())))
        tree = await it.until(lambda tree: tree["accepted"] == 3)
    assert tree["head_version"] == 0
    assert any("manifest" in notice["text"] for notice in tree["notices"])


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


async def test_a_full_disk_at_the_coordinator_costs_no_work(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()

    async def full() -> None:
        boss.submissions.clear()
        boss.leases[boss.received_lease] = boss.lent[boss.received_lease]
        raise RefusedError("storage-full", "the coordinator's disk is full")

    boss.before_ack = full
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["accepted"] == 1)
    assert boss.received[0] == boss.received[1]


async def test_a_refused_submission_is_dropped_and_the_reason_shown(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss")
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        await it.until(lambda tree: tree["unit"] is not None)
        boss.leases.clear()
        tree = await it.until(lambda tree: tree["accepted"] == 1)
    assert any("unknown-lease" in notice["text"] for notice in tree["notices"])
    assert len(boss.received) == 2


async def test_a_rejection_names_check_threshold_value_and_place(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """R18."""
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss", accept=False)
    boss.publish()
    async with boss.up(swarm) as address, node(swarm, tmp_path, address) as it:
        tree = await it.until(lambda tree: tree["rejected"] == 1)
    assert tree["last_verdict"]["check"] == "toploc"
    line = next(r.getMessage() for r in caplog.records if "rejected" in r.getMessage())
    for part in ("toploc", "97.5", "10", "rollout 3 chunk 0"):
        assert part in line


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


async def test_a_complete_run_ends_the_node_that_was_told_to(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, boss = MemorySwarm(), Coordinator(tmp_path / "boss", versions=1)
    boss.publish()
    async with boss.up(swarm) as address:
        async with node(swarm, tmp_path, address, exit_when_complete=True) as it:
            await it.until(lambda tree: tree["accepted"] == 1)
            boss.publish()
            assert await it.until_ended(30.0) == 0
        async with node(swarm, tmp_path, address) as it:
            tree = await it.until(lambda tree: tree["have_version"] == 1)
            await trio.sleep(600)
            tree = it.tree
            assert tree["state"] == "complete"
            assert tree["complete"]
            assert not it.exit_codes


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
    assert any("tries again in" in text for _, text in lines)
