"""kill -9 of daemon, engine and app in one state after the other, between real processes (R6, R24)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_support import PATIENCE_S, Place, barnraise, call, environment
from swarm_support import make_model, make_run
from terminal_support import pseudo_terminal, read

from barnraise.node.receipts import read_receipts
from barnraise.protocol.messages import Receipt
from barnraise.protocol.wire import decode

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

State = dict[str, Any]
ENGINE = "barnraise.node.engine_child"


def until(reached: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_kill_9_of_daemon_engine_and_app_in_every_state(tmp_path: Path) -> None:
    """R4, R5, R6, R16, R24."""
    made = make_run(
        tmp_path / "run", make_model(tmp_path / "model"), time.time_ns() // 1_000_000, versions=60_000
    )
    here = Place(tmp_path, made)
    try:
        address = here.coordinator()

        def join() -> Path:
            return here.node("node", address)

        # While it starts, fetches and loads.
        home = join()
        for reached in (
            lambda state: state["connected"],
            lambda state: state["state"] == "loading" or state["policy_version"] >= 0,
        ):
            here.wait(home, reached)
            here.kill("node")
            join()
        here.wait(home, lambda state: state["accepted"] >= 1)

        # While it generates, and while work is on its way.
        for reached in (
            lambda state: state["state"] == "generating",
            lambda state: state["pending"] > 0,
        ):
            here.wait(home, reached)
            here.kill("node")
            assert not any(psutil.pid_exists(child.pid) for child in engines_of(home))
            join()
        before = here.wait(home, lambda state: state["units_done"] >= 1)

        # The engine alone: while it works, and while it rests.
        for _ in range(2):
            (engine,) = here.children("node", ENGINE)
            engine.kill()
            had = before["units_done"]
            before = here.wait(home, lambda state, had=had: state["units_done"] > had)  # type: ignore[misc]
            assert before["notices"]
            until(lambda: len(here.children("node", ENGINE)) == 1, "no new engine")
        assert call("pause", str(home)).returncode == 0
        here.wait(home, lambda state: state["state"] == "paused")
        for engine in here.children("node", ENGINE):
            engine.kill()
        assert here.now(home)["state"] == "paused"

        # The app: a viewer, nothing of which is missed.
        with pseudo_terminal(barnraise("tui", str(home)), environment()) as terminal:
            read(terminal, "Overview")
            os.kill(terminal.process.pid, signal.SIGKILL)
            terminal.process.wait(PATIENCE_S)
        assert here.now(home)["state"] == "paused"

        # The daemon while it is paused: it comes back paused.
        here.kill("node")
        join()
        here.wait(home, lambda state: state["connected"] and state["state"] == "paused")
        assert call("resume", str(home)).returncode == 0
        with pseudo_terminal(barnraise("tui", str(home)), environment()) as terminal:
            read(terminal, "Overview")
            here.wait(home, lambda state: state["state"] == "generating")
            os.kill(terminal.process.pid, signal.SIGKILL)
            terminal.process.wait(PATIENCE_S)
        done = here.wait(home, lambda state: state["accepted"] > 0 and state["units_done"] > 0)
        here.wait(home, lambda state: state["accepted"] > done["accepted"])
        here.processes["node"].terminate()
        assert here.processes["node"].wait(PATIENCE_S) == 0

        # Every verdict is kept once, none of them is a rejection, and no half-written file is left.
        (book,) = home.glob("runs/*/receipts.bin")
        receipts = [decode(signed.payload, Receipt) for signed in read_receipts(book)]
        assert all(receipt.verdict.accepted for receipt in receipts)
        assert len({receipt.submission_id for receipt in receipts}) == len(receipts)
        assert len({receipt.lease_id for receipt in receipts}) == len(receipts)
        assert not list(home.rglob(".tmp-*"))
    finally:
        here.stop()


def engines_of(home: Path) -> list[psutil.Process]:
    """Engines whose daemon is gone: they end by themselves, at once."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        orphans = [
            process
            for process in psutil.process_iter(["cmdline", "ppid", "status"])
            if ENGINE in (process.info["cmdline"] or [])
            and process.info["ppid"] == 1
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and str(home) in " ".join(file.path for file in _files(process))
        ]
        if not orphans:
            return []
        time.sleep(0.1)
    return orphans


def _files(process: psutil.Process) -> list[Any]:
    try:
        return list(process.open_files())
    except psutil.Error:
        return []
