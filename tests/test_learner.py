"""The learner: what it makes of a job, what survives a crash, and that the policy really learns."""

from __future__ import annotations

import logging
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_support import make_run, next_job
from msgspec import structs
from safetensors.torch import load_file

from barnraise.coordinator import checkpoints, evaluation, learner_policy, optimizer_file
from barnraise.coordinator.batches import read_batch
from barnraise.coordinator.evaluation import HeldOut
from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.workers import BatchPart, TrainJob, WorkerSetup, checkpoint_folder
from barnraise.coordinator.workshop import LocalLearner
from barnraise.kernels.models import load_policy
from barnraise.protocol.amendments import amended
from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.messages import RolloutSubmission
from barnraise.protocol.seeds import task_seed
from barnraise.protocol.wire import decode, encode


def weights(setup: WorkerSetup, version: int, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(checkpoint_folder(Path(setup.folder), version) / name)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def change(part: BatchPart, **values: Any) -> BatchPart:
    """``part`` with fields of its first rollout replaced."""
    submission = decode(part.payload, RolloutSubmission)
    rollouts = (structs.replace(submission.rollouts[0], **values), *submission.rollouts[1:])
    return structs.replace(part, payload=encode(structs.replace(submission, rollouts=rollouts)))


# --- learning


def test_grpo_raises_the_reward_from_rollouts_alone(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50, evaluation__every=1000)
    trainer = Trainer(setup)
    rewards = []
    for version in range(1, 41):
        stats = trainer.train(next_job(setup, version, units=4)).stats
        assert stats is not None
        rewards.append(stats.reward_mean)
    before, after = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert before < 0.3
    assert after > 0.55


def test_learning_from_stale_rollouts_is_corrected_and_counted(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50, evaluation__every=1000)
    trainer = Trainer(setup)
    for version in range(1, 4):
        stats = trainer.train(next_job(setup, version, lag=1)).stats
        assert stats is not None
        assert stats.lag_mean == (0.0 if version == 1 else 1.0)
        assert stats.kl > 0.0
        assert stats.ratio_max > 1.0


# --- one job


def test_a_fresh_rollouts_first_step_is_on_policy(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50, grpo__inner_epochs=1)
    stats = Trainer(setup).train(next_job(setup, 1)).stats
    assert stats is not None
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert stats.kl == pytest.approx(0.0, abs=1e-6)
    assert stats.clip_fraction == 0.0
    assert stats.groups == 8
    assert 0 < stats.groups_used <= 8
    assert stats.entropy > 0.0
    assert stats.seconds > 0.0


def test_training_is_deterministic(tmp_path: Path) -> None:
    results = []
    for name in ("one", "two"):
        setup = make_run(tmp_path / name, warm_up=50, grpo__minibatches=3)
        trainer = Trainer(setup)
        for version in (1, 2):
            trainer.train(next_job(setup, version))
        results.append([weights(setup, 2), weights(setup, 2, "optimizer.safetensors")])
    assert all(same(one, two) for one, two in zip(*results, strict=True))


def test_micro_batches_give_the_same_step_as_one_pass(tmp_path: Path) -> None:
    made = []
    for name, size in (("whole", 2**31), ("cut", 1)):  # one byte: every row alone
        setup = make_run(tmp_path / name, warm_up=50, grpo__loss_aggregation="sequence")
        Trainer(setup, micro_batch_bytes=size).train(next_job(setup, 1))
        made.append(weights(setup, 1))
    for key, value in made[0].items():
        torch.testing.assert_close(value, made[1][key], rtol=1e-3, atol=2e-5)


def test_groups_of_equal_rewards_are_left_out(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50)
    job = next_job(setup, 1, units=1)
    flat = structs.replace(job.parts[0], rewards=(1.0,) * len(job.parts[0].rewards))
    trained = Trainer(setup).train(TrainJob(version=1, parts=(flat,)))
    assert trained.stats is not None
    assert (trained.stats.groups, trained.stats.groups_used, trained.stats.reward_mean) == (4, 0, 1.0)
    assert same(weights(setup, 0), weights(setup, 1))


def test_advantages_follow_the_rewards_and_prompts_the_seeds(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50)
    job = next_job(setup, 1, units=1)
    size = setup.spec.rollout.group_size
    rewards = (1.0,) + (0.0,) * (size - 1) + (0.5,) * (3 * size)
    environment = build_environment(setup.spec.environment)
    job = TrainJob(version=1, parts=(structs.replace(job.parts[0], rewards=rewards),))
    batch = read_batch(job, environment, lambda text: [ord(letter) for letter in text], normalise_std=False)
    assert (batch.groups, batch.groups_used) == (4, 1)
    assert [row.advantage for row in batch.rows] == [1 - 1 / size] + [-1 / size] * (size - 1)
    lease = job.parts[0].lease
    task = environment.task(task_seed(lease.run_id, lease.lease_id, lease.node, 0), held_out=False)
    assert {"".join(map(chr, row.prompt)) for row in batch.rows} == {task.prompt}


def test_an_unreadable_part_is_left_out_and_the_version_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = make_run(tmp_path, warm_up=50)
    job = next_job(setup, 1, units=2)
    bad = [
        structs.replace(job.parts[0], payload=job.parts[0].payload[:-1]),
        structs.replace(job.parts[0], rewards=(1.0,)),
        change(job.parts[0], logprobs=b""),
        change(job.parts[0], sample=1),
    ]
    with caplog.at_level(logging.WARNING):
        stats = Trainer(setup).train(TrainJob(version=1, parts=(*bad, job.parts[1]))).stats
    assert stats is not None
    assert stats.groups == 4
    assert sum("left out" in record.message for record in caplog.records) == 4


def test_a_step_that_is_not_finite_is_skipped_and_reported(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50)
    job = next_job(setup, 1, units=1)
    part = structs.replace(job.parts[0], rewards=(1.0, 0.0) * (len(job.parts[0].rewards) // 2))
    tokens = decode(part.payload, RolloutSubmission).rollouts[0].tokens
    poisoned = change(part, logprobs=array("f", [float("nan")] * (len(tokens) // 4)).tobytes())
    stats = Trainer(setup).train(TrainJob(version=1, parts=(poisoned,))).stats
    assert stats is not None
    assert stats.skipped_steps == setup.spec.grpo.inner_epochs
    assert (stats.loss, stats.grad_norm, stats.kl) == (0.0, 0.0, 0.0)
    assert same(weights(setup, 0), weights(setup, 1))
    # The next version is trained as if nothing had happened.
    assert Trainer(setup).train(next_job(setup, 2)).version == 2


def test_the_learning_rate_warms_up_over_optimiser_steps(tmp_path: Path) -> None:
    moved = []
    for name, steps in (("cold", 0), ("warm", 1000)):
        setup = make_run(tmp_path / name, warm_up=50, grpo__warmup_steps=steps, grpo__inner_epochs=1)
        Trainer(setup).train(next_job(setup, 1))
        old, new = weights(setup, 0), weights(setup, 1)
        moved.append(max(float((new[key] - old[key]).abs().max()) for key in new))
    assert moved[0] == pytest.approx(1e-3, rel=0.01)  # Adam's first step is the rate itself
    assert moved[1] == pytest.approx(1e-6, rel=0.2)


def test_amended_settings_hold_from_the_next_version_on_and_moments_stay(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50)
    trainer = Trainer(setup)
    trainer.train(next_job(setup, 1))
    moments = weights(setup, 1, "optimizer.safetensors")
    slower = amended(setup.spec, {"grpo.learning_rate": "1e-12", "grpo.weight_decay": "0.0"})
    trainer.train(structs.replace(next_job(setup, 2), settings=slower))
    before, after = weights(setup, 1), weights(setup, 2)
    assert max(float((before[key] - after[key]).abs().max()) for key in before) < 1e-8
    assert not same(moments, weights(setup, 2, "optimizer.safetensors"))  # they went on from where they were


def test_a_kl_penalty_holds_the_policy_near_version_zero(tmp_path: Path) -> None:
    far = []
    for name, coefficient in (("free", 0.0), ("held", 5.0)):
        setup = make_run(tmp_path / name, warm_up=50, grpo__kl_coefficient=coefficient, grpo__inner_epochs=8)
        trainer = Trainer(setup)
        job = next_job(setup, 1, units=2)
        trainer.train(job)
        old, new = weights(setup, 0), weights(setup, 1)
        stats = trainer.train(TrainJob(version=2, parts=job.parts)).stats
        assert stats is not None
        far.append(stats.kl)
        assert not same(old, new)
    assert far[1] < far[0]


# --- evaluation


def test_version_zero_is_evaluated_once_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_run(tmp_path, warm_up=50)
    first = Trainer(setup).initial()
    assert (first.version, first.stats) == (0, None)
    assert 0.0 <= first.accuracy <= 1.0
    monkeypatch.setattr(HeldOut, "accuracy", lambda *_: pytest.fail("evaluated again"))
    assert Trainer(setup).initial() == first


def test_a_perfect_policy_has_accuracy_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_run(tmp_path)
    code = {symbol: i for i, symbol in enumerate(["<eos>", "r", "=", *"abcd"])}
    prompts: list[Any] = []

    def perfect(
        policy: Any, asked: list[list[int]], limit: int, eos: frozenset[int], **_: Any
    ) -> list[list[int]]:
        assert limit == 4
        assert eos == {code["<eos>"]}
        prompts.extend(asked)
        return [[*prompt[3:0:-1], *eos] for prompt in asked]

    monkeypatch.setattr(evaluation, "greedy", perfect)
    assert Trainer(setup).initial().accuracy == 1.0
    assert len(prompts) == setup.spec.evaluation.tasks


def test_versions_are_evaluated_when_due_and_at_the_end(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50, evaluation__every=2, rollout__versions=3)
    trainer = Trainer(setup)
    accuracies = [trainer.train(next_job(setup, version)).accuracy for version in (1, 2, 3)]
    assert accuracies[0] == -1.0
    assert accuracies[1] >= 0.0
    assert accuracies[2] >= 0.0


# --- checkpoints and crashes


def test_a_version_that_exists_is_reported_and_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_run(tmp_path, warm_up=50)
    job = next_job(setup, 1)
    first = Trainer(setup).train(job)
    monkeypatch.setattr(Trainer, "_improve", lambda *_: pytest.fail("trained again"))
    assert Trainer(setup).train(job) == first
    assert Path(first.weights).is_file()


def test_a_restart_between_versions_changes_nothing(tmp_path: Path) -> None:
    made = []
    for name, restarts in (("through", False), ("restarted", True)):
        setup = make_run(tmp_path / name, warm_up=50, model__weights_dtype="bfloat16")
        trainer = Trainer(setup)
        for version in (1, 2, 3):
            trainer.train(next_job(setup, version))
            if restarts:
                trainer = Trainer(setup)
        made.append([weights(setup, 3, name) for name in ("master.safetensors", "optimizer.safetensors")])
    assert all(same(one, two) for one, two in zip(*made, strict=True))


def test_published_weights_have_the_runs_dtype_and_the_master_stays_float32(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50, model__weights_dtype="bfloat16")
    Trainer(setup).train(next_job(setup, 1))
    published, master = weights(setup, 1), weights(setup, 1, "master.safetensors")
    assert {value.dtype for value in published.values()} == {torch.bfloat16}
    assert {value.dtype for value in master.values()} == {torch.float32}
    assert all(torch.equal(master[key].bfloat16(), value) for key, value in published.items())


def test_a_bfloat16_run_computes_in_bfloat16_and_still_trains(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50, model__compute_dtype="bfloat16")
    stats = Trainer(setup).train(next_job(setup, 1)).stats
    assert stats is not None
    assert stats.skipped_steps == 0
    assert not same(weights(setup, 0), weights(setup, 1))


def test_a_checkpoint_is_a_model_folder_of_its_own(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50)
    trained = Trainer(setup).train(next_job(setup, 1))
    folder = checkpoint_folder(tmp_path, 1)
    assert trained.weights == str(folder / "model.safetensors")
    assert load_policy(folder).vocabulary == setup.spec.model.vocabulary
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "optimizer.safetensors",
        "state.json",
    } <= names
    assert not [name for name in names if name.startswith(".")]


def crash_points() -> list[str]:
    return ["save_weights", "save_tensors", "write_record", "rename"]


@pytest.mark.parametrize("where", crash_points())
def test_a_kill_anywhere_in_saving_leaves_the_previous_version_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    setup = make_run(tmp_path / "run", warm_up=50)
    undisturbed = make_run(tmp_path / "undisturbed", warm_up=50)
    for each in (setup, undisturbed):
        Trainer(each).train(next_job(each, 1))
    Trainer(undisturbed).train(next_job(undisturbed, 2))
    job = next_job(setup, 2)
    owners: dict[str, Any] = {
        "save_weights": learner_policy,
        "save_tensors": optimizer_file,
        "write_record": checkpoints,
        "rename": checkpoints.os,
    }
    with monkeypatch.context() as patch:
        patch.setattr(owners[where], where, kill)
        with pytest.raises(Killed):
            Trainer(setup).train(job)
    assert checkpoints.complete_versions(Path(setup.folder)) == [1]
    assert list((tmp_path / "run" / "checkpoints").glob(".saving-*"))
    Trainer(setup).train(job)
    assert not list((tmp_path / "run" / "checkpoints").glob(".saving-*"))
    assert same(weights(setup, 2), weights(undisturbed, 2))


def test_a_full_disk_is_an_error_that_says_where_and_costs_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_run(tmp_path, warm_up=50)
    trainer = Trainer(setup)
    trainer.train(next_job(setup, 1))
    job = next_job(setup, 2)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "sync_folder", full)
        with pytest.raises(StorageError, match="No space left"):
            trainer.train(job)
    assert not list((tmp_path / "checkpoints").glob(".saving-*"))
    assert trainer.train(job).version == 2  # memory was ahead of the disk and is read again


def test_a_folder_without_a_record_is_no_version(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50)
    Trainer(setup).train(next_job(setup, 1))
    shutil.copytree(checkpoint_folder(tmp_path, 1), checkpoint_folder(tmp_path, 2))
    (checkpoint_folder(tmp_path, 2) / "state.json").unlink()
    assert Trainer(setup).train(next_job(setup, 2)).version == 2
    assert checkpoints.complete_versions(tmp_path) == [1, 2]


def test_damage_is_named_with_its_cure(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50)
    job = next_job(setup, 1)
    Trainer(setup).train(job)
    (checkpoint_folder(tmp_path, 1) / "optimizer.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(RunFolderError, match=r"optimizer\.safetensors is damaged"):
        Trainer(setup).train(TrainJob(version=2, parts=job.parts))
    (checkpoint_folder(tmp_path, 1) / "state.json").write_text("{}")
    with pytest.raises(RunFolderError, match="remove the folder v000001"):
        Trainer(setup).train(job)
    with pytest.raises(RunFolderError, match="missing or incomplete"):
        Trainer(setup).train(TrainJob(version=9, parts=job.parts))
    (checkpoint_folder(tmp_path, 0) / "model.safetensors").unlink()
    with pytest.raises(RunFolderError, match="run init"):
        Trainer(setup).initial()


async def test_the_local_learner_satisfies_the_seam(tmp_path: Path) -> None:
    setup = make_run(tmp_path, warm_up=50)
    local = LocalLearner(setup)
    assert (await local.initial()).version == 0
    assert (await local.train(next_job(setup, 1))).version == 1
    await local.close()
