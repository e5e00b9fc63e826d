"""A volunteer's node from the first start to the last, as real processes in a real terminal.

All stories share one coordinator, whose run never ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_support import PATIENCE_S, Place, barnraise, call, environment
from swarm_support import make_model, make_run
from terminal_support import LOOK_EVERY_S, Terminal, pseudo_terminal, read, tmux, until

from barnraise.node.supervise import read_supervisor

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

State = dict[str, Any]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("lifecycle")
    run = make_run(folder / "run", make_model(folder / "model"), time.time_ns() // 1_000_000, versions=60_000)
    it = Place(folder, run)
    try:
        it.coordinator()
        yield it
    finally:
        it.stop()


@pytest.fixture
def home(here: Place, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A data folder; whatever runs on it afterwards is ended."""
    folder = here.folder / f"home-{abs(hash(request.node.name)) % 10**6}"
    yield folder
    for pid in running(folder):
        try:
            psutil.Process(pid).kill()
        except psutil.Error:
            continue


def running(home: Path) -> list[int]:
    """Every process that was started for a data folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(home) in words and process.info["status"] != psutil.STATUS_ZOMBIE and "tmux" not in words[0]:
            found.append(process.pid)
    return found


def ends(home: Path) -> None:
    """Wait until every process that was started for a data folder has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while left := running(home):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(LOOK_EVERY_S)


def join(here: Place, home: Path, *options: str) -> list[str]:
    address = f"{here.listen}/p2p/{here.now(here.run)['address'].rpartition('/')[2]}"
    key = ("--key", str(home / "node.key"))
    more = ("--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0", *options)
    return barnraise("join", address, "--data", str(home), *key, "--name", "ann", *more)


def is_working(state: State) -> bool:
    return bool(state["mode"] == "run" and state["units_done"] > 0)


def tells_of_it(state: State) -> bool:
    return any("SIGKILL" in notice["text"] for notice in state["notices"])


def is_paused(state: State) -> bool:
    return bool(state["state"] == "paused" and state["unit"] is None)


def a_volunteer_s_first_day(here: Place, home: Path, terminal: Terminal) -> None:
    """From the prompt to the app at work, a pause, and back; the app is open afterwards."""
    read(terminal, "first start of a node")
    read(terminal, str(home / "node.key"))
    for question in ("Most disk", "Most to send", "Most to receive"):
        read(terminal, question)
        terminal.press("\r")
    read(terminal, "Join this run?")
    assert "run by" in terminal.screen()
    assert here.now(home)["have_version"] == -1  # nothing of the model was fetched yet
    terminal.press("\r")
    here.wait(home, is_working)
    read(terminal, "Overview")
    terminal.press("p")
    here.wait(home, is_paused)
    terminal.press("r")
    before = here.now(home)["units_done"]
    here.wait(home, lambda state: is_working(state) and state["units_done"] > before)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_join_pause_resume_quit_come_back_and_finish_in_tmux(here: Place, home: Path, tmp_path: Path) -> None:
    """R8, R13, R24, in the terminal that people use."""
    with tmux(tmp_path, join(here, home), environment()) as terminal:
        a_volunteer_s_first_day(here, home, terminal)
        read(terminal, "Pause")  # the footer's keys
        terminal.press("q")
        until(terminal, lambda: terminal.exit_code() is not None, "the app does not close")
        assert terminal.exit_code() == 0
    # The terminal is gone, tmux and all; the node is not.
    before = here.now(home)["units_done"]
    here.wait(home, lambda state: state["units_done"] > before)
    with tmux(tmp_path, join(here, home), environment()) as terminal:
        read(terminal, "Overview")
        assert "Join this run?" not in terminal.screen()
        terminal.press("f")
        until(terminal, lambda: not running(home) or here.state(home) == {}, "it does not finish")
        until(terminal, lambda: read_supervisor(home) is None, "its supervisor does not end")
        terminal.press("q")
        until(terminal, lambda: terminal.exit_code() is not None, "the app does not close")
    assert "finished the last unit" in (home / "node.log").read_text()


def test_a_closed_window_and_kill_9_leave_the_node_at_work(here: Place, home: Path) -> None:
    """R6, R13, R24: the terminal hangs up; the daemon is killed and comes back, paused as it was."""
    with pseudo_terminal(join(here, home), environment()) as terminal:
        a_volunteer_s_first_day(here, home, terminal)
        terminal.hang_up()
        before = here.now(home)["units_done"]
        here.wait(home, lambda state: state["units_done"] > before)
    told = json.loads(call("pause", str(home), "--for", "2h", "--json").stdout)
    assert told["ok"]
    pid = here.wait(home, is_paused)["pid"]
    os.kill(pid, signal.SIGKILL)
    state = here.wait(home, lambda state: state["pid"] != pid and state["connected"] and tells_of_it(state))
    assert state["state"] == "paused"
    shown = call("status", str(home)).stdout
    assert "SIGKILL" in shown
    assert "resumes in 1h" in shown
    assert call("resume", str(home)).returncode == 0
    here.wait(home, lambda state: state["mode"] == "run")
    assert "starts again in" in call("logs", str(home), "--level", "warning").stdout
    for _ in range(2):
        assert call("leave", str(home)).returncode == 0
    ends(home)
    assert call("pause", str(home)).returncode == 1


def test_who_declines_gets_exit_code_5_and_nothing_stays_behind(here: Place, home: Path) -> None:
    with pseudo_terminal(join(here, home), environment()) as terminal:
        for question in ("Most disk", "Most to send", "Most to receive"):
            read(terminal, question)
            terminal.press("\r")
        read(terminal, "Join this run?")
        terminal.press("n\r")
        until(terminal, lambda: terminal.exit_code() is not None, "it does not end")
        assert terminal.exit_code() == 5
        assert "chose not to join" in terminal.screen()
    ends(home)
    assert not list(home.glob("runs/*/versions/*"))


def test_errors_at_the_start_are_shown_with_their_exit_code_in_the_background_too(
    here: Place, home: Path
) -> None:
    """R24: the same line and code as in the foreground."""
    home.mkdir()
    (home / "node.key").write_text("no key")
    (home / "node.key").chmod(0o600)
    plain = call(*join(here, home, "--yes")[4:])
    assert plain.returncode == 2
    with pseudo_terminal(join(here, home, "--yes"), environment()) as terminal:
        until(terminal, lambda: terminal.exit_code() is not None, "it does not end")
        assert terminal.exit_code() == 2
        lines = [line for line in terminal.screen().splitlines() if line.startswith("barnraise: ")]
    assert lines == [plain.stderr.strip()]
    ends(home)


@pytest.mark.long
def test_two_live_nodes_with_one_key_are_both_told(here: Place, home: Path) -> None:
    """R9: between real processes, and on the status of both."""
    address = str(here.now(here.run)["address"])
    first = here.node("first", address)
    here.wait(first, is_working)
    second = here.folder / "second"
    second.mkdir()
    shutil.copy(first / "node.key", second / "node.key")
    here.node("second", address)
    for folder in (first, second):
        here.wait(folder, lambda state: state["duplicate_key"])
        shown = call("status", str(folder)).stdout
        assert "another live node uses the same key" in shown
        assert "--key" in shown
    here.wait(second, is_working)  # the newer one keeps it (R4), the older one stays away
    away = here.wait(first, lambda state: not state["connected"])
    assert "another machine uses this key" in away["reason"]
    assert here.processes["first"].poll() is None
    for name in ("first", "second"):
        here.processes[name].terminate()
        assert here.processes[name].wait(PATIENCE_S) == 0
