"""A pretraining run over the in-memory network: scaffold, rounds, recombination, and who is paid for what."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
import trio.testing
from block_stage_support import Unit, entry_of, lease_for, lie_unit, make_pretrain_run, setup_of, train_unit
from coordinator_support import Coordinator, ScriptedNode, attached, coordinating
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from barnraise.coordinator import block_belt, publisher
from barnraise.coordinator.block_files import DESCRIPTION, SHARDS, fetch_unit, serve_corpus, state_name
from barnraise.coordinator.block_shapes import check_files, delta_range, read_shape, state_range
from barnraise.coordinator.block_stage import BlockStages
from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob, corpus_folder
from barnraise.coordinator.core import in_place
from barnraise.coordinator.corpus_files import DESCRIPTION as WRITTEN_DESCRIPTION
from barnraise.coordinator.corpus_files import SHARDS as WRITTEN_SHARDS
from barnraise.coordinator.corpus_files import open_corpus
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.learner_child import ChildLearner
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.state import State, fold
from barnraise.coordinator.verifier import LocalVerifier
from barnraise.coordinator.verifier_child import ChildVerifier
from barnraise.coordinator.verifier_pool import VerifierPool
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.coordinator.workshop import LocalLearner
from barnraise.protocol import shards
from barnraise.protocol.corpus import corpus_digest, read_corpus
from barnraise.protocol.envelope import open_signed, sign
from barnraise.protocol.errors import ChildError, RefusedError, RunFolderError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import credit_for_block
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.protocol.manifest import check_manifest
from barnraise.protocol.memory_network import MemoryNetwork, MemorySwarm
from barnraise.protocol.messages import (
    MAX_SHARD,
    SHARD_PROTOCOL,
    Acknowledged,
    AppealRequest,
    FileEntry,
    LeaseReturn,
    Receipt,
    ReceiptPush,
)
from barnraise.protocol.pretrain import BlockLease, BlockSubmission, part_name
from barnraise.protocol.shards import ShardClient, serve_shards
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


# --- the whole way


class SlowLearner(LocalLearner):
    """Takes its time, in virtual time, so that a version is seen before the next is made."""

    async def train(self, job: Any) -> Any:
        await trio.sleep(5)
        return await super().train(job)


def _over(coordinator: Coordinator, head: int) -> bool:
    return coordinator.state()["complete"] or coordinator.state()["policy_version"] > head


async def whole_run(tmp_path: Path, stops: int, **pretrain: Any) -> tuple[Path, list[str]]:
    """A run to its end with two volunteers; ``stops``: how many versions get a coordinator of their own."""
    folder = make_pretrain_run(tmp_path, **pretrain)
    swarm = MemorySwarm(latency_s=0.01)
    stages: list[str] = []
    complete = False
    turn = 0
    while not complete:
        learner = SlowLearner(setup_of(folder))
        async with running(swarm, folder, seed=turn, learner=learner) as coordinator:
            head = coordinator.state()["policy_version"]
            stages.append(coordinator.state()["stage"])
            async with (
                volunteer(swarm, coordinator, tmp_path, b"A") as ann,
                volunteer(swarm, coordinator, tmp_path, b"B") as bob,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(work, ann)
                nursery.start_soon(work, bob)
                await until(partial(_over, coordinator, head if turn < stops else 10**6))
                complete = coordinator.state()["complete"]
                nursery.cancel_scope.cancel()
        turn += 1
    return folder, stages


async def test_a_run_goes_from_scaffold_to_model_and_a_restart_at_every_stage_changes_nothing(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    straight, _ = await whole_run(tmp_path / "a", 0, contributors=2, quorum=2)
    broken, stages = await whole_run(tmp_path / "b", 9, contributors=2, quorum=2)
    assert stages == ["scaffold", "blocks round 1 of 2", "blocks round 2 of 2", "recombining"]
    models = [load_file(checkpoint_folder(folder, 3) / "model.safetensors") for folder in (straight, broken)]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    for folder in (straight, broken):
        assert not list((folder / "units").iterdir())
        run = setup_of(folder)
        target = tmp_path / "ledger.bin"
        journal = Journal(folder / "state.sqlite")
        identity = Identity.from_private_bytes(b"o" * 32)
        export_ledger(journal, read_spec(folder)[1], run.spec.rollout.max_lag, identity, 9_000_000, target)
        manifests = [journal.manifest(version) for version in range(4)]
        journal.close()
        report = verify_ledger_file(target)
        assert report.ok, report.problems
        assert report.accepted == 8
        assert all(credit > 0 for credit in report.balances.values())
        opened = [check_manifest(signed, run.spec, run.run_id) for signed in manifests if signed]
        assert [len(manifest.files) for manifest in opened] == [5, 5, 5, 3]
        first, last = opened[0], opened[2]
        scaffold = next(entry for entry in first.files if entry.path.startswith("model-00001"))
        assert scaffold in last.files  # the same shards
        assert not any(manifest.patches for manifest in opened)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_folder(straight, 3))
    assert model.config.num_hidden_layers == 4
    lines = [msgspec.json.decode(line) for line in (straight / "pretrain.jsonl").read_bytes().splitlines()]
    assert [line["stage"] for line in lines] == ["scaffold", "round", "round", "adaptation"]


async def test_the_corpus_is_served_by_its_digest(tmp_path: Path, autojump_clock: Clock) -> None:
    assert (DESCRIPTION, SHARDS) == (WRITTEN_DESCRIPTION, WRITTEN_SHARDS)
    async with stage(tmp_path) as (coordinator, (ann,)):
        corpus = open_corpus(corpus_folder(coordinator.run.path))
        digest = corpus_digest(corpus)
        client = ShardClient(ann.network, coordinator.run.identity.peer_id)
        size = (corpus_folder(coordinator.run.path) / DESCRIPTION).stat().st_size
        data = await client.fetch(digest, size)
        assert data is not None
        assert read_corpus(data) == corpus
        assert await client.fetch(corpus.train[0], 2 * corpus.shard_tokens) is not None
        await client.close()
        with pytest.raises(RunFolderError, match="not the corpus"):
            serve_corpus(coordinator.run.path, bytes(32), ann.store)


async def test_the_state_tree_says_how_far_the_block_stage_is(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path, 2, {"contributors": 2, "quorum": 2}) as (coordinator, (ann, bob)):
        lease = await ann.lease()
        other = await bob.lease()
        assert {lease.block, other.block} == {0, 1}
        shown = coordinator.state()
        assert shown["stage"] == "blocks round 1 of 1"
        assert [item["leased"] for item in shown["pretrain"]["blocks"]] == [1, 1]
        assert shown["pretrain"]["measured"][0]["perplexity"] > 1
        await ann.submit(ann.train(lease))
        assert (await ann.verdict()).accepted
        blocks = coordinator.state()["pretrain"]["blocks"]
        assert [item["accepted"] for item in blocks] == [int(lease.block == 0), int(lease.block == 1)]
        assert coordinator.state()["reason"].startswith(f"block {other.block} has 0 of 2 units")


# --- messages


async def test_a_unit_is_paid_once_however_often_it_is_sent(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (coordinator, (ann,)):
        lease = await ann.lease()
        assert (await ann.lease()) == lease  # the same process asks again
        submission = ann.train(lease)
        assert not (await ann.submit(submission)).duplicate
        assert (await ann.submit(submission)).duplicate
        verdict = await ann.verdict()
        assert verdict.accepted
        assert verdict.position.startswith("segment ")
        judged = events_of(coordinator.run.path, "BlockJudged")
        assert len(judged) == 1
        assert judged[0].credit == ann.receipts()[0].credit >= credit_for_block(1000, judged[0].tokens)
        assert (await ann.submit(submission)).duplicate
        changed = msgspec.structs.replace(submission, train_ms=6)
        with pytest.raises(RefusedError) as refused:
            await ann.submit(changed)
        assert refused.value.code == "used-lease"


async def test_a_block_lease_can_be_given_back(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path, 2, {"blocks": 1, "scaffold_layers": 2}) as (_, (ann, bob)):
        lease = await ann.lease()

        def giving(number: int) -> LeaseReturn:
            return LeaseReturn(id=number, lease_id=lease.lease_id, reason="leaving")

        with pytest.raises(RefusedError) as refused:
            await bob.scripted.ask(giving, Acknowledged)
        assert refused.value.code == "not-your-lease"
        assert not (await ann.scripted.ask(giving, Acknowledged)).duplicate
        assert (await ann.scripted.ask(giving, Acknowledged)).duplicate
        assert (await bob.lease()).slot == lease.slot
        with pytest.raises(RefusedError) as refused:
            await ann.submit(ann.train(lease))
        assert refused.value.code == "returned-lease"


def _entry(size: int, shards: int | None = None) -> FileEntry:
    count = -(-size // MAX_SHARD) if shards is None else shards
    digests = tuple(sha256(bytes([number])).digest() for number in range(count))
    return FileEntry(path="x", size=size, sha256=bytes(32), shards=digests)


@pytest.mark.parametrize(
    "case", ["few states", "huge", "tiny", "shards", "delta", "losses", "no loss", "odd loss"]
)
async def test_files_that_cannot_be_a_blocks_are_refused_before_anything_is_fetched(
    tmp_path: Path, autojump_clock: Clock, case: str
) -> None:
    async with stage(tmp_path) as (coordinator, (ann,)):
        lease = await ann.lease()
        good = ann.train(lease)
        changes: dict[str, dict[str, Any]] = {
            "few states": {"states": good.states[:2]},
            "huge": {"states": (*good.states[:2], _entry(100 * MAX_SHARD))},
            "tiny": {"states": (*good.states[:2], _entry(100))},
            "shards": {"states": (*good.states[:2], _entry(good.states[2].size, 2))},
            "delta": {"delta": good.states[0]},
            "losses": {"losses": good.losses[:1]},
            "no loss": {"losses": (*good.losses[:2], -1.0)},
            "odd loss": {"losses": (*good.losses[:2], 1e300)},
        }
        with pytest.raises(RefusedError) as refused:
            await ann.submit(msgspec.structs.replace(good, **changes[case]))
        assert refused.value.code == "wrong-shape"
        assert not coordinator.state()["queue"]
        assert not (coordinator.run.path / "units").exists()
        await ann.submit(good)  # the lease is still good
        assert (await ann.verdict()).accepted


async def test_a_forged_signature_is_an_offence_and_another_kind_of_work_is_none(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (coordinator, (ann,)):
        lease = await ann.lease()
        signed = sign(ann.train(lease), ann.scripted.identity)
        with pytest.raises(RefusedError) as refused:
            await ann.scripted.submit(msgspec.structs.replace(signed, signature=bytes(64)))
        assert refused.value.code == "bad-signature"
        assert len(events_of(coordinator.run.path, "OffenceNoted")) == 1
        assert not (await ann.scripted.submit(signed)).duplicate


# --- lies over the network


@pytest.mark.parametrize(
    ("lie", "check"),
    [
        ("nothing done", "block-replay"),
        ("scaled difference", "block-delta"),
        ("backdoor in the states", "block-bound"),
        ("not a number", "block-format"),
    ],
)
async def test_a_liar_is_rejected_paid_nothing_and_its_place_is_open_again(
    tmp_path: Path, autojump_clock: Clock, lie: str, check: str
) -> None:
    async with stage(tmp_path, 2, {"blocks": 1, "scaffold_layers": 2}) as (coordinator, (ann, bob)):
        ann.make = lambda setup, lease: lie_unit(setup, lease, lie)
        lease = await ann.one()
        verdict = await ann.verdict()
        assert (verdict.accepted, verdict.check) == (False, check)
        assert ann.receipts()[0].credit == 0
        shown = next(node for node in coordinator.state()["nodes"] if node["rejected"])
        assert shown["strikes"] == 1
        assert not (coordinator.run.path / "units" / ann.receipts()[0].submission_id.hex()).exists()
        again = await bob.one()
        assert again.slot == lease.slot
        assert (await bob.verdict()).accepted


async def test_whoever_does_not_serve_its_files_is_rejected_after_the_deadline(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path, 2) as (coordinator, (ann, bob)):
        ann.serves = False
        lease = await ann.one()
        await bob.one()
        assert (await bob.verdict()).accepted  # nobody waits for the one who withholds
        before = trio.current_time()
        verdict = await ann.verdict()
        assert (verdict.accepted, verdict.check) == (False, "block-withheld")
        assert verdict.value == 0 < verdict.threshold
        waited = (lease.deadline_at - lease.issued_at) / 1000
        assert trio.current_time() - before > waited
        assert coordinator.state()["rejections"] == {"block-withheld": 1}


async def test_a_node_that_goes_offline_and_returns_before_the_deadline_is_paid(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm = MemorySwarm(latency_s=0.01)
    async with running(swarm, folder) as coordinator:
        await until(lambda: coordinator.state()["policy_version"] == 0)
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            ann.serves = False
            lease = await ann.one()
        await trio.sleep(60)
        assert coordinator.state()["queue"] == 1
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            ann.train(lease)  # the same bits again, served now
            assert (await ann.verdict()).accepted


async def test_a_restart_while_files_are_missing_goes_on_from_the_journal(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm = MemorySwarm(latency_s=0.01)
    async with running(swarm, folder) as coordinator:
        await until(lambda: coordinator.state()["policy_version"] == 0)
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            ann.serves = False
            lease = await ann.one()
    await trio.sleep(10_000)  # far beyond the deadline: our own absence is nobody's fault
    async with running(swarm, folder, seed=1) as coordinator:
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            await trio.sleep(30)
            ann.train(lease)
            assert (await ann.verdict()).accepted


async def test_a_file_with_another_hash_than_was_signed_is_refused(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, (ann,)):
        lease = await ann.lease()
        work = ann.train(lease)
        wrong = msgspec.structs.replace(work, delta=msgspec.structs.replace(work.delta, sha256=bytes(32)))
        await ann.submit(wrong)
        verdict = await ann.verdict()
        assert verdict.check == "block-files"
        assert "delta" in verdict.position


class Corrupt:
    """Serves bytes that are not what was asked for."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store

    def size(self, digest: bytes) -> int | None:
        return self.store.size(digest)

    def get(self, digest: bytes) -> bytes | None:
        data = self.store.get(digest)
        return None if data is None else data[:-1] + bytes([data[-1] ^ 1])


async def test_corrupt_shards_are_asked_for_a_few_times_and_then_refused(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, (ann,)):
        ann.network.set_handler(SHARD_PROTOCOL, serve_shards(Corrupt(ann.store)))
        await ann.one()
        assert (await ann.verdict()).check == "block-files"


# --- going away, standing, and places


class Choosy:
    """Serves some of what it has."""

    def __init__(self, store: DiskStore, shown: set[bytes]) -> None:
        self.store, self.shown = store, shown

    def size(self, digest: bytes) -> int | None:
        return self.store.size(digest) if digest in self.shown else None

    def get(self, digest: bytes) -> bytes | None:
        return self.store.get(digest) if digest in self.shown else None


def folded(folder: Path) -> State:
    journal = Journal(folder / "state.sqlite")
    try:
        return fold(journal.events(), 2)
    finally:
        journal.close()


async def test_whoever_hides_the_drawn_segments_has_failed_and_whoever_was_just_away_has_not(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    """Else a cheat would go away each time that the wrong segment is asked for, and come back unharmed."""
    async with stage(tmp_path, 2) as (coordinator, (ann, bob)):
        lease = await ann.lease()
        work = ann.train(lease)
        shown = {*work.delta.shards, *work.states[-1].shards}
        ann.network.set_handler(SHARD_PROTOCOL, serve_shards(Choosy(ann.store, shown)))
        await ann.submit(work)
        bob.serves = False
        await bob.one()
        hidden, away = await ann.verdict(), await bob.verdict()
        assert (hidden.check, away.check) == ("block-hidden", "block-withheld")
        assert hidden.value == work.delta.size + work.states[-1].size
        nodes = folded(coordinator.run.path).nodes
        assert nodes[ann.scripted.identity.public_key].offences == 1
        assert nodes[bob.scripted.identity.public_key].offences == 0


async def test_a_place_is_not_kept_for_files_that_do_not_come(tmp_path: Path, autojump_clock: Clock) -> None:
    """A submission costs a liar nothing: it must not stop a round for longer than a lease can."""
    async with stage(tmp_path, 2, {"blocks": 1, "scaffold_layers": 2}) as (_, (ann, bob)):
        ann.serves = False
        lease = await ann.one()
        again = await bob.one()
        assert again.slot == lease.slot
        assert lease.timeout_at <= again.issued_at < lease.deadline_at
        assert (await bob.verdict()).accepted


# --- rounds


async def test_a_quorum_is_enough_when_time_is_up_and_late_work_is_paid(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    pretrain = {"rounds": 2, "contributors": 2, "quorum": 1, "round_s": 30.0}
    async with stage(tmp_path, 3, pretrain) as (coordinator, (ann, bob, eve)):
        slow = await eve.lease()
        for person in (ann, bob):
            await person.one()
            assert (await person.verdict()).accepted
        filled = coordinator.state()["pretrain"]["blocks"]
        missing = [item["block"] for item in filled if not item["accepted"]]
        if missing:
            await ann.one()
        assert coordinator.state()["policy_version"] == 0
        await until(lambda: coordinator.state()["policy_version"] == 1)
        await eve.submit(eve.train(slow))
        assert (await eve.verdict()).accepted
        assert eve.receipts()[0].credit > 0
        judged = events_of(coordinator.run.path, "RoundFormed")
        assert eve.receipts()[0].submission_id not in judged[0].submissions


class BrokenVerifier(LocalVerifier):
    """Dies of everything."""

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        await trio.sleep(1)
        raise ChildError("the verifier died: out of memory")


async def test_our_own_broken_verifier_costs_a_node_nothing(
    tmp_path: Path, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm = MemorySwarm(latency_s=0.01)
    with caplog.at_level(logging.CRITICAL):
        async with running(swarm, folder, verifier=BrokenVerifier(setup_of(folder))) as coordinator:
            await until(lambda: coordinator.state()["policy_version"] == 0)
            async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
                await ann.one()
                await until(lambda: "out of memory" in coordinator.state()["reason"])
                verdict = await ann.verdict()
                assert verdict.check == "unverifiable"
                assert coordinator.state()["nodes"][0]["strikes"] == 0


async def test_units_without_room_wait_for_it(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_belt.BlockBelt, "most_bytes", 1)
    async with stage(tmp_path, 2) as (_, (ann, bob)):
        ann.serves = False
        await ann.one()
        await bob.one()
        assert (await bob.verdict()).accepted  # who does not serve makes room


async def test_half_a_file_is_gone_on_with(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "INLINE_BYTES", 2**30)  # virtual time waits for no thread
    swarm = MemorySwarm(latency_s=0.01)
    data = bytes(range(256)) * 40_000  # 2.5 shards
    path = tmp_path / "state"
    path.write_bytes(data)
    entry = entry_of(path)
    store = DiskStore(tmp_path / "store")
    store.adopt(
        path,
        [(d, n * MAX_SHARD, min(MAX_SHARD, entry.size - n * MAX_SHARD)) for n, d in enumerate(entry.shards)],
    )
    folder = tmp_path / "unit"
    folder.mkdir()
    (folder / f"{state_name(0)}.part").write_bytes(data[: MAX_SHARD + 100])
    async with swarm.network("server") as server, swarm.network("client") as client:
        server.set_handler(SHARD_PROTOCOL, serve_shards(store))
        await client.connect(server.addresses[0])
        asked = ShardClient(client, "server")
        with pytest.raises(TimeoutError):
            await fetch_unit(asked, {state_name(0): entry}, folder, in_place, 0.0)
        await fetch_unit(asked, {state_name(0): entry}, folder, in_place, 1e9)
        assert asked.received < entry.size - MAX_SHARD + 1000
        await asked.close()
    assert (folder / state_name(0)).read_bytes() == data


async def test_grpo_begins_with_the_recombined_model_and_with_no_version_before_it(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1, versions=4, then_posttrain=True)
    swarm = MemorySwarm(latency_s=0.01)
    async with running(swarm, folder) as coordinator:
        await until(lambda: coordinator.state()["policy_version"] == 0)
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann, trio.open_nursery() as nursery:
            nursery.start_soon(work, ann)
            await until(lambda: coordinator.state()["policy_version"] == 2)
            nursery.cancel_scope.cancel()
        async with volunteer(swarm, coordinator, tmp_path, b"B") as bob:
            assert coordinator.state()["stage"] == "posttrain"
            assert 0 <= coordinator.state()["accuracy"][-1][1] <= 1
            early = await bob.scripted.lease_reply(1)
            assert early.lease is None
            assert "no model yet" in early.reason
            terms = await bob.scripted.lease(2)
            assert terms.policy_version == 2
            answer = bob.train(msgspec.structs.replace(lease_for(setup_of(folder)), lease_id=terms.lease_id))
            with pytest.raises(RefusedError) as refused:  # a rollout lease is not answered by a block
                await bob.submit(answer)
            assert refused.value.code == "unknown-lease"


class Careless(LocalVerifier):
    """Rejects what it should accept, for a while: a broken device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.broken = True

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        result = await super().verify_block(job)
        if not self.broken:
            return result
        verdict = msgspec.structs.replace(result.verdict, accepted=False, check="block-replay")
        return msgspec.structs.replace(result, verdict=verdict, tokens=0)


def appealing(person: Volunteer, number: int = 0) -> Callable[[int], AppealRequest]:
    receipt = person.scripted.received(ReceiptPush)[number].receipt
    return lambda request: AppealRequest(id=request, receipt=receipt, submission=None)


async def test_a_rejected_unit_is_judged_again_on_appeal_and_everything_is_made_good(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm, verifier = MemorySwarm(latency_s=0.01), Careless(setup_of(folder))
    async with running(swarm, folder, verifier=verifier) as coordinator:
        await until(lambda: coordinator.state()["policy_version"] == 0)
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            await ann.one()
            assert (await ann.verdict()).check == "block-replay"
            assert folded(folder).nodes[ann.scripted.identity.public_key].offences == 1
            verifier.broken = False
            await ann.scripted.ask(appealing(ann), Acknowledged)
            with pytest.raises(RefusedError) as refused:
                await ann.scripted.ask(appealing(ann), Acknowledged)
            assert refused.value.code == "appealed-before"
            await until(lambda: len(ann.receipts()) == 2)
            first, second = ann.receipts()
            assert second.submission_id == first.submission_id
            assert second.verdict.accepted
            assert second.credit > 0 == first.credit
            state = folded(folder)
            node = state.nodes[ann.scripted.identity.public_key]
            assert (node.offences, node.strikes, node.accepted, node.rejected) == (0, 0, 1, 0)
            assert node.credit == second.credit
            assert state.blocks.work[first.submission_id].status == "accepted"
            assert (folder / "units" / first.submission_id.hex() / "delta.safetensors").is_file()
    target = tmp_path / "ledger.bin"
    journal = Journal(folder / "state.sqlite")
    export_ledger(journal, read_spec(folder)[1], 2, Identity.from_private_bytes(b"o" * 32), 9_000_000, target)
    journal.close()
    report = verify_ledger_file(target)
    assert report.ok, report.problems
    assert report.accepted == 1


async def test_an_appeal_of_a_lie_looks_at_the_same_segments_again(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    """A second draw would be a second chance to hide."""
    async with stage(tmp_path) as (coordinator, (ann,)):
        ann.make = lambda setup, lease: lie_unit(setup, lease, "nothing done")
        await ann.one()
        first = await ann.verdict()
        await ann.scripted.ask(appealing(ann), Acknowledged)
        await until(lambda: len(ann.receipts()) == 2)
        second = ann.receipts()[1].verdict
        assert (second.accepted, second.check, second.position) == (False, first.check, first.position)
        assert folded(coordinator.run.path).nodes[ann.scripted.identity.public_key].offences == 1
        with pytest.raises(RefusedError) as refused:
            await ann.scripted.ask(appealing(ann), Acknowledged)
        assert refused.value.code == "appealed-before"


async def test_a_banned_nodes_place_goes_to_another_at_once(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path, 2, {"blocks": 1, "scaffold_layers": 2}) as (_, (ann, bob)):
        lease = await ann.lease()
        signed = sign(ann.train(lease), ann.scripted.identity)
        for number in range(5):
            with pytest.raises(RefusedError):
                await ann.scripted.submit(msgspec.structs.replace(signed, signature=bytes([number]) * 64))
        assert "no work until" in (await ann.scripted.lease_reply(0)).reason
        with pytest.raises(RefusedError) as refused:
            await ann.scripted.submit(signed)
        assert refused.value.code == "banned"
        assert (await bob.lease()).slot == lease.slot


async def test_children_do_what_the_workers_of_this_process_do(tmp_path: Path) -> None:
    """Real processes: the scaffold with progress on its way, a unit judged, both by message."""
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    setup = setup_of(folder)
    learner, verifier = ChildLearner(setup, tmp_path / "l.log"), ChildVerifier(setup, tmp_path / "v.log")
    said: list[tuple[str, float]] = []
    learner.on_progress = lambda *what: said.append(what)
    try:
        assert (await learner.initial()).version == 0
        assert said[-1] == (said[-1][0], 1.0)
        assert said[-1][0].startswith("scaffold: step 4 of 4, loss ")
        lease = lease_for(setup)
        unit = train_unit(setup, lease)
        home = Path("units") / "aa"
        job = BlockVerifyJob(
            submission_id=bytes(32),
            lease=lease,
            submission=unit.submission(lease, folder / home),
            segments=(2,),
            states={end: str(home / state_name(end)) for end in (1, 2)},
            delta=str(home / "delta.safetensors"),
            draw=bytes(32),
        )
        result = await VerifierPool([verifier]).verify_block(job)
        assert result.verdict.accepted
        (folder / home / "delta.safetensors").unlink()
        with pytest.raises(ChildError, match="cannot be read"):
            await verifier.verify_block(job)
        assert verifier.pid is not None
    finally:
        await learner.close()
        await verifier.close()


async def test_a_version_of_blocks_lost_before_it_was_published_is_made_again_from_its_units(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm = MemorySwarm(latency_s=0.01)
    real, held = publisher.publish, [True]

    def publish(*args: Any, **named: Any) -> Any:
        if args[3] == 1 and held[0]:
            raise StorageError("the disk is busy")
        return real(*args, **named)

    monkeypatch.setattr(publisher, "publish", publish)
    async with running(swarm, folder) as coordinator:
        await until(lambda: coordinator.state()["policy_version"] == 0)
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann, trio.open_nursery() as nursery:
            nursery.start_soon(work, ann)
            await until(lambda: "busy" in coordinator.state()["reason"])
            nursery.cancel_scope.cancel()
    before = load_file(checkpoint_folder(folder, 1) / "model-00002-of-00003.safetensors")
    shutil.rmtree(checkpoint_folder(folder, 1))
    held[0] = False
    async with running(swarm, folder, seed=1) as again:
        await until(lambda: again.state()["complete"])
    after = load_file(checkpoint_folder(folder, 1) / "model-00002-of-00003.safetensors")
    assert all(torch.equal(value, after[name]) for name, value in before.items())


async def test_five_lies_are_a_ban_and_being_away_is_none(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (coordinator, (ann,)):
        ann.make = lambda setup, lease: lie_unit(setup, lease, "scaled difference")
        for number in range(5):
            await ann.one()
            await until(lambda number=number: len(ann.receipts()) > number)  # type: ignore[misc]
        banned = events_of(coordinator.run.path, "NodeBanned")
        assert [event.reason for event in banned] == ["5 submissions failed, the last by check block-delta"]
        assert "no work until" in (await ann.scripted.lease_reply(0)).reason


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_files_of_honest_work_have_the_sizes_that_are_expected(tmp_path: Path, kind: str) -> None:
    folder = make_pretrain_run(tmp_path, delta=kind)
    setup = setup_of(folder)
    BlockStages(setup).initial()
    spec = setup.spec.pretrain
    assert spec is not None
    for block in (0, 1):
        shape = read_shape(checkpoint_folder(folder, 0) / part_name(spec, block + 1))
        lease = lease_for(setup, block=block)
        honest = train_unit(setup, lease).submission(lease, tmp_path / "unit")
        check_files(spec, shape, honest)
        for least, most, size in (
            (*state_range(shape), honest.states[0].size),
            (*delta_range(shape, kind), honest.delta.size),
        ):
            assert least < size <= most < 2 * size + 10_000
    (folder / "bad").write_bytes(b"\xff" * 100)
    with pytest.raises(RunFolderError, match="no readable block"):
        read_shape(folder / "bad")
