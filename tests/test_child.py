"""Real processes: this very file is the child's program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import trio

from barnraise.protocol.child import Child, ChildOutOfMemoryError
from barnraise.protocol.child_serve import Send, serve
from barnraise.protocol.errors import ChildError, RefusedError


class Do(msgspec.Struct, frozen=True, tag=True):
    what: str
    data: bytes = b""


class Step(msgspec.Struct, frozen=True, tag=True):
    number: int


class Done(msgspec.Struct, frozen=True, tag=True):
    text: str
    data: bytes = b""


def handle(request: Do, send: Send) -> Done:
    match request.what:
        case "echo":
            return Done(str(len(request.data)), request.data)
        case "count":
            for number in range(5):
                send(Step(number))
            return Done("counted")
        case "print":
            print("a library prints")
            os.write(1, b"and another writes to descriptor 1\n")
            return Done(sys.stdin.read())
        case "refuse":
            raise RefusedError("no", "that cannot be done")
        case "raise":
            raise ZeroDivisionError("oh dear")
        case "memory":
            raise MemoryError
        case "torch memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            print("last line of the log", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        case "until cancelled":
            while not send.cancelled():
                send(Step(0))
                time.sleep(0.01)
            return Done("cancelled")
        case "busy":
            send(Step(0))
            end = time.monotonic() + 60
            while time.monotonic() < end:
                sum(range(10_000))
    raise AssertionError(request.what)


@asynccontextmanager
async def child(tmp_path: Path) -> AsyncIterator[Child]:
    process = await Child.start([sys.executable, __file__], name="worker", log=tmp_path / "worker.log")
    try:
        yield process
    finally:
        await process.kill()


async def test_a_request_is_answered_and_large_frames_survive(tmp_path: Path) -> None:
    async with child(tmp_path) as worker:
        for size in (0, 1, 100_000, 50_000_000):
            data = os.urandom(1000) * (size // 1000) + b"x" * (size % 1000)
            done = await worker.request(Do("echo", data), Done)
            assert done.text == str(size)
            assert done.data == data


async def test_the_event_loop_runs_on_while_a_child_works(tmp_path: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.sleep(0.01)
            ticks += 1

    async with child(tmp_path) as worker, trio.open_nursery() as nursery:
        await worker.request(Do("echo"), Done)
        nursery.start_soon(tick)
        with trio.move_on_after(0.5):
            await worker.request(Do("busy"), Done | Step)
        assert ticks > 20
        nursery.cancel_scope.cancel()


async def test_events_come_before_the_reply(tmp_path: Path) -> None:
    seen: list[Any] = []
    async with child(tmp_path) as worker:
        assert await worker.request(Do("count"), Done, seen.append, events=Step) == Done("counted")
        assert await worker.request(Do("count"), Done | Step, seen.append) == Done("counted")
        assert await worker.request(Do("count"), Done) == Done("counted")  # nobody listens
    assert seen == [Step(n) for n in range(5)] * 2


async def test_printing_does_not_corrupt_the_frames(tmp_path: Path) -> None:
    async with child(tmp_path) as worker:
        assert await worker.request(Do("print"), Done) == Done("")
        assert await worker.request(Do("echo"), Done) == Done("0")
        await worker.close()
    log = (tmp_path / "worker.log").read_text()
    assert "another writes to descriptor 1" in log


async def test_a_refusal_is_reported_and_the_child_lives(tmp_path: Path) -> None:
    async with child(tmp_path) as worker:
        with pytest.raises(ChildError, match=r"^that cannot be done$"):
            await worker.request(Do("refuse"), Done)
        assert worker.alive
        assert (await worker.request(Do("echo"), Done)).text == "0"


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("raise", ChildError, "worker failed: ZeroDivisionError: oh dear"),
        ("memory", ChildOutOfMemoryError, "worker failed: out of memory"),
        ("torch memory", ChildOutOfMemoryError, "out of memory .*DefaultCPUAllocator"),
        ("kill", ChildError, "killed by signal 9 .often the system running out of memory"),
        ("segfault", ChildError, "crashed: SIGSEGV"),
        ("exit", ChildError, "exit code 3; .*worker.log ends: last line of the log"),
    ],
)
async def test_a_death_is_explained(tmp_path: Path, what: str, error: type[ChildError], text: str) -> None:
    async with child(tmp_path) as worker:
        with pytest.raises(error, match=text):
            await worker.request(Do(what), Done)
        assert not worker.alive
        with pytest.raises(error, match=text):
            await worker.request(Do("echo"), Done)


async def test_cancelling_reaches_the_handler_and_the_next_request_is_not_confused(tmp_path: Path) -> None:
    async with child(tmp_path) as worker:
        steps: list[Any] = []
        with trio.CancelScope() as scope:

            def on_event(event: Any) -> None:
                steps.append(event)
                if len(steps) == 3:
                    scope.cancel()

            await worker.request(Do("until cancelled"), Done, on_event, events=Step)
        assert scope.cancelled_caught
        with trio.fail_after(30):
            assert (await worker.request(Do("echo", b"abc"), Done)).data == b"abc"


async def test_a_busy_child_dies_at_once_when_its_pipe_closes(tmp_path: Path) -> None:
    async with child(tmp_path) as worker:
        with trio.CancelScope() as scope:
            await worker.request(Do("busy"), Done, lambda _: scope.cancel(), events=Step)
        with trio.fail_after(30):
            await worker.close(grace_s=4)
            assert "exit code 0" in await worker.wait()


async def test_an_idle_child_outlives_the_thread_pool_and_a_crash_is_noticed(tmp_path: Path) -> None:
    async with child(tmp_path) as worker:
        await worker.request(Do("echo"), Done)
        os.kill(worker.pid, signal.SIGINT)  # ignored: the parent decides
        await worker.request(Do("echo"), Done)
        os.kill(worker.pid, signal.SIGTERM)
        with trio.fail_after(30):
            assert "SIGTERM" in await worker.wait()


async def test_killing_twice_and_closing_after_are_harmless(tmp_path: Path) -> None:
    async with child(tmp_path) as worker:
        await worker.kill()
        await worker.kill()
        await worker.close()
        with pytest.raises(ChildError, match="worker was stopped"):
            await worker.request(Do("echo"), Done)


async def test_a_program_that_does_not_exist_is_named() -> None:
    with pytest.raises(ChildError, match=r"cannot start engine .*/no/such/program"):
        await Child.start(["/no/such/program"], name="engine")


async def test_a_reply_of_another_type_ends_the_child(tmp_path: Path) -> None:
    async with child(tmp_path) as worker:
        with pytest.raises(ChildError, match="unexpected"):
            await worker.request(Do("echo"), Step)
        assert not worker.alive


PARENT = """
import sys, trio
from barnraise.protocol.child import Child
async def main():
    worker = await Child.start([sys.executable, {path!r}], name="worker")
    print(worker.pid, flush=True)
    await trio.sleep(60)
trio.run(main)
"""


def test_a_child_dies_with_its_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(path=__file__)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    worker = psutil.Process(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


if __name__ == "__main__":
    serve(handle, Do)
