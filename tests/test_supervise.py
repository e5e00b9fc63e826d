"""A background node that crashes is started again, later each time, not for ever, and it is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.node import supervise
from barnraise.node.supervise import (
    LONGEST_S,
    MOST_CRASHES,
    STOOD_S,
    Crashes,
    Supervisor,
    after_end,
    lock_path,
    read_supervisor,
)
from barnraise.tui.background import waiting_in
from barnraise.tui.log_file import tail

PATIENCE_S = 60.0
KILLED = -signal.SIGKILL
UP = "import os; os.write(int(os.environ['BARNRAISE_READY_FD']), b'1')\n"


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 130, -signal.SIGTERM, -signal.SIGINT])
def test_an_orderly_end_stays_one(code: int) -> None:
    assert after_end(Crashes(), code, 5.0, True) == (Crashes(), None)


def test_what_never_came_up_is_the_person_s_to_cure_but_a_restart_is_tried_again() -> None:
    assert after_end(Crashes(), 1, 1.0, False)[1] is None
    assert after_end(Crashes(1), 1, 1.0, False)[1] is not None  # the port may not be free yet
    assert after_end(Crashes(), KILLED, 1.0, False)[1] is not None


def test_crashes_in_a_row_are_waited_out_longer_and_given_up() -> None:
    crashes, delays = Crashes(), []
    while (step := after_end(crashes, KILLED, 1.0, True))[1] is not None:
        crashes = step[0]
        delays.append(step[1])
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    assert len(delays) == MOST_CRASHES - 1


def test_a_long_life_between_crashes_begins_the_count_afresh() -> None:
    assert after_end(Crashes(6), KILLED, STOOD_S, True) == (Crashes(1), 1.0)


@given(st.integers(0, 100), st.integers(-64, 255), st.floats(0, 1e7), st.booleans())
def test_no_end_is_followed_by_a_rush_or_an_endless_wait(
    count: int, code: int, lived: float, was_up: bool
) -> None:
    after, delay = after_end(Crashes(count), code, lived, was_up)
    assert delay is None or 1.0 <= delay <= LONGEST_S
    assert delay is None or after.count < MOST_CRASHES


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(supervise.time, "sleep", slept.append)
    monkeypatch.setattr(supervise.signal, "signal", lambda number, handler: None)
    return slept


def child(folder: Path, text: str) -> list[str]:
    path = folder / "child.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_a_killed_child_comes_back_and_is_told_why(tmp_path: Path, no_waiting: list[float]) -> None:
    text = UP + (
        "said = os.environ['BARNRAISE_AFTER_CRASH']\n"
        "open('said', 'a').write(said + '\\n')\n"
        "os.kill(os.getpid(), 0 if said.count('crash 3') else 9)\n"
    )
    command = child(tmp_path, text.replace("'said'", repr(str(tmp_path / "said"))))
    assert Supervisor(tmp_path, command).run() == 0
    assert no_waiting == [1.0, 2.0, 4.0]
    said = (tmp_path / "said").read_text().splitlines()
    assert len(said) == 4
    assert said[0] == ""
    assert "SIGKILL" in said[1]
    lines = tail(tmp_path, 10)
    assert len(lines) == 3
    assert all(line.level == "WARNING" and "starts again in" in line.text for line in lines)
    assert "out of memory" in lines[0].text


def test_it_gives_up_and_says_so(tmp_path: Path, no_waiting: list[float]) -> None:
    assert Supervisor(tmp_path, child(tmp_path, UP + "raise SystemExit(1)")).run() == 1
    assert len(no_waiting) == MOST_CRASHES - 1
    assert "not started again" in tail(tmp_path, 1)[0].text


@pytest.mark.parametrize("code", [1, 2, 4])
def test_a_start_that_fails_passes_its_exit_code_on(
    code: int, tmp_path: Path, no_waiting: list[float]
) -> None:
    assert Supervisor(tmp_path, child(tmp_path, f"raise SystemExit({code})")).run() == code
    assert no_waiting == []
    assert not (tmp_path / "node.log").exists()


def start(folder: Path, text: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "barnraise.node.supervise", str(folder), "--"]
    return subprocess.Popen([*command, *child(folder, text)], start_new_session=True)


def until(reached, what: str):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + PATIENCE_S
    while not (value := reached()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return value


def test_while_it_waits_it_says_so_and_leaves_at_once_when_asked(tmp_path: Path) -> None:
    text = UP + "os.kill(os.getpid(), 9)"
    process = start(tmp_path, text)
    try:
        told = until(lambda: (read_supervisor(tmp_path) or {}).get("until_ms"), "it never waits")
        assert told > time.time() * 1000 - 60_000
        assert "SIGKILL" in waiting_in(tmp_path)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
    assert read_supervisor(tmp_path) is None
    assert waiting_in(tmp_path) == ""


def test_a_signal_reaches_the_child_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    up = tmp_path / "up"
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))\n"
        f"open({str(up)!r}, 'w')\n"
        "time.sleep(600)"
    )
    process = start(tmp_path, text)
    try:
        until(up.exists, "no child")
        assert (read_supervisor(tmp_path) or {})["pid"] == process.pid
        assert "is starting" in waiting_in(tmp_path)
        again = start(tmp_path, "")
        assert again.wait(PATIENCE_S) == 1  # one is enough
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff" * 10])
def test_a_lock_that_says_nonsense_is_nobody(content: bytes, tmp_path: Path) -> None:
    lock_path(tmp_path).write_bytes(content)
    assert read_supervisor(tmp_path) is None
    lock_path(tmp_path).write_text(json.dumps({"pid": 1, "text": "", "until_ms": None}))
    assert read_supervisor(tmp_path) is None  # whoever wrote it is gone: nobody holds the lock
