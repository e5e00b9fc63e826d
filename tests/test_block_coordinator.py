"""A pretraining run over the in-memory network: scaffold, rounds, recombination, and what follows."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
import trio.testing
from block_stage_support import lease_for, make_pretrain_run, setup_of, train_unit
from block_swarm_support import (
    Clock,
    running,
    stage,
    until,
    volunteer,
    work,
)
from coordinator_support import Coordinator
from remote_support import worker_command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from barnraise.coordinator import checkpoints, publisher
from barnraise.coordinator.block_files import DESCRIPTION, SHARDS, serve_corpus, state_name
from barnraise.coordinator.block_workers import (
    REPORT_FILE,
    BlockVerifyJob,
    Contribution,
    RecombineJob,
    RoundJob,
    corpus_folder,
)
from barnraise.coordinator.corpus_files import DESCRIPTION as WRITTEN_DESCRIPTION
from barnraise.coordinator.corpus_files import SHARDS as WRITTEN_SHARDS
from barnraise.coordinator.corpus_files import open_corpus
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.learner_child import ChildLearner
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.remote import Elsewhere
from barnraise.coordinator.verifier_child import ChildVerifier
from barnraise.coordinator.verifier_pool import VerifierPool
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.coordinator.workshop import LocalLearner
from barnraise.protocol.corpus import corpus_digest, read_corpus
from barnraise.protocol.errors import ChildError, RefusedError, RunFolderError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.protocol.manifest import check_manifest
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.shards import ShardClient


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


@pytest.mark.parametrize("far", [False, True], ids=["here", "elsewhere"])
async def test_children_do_what_the_workers_of_this_process_do(tmp_path: Path, far: bool) -> None:
    """Real processes: the scaffold with its progress, a unit judged, a round and the recombined model."""
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    setup = setup_of(folder)
    command = worker_command(tmp_path / "cache")
    places = [Elsewhere(command, kind, setup) if far else None for kind in ("learner", "verifier")]
    learner = ChildLearner(setup, tmp_path / "l.log", at=places[0])
    verifier = ChildVerifier(setup, tmp_path / "v.log", at=places[1])
    said: list[tuple[str, float]] = []
    learner.on_progress = lambda *what: said.append(what)
    try:
        assert (await learner.initial()).version == 0
        trained = [what for what in said if what[0].startswith("scaffold: step 4 of 4, loss ")]
        assert trained[-1] == (trained[-1][0], 1.0)
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
        deltas = [Contribution(block=lease.block, slot=lease.slot, delta=job.delta)]
        deltas.append(msgspec.structs.replace(deltas[0], block=1 - lease.block))  # of the same shapes
        assert (await learner.train(RoundJob(version=1, contributions=tuple(deltas)))).version == 1
        assert (await learner.train(RecombineJob(version=2))).version == 2
        assert checkpoints.complete_versions(folder) == [0, 1, 2]
        assert (folder / REPORT_FILE).stat().st_size > 0
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
