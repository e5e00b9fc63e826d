"""How ``runs-*.tar.xz`` was made, once, by the very release that its name says; no test needs this.

    PYTHONPATH=tests:. .venv/bin/python -P tests/data/older_runs.py tests/data/runs-COMMIT.tar.xz

Two runs, kept by that release's own coordinator in virtual time, with every kind of event that it
knew: ``posttrain`` (audits under a backlog, credit taken back and given again, appeals, bans,
offences, invites, amendments, guards, pauses, a rollback) and ``pretrain`` (block units, rounds,
the recombined model). Both are stopped in the middle, so that whoever opens them can go on. Beside
each lies ``said.json``: what that release said of it. Their key is the tests' fixed one and guards
nothing. To add a release: run this there, and add its commit to ``RELEASES`` in
``tests/test_older_run.py``. (``run-05f6377.tar.xz`` is from before this; it has snapshots, these have none.)
"""

from __future__ import annotations

import json
import random
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import trio
import trio.testing
from block_stage_support import lie_unit, make_pretrain_run, train_unit
from block_swarm_support import appealing, running, volunteer
from coordinator_support import (
    Coordinator,
    FakeLearner,
    FakeVerifier,
    ScriptedNode,
    attached,
    coordinating,
    make_run,
    node,
)

from barnraise.coordinator import checkpoints
from barnraise.coordinator.admission import allow, disallow, make_invite, revoke_invite, set_mode
from barnraise.coordinator.amending import amend
from barnraise.coordinator.audit import Pressure
from barnraise.coordinator.bans import ban, unban
from barnraise.coordinator.checkpoints import Record, write_record
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Event
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.state import State, fold
from barnraise.coordinator.steering import pause, resume, roll_back
from barnraise.coordinator.workers import Judged, Trained, TrainJob, VerifyJob, checkpoint_folder
from barnraise.protocol import shards
from barnraise.protocol.envelope import content_id, sign
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.invites import read_invite
from barnraise.protocol.ledger import encode_entry
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import (
    Acknowledged,
    AppealRequest,
    InviteRequest,
    LeaseReturn,
    ReceiptPush,
    Signed,
)

MOST_BYTES = 300_000


@dataclass
class Moody(FakeVerifier):
    """Rejects everything while it is ``wrong``."""

    wrong: bool = False

    def _judge(self, job: VerifyJob) -> Judged:
        result = super()._judge(job)
        if not self.wrong or not job.model_check:
            return result
        verdict = msgspec.structs.replace(result.verdict, accepted=False, check="toploc", value=99.0)
        return msgspec.structs.replace(result, verdict=verdict, rewards=(), tokens=0)


@dataclass
class Recording(FakeLearner):
    """Records its versions as the learner does; the reward is gone while it is ``bad``."""

    bad: bool = False

    async def initial(self) -> Trained:
        return self._recorded(await super().initial())

    async def train(self, job: TrainJob) -> Trained:
        made = await super().train(job)
        if self.bad:
            made = msgspec.structs.replace(made, stats=msgspec.structs.replace(made.stats, reward_mean=0.01))
        return self._recorded(made)

    def _recorded(self, made: Trained) -> Trained:
        bare = msgspec.structs.replace(made, weights=checkpoints.WEIGHTS_FILE)
        record = Record(version=made.version, step=made.version, trained=bare)
        write_record(checkpoint_folder(self.folder, made.version), record)
        return made


async def until(reached: Callable[[], bool]) -> None:
    with trio.fail_after(20_000):
        while not reached():
            await trio.sleep(0.25)


async def work(person: ScriptedNode, coordinator: Coordinator, engine: str = "good") -> Signed:
    """One unit, from the lease to the acknowledgement."""
    person.version = max(0, coordinator.state()["policy_version"])
    done = person.signed_work(await person.lease(), engine)
    await person.submit(done)
    return done


async def receipt_of(person: ScriptedNode, submission_id: bytes) -> Signed:
    """The first signed receipt that the node got for a submission."""

    def found() -> list[Signed]:
        receipts = [push.receipt for push in person.received(ReceiptPush)]
        return [item for item in receipts if submission_id in item.payload]

    await until(lambda: bool(found()))
    return found()[0]


async def appeal(person: ScriptedNode, receipt: Signed) -> None:
    await person.ask(lambda n: AppealRequest(id=n, receipt=receipt, submission=None), Acknowledged)


async def keep_at_it(person: ScriptedNode, coordinator: Coordinator) -> None:
    while True:
        with trio.move_on_after(60):
            await work(person, coordinator)
        await trio.sleep(0.5)


async def posttrain(folder: Path, swarm: MemorySwarm) -> None:
    """A run with everything that can happen to one."""
    verifier, learner = Moody(delay_s=2.0), Recording(folder)
    pressure = Pressure(submissions=1, age_ms=1)
    async with coordinating(swarm, folder, verifier, learner, pressure=pressure) as coordinator:
        core: Core = coordinator.state.args[0]  # type: ignore[attr-defined]
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            await until(lambda: core.state.head >= 0)
            await _audits(core, coordinator, verifier, ann)
            await _leases(coordinator, bob)
            await _offences(core, coordinator, swarm, bob)
            await _doors(core, coordinator, swarm)
            await _collapse(core, coordinator, learner, ann, folder)
            for _ in range(2):  # in the middle of things
                await work(bob, coordinator)
            held = await bob.lease()
            assert held.lease_id in core.state.leases


async def _audits(core: Core, coordinator: Coordinator, verifier: Moody, ann: ScriptedNode) -> None:
    """Proven work is spared, a failed audit takes it back, an appeal gives it again; another is upheld."""
    key = ann.identity.public_key
    while not core.state.nodes[key].audit.unaudited:
        with trio.move_on_after(20):
            await work(ann, coordinator)
    verifier.wrong = True
    while not core.state.clawed_back:
        with trio.move_on_after(20):
            await work(ann, coordinator)
    cause = next(item for item in core.state.submissions.values() if item.voided).submission_id
    verifier.wrong = False
    await until(lambda: not core.state.waiting)
    await appeal(ann, await receipt_of(ann, cause))
    await until(lambda: not core.state.appeals and not core.state.clawed_back)
    bad = await work(ann, coordinator, "bad")
    receipt = await receipt_of(ann, content_id(bad))
    await trio.sleep(700)
    await appeal(ann, receipt)
    await until(lambda: not core.state.appeals)
    for _ in range(12):  # flat ones are left out of a batch
        await work(ann, coordinator, "good-flat")
    await until(lambda: not core.state.waiting)


async def _leases(coordinator: Coordinator, bob: ScriptedNode) -> None:
    """One given back, one that runs out of time and then of patience."""
    bob.version = max(0, coordinator.state()["policy_version"])
    given = await bob.lease()
    await bob.ask(lambda n: LeaseReturn(id=n, lease_id=given.lease_id, reason="leaving"), Acknowledged)
    bob.version = max(0, coordinator.state()["policy_version"])
    await bob.lease()
    await trio.sleep(300)


async def _offences(core: Core, coordinator: Coordinator, swarm: MemorySwarm, bob: ScriptedNode) -> None:
    """A forger is banned by rule, a flooder by hand, and let in again."""
    async with node(swarm, coordinator, b"e") as eve:
        for _ in range(5):
            eve.version = max(0, coordinator.state()["policy_version"])
            stranger = sign(eve.work(await eve.lease()), Identity.from_private_bytes(b"f" * 32))
            try:
                await eve.submit(stranger)
            except RefusedError:
                await trio.sleep(200)
    await work(bob, coordinator)
    await until(lambda: not core.state.waiting)
    name = bob.identity.public_key.hex()
    await ban(core, {"node": name, "reason": "floods others", "seconds": 3600})
    await unban(core, {"node": name, "reason": "a mistake"})


async def _doors(core: Core, coordinator: Coordinator, swarm: MemorySwarm) -> None:
    """The run takes not everybody any more."""
    await set_mode(core, {"mode": "invite", "keep_proven": True, "reason": "a closed group"})
    made = await make_invite(core, {"uses": 2, "seconds": 10**6, "note": "the lab"})
    gone = await make_invite(core, {"uses": 1, "seconds": 10**6, "note": "nobody"})
    await revoke_invite(core, {"id": gone["id"]})
    identity = Identity.from_private_bytes(b"g" * 32)
    async with swarm.network(identity.peer_id) as network:
        async with attached(network, coordinator, identity, join=False) as gus:
            key, signed = identity.public_key, read_invite(made["invite"])[1]
            await gus.ask(lambda n: InviteRequest(id=n, public_key=key, invite=signed), Acknowledged)
            await gus.join(name="gus")
            await work(gus, coordinator)
    for seed in (b"h", b"k"):
        peer_id = Identity.from_private_bytes(seed * 32).peer_id
        await allow(core, {"nodes": [peer_id], "note": "a friend"})
    await disallow(core, {"nodes": [peer_id]})
    await amend(core, {"changes": {"grpo.learning_rate": "5e-07"}, "reason": "a slower walk"})


async def _collapse(
    core: Core, coordinator: Coordinator, learner: Recording, ann: ScriptedNode, folder: Path
) -> None:
    """The reward collapses, a guard pauses the run, and it goes back."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_at_it, ann, coordinator)
        start = core.state.head
        await until(lambda: core.state.head >= start + 4)
        learner.bad = True
        await until(lambda: core.state.operations.paused is not None)
        nursery.cancel_scope.cancel()
    learner.bad = False
    await until(lambda: core.state.batch is None and core.state.unpublished is None)
    back = checkpoints.complete_versions(folder)[-2]
    await roll_back(core, folder, {"version": back, "reason": "the reward collapsed"})
    await until(lambda: core.state.operations.rollback is None and core.state.unpublished is None)
    await resume(core, {})
    await pause(core, {"reason": "maintenance"})
    await resume(core, {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_at_it, ann, coordinator)
        start = core.state.head
        await until(lambda: core.state.head >= start + 1)
        nursery.cancel_scope.cancel()
    await until(lambda: core.state.batch is None and core.state.unpublished is None)


async def pretrain(folder: Path, swarm: MemorySwarm, scratch: Path) -> None:
    """Two blocks and a round; a lie, an appeal, files that are not to be had; then the whole model."""
    async with running(swarm, folder) as coordinator:
        core: Core = coordinator.state.args[0]  # type: ignore[attr-defined]
        async with (
            volunteer(swarm, coordinator, scratch, b"A") as ann,
            volunteer(swarm, coordinator, scratch, b"B", serves=False) as bob,
        ):
            await until(lambda: core.state.head >= 0)
            await bob.one()  # nobody can have its files
            ann.make = lambda setup, lease: lie_unit(setup, lease, "nothing done")
            await ann.one()
            await ann.verdict()
            await ann.scripted.ask(appealing(ann), Acknowledged)
            await until(lambda: not core.state.appeals)
            ann.make = train_unit
            while core.state.head < 1:
                with trio.move_on_after(30):
                    await ann.one()
            await until(lambda: "BlockOverdue" in _kinds(folder))
            held = await ann.lease()
            assert held is not None


def _kinds(folder: Path) -> set[str]:
    with closing(Journal(folder / "state.sqlite", reading=True)) as journal:
        return {type(event).__name__ for event in journal.events()}


def said(folder: Path) -> dict[str, Any]:
    """What this release says of a run that it kept, from the journal alone."""
    spec, _, run_id = read_spec(folder)
    log = MerkleLog()
    with closing(Journal(folder / "state.sqlite", reading=True)) as journal:
        state: State = fold(journal.events(), spec.rollout.max_lag)
        for entry in entries_of(journal.events(), spec.rollout.max_lag):
            log.append(encode_entry(entry))
        events = journal.length
    published = (folder / "log" / CHECKPOINT).read_text().splitlines()
    return {
        "run_id": run_id.hex(),
        "events": events,
        "kinds": sorted(_kinds(folder)),
        "ledger": {"size": len(log), "root": log.root().hex()},
        "published": {"size": int(published[1]), "root": published[2]},
        "head": state.head,
        "accepted": state.accepted,
        "rejected": state.rejected,
        "rejections": state.rejections,
        "credit": {key.hex(): item.credit for key, item in state.nodes.items()},
        "banned_until": {key.hex(): item.banned_until for key, item in state.nodes.items()},
        "amendments": len(state.operations.amendments),
        "allowed": sorted(key.hex() for key in state.operations.allowed),
        "blocks": {key.hex(): item.status for key, item in state.blocks.work.items()},
    }


def _known() -> set[str]:
    return {kind.__name__ for kind in get_args(Event)}


async def _main(scratch: Path) -> None:
    shards.INLINE_BYTES = 2**40  # type: ignore[misc]  # a clock that jumps does not wait for threads
    folder = make_run(scratch, "posttrain", versions=60, max_lag=4)
    await posttrain(folder, MemorySwarm(latency_s=0.01))
    block = make_pretrain_run(scratch / "blocks", rounds=2, contributors=1, round_s=600.0)
    await pretrain(block, MemorySwarm(latency_s=0.01), scratch)


def main(target: Path) -> None:
    """Make the archive."""
    random.seed(1)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        trio.run(_main, scratch, clock=trio.testing.MockClock(autojump_threshold=0))
        folders = {"posttrain": scratch / "posttrain", "pretrain": scratch / "blocks/run"}
        lacks = _known() - set.union(*(_kinds(folder) for folder in folders.values()))
        if lacks:
            raise SystemExit(f"no {', '.join(sorted(lacks))} happened")
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for kind, folder in folders.items():
                for path in sorted(folder.rglob("*")):
                    top = path.relative_to(folder).parts[0]
                    if path.is_file() and top not in ("lock", "web.sqlite", "state.sqlite-shm"):
                        archive.add(path, f"{kind}/{path.relative_to(folder)}")
                (folder / "said.json").write_text(json.dumps(said(folder), indent=1))
                archive.add(folder / "said.json", f"{kind}/said.json")
    size = target.stat().st_size
    print(f"{target}: {size} bytes")
    if size > MOST_BYTES:
        raise SystemExit("too large to be kept")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
