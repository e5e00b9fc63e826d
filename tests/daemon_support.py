"""A daemon on the in-memory network, its coordinator and its engine scripted, in virtual time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import spec_support
import trio
import trio.testing

from barnraise.node.config import NodeConfig
from barnraise.node.consent import Approve
from barnraise.node.daemon import run_node
from barnraise.node.engine import EngineInfo, Generated, Progress, Work
from barnraise.node.handle import NodeHandle
from barnraise.node.machine import Sensors
from barnraise.protocol.envelope import content_id, open_signed, sign
from barnraise.protocol.errors import RefusedError
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
from barnraise.protocol.server_session import ServerSession
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.spec import (
    RunSpec,
)
from barnraise.protocol.store import DiskStore

EPOCH_MS = 1_800_000_000_000
CONFIG = b"{}"
SPEED = 3.0  # virtual seconds per unit


def run_spec(operator: Identity, versions: int = 50) -> RunSpec:
    return spec_support.run_spec(
        name="barn",
        operator=operator.public_key,
        model__parameters=100_000,
        model__assets={"config.json": sha256(CONFIG).digest()},
        rollout__versions=versions,
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
    outside: str = "",
    **settings: Any,
) -> AsyncIterator[Node]:
    """A running daemon, cancelled (as by kill -9, as far as the disk is concerned) on leaving."""
    places = {"data": tmp_path / "node", "key": tmp_path / "key"}
    config = NodeConfig(address=address, name="n", **{**places, **settings})
    identity = identity or Identity.generate()
    engine = engine or ScriptedEngine()
    async with swarm.network(identity.peer_id, outside=outside) as network, trio.open_nursery() as nursery:
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
