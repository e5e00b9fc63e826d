"""Bounds on work that a stranger's file asks for."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

import pytest

from barnraise.protocol.limits import LimitError, bounded


def loop() -> None:
    while True:
        pass


def stubborn_loop() -> None:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def nested() -> None:
    with bounded("inner", seconds=30):
        pass
    loop()


def test_a_loop_without_end_is_interrupted_with_its_name_and_the_limit() -> None:
    began = time.monotonic()
    error = r"the template takes longer than 0\.2 s here"
    with pytest.raises(LimitError, match=error), bounded("the template", seconds=0.2):
        loop()
    assert time.monotonic() - began < 5


def test_a_loop_that_swallows_every_exception_is_interrupted_all_the_same() -> None:
    with pytest.raises(LimitError), bounded("it", seconds=0.1):
        stubborn_loop()


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA")
def test_a_memory_bomb_goes_off_inside_its_bounds_and_the_process_lives() -> None:
    error = r"the config takes more than 0\.3 GB of memory"
    with pytest.raises(LimitError, match=error), bounded("the config", seconds=60, memory=300_000_000):
        ["full_attention" for _ in range(10**10)]
    with pytest.raises(LimitError), bounded("the config", seconds=60, memory=300_000_000):
        "a" * 10**12
    assert len(bytes(400_000_000)) == 400_000_000  # the ceiling is gone again


def test_bounds_leave_no_trace_and_nest() -> None:
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    with pytest.raises(LimitError, match="outer"), bounded("outer", seconds=0.3, memory=10**9):
        nested()
    with bounded("quick", seconds=5):
        pass
    assert signal.getsignal(signal.SIGALRM) == handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (
        timer > 0
    )  # somebody else's, such as the runner's


def test_other_errors_pass_through_and_other_threads_are_left_alone() -> None:
    with pytest.raises(KeyError):
        with bounded("it", seconds=5, memory=10**9):
            raise KeyError("x")
    seen: list[int] = []

    def work() -> None:
        with bounded("it", seconds=0.01):
            time.sleep(0.05)
            seen.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1]
