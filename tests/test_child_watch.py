"""A hung child is found out, whatever it hangs in, killed and reported (R5). This is its program, too."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import trio

from barnraise.protocol.child import Child, ChildOutOfMemoryError
from barnraise.protocol.child_serve import Send, serve
from barnraise.protocol.child_watch import ChildHungError, Patience, Vitals, Watch, vitals
from barnraise.protocol.oom import oom_kills

# The real limits are in minutes.
QUICK = Patience(still_s=1.5, stuck_s=3.0, mute_s=5.0, busy_s=6.0, look_s=0.25)


class Do(msgspec.Struct, frozen=True, tag=True):
    what: str


class Step(msgspec.Struct, frozen=True, tag=True):
    pass


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


def handle(request: Do, send: Send) -> Done:
    send(Step())
    match request.what:
        case "sleep":  # lets other threads run: a lock that nobody gives back, a device that never answers
            time.sleep(600)
        case "lock":
            threading.Lock().acquire()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "C":  # holds the interpreter: not even a beat
            ctypes.PyDLL(None).sleep(600)
        case "busy C":
            re.match(r"(a+)+$", "a" * 64 + "b")
        case "busy":
            while True:
                pass
        case "slow":  # honest: a step now and then
            for _ in range(4):
                end = time.monotonic() + 1.0
                while time.monotonic() < end:
                    sum(range(1000))
                send.cancelled()
    return Done()


async def start(tmp_path: Path) -> Child:
    return await Child.start([sys.executable, __file__], name="engine", log=tmp_path / "log")


HANGS = {
    "sleep": "no progress, and neither processor nor disk used, for ",
    "lock": "no progress, and neither processor nor disk used, for ",
    "C": "no sign of life, and neither processor nor disk used, for ",
    "busy C": "no sign of life for .* caught in a library",
    "busy": "busy, but not one step done for ",
    "stop": "it was stopped from outside .SIGSTOP.",
}


async def test_r5_a_child_that_hangs_is_killed_and_the_reason_told(tmp_path: Path) -> None:
    """All at once: what takes time here is waiting."""

    async def hang(what: str, text: str) -> None:
        child = await Child.start([sys.executable, __file__], name="engine", log=tmp_path / f"{what}.log")

        def stop(step: Step) -> None:
            if what == "stop":
                os.kill(child.pid, signal.SIGSTOP)

        request = Do("sleep" if what == "stop" else what)
        try:
            with pytest.raises(ChildHungError, match=f"engine hung and was ended: {text}"):
                await child.request(request, Done, stop, events=Step, patience=QUICK)
            assert not child.alive
            assert vitals(child.pid) is None
        finally:
            await child.kill()

    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for what, text in HANGS.items():
                nursery.start_soon(hang, what, text)


async def test_a_slow_child_is_not_taken_for_a_hung_one(tmp_path: Path) -> None:
    child = await start(tmp_path)
    try:
        assert await child.request(Do("slow"), Done, patience=QUICK) == Done()
        assert await child.request(Do("nothing"), Done, patience=QUICK) == Done()
    finally:
        await child.kill()


async def test_r5_a_child_that_the_kernel_killed_for_memory_is_reported_as_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([5, 6])  # the kernel's counter before the child began, and after it died
    monkeypatch.setattr("barnraise.protocol.child.oom_kills", lambda: next(kills))
    child = await start(tmp_path)
    with pytest.raises(ChildOutOfMemoryError, match="engine ran out of memory: the system killed it"):
        await child.request(
            Do("sleep"), Done, lambda step: os.kill(child.pid, signal.SIGKILL), events=Step, patience=QUICK
        )


# --- the judgement alone

SECOND = Patience(look_s=1.0)


def look(
    watch: Watch,
    seconds: int,
    start: int = 0,
    *,
    cpu: float = 0.0,
    steps: int | None = None,
    beats: bool = True,
) -> tuple[int, str]:
    """Look once a second; how long until something was wrong, and what."""
    for second in range(start + 1, start + seconds + 1):
        if beats:
            watch.beat(second if steps is None else steps, second)
        wrong = watch.look(Vitals(cpu * second, 0, False), second)
        if wrong:
            return second, wrong
    return start + seconds, ""


@pytest.mark.parametrize(
    ("cpu", "beats", "limit"),
    [(0.0, False, "still_s"), (0.001, True, "stuck_s"), (0.9, False, "mute_s"), (0.9, True, "busy_s")],
)
def test_each_silence_has_its_own_limit(cpu: float, beats: bool, limit: str) -> None:
    when, wrong = look(Watch(SECOND, 0), 4000, cpu=cpu, steps=7, beats=beats)
    assert wrong
    assert getattr(SECOND, limit) <= when <= getattr(SECOND, limit) + 2


def test_a_child_that_makes_steps_may_take_for_ever() -> None:
    assert look(Watch(SECOND, 0), 5000) == (5000, "")


def test_an_engine_that_stands_back_on_a_busy_machine_is_no_hang() -> None:
    assert look(Watch(SECOND, 0), 1000, cpu=0.01, steps=7) == (1000, "")


def test_a_file_that_is_read_for_long_is_no_hang() -> None:
    watch = Watch(SECOND, 0)
    for second in range(1, 200):
        assert not watch.look(Vitals(0.0, second, False), second)


def test_a_machine_that_slept_blames_nobody() -> None:
    watch = Watch(SECOND, 0)
    look(watch, 5, steps=1)
    assert not watch.look(Vitals(0.0, 0, False), 40_000)
    assert not watch.look(Vitals(0.0, 0, False), 40_001)
    assert look(watch, 60, 40_001, beats=False)[1]


def test_a_process_that_is_gone_has_no_vitals() -> None:
    here = vitals(os.getpid())
    assert here is not None
    assert here.cpu_s > 0
    assert not here.stopped
    assert vitals(2**22 + 1) is None


# --- the kernel's evidence


def test_r5_the_kernels_counters_are_found_in_either_version_of_control_groups(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
    write(tmp_path / "proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    write(tmp_path / "proc/self/cgroup", "0::/user.slice/node.service\n")
    write(tmp_path / "sys/fs/cgroup/user.slice/node.service/memory.events", "low 0\noom 9\noom_kill 10\n")
    write(tmp_path / "sys/fs/cgroup/user.slice/memory.events", "oom_kill 100\noom_group_kill 7\n")
    assert oom_kills(tmp_path) == 113
    write(tmp_path / "proc/self/cgroup", "4:memory:/box\n1:cpu:/\n0::/\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.oom_control", "under_oom 0\noom_kill 1000\n")
    assert oom_kills(tmp_path) == 1003
    write(tmp_path / "sys/fs/cgroup/memory/box/memory.oom_control", "oom_kill many\noom_kill 1\n")
    assert oom_kills(tmp_path) == 1004


def test_a_path_out_of_the_control_groups_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/../../../..\n")
    write(tmp_path / "memory.events", "oom_kill 5\n")
    assert oom_kills(tmp_path) == 0


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    serve(handle, Do, beat_s=0.1)
