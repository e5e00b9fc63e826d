"""What one coordinator carries: submissions a second, and nodes that hold leases at once.

    python -m benchmarks.coordinator [--json] [--nodes 10000] [--bytes 1500] [--in-flight 256] [--rate 200]
                                     [--no-logs]

Everything of the coordinator is real (sessions and their frames, hub, scheduler, state, ledger, journal
with its fsyncs on the disk of ``--scratch``, receipts, the ticker), and all of it shares ONE core with the
nodes' side. Three things stand in: the wire is a queue in memory (what libp2p costs is ``benchmarks.hop``'s
business), the verifier accepts everything at once (what a model costs is ``benchmarks.verification``'s),
and there is no learner. The nodes' submissions are built and signed before the clock starts. Logs are
written as a coordinator writes them (``log_bytes``, of all stages), unless ``--no-logs``.

Stages: every node joins; every node asks for a lease and holds it (``leased_nodes``, ``lease_ms``: from the
request to the signed reply that is on the disk); every node submits, ``--in-flight`` at a time
(``submissions_per_s``: signature, schema, lease, state, ledger, commit, acknowledgement, while verdicts
come and take their share; ``judged_per_s``: until the last has its verdict and signed receipt, too; the
same by seconds of processor time, which other work on the machine does not change); then, with all leases
held anew, nodes come at random ``--rate`` times a second, submit, and ask again: ``submit_ms`` and
``ask_ms`` under that load.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio

from barnraise.coordinator.collector import calm_collector
from barnraise.coordinator.core import Core
from barnraise.coordinator.deadlines import Deadlines
from barnraise.coordinator.door import Door
from barnraise.coordinator.events import VersionPublished
from barnraise.coordinator.greeter import Greeter
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.main import _logging
from barnraise.coordinator.newcomer_book import NewcomerBook
from barnraise.coordinator.newcomers import NewcomerLimits
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.server import _push_receipts, _tick, wall_clock_ms
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
    JoinRequest,
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
from benchmarks.starts import peak_mb
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
        deadlines = Deadlines(core)
        door = Door(core, lambda peer: "", NewcomerLimits(per_day=0), NewcomerBook(folder, run.identity))
        sessions = Sessions(core, hub, run.signed_spec, random.Random(1), door)

        def receipts(write: Write) -> None:
            _push_receipts(hub, write)

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
            nursery.start_soon(_tick, core, sessions, Greeter(hub, wall_clock_ms), deadlines, False)
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


async def for_all(wires: Sequence[Wire], in_flight: int, do: Any) -> tuple[float, list[float]]:
    """``do(index, wire)`` for each, so many at a time; seconds in all, and of each."""
    took: list[float] = []
    queue = iter(enumerate(wires))

    async def worker() -> None:
        for index, node in queue:
            began = time.perf_counter()
            await do(index, node)
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(in_flight):
            nursery.start_soon(worker)
    return time.perf_counter() - began, took


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In ms."""
    cut = statistics.quantiles(seconds, n=100)
    return {"p50": cut[49] * 1e3, "p90": cut[89] * 1e3, "p99": cut[98] * 1e3, "max": max(seconds) * 1e3}


async def stages(
    scratch: Path, nodes: int, size: int, in_flight: int, rate: float, seconds: float
) -> dict[str, Any]:
    """All of it."""
    result: dict[str, Any] = {}
    async with world(scratch, nodes, size) as place:
        core, leases = place.core, dict[int, RolloutLease]()

        async def join(index: int, node: Wire) -> None:
            place.nursery.start_soon(place.sessions.serve, node)
            await node.ask(
                wire.frame(
                    JoinRequest(
                        id=place.number(),
                        public_key=node.identity.public_key,
                        instance=bytes(16),
                        name=f"node-{index}",
                        engine="benchmark",
                        addresses=(),
                    )
                )
            )

        async def ask(index: int, node: Wire) -> None:
            leases[index] = await place.lease(node)

        whole, _ = await for_all(place.wires, in_flight, join)
        result["joins_per_s"] = nodes / whole
        whole, took = await for_all(place.wires, in_flight, ask)
        result |= {
            "leased_nodes": len(core.state.leases),
            "leases_per_s": nodes / whole,
            "lease_ms": percentiles(took),
            "sessions": len(place.hub.by_key),
        }
        place.pause[0] = 0.0
        await trio.sleep(2.0)
        began = time.process_time()
        await trio.sleep(3.0)
        result["idle_core_share"] = (time.process_time() - began) / 3.0
        result["idle_longest_pause_ms"] = place.pause[0] * 1e3

        frames = [place.work(node, leases[index]) for index, node in enumerate(place.wires)]
        result["submission_bytes"] = statistics.fmean(map(len, frames))

        turned_away = 0

        async def submit(index: int, node: Wire) -> None:
            nonlocal turned_away
            while True:
                try:
                    await node.ask(frames[index])
                    return
                except RefusedError as error:  # the verifier's queue is full: its lease is kept
                    if error.code != "busy":
                        raise
                    turned_away += 1
                    await trio.sleep(0.25)

        began, used = time.perf_counter(), time.process_time()
        place.pause[0] = 0.0
        whole, took = await for_all(place.wires, in_flight, submit)
        result["submissions_per_s"] = nodes / whole
        result["submissions_per_core_s"] = nodes / (time.process_time() - used)
        result["acknowledged_ms"] = percentiles(took)
        while core.state.waiting or sum(node.receipts for node in place.wires) < nodes:
            await trio.sleep(0.01)
        result["judged_per_s"] = nodes / (time.perf_counter() - began)
        result["judged_per_core_s"] = nodes / (time.process_time() - used)
        result["longest_pause_ms"] = place.pause[0] * 1e3
        result["turned_away"] = turned_away
        frames.clear()

        await for_all(place.wires, in_flight, ask)
        result |= await _under_load(place, leases, rate, seconds)
        result["entries"] = len(core.ledger)
        result["peak_rss_mb"] = peak_mb()
    return result


async def _under_load(
    place: World, leases: dict[int, RolloutLease], rate: float, seconds: float
) -> dict[str, Any]:
    """Nodes that come at random, as if there were no end of them."""
    rng, free = random.Random(7), list(range(len(place.wires)))
    submitted: list[float] = []
    asked: list[float] = []

    async def once(index: int) -> None:
        node = place.wires[index]
        frame = place.work(node, leases[index])
        began = time.perf_counter()
        await node.ask(frame)
        submitted.append(time.perf_counter() - began)
        began = time.perf_counter()
        leases[index] = await place.lease(node)
        asked.append(time.perf_counter() - began)
        free.append(index)

    place.pause[0] = 0.0
    held = len(place.core.state.leases)
    began = trio.current_time()
    at = began
    async with trio.open_nursery() as nursery:
        while at < began + seconds and free:
            at += -math.log(1.0 - rng.random()) / rate
            await trio.sleep_until(at)
            free[0], free[-1] = free[-1], free[0]
            place_of = rng.randrange(len(free))
            free[place_of], free[-1] = free[-1], free[place_of]
            nursery.start_soon(once, free.pop())
    return {
        "load_per_s": rate,
        "load_held": held,
        "load_done_per_s": len(submitted) / (trio.current_time() - began),
        "submit_ms": percentiles(submitted),
        "ask_ms": percentiles(asked),
        "load_longest_pause_ms": place.pause[0] * 1e3,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What one coordinator carries.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=1_500, help="about the size of a submission")
    parser.add_argument("--in-flight", type=int, default=256, help="requests under way at a time")
    parser.add_argument("--rate", type=float, default=200.0, help="submit and ask, times a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of that load")
    parser.add_argument("--no-logs", action="store_true", help="write no logs, to see what they cost")
    parser.add_argument("--scratch", type=Path, default=None, help="a folder on the disk to measure with")
    options = parser.parse_args(arguments)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    with (
        tempfile.TemporaryDirectory(prefix="barnraise-coordinator-", dir=options.scratch) as scratch,
        ExitStack() as stack,
    ):
        logs = Path(scratch) / "logs"
        logs.mkdir()
        if not options.no_logs:
            stack.enter_context(_logging(logs, lambda line: None))
        result = trio.run(
            stages,
            Path(scratch),
            options.nodes,
            options.bytes,
            options.in_flight,
            options.rate,
            options.seconds,
        )
        result["log_bytes"] = sum(path.stat().st_size for path in logs.iterdir())
    result["conditions"] = {
        "logs": not options.no_logs,
        "cores_used": 1,
        "cores": len(cores),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "in_flight": options.in_flight,
        "load_average": os.getloadavg()[0],
        "msgspec": msgspec.__version__,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name:24} {value if isinstance(value, dict) else f'{value:,.3f}'}")


if __name__ == "__main__":
    main()
