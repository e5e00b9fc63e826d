"""The engine: a unit in, rollouts with proofs out, in a thread or in a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import standin_engine
import torch
import trio
import trio.testing
from learner_support import make_model, run_spec

from barnraise.kernels import toploc
from barnraise.kernels.models import load_policy
from barnraise.kernels.prefill import prefill
from barnraise.kernels.tokens import Codec
from barnraise.node import sizing, torch_engine
from barnraise.node.engine import Engine, Generated, OutOfMemory, Progress, Work
from barnraise.node.engine_child import ChildEngine
from barnraise.node.sizing import MAX_BATCH, size_unit
from barnraise.node.torch_engine import TorchEngine
from barnraise.protocol.child_watch import Patience
from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import ChildError
from barnraise.protocol.log_lines import read_line
from barnraise.protocol.seeds import task_seed
from barnraise.protocol.spec import RunSpec

SPEC = run_spec()
LONG = run_spec(sampling__max_new_tokens=50, model__eos_token=6)


def work(version: int = 0, prompts: int = 3, group_size: int = 4, shrink: int = 0) -> Work:
    return Work(
        run_id=bytes(32),
        lease_id=bytes(16),
        node=bytes(range(32)),
        policy_version=version,
        prompts=prompts,
        group_size=group_size,
        shrink=shrink,
    )


def ignore(progress: Progress) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "v0")
    return tmp_path / "v0"


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[ChildEngine]:
    engine = ChildEngine(threads=1, log=tmp_path / "engine.log", device="cpu")
    yield engine
    await engine.close()


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children without torch, for what concerns the process alone; the other tests start the real one."""
    standin_engine.program(monkeypatch)


def unpack(generated: Generated) -> list[tuple[list[int], list[float]]]:
    return [
        (np.frombuffer(r.tokens, "<u4").tolist(), np.frombuffer(r.logprobs, "<f4").tolist())
        for r in generated.rollouts
    ]


async def test_a_unit_answers_the_leases_prompts_with_valid_proofs(folder: Path) -> None:
    engine: Engine = TorchEngine("cpu")
    info = await engine.load(SPEC, folder, 0)
    assert info.name == "torch-cpu-float32"
    assert info.memory_bytes > 0
    seen: list[Progress] = []
    done = await engine.generate(work(), seen.append)

    assert [(r.prompt, r.sample) for r in done.rollouts] == [(p, s) for p in range(3) for s in range(4)]
    environment, codec = build_environment(SPEC.environment), Codec(folder, SPEC.environment)
    tasks = [
        environment.task(task_seed(bytes(32), bytes(16), bytes(range(32)), p), held_out=False)
        for p in range(3)
    ]
    prompts = [codec.encode_prompt(task.prompt) for task in tasks for _ in range(4)]
    completions = unpack(done)
    for tokens, logprobs in completions:
        assert 1 <= len(tokens) == len(logprobs) <= SPEC.sampling.max_new_tokens
    states = prefill(load_policy(folder), prompts, [tokens for tokens, _ in completions])
    for rollout, state in zip(done.rollouts, states, strict=True):
        toploc.check_format(rollout.proofs, *state.shape)
    for scores in toploc.score([r.proofs for r in done.rollouts], states):
        for chunk in scores:
            assert chunk.exponent_mismatches <= SPEC.verify.max_exponent_mismatches
            assert chunk.mantissa_mean <= SPEC.verify.max_mantissa_mean
    tokens = sum(len(tokens) for tokens, _ in completions)
    assert done.tokens == tokens
    assert seen[-1] == Progress(completions=12, tokens=tokens)


async def test_a_smaller_batch_draws_the_same_unit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine("cpu")
    await engine.load(SPEC, folder, 0)
    whole = await engine.generate(work(), ignore)
    sizes: list[int] = []
    real = torch_engine.generate

    def spy(*arguments: object) -> object:
        sizes.append(arguments[-1])  # type: ignore[arg-type]
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_engine, "generate", spy)
    shrunk = await engine.generate(work(shrink=7), ignore)
    assert sizes == [MAX_BATCH >> 7]
    assert [tokens for tokens, _ in unpack(shrunk)] == [tokens for tokens, _ in unpack(whole)]


def test_r5_the_batch_follows_the_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prompts = load_policy(folder), [[1, 2, 3]]
    for free, least, most in ((1 << 40, 256, 256), (1 << 20, 1, 255), (1, 1, 1)):
        monkeypatch.setattr(sizing, "free_memory", lambda device, free=free: free)
        sized = size_unit(policy, SPEC, prompts)
        assert least <= sized.at_once <= most
        assert sized.free == free
        assert size_unit(policy, SPEC, prompts, shrink=3).at_once == max(1, sized.at_once >> 3)


async def test_a_new_version_swaps_the_weights(folder: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "v1", seed=1)
    engine, fresh = TorchEngine("cpu"), TorchEngine("cpu")
    await engine.load(SPEC, folder, 0)
    old = await engine.generate(work(), ignore)
    await engine.load(SPEC, tmp_path / "v1", 1)
    await fresh.load(SPEC, tmp_path / "v1", 1)
    new = await engine.generate(work(1), ignore)
    assert new.rollouts == (await fresh.generate(work(1), ignore)).rollouts
    assert new.rollouts != old.rollouts
    with pytest.raises(ChildError, match="needs policy version 0, version 1 is loaded"):
        await engine.generate(work(0), ignore)


async def test_after_a_load_that_failed_nothing_is_loaded(folder: Path, tmp_path: Path) -> None:
    engine = TorchEngine("cpu")
    await engine.load(SPEC, folder, 0)
    make_model(tmp_path / "v1")
    (tmp_path / "v1" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ChildError, match="not a readable safetensors file"):
        await engine.load(SPEC, tmp_path / "v1", 1)
    with pytest.raises(ChildError, match="nothing is loaded"):
        await engine.generate(work(0), ignore)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    ],
)
async def test_every_way_to_run_out_of_memory_is_told_as_such(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = TorchEngine("cpu")
    await engine.load(SPEC, folder, 0)

    def fail(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch_engine, "generate", fail)
        with pytest.raises(OutOfMemory):
            await engine.generate(work(), ignore)
    assert (await engine.generate(work(), ignore)).tokens > 0  # and the engine lives


async def test_cancelling_stops_a_thread_before_its_next_step(folder: Path) -> None:
    engine = TorchEngine("cpu")
    await engine.load(LONG, folder, 0)
    with trio.move_on_after(30) as scope:
        await engine.generate(work(prompts=64, group_size=64), lambda progress: scope.cancel())
    assert scope.cancelled_caught


async def test_in_place_it_draws_the_same_unit_without_a_thread(
    folder: Path, autojump_clock: trio.testing.MockClock
) -> None:
    engine, threaded = TorchEngine("cpu", in_place=True), TorchEngine("cpu")
    with trio.fail_after(1e-9):  # no virtual time passes beside it
        await engine.load(SPEC, folder, 0)
        done = await engine.generate(work(), ignore)
    await threaded.load(SPEC, folder, 0)
    assert unpack(done) == unpack(await threaded.generate(work(), ignore))


async def test_a_child_draws_the_same_unit_as_a_thread_after_a_folder_that_is_no_model_and_a_cancelled_unit(
    folder: Path, tmp_path: Path, child: ChildEngine
) -> None:
    engine: Engine = child
    with pytest.raises(ChildError, match=r"config\.json is missing"):
        await engine.load(SPEC, tmp_path / "empty", 0)
    pid = child.pid
    await engine.load(LONG, folder, 0)
    with trio.CancelScope() as scope:
        await engine.generate(work(prompts=64, group_size=64), lambda progress: scope.cancel())
    assert scope.cancelled_caught
    info = await engine.load(SPEC, folder, 0)
    assert info.name == "torch-cpu-float32"
    seen: list[Progress] = []
    done = await engine.generate(work(), seen.append)
    here = TorchEngine("cpu")
    await here.load(SPEC, folder, 0)
    assert unpack(done) == unpack(await here.generate(work(), ignore))
    assert seen[-1].completions == 12
    assert child.pid == pid
    told = [read_line(line) for line in (tmp_path / "engine.log").read_bytes().splitlines()]
    drew = [line for line in told if line and line.message.startswith("drew ")]
    assert {(line.role, line.pid, line.unit) for line in drew} == {("engine", pid, bytes(8).hex())}


async def test_a_killed_child_is_reported_and_the_next_load_starts_a_fresh_one(
    standin: None, folder: Path, child: ChildEngine
) -> None:
    await child.load(SPEC, folder, 0)
    pid = child.pid
    assert pid is not None

    with pytest.raises(ChildError, match="signal 9"):
        await child.generate(work(prompts=64, group_size=64), lambda progress: os.kill(pid, signal.SIGKILL))
    with pytest.raises(ChildError, match="no model loaded"):
        await child.generate(work(), ignore)
    await child.load(SPEC, folder, 0)
    assert child.pid != pid
    assert (await child.generate(work(), ignore)).tokens > 0


async def test_r11_an_engine_that_is_to_begin_anew_does_so_at_its_next_load(
    standin: None, folder: Path, child: ChildEngine
) -> None:
    await child.load(SPEC, folder, 0)
    pid = child.pid
    child.renew()
    with pytest.raises(ChildError, match="no model loaded"):
        await child.generate(work(), ignore)
    await child.load(SPEC, folder, 0)
    assert child.pid not in (None, pid)
    assert (await child.generate(work(), ignore)).tokens > 0


async def test_r5_a_stopped_engine_is_reported_within_bounded_time_and_the_next_load_starts_a_fresh_one(
    standin: None, folder: Path, tmp_path: Path
) -> None:
    patience = Patience(still_s=2.0, look_s=0.25)
    engine = ChildEngine(threads=1, log=tmp_path / "engine.log", device="cpu", patience=patience)
    try:
        await engine.load(SPEC, folder, 0)
        pid = engine.pid
        assert pid is not None
        with (
            trio.fail_after(120),
            pytest.raises(ChildError, match="hung and was ended: it was stopped"),
        ):
            await engine.generate(
                work(prompts=64, group_size=64), lambda progress: os.kill(pid, signal.SIGSTOP)
            )
        assert engine.pid is None
        await engine.load(SPEC, folder, 0)
        assert engine.pid not in (None, pid)
        assert (await engine.generate(work(), ignore)).tokens > 0
    finally:
        await engine.close()


async def test_a_child_may_be_closed_twice(standin: None, folder: Path, child: ChildEngine) -> None:
    await child.load(SPEC, folder, 0)
    assert child.pid is not None
    await child.close()
    await child.close()
    assert child.pid is None


async def test_a_child_that_runs_out_of_memory_says_so_and_draws_the_unit_when_there_is_room(
    folder: Path, tmp_path: Path
) -> None:
    import psutil

    engine = ChildEngine(threads=1, log=tmp_path / "engine.log", device="cpu")
    try:
        await engine.load(LONG, folder, 0)
        assert engine.pid is not None
        process = psutil.Process(engine.pid)
        room = process.memory_info().vms + 1_000_000
        process.rlimit(psutil.RLIMIT_AS, (room, psutil.RLIM_INFINITY))
        with pytest.raises(OutOfMemory):
            await engine.generate(work(prompts=64, group_size=64), ignore)
        if engine.pid is not None:
            process.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        assert (await engine.generate(work(), ignore)).tokens > 0
    finally:
        await engine.close()


def test_the_daemons_side_imports_no_torch() -> None:
    code = "import barnraise.node.engine_child, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def check_types(spec: RunSpec) -> tuple[Engine, Engine, Callable[[Progress], None]]:
    """Both engines satisfy the seam (for mypy)."""
    return TorchEngine(), ChildEngine(), ignore
