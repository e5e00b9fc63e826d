"""A coordinator's page over a scripted history, for the tests of the page and for its pictures."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import trio
from coordinator_support import make_run, opened

from barnraise.coordinator.commands import operator_commands
from barnraise.coordinator.core import Core, Offload, in_place
from barnraise.coordinator.door import Door
from barnraise.coordinator.draining import Drain
from barnraise.coordinator.events import (
    AppealDecided,
    AppealFiled,
    BatchFormed,
    Event,
    LeaseClosed,
    LeaseIssued,
    NodeBanned,
    NodeJoined,
    RunOpened,
    SubmissionJudged,
    SubmissionsSkipped,
    Submitted,
    VersionPublished,
)
from barnraise.coordinator.hub import Hub, Live
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.log_belt import LogBelt
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.newcomer_book import NewcomerBook
from barnraise.coordinator.newcomers import NewcomerLimits
from barnraise.coordinator.operator_events import AlarmRaised, RunPaused
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.status import state_tree
from barnraise.coordinator.web.gate import Access
from barnraise.coordinator.web.service import WebService
from barnraise.coordinator.workers import TrainStats
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import RolloutLease, Verdict
from barnraise.protocol.tlog_checkpoint import log_key

START = 1_780_000_000_000  # ms
EVIL = '<script>alert("x")</script>'
BIDI = "ev\u202eil\u0007"
NAMES = ("anna", EVIL, BIDI, "年輕的機器", "a" * 60, "?")


def identity_of(number: int) -> Identity:
    return Identity.from_private_bytes(hashlib.sha256(b"node %d" % number).digest())


@cache
def key_of(number: int) -> bytes:
    return identity_of(number).public_key


@dataclass
class FakeNetwork:
    addresses: tuple[str, ...] = (
        "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWQK1wnefoLrcVHbbnf5tLzb2BiKPSuYTLrFPbVsmUQoBa",
    )
    bytes_in: int = 48_213_004
    bytes_out: int = 913_200_119


@dataclass
class Web:
    """A page under test. ``now``: its clock, ms."""

    core: Core
    service: WebService
    public_log: LogBelt
    client: httpx.AsyncClient
    hub: Hub
    progress: Progress
    run_folder: Path
    clock: list[int]
    ended: trio.Event  # by "stop" or "drain"
    door: Door  # one new key a day

    async def record(self, events: Iterable[Event], group: int = 16) -> None:
        """In several durable writes."""
        waiting = list(events)
        for start in range(0, len(waiting), group):
            self.clock[0] = max(self.clock[0], *(event.at_ms for event in waiting[start : start + group]))
            await self.core.record(waiting[start : start + group])

    async def settled(self) -> None:
        """Once everything durable is published and in the index."""
        await self.core.sign_tree_head()
        index = self.service.site.index
        while index.size < index.known or index.entries.folder.size < index.known:
            await trio.sleep(0.1)
        self.clock[0] += 1000  # the overview is made anew

    async def get(self, path: str, status: int = 200) -> httpx.Response:
        reply = await self.client.get(path)
        assert reply.status_code == status, f"{path}: {reply.status_code} {reply.text[:300]}"
        return reply

    async def json(self, path: str) -> Any:
        return (await self.get(path)).json()


@asynccontextmanager
async def website(
    folder: Path,
    offload: Offload = in_place,
    http: list[trio.SocketListener] | None = None,
    admin: Access = "local",
) -> AsyncIterator[Web]:
    """The page of the run in ``folder`` (made if need be), as ``run_coordinator`` wires it."""
    run_folder = folder / "run"
    with opened(run_folder if run_folder.is_dir() else make_run(folder, versions=40)) as run:
        journal = Journal(run.journal_path)
        clock, hub, progress = [START], Hub(), Progress(learner="collecting")
        out_there = LogFolder(run.log_folder, log_key(run.run_id, run.spec.operator))
        core = Core(
            journal, run.spec, run.run_id, run.identity, lambda: clock[0], offload, published=out_there.size
        )
        public_log = LogBelt(core, run.identity, out_there, run.signed_spec)
        where = NewcomerLimits(1), NewcomerBook(run.path, run.identity)
        door = Door(core, lambda peer: "/ip4/203.0.113.9/tcp/1", *where)

        def state() -> dict[str, Any]:
            network: Any = FakeNetwork()
            return state_tree(
                core, hub, progress, network, START, None, run.path, public_log, door, with_nodes=False
            )

        service = WebService(core, hub, out_there, run.path, state, admin=admin)
        ended = trio.Event()
        drain = Drain(core, progress, ended.set)
        service.admin.commands = operator_commands(core, run, drain, ended.set)
        transport = httpx.ASGITransport(app=service.app)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(core.run)
                nursery.start_soon(public_log.run)
                nursery.start_soon(service.run, http or ())
                nursery.start_soon(drain.run)
                async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
                    yield Web(core, service, public_log, client, hub, progress, run.path, clock, ended, door)
                nursery.cancel_scope.cancel()
        finally:
            journal.close()


@dataclass
class Story:
    """Events of an ordinary run, one after the other; each call adds some. Times go on by themselves."""

    run_id: bytes
    seed: int = 0
    now: int = START
    events: list[Event] = field(default_factory=list)
    units: int = 0
    version: int = -1
    pool: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.events.append(RunOpened(run_id=self.run_id, operator=b"o" * 32, at_ms=self.now))

    def later(self, ms: int) -> int:
        self.now += ms
        return self.now

    def join(self, number: int, name: str) -> None:
        self.events.append(NodeJoined(node=key_of(number), name=name, at_ms=self.later(300)))

    def publish(self, accuracy: float = -1.0, reward: float | None = None) -> None:
        """Version 0, or the next one, made from everything accepted."""
        if self.version >= 0:
            chosen, self.pool = tuple(self.pool), []
            self.events.append(
                BatchFormed(
                    version=self.version + 1,
                    submissions=chosen,
                    groups=2 * len(chosen),
                    usable=2,
                    at_ms=self.later(10),
                )
            )
        self.version += 1
        stats = None
        if reward is not None:
            stats = TrainStats(
                reward_mean=reward,
                groups=8,
                groups_used=6,
                loss=0.01,
                grad_norm=0.42 + 0.1 * self.rng.random(),
                clip_fraction=0.013,
                ratio_max=1.2,
                entropy=1.31 - 0.01 * self.version,
                kl=0.0021,
                lag_mean=0.4,
                seconds=11.3,
            )
        self.events.append(
            VersionPublished(
                version=self.version,
                manifest=hashlib.sha256(b"manifest %d" % self.version).digest(),
                weights="w",
                size=3_211_264,
                stats=stats,
                accuracy=accuracy,
                at_ms=self.later(12_000),
            )
        )

    def lend(self, node: int, unit: int | None = None) -> RolloutLease:
        if unit is None:
            unit, self.units = self.units, self.units + 1
        lease = RolloutLease(
            run_id=self.run_id,
            lease_id=self.rng.randbytes(16),
            unit_id=unit,
            node=key_of(node),
            policy_version=self.version,
            prompts=2,
            group_size=2,
            issued_at=self.later(400),
            timeout_at=self.now + 60_000,
            deadline_at=self.now + 120_000,
        )
        self.events.append(LeaseIssued(lease=lease, instance=b"i" * 16))
        return lease

    def give_back(self, lease: RolloutLease) -> None:
        self.events.append(LeaseClosed(lease_id=lease.lease_id, reason="returned", at_ms=self.later(900)))

    def submit(self, lease: RolloutLease, took_ms: int = 3000) -> bytes:
        submission = self.rng.randbytes(32)
        at = self.later(took_ms)
        self.events.append(
            Submitted(submission_id=submission, lease_id=lease.lease_id, size=23_000, at_ms=at)
        )
        return submission

    def judge(self, submission: bytes, check: str = "all", credit: int = 812) -> None:
        good = check == "all"
        self.events.append(
            SubmissionJudged(
                submission_id=submission,
                verdict=Verdict(
                    accepted=good,
                    check=check,
                    threshold=0.0 if good else 3.0,
                    value=0.0 if good else 17.25,
                    position="" if good else "rollout 2 chunk 1",
                    message="" if good else "mantissas differ by 17.25 on average",
                ),
                rewards=(0.0, 1.0, 0.0, 1.0) if good else (),
                tokens=240 if good else 0,
                credit=credit if good else 0,
                blameless=False,
                at_ms=self.later(700),
            )
        )
        if good:
            self.pool.append(submission)

    def unit(self, node: int, check: str = "all", credit: int = 812) -> bytes:
        submission = self.submit(self.lend(node))
        self.judge(submission, check, credit)
        return submission

    def skip(self, submission: bytes) -> None:
        self.pool.remove(submission)
        self.events.append(SubmissionsSkipped(submissions=(submission,), at_ms=self.later(5)))

    def appeal(self, submission: bytes) -> None:
        self.events.append(AppealFiled(submission_id=submission, at_ms=self.later(5000)))
        self.events.append(
            AppealDecided(
                submission_id=submission,
                verdict=Verdict(
                    accepted=True, check="all", threshold=0.0, value=0.0, position="", message=""
                ),
                rewards=(0.0, 1.0, 0.0, 1.0),
                tokens=240,
                credit=812,
                at_ms=self.later(3000),
            )
        )

    def ban(self, node: int, reason: str, seconds: int) -> None:
        until = self.later(100) + seconds * 1000
        self.events.append(
            NodeBanned(node=key_of(node), reason=reason, until=until, by_rule=False, at_ms=self.now)
        )


def ordinary(run_id: bytes, versions: int = 6, names: tuple[str, ...] = NAMES) -> Story:
    """Some nodes with difficult names, verdicts of several kinds, a ban, an appeal, a skipped unit."""
    story = Story(run_id)
    for number, name in enumerate(names):
        story.join(number, name)
    story.publish(accuracy=0.075)
    for version in range(1, versions):
        for number in range(len(names)):
            for _ in range(1 + (number * version) % 3):
                story.unit(number, credit=400 + 100 * number)
        if version == 2:
            story.give_back(story.lend(0))
            rejected = story.unit(1, "toploc")
            story.unit(2, "bad-signature")
            story.appeal(rejected)
            story.skip(story.unit(3))
            story.ban(2, f"floods others {EVIL}", 86_400)
        reached = 1 - 0.93 / version
        story.publish(accuracy=reached if version % 2 else -1.0, reward=reached * 0.9)
    for number in range(3):
        story.submit(story.lend(number))
        story.lend(number)
    return story


def connect(web: Web, number: int, state: str = "generating", version: int = 5) -> None:
    """A live session of a node."""

    class Nobody:
        def push(self, message: object) -> bool:
            return True

        def close(self, reason: str) -> None:
            pass

    live = Live(session=Nobody(), peer_id="", connected_at=0, key=key_of(number))
    live.state, live.engine, live.have_version, live.reach = state, "torch 2.13 cpu", version, "direct"
    web.hub.add(live)
    web.hub.join(live)


async def finish_all(web: Web) -> None:
    """Whatever is lent comes back, whatever waits is judged."""
    state, now = web.core.state, web.core.now_ms()
    bad = Verdict(accepted=False, check="toploc", threshold=1.0, value=2.0, position="", message="")
    events: list[Event] = [
        SubmissionJudged(
            submission_id=item,
            verdict=bad,
            rewards=(),
            tokens=0,
            credit=0,
            blameless=False,
            at_ms=now,
        )
        for item in state.waiting
    ]
    events += [LeaseClosed(lease_id=lease, reason="returned", at_ms=now) for lease in state.leases]
    await web.core.record(events)


def in_trouble(at_ms: int) -> list[Event]:
    """Two alarms, of which one has paused the run."""
    texts = {
        "reward-collapse": "the reward fell from 0.812 to 0.203 (version 5): see `barnraise report`; "
        "`barnraise coordinator rollback DIR VERSION` takes an earlier version up again",
        "stale-work": "the work trained on is 1.9 versions old on average, and 2 is the most: the learner or "
        "the broadcast is slower than the volunteers; raise rollout.groups_per_version",
    }
    raised = [
        AlarmRaised(kind=kind, value=0.2, limit=0.4, text=text, version=5, at_ms=at_ms)
        for kind, text in texts.items()
    ]
    reason = f"reward-collapse: {texts['reward-collapse']}"
    return [*raised, RunPaused(by="guard", reason=reason, at_ms=at_ms)]
