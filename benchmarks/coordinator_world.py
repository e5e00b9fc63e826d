"""One real coordinator in memory, and nodes that ask it: what ``benchmarks.coordinator`` measures.

Stand-ins are the wire, a queue, and the verifier, which accepts everything.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from barnraise.coordinator.clock_back import ClockBack
from barnraise.coordinator.collector import calm_collector
from barnraise.coordinator.core import Core
from barnraise.coordinator.deadlines import Deadlines
from barnraise.coordinator.door import Door
from barnraise.coordinator.events import VersionPublished
from barnraise.coordinator.greeter import Greeter
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.newcomer_book import NewcomerBook
from barnraise.coordinator.newcomers import NewcomerLimits
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.server import due_events, push_receipts, tick, wall_clock_ms
from barnraise.coordinator.sessions import Sessions
from barnraise.coordinator.verify_belt import VerifyBelt
from barnraise.coordinator.workers import Judged, VerifyJob
from barnraise.protocol import wire
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.frames import FRAME_BY_TYPE
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import (
    Acknowledged,
    JoinReply,
    LeaseReply,
    LeaseRequest,
    Message,
    ReceiptPush,
    Refusal,
    Rollout,
    RolloutLease,
    RolloutSubmission,
    SubmitRequest,
    Verdict,
)
from tests.coordinator_support import make_run, opened

REPLIES: dict[int, type[Message]] = {
    FRAME_BY_TYPE[kind].code: kind for kind in (JoinReply, LeaseReply, Acknowledged, Refusal)
}
WATCH_S = 0.01  # between two looks at the clock
RECEIPT = FRAME_BY_TYPE[ReceiptPush].code
GOOD = Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message="")


class Wire:
    """A node's end and the coordinator's of one stream, as a queue in memory."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.receipts = 0
        self._inbox = b""
        self._filled = trio.Event()
        self._answered = trio.Event()
        self._reply: tuple[int, bytes] = (0, b"")
        self._closed = False

    async def read(self, limit: int) -> bytes:
        """The coordinator reads."""
        while not self._inbox:
            if self._closed:
                return b""
            await self._filled.wait()
        data, self._inbox = self._inbox[:limit], self._inbox[limit:]
        if not self._inbox:
            self._filled = trio.Event()
        return data

    async def write(self, data: bytes) -> None:
        """The coordinator writes one frame."""
        await trio.lowlevel.checkpoint()
        if data[0] in REPLIES:
            self._reply = data[0], data[wire.HEADER_BYTES :]
            self._answered.set()
        elif data[0] == RECEIPT:
            self.receipts += 1

    async def close(self) -> None:
        self._closed = True
        self._filled.set()

    reset = close

    async def ask(self, request: bytes) -> Message:
        """Send a frame; the reply. One at a time."""
        self._answered = trio.Event()
        self._inbox += request
        self._filled.set()
        await self._answered.wait()
        code, body = self._reply
        reply = wire.decode(body, REPLIES[code])
        if isinstance(reply, Refusal):
            raise RefusedError(reply.code, reply.message)
        return reply


@dataclass
class Accepting:
    """The stand-in for the verifier: everything is accepted, at once."""

    slots: int = 1
    judged: int = 0

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        await trio.lowlevel.checkpoint()
        self.judged += len(jobs)
        rewards = (0.0,) * (jobs[0].lease.prompts * jobs[0].lease.group_size)
        return tuple(
            Judged(submission_id=job.submission_id, verdict=GOOD, rewards=rewards, tokens=8) for job in jobs
        )

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


@dataclass
class World:
    """A coordinator and its nodes."""

    core: Core
    hub: Hub
    nursery: trio.Nursery
    sessions: Sessions
    wires: list[Wire]
    size: int  # about the bytes of a submission
    pause: list[float] = field(default_factory=lambda: [0.0])
    numbers: int = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    async def lease(self, node: Wire) -> RolloutLease:
        """Ask until there is one."""
        while True:
            reply = await node.ask(wire.frame(LeaseRequest(id=self.number(), policy_version=0)))
            assert isinstance(reply, LeaseReply)
            if reply.lease is not None:
                return open_signed(reply.lease, RolloutLease, self.core.spec.operator)
            await trio.sleep(reply.retry_after_ms / 1000)

    def work(self, node: Wire, lease: RolloutLease) -> bytes:
        """The frame of a signed submission."""
        rollouts = lease.prompts * lease.group_size
        tokens = max(4, (self.size - 200) // rollouts // 16 * 4)
        body = os.urandom(tokens)
        work = RolloutSubmission(
            run_id=lease.run_id,
            lease_id=lease.lease_id,
            policy_version=lease.policy_version,
            engine="benchmark",
            generate_ms=5,
            rollouts=tuple(
                Rollout(prompt=prompt, sample=sample, tokens=body, logprobs=bytes(tokens), proofs=body * 2)
                for prompt in range(lease.prompts)
                for sample in range(lease.group_size)
            ),
        )
        return wire.frame(SubmitRequest(id=self.number(), submission=sign(work, node.identity)))


@asynccontextmanager
async def world(scratch: Path, nodes: int, size: int) -> AsyncIterator[World]:
    """Version 0 is published; nobody has joined."""
    folder = make_run(scratch, groups_per_version=60_000, max_groups_per_version=60_000, timeout_s=3600.0)
    with opened(folder) as run:
        journal = Journal(run.journal_path)
        core = Core(journal, run.spec, run.run_id, run.identity, wall_clock_ms)
        hub, verifier = Hub(), Accepting()
        door = Door(core, lambda peer: "", NewcomerLimits(per_day=0), NewcomerBook(folder, run.identity))
        sessions = Sessions(core, hub, run.signed_spec, random.Random(1), door)
        due = partial(due_events, core, sessions, Deadlines(core), ClockBack(core))

        def receipts(write: Write) -> None:
            push_receipts(hub, write)

        core.listeners.append(receipts)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.run)
            await core.open()
            version = VersionPublished(
                version=0, manifest=bytes(32), weights="w", size=1, stats=None, accuracy=-1.0, at_ms=1
            )
            await core.record([version])
            hub.head_version = 0
            nursery.start_soon(sessions.run)
            nursery.start_soon(VerifyBelt(core, verifier, Progress()).run)
            nursery.start_soon(tick, core, sessions, Greeter(hub, wall_clock_ms), due, False)
            wires = [Wire(Identity.generate()) for _ in range(nodes)]
            place = World(core, hub, nursery, sessions, wires, size)
            nursery.start_soon(_watch, place.pause)
            calm_collector()
            yield place
            nursery.cancel_scope.cancel()
        journal.close()


async def _watch(pause: list[float]) -> None:
    last = time.perf_counter()
    while True:
        await trio.sleep(WATCH_S)
        now = time.perf_counter()
        pause[0], last = max(pause[0], now - last - WATCH_S), now
