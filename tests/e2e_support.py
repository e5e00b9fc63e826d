"""Real processes for end-to-end tests: the commands that a person would type, and ways to wait for them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from swarm_support import make_model

from barnraise.protocol.control_client import read_state
from barnraise.protocol.errors import BarnraiseError

PATIENCE_S = 240.0  # for a busy machine: a process that imports torch takes 3 s alone, 30 s in a crowd


def barnraise(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "barnraise.tui.main", *arguments]


def call(
    *arguments: str, cwd: Path | None = None, timeout: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        barnraise(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none of a process that has just ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def small_run(folder: Path, versions: int) -> Path:
    """A run of a small model whose groups nearly always disagree, so that every version has a gradient."""
    model, run = folder / "model", folder / "run"
    make_model(model)
    settings = json.dumps({"letters": 3, "alphabet": 3, "partial": True})
    done = call(
        *("run", "init", str(run), "--model", str(model), "--versions", str(versions), "--plain-prompts"),
        *("--environment", "reverse", "--environment-settings", settings, "--max-new-tokens", "6"),
        *("--prompts-per-unit", "4", "--group-size", "4", "--groups-per-version", "4"),
    )
    assert done.returncode == 0, done.stderr
    return run


@dataclass
class Place:
    """One run folder, the coordinator on it and the nodes that joined, as real processes."""

    folder: Path
    run: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    listen: str = "/ip4/127.0.0.1/tcp/0"

    def start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                barnraise(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    def coordinator(self) -> str:
        """Start the coordinator (again) and return its address, which stays the same."""
        self.start("coordinator", "coordinator", "run", str(self.run), "--listen", self.listen)
        pid = self.processes["coordinator"].pid
        state = self.wait(self.run, lambda state: state.get("pid") == pid and bool(state.get("address")))
        address = str(state["address"])
        self.listen = address.rsplit("/p2p/", 1)[0]
        return address

    def node(self, name: str, address: str, *more: str) -> Path:
        home = self.folder / name
        key = str(home / "node.key")
        self.start(
            *(name, "join", address, "--yes", "--name", name, "--data", str(home), "--key", key),
            *("--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0", *more),
        )
        return home

    def state(self, folder: Path) -> dict[str, Any]:
        try:
            return read_state(folder / "control.sock")
        except (BarnraiseError, OSError):
            return {}

    def wait(
        self, folder: Path, ready: Callable[[dict[str, Any]], bool], patience: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Poll the state of the process that owns ``folder`` until it satisfies ``ready``."""
        deadline = time.monotonic() + patience
        state: dict[str, Any] = {}
        while time.monotonic() < deadline:
            state = self.state(folder) or state
            if state and ready(state):
                return state
            time.sleep(0.1)
        logs = "\n".join(
            f"--- {path.name}\n" + path.read_text(errors="replace")[-1500:]
            for path in sorted(self.folder.glob("*.log"))
        )
        raise AssertionError(f"not reached within {patience} s; last state {state}\n{logs}")

    def now(self, folder: Path) -> dict[str, Any]:
        """The state of the process that owns ``folder``, as soon as it answers."""
        return self.wait(folder, lambda state: True)

    def kill(self, name: str) -> None:
        """kill -9, as a power cut would."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(10)

    def children(self, name: str, module: str) -> list[psutil.Process]:
        """The worker processes below a process, such as its engine."""
        below = psutil.Process(self.processes[name].pid).children(recursive=True)
        return [child for child in below if any(module in part for part in words_of(child))]

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


@contextmanager
def place(folder: Path, versions: int) -> Iterator[Place]:
    """A made run; whatever was started in it is ended."""
    here = Place(folder, small_run(folder, versions))
    try:
        yield here
    finally:
        here.stop()
