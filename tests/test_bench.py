"""The engine's benchmark, small: in this process and in the child that ``doctor`` uses."""

from __future__ import annotations

import pytest

from barnraise.node.bench import NEW, ROWS, Measured, measure
from barnraise.node.probe_child import open_prober
from barnraise.protocol.errors import ChildError


def test_r7_progress_is_finished_work_and_ends_in_the_result() -> None:
    seen: list[Measured] = []
    done = measure("cpu", 1, 0.5, seen.append, size=(64, 1))
    assert seen[-1] == done
    assert [item.tokens for item in seen] == sorted(item.tokens for item in seen)
    assert done.tokens > 0
    assert done.tokens <= (done.tokens // (ROWS * NEW) + 1) * ROWS * NEW
    assert done.gflops > 0


def test_a_benchmark_that_is_stopped_ends_at_once() -> None:
    polls = iter([False] * 5)
    done = measure("cpu", 1, 600.0, lambda measured: None, lambda: next(polls, True), size=(64, 1))
    assert done.tokens < ROWS * NEW


async def test_the_child_says_what_torch_sees_and_why_a_device_does_not_work() -> None:
    async with open_prober(humble=True) as prober:
        facts = await prober.ask_torch()
        assert not facts.error
        assert facts.version
        assert facts.cpu
        with pytest.raises(ChildError, match="the engine does not work on cuda:99"):
            await prober.measure(1, 1.0, lambda measured: None, "cuda:99")
        assert (await prober.ask_torch()).version == facts.version
