"""The learner over several processes: the same curve, the same files, and no version lost to a crash."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import trio
from learner_support import make_run, next_job
from msgspec import structs
from safetensors.torch import load_file

from barnraise.coordinator import checkpoints, learner_step
from barnraise.coordinator.batches import Row
from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.learner_child import ChildLearner
from barnraise.coordinator.learner_step import Share, dealt, micro_batches
from barnraise.coordinator.main import verifiers_of
from barnraise.coordinator.scale import read_spread
from barnraise.coordinator.workers import LearnerScale, Trained, TrainStats, WorkerSetup, checkpoint_folder
from barnraise.protocol.errors import ChildError

WEIGHTS = {"float32": 2e-6, "bfloat16": 2e-3}
"""How far weights after four versions lie apart at most; the rate is 1e-3."""
LOSSES = {"float32": 1e-5, "bfloat16": 2e-3}


def weights(setup: WorkerSetup, version: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint_folder(Path(setup.folder), version) / "model.safetensors")


def published(setup: WorkerSetup, version: int) -> bytes:
    return (checkpoint_folder(Path(setup.folder), version) / "model.safetensors").read_bytes()


def assert_like(one: tuple[WorkerSetup, Trained], other: tuple[WorkerSetup, Trained], dtype: str) -> None:
    """The same version from two learners: losses and weights within what rounding does to them."""
    first, second = one[1].stats, other[1].stats
    assert isinstance(first, TrainStats)
    assert isinstance(second, TrainStats)
    assert first.loss == pytest.approx(second.loss, abs=LOSSES[dtype])
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=0.1 if dtype == "bfloat16" else 1e-3)
    assert (first.groups_used, first.skipped_steps) == (second.groups_used, second.skipped_steps)
    made = [weights(setup, trained.version) for setup, trained in (one, other)]
    assert made[0].keys() == made[1].keys()
    for name, value in made[0].items():
        torch.testing.assert_close(value, made[1][name], rtol=0, atol=WEIGHTS[dtype])


async def test_two_processes_learn_what_one_does_and_one_goes_on_from_their_shards(tmp_path: Path) -> None:
    alone, run = (make_run(tmp_path / name, warm_up=50, grpo__minibatches=2) for name in ("alone", "run"))
    one, two = Trainer(alone), ChildLearner(run, tmp_path / "log", LearnerScale(processes=2))
    try:
        job = next_job(alone, 1)
        assert_like((alone, one.train(job)), (run, await two.train(job)), "float32")
    finally:
        await two.close()
    job = next_job(alone, 2)
    assert_like((alone, one.train(job)), (run, Trainer(run).train(job)), "float32")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_two_processes_learn_what_one_does_through_crashes_and_changes_of_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    changes = {"model__compute_dtype": dtype, "grpo__minibatches": 2, "grpo__kl_coefficient": 0.01}
    alone = make_run(tmp_path / "alone", warm_up=50, evaluation__every=3, **changes)
    run = make_run(tmp_path / "run", warm_up=50, evaluation__every=3, **changes)
    one, two = Trainer(alone), ChildLearner(run, tmp_path / "log", LearnerScale(processes=2, recompute=True))
    try:
        # Rewards that are all equal teach nothing: the same file, to the byte.
        job = next_job(alone, 1, units=1)
        flat = structs.replace(job.parts[0], rewards=(1.0,) * len(job.parts[0].rewards))
        one.train(structs.replace(job, parts=(flat,)))
        await two.train(structs.replace(job, parts=(flat,)))
        assert published(alone, 1) == published(run, 1)
        # One process goes on where two were, and two where one was; then one of the two is killed.
        job = next_job(alone, 2)
        assert_like((alone, one.train(job)), (run, Trainer(run).train(job)), dtype)
        job = next_job(alone, 3)
        expected = one.train(job)
        with caplog.at_level(logging.WARNING):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill_the_second, two)
                made = await two.train(job)
        assert_like((alone, expected), (run, made), dtype)
        assert made.accuracy == pytest.approx(expected.accuracy, abs=0.2)
        assert "learner process 1 of 0 to 1 was ended by SIGKILL: all start again" in caplog.text
        # A refusal costs no process.
        pid = two.pid
        with pytest.raises(ChildError, match="v000008 is missing"):
            await two.train(structs.replace(job, version=9))
        assert two.pid == pid is not None
    finally:
        await two.close()
    folder = checkpoint_folder(tmp_path / "run", 3)
    assert len(list((folder / checkpoints.SHARDS_FOLDER).glob("*.safetensors"))) == 2
    assert not [path for path in folder.rglob("*") if path.suffix in (".pt", ".distcp", ".metadata")]
    job = next_job(alone, 4)
    assert_like((alone, one.train(job)), (run, Trainer(run).train(job)), dtype)


async def kill_the_second(learner: ChildLearner) -> None:
    while not (learner.pid and psutil.Process(learner.pid).children()):
        await trio.sleep(0.01)
    await trio.sleep(0.05)
    assert learner.pid is not None
    psutil.Process(learner.pid).children()[0].send_signal(signal.SIGKILL)


def test_packing_and_recomputing_give_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, packed = (make_run(tmp_path / name, warm_up=50) for name in ("plain", "packed"))
    job = next_job(plain, 1)
    expected = Trainer(plain).train(job)
    packings = []
    monkeypatch.setitem(learner_step.LEAST_WORK, "cpu", 0)
    pack = learner_step.pack
    monkeypatch.setattr(learner_step, "pack", lambda *what: packings.append(what) or pack(*what))
    made = Trainer(packed, recompute=True).train(job)
    assert packings
    assert_like((plain, expected), (packed, made), "float32")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"processes": "0"}, "a number from 1"),
        ({"processes": "many"}, "or auto"),
        ({"processes": "2", "learner_devices": "0"}, "as many devices"),
        ({"processes": "auto", "torchrun": "--nnodes=2"}, "not auto"),
        ({"torchrun": "--nnodes=2"}, "needs --learner-processes"),
        ({"verifier_devices": "1,1"}, "each once"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_spread(**options)  # type: ignore[arg-type]


def test_learner_and_verifiers_can_be_given_devices_of_their_own(tmp_path: Path) -> None:
    spread = read_spread("auto", learner_devices="0,1", verifier_devices="2, 3")
    assert (spread.learner.processes, spread.learner.devices) == (2, "0,1")
    setup = make_run(tmp_path)
    for count, expected in ((0, ["2", "3"]), (3, ["2", "3", "2"])):
        pool = verifiers_of(setup, tmp_path / "log", count, spread)
        assert [member.accelerator for member in pool.members] == expected  # type: ignore[attr-defined]


def row(prompt: int, tokens: int, first: int = 1) -> Row:
    return Row([first] * prompt, [2] * tokens, [-1.0] * tokens, 0.5)


def test_every_process_gets_as_many_micro_batches_and_every_row_goes_to_one() -> None:
    rows = [row(3, length, first) for first in range(5) for length in (1, 4, 9)]
    micro = [(part, torch.ones(sum(len(r.tokens) for r in part))) for part in micro_batches(rows, 14, True)]
    hands = [list(dealt(micro, Share(rank, 3))) for rank in range(3)]
    assert len({len(hand) for hand in hands}) == 1
    weighted = [part for hand in hands for part, weight in hand if bool(weight.any())]
    assert sorted(id(part) for part in weighted) == sorted(id(part) for part, _ in micro)


def test_a_micro_batch_holds_what_fits_and_keeps_a_prompts_rows_together() -> None:
    rows = [row(10, 4, first) for first in (1, 2) for _ in range(4)]
    packed = micro_batches(rows, 25, packs=True)
    assert [[r.prompt[0] for r in part] for part in packed] == [[1] * 4, [2] * 4]
    assert [len(part) for part in micro_batches(rows, 28, packs=False)] == [2] * 4
    assert [len(part) for part in micro_batches(rows, 1, packs=True)] == [1] * 8


@pytest.mark.long
async def test_torchrun_starts_a_learner_over_two_machines(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    run = make_run(tmp_path / "run", warm_up=50)
    alone = make_run(tmp_path / "alone", warm_up=50)
    learner = ChildLearner(
        run,
        tmp_path / "learner.log",
        LearnerScale(processes=2, torchrun=(*common, "--node-rank=0")),
    )
    program = [
        "-m",
        "torch.distributed.run",
        *common,
        "--node-rank=1",
        "-m",
        "barnraise.coordinator.learner_child",
    ]
    other = subprocess.Popen(
        [sys.executable, "-P", *program],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        job = next_job(alone, 1)
        made = await learner.train(job)
        assert_like((alone, Trainer(alone).train(job)), (run, made), "float32")
    finally:
        await learner.close()
        other.terminate()
        other.wait()
