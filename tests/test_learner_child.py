"""The learner behind a pipe: real child processes, killed and refused."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import trio
import trio.testing
from learner_support import make_run, next_job
from msgspec import structs
from safetensors.torch import load_file

from barnraise.coordinator import learner_child
from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.learner_child import ATTEMPTS, ChildLearner
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.child import Child, ChildOutOfMemoryError
from barnraise.protocol.errors import ChildError


async def test_a_child_makes_versions_a_killed_one_is_replaced_and_a_refusal_costs_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = make_run(tmp_path / "run", warm_up=50)
    learner = ChildLearner(setup, tmp_path / "learner.log")
    assert learner.pid is None
    try:
        initial = await learner.initial()
        assert initial.accuracy >= 0.0
        job = next_job(setup, 1)
        async with trio.open_nursery() as nursery:

            async def train() -> None:
                assert (await learner.train(job)).version == 1

            nursery.start_soon(train)
            await trio.testing.wait_all_tasks_blocked()
            first = learner.pid
            assert first is not None
            with caplog.at_level(logging.WARNING):
                os.kill(first, signal.SIGKILL)
        assert learner.pid not in (None, first)
        assert "signal 9" in caplog.text
        assert await learner.initial() == initial
        # A refusal is passed on, and costs no child.
        second = learner.pid
        with pytest.raises(ChildError, match="v000006 is missing"):
            await learner.train(structs.replace(job, version=7))
        assert learner.pid == second
    finally:
        await learner.close()
        await learner.close()
    assert learner.pid is None
    # What the replaced child made is what an undisturbed learner makes.
    other = make_run(tmp_path / "other", warm_up=50)
    Trainer(other).train(job)
    made = [
        load_file(checkpoint_folder(tmp_path / name, 1) / "model.safetensors") for name in ("run", "other")
    ]
    assert all(value.allclose(made[1][key], atol=1e-6) for key, value in made[0].items())


async def test_a_learner_that_keeps_dying_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = []
    start = Child.start

    async def doomed(argv: list[str], **options: object) -> Child:
        started.append(argv)
        return await start([sys.executable, "-c", "import sys; sys.exit('no torch here')"], **options)

    monkeypatch.setattr(Child, "start", doomed)
    learner = ChildLearner(make_run(tmp_path / "run"), tmp_path / "learner.log")
    with caplog.at_level(logging.WARNING), pytest.raises(ChildError, match="no torch here"):
        await learner.initial()
    assert len(started) == ATTEMPTS
    assert caplog.text.count("starting another") == ATTEMPTS - 1


async def test_memory_that_runs_out_means_smaller_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        alive = False

        async def request(self, request: object, reply: object, *rest: object, **named: object) -> object:
            if isinstance(request, learner_child.SetUp):
                sizes.append(request.micro_batch_bytes)
                return learner_child.Ready()
            raise ChildOutOfMemoryError("learner ran out of memory")

        async def close(self) -> None: ...

    async def start(argv: list[str], **options: object) -> Small:
        return Small()

    sizes: list[int] = []
    monkeypatch.setattr(Child, "start", start)
    with pytest.raises(ChildOutOfMemoryError):
        await ChildLearner(make_run(tmp_path / "run")).initial()
    assert sizes == [learner_child.MICRO_BATCH_BYTES // 4**attempt for attempt in range(ATTEMPTS)]


async def test_a_run_that_cannot_be_trained_here_is_refused_once(tmp_path: Path) -> None:
    setup = make_run(tmp_path / "run", environment__name="no_such_thing", environment__settings="{}")
    learner = ChildLearner(setup, tmp_path / "learner.log")
    with pytest.raises(ChildError, match="no_such_thing"):
        await learner.initial()
    assert learner.pid is None
    assert (tmp_path / "learner.log").read_text().count("starting another") == 0
    await learner.close()
