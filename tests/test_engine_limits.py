"""Limits that reach a real engine child while it works, and what a suspended one still uses (R5, R14)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
import trio
from learner_support import make_model, run_spec

from barnraise.node import memory
from barnraise.node.engine import EngineLimits, LimitedEngine, Progress, Sized, Work
from barnraise.node.engine_child import ChildEngine
from barnraise.node.engine_limits import Limiter

SPEC = run_spec(sampling__max_new_tokens=50, model__eos_token=6)


def work(prompts: int, group_size: int) -> Work:
    return Work(
        run_id=bytes(32),
        lease_id=bytes(16),
        node=bytes(range(32)),
        policy_version=0,
        prompts=prompts,
        group_size=group_size,
    )


def processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def test_r14_a_real_engine_is_limited_in_the_middle_of_a_unit_and_rests_when_suspended(
    tmp_path: Path,
) -> None:
    make_model(tmp_path / "v0")
    child = ChildEngine(threads=1, log=tmp_path / "engine.log", device="cpu", nice=3)
    assert isinstance(child, LimitedEngine)
    try:
        await child.limit(EngineLimits(threads=1, memory=1))
        await child.load(SPEC, tmp_path / "v0", 0)
        assert child.pid is not None
        process = psutil.Process(child.pid)
        assert process.nice() == min(19, os.nice(0) + 3)

        sized: list[Sized] = []

        def note(made: Progress) -> None:
            if made.sized is not None:
                sized.append(made.sized)

        await child.generate(work(2, 4), note)
        await child.limit(EngineLimits(threads=1))
        await child.generate(work(2, 4), note)
        assert [(one.free, one.at_once) for one in sized[:1]] == [(0, 1)]  # from the child's start on
        assert sized[1].at_once > 1

        before = process.num_threads()
        seen: list[int] = []
        scope = trio.CancelScope()

        def progress(made: Progress) -> None:
            if made.tokens and not seen:
                nursery.start_soon(child.limit, EngineLimits(threads=3))
            if made.tokens:
                seen.append(process.num_threads())
            if seen and seen[-1] >= before + 2:  # torch's workers, in the same process
                scope.cancel()

        async with trio.open_nursery() as nursery:
            with scope:
                await child.generate(work(64, 64), progress)
        assert scope.cancelled_caught
        assert child.pid == process.pid
        used = processor_s(process)
        await trio.sleep(1.0)
        assert processor_s(process) - used <= 0.03
    finally:
        await child.close()
    assert not process.is_running()


async def test_r14_loading_is_stopped_too(tmp_path: Path) -> None:
    make_model(tmp_path / "v0")
    child = ChildEngine(threads=1, log=tmp_path / "engine.log", device="cpu")
    with trio.move_on_after(0.2) as scope:  # it is only starting, and imports torch
        await child.load(SPEC, tmp_path / "v0", 0)
    assert scope.cancelled_caught
    assert child.pid is None


def test_threads_are_set_in_the_thread_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, float]] = []
    monkeypatch.setattr("barnraise.node.engine_limits.allow", lambda *given: told.append(given))
    limiter = Limiter("cpu")
    mine = torch.get_num_threads()
    found: list[int] = []

    def compute() -> None:
        limiter.apply()
        found.append(torch.get_num_threads())

    limiter.want(EngineLimits(threads=mine + 1, memory=7))
    limiter.want("something else")
    other = threading.Thread(target=compute)
    other.start()
    other.join()
    assert found == [mine + 1]
    assert torch.get_num_threads() == mine
    assert told == [(7, 1.0)]
    limiter.apply()
    assert len(told) == 1


def test_r14_a_share_of_a_gpu_bounds_what_is_free_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # No GPU here: torch's own figures are written down.
    monkeypatch.setattr(memory, "_allowed", {"memory": 0.0, "gpu": 1.0})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * 10**9, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * 10**9)
    told: list[tuple[float, str]] = []

    def fraction(share: float, device: torch.device) -> None:
        told.append((share, str(device)))

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction)
    device = torch.device("cuda")
    assert memory.free_memory(device) == 12 * 10**9
    limiter = Limiter("cuda")
    for share, free in ((0.9, 12 * 10**9), (0.5, 8 * 10**9), (0.1, 0)):
        limiter.want(EngineLimits(threads=torch.get_num_threads(), gpu_memory=share))
        limiter.apply()
        assert memory.free_memory(device) == free
    assert told == [(0.9, "cuda"), (0.5, "cuda"), (0.1, "cuda")]


def test_free_memory_is_what_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_allowed", {"memory": 0.0, "gpu": 1.0})
    device = torch.device("cpu")
    free = memory.free_memory(device)
    assert free > 10**7
    rss = psutil.Process().memory_info().rss
    memory.allow(rss + 10**6, 1.0)
    assert memory.free_memory(device) < 10**7
    memory.allow(1, 1.0)
    assert memory.free_memory(device) == 0
