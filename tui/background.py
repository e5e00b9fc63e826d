"""Nodes in the background: find the one that runs in a folder, or start one that survives the terminal.

What is started is ``barnraise.node.supervise`` in a session of its own, which runs
``barnraise join`` as its child. Errors on the way up reach the person as if the node
had been started in the foreground, exit code included.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from barnraise.node.supervise import cause, read_supervisor
from barnraise.protocol.control_client import read_state
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.tui.console import duration
from barnraise.tui.demo_processes import barnraise, last_lines

START_S = 120.0  # a process that imports libp2p takes 2 s alone, 30 s on a crowded machine
LOOK_EVERY_S = 0.1

State = dict[str, Any]


def state_in(data: Path) -> State | None:
    """The state of the node that runs in ``data``, None if none answers."""
    try:
        return read_state(data / "control.sock")
    except (BarnraiseError, OSError):
        return None


def waiting_in(data: Path) -> str:
    """What a background node that crashed waits for before it starts again, or ``""``."""
    told = read_supervisor(data)
    if told is None:
        return ""
    until = told.get("until_ms")
    if not isinstance(until, int):
        return f"the background node (process {told['pid']}) is starting"
    left = max(0.0, until / 1000 - time.time())
    return f"{told.get('text', 'the node crashed')}; it starts again in {duration(left)}"


class Background:
    """A supervisor that this process started."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self._process = process
        self._errors = errors

    def ended(self) -> int | None:
        """The exit code, once the node has ended for good."""
        return self._process.poll()

    def terminate(self) -> None:
        """Have the node leave in an orderly way."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self, seconds: float) -> int | None:
        """The exit code, if the node ends in time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def complaint(self) -> str:
        """What the node wrote to stderr last, if anything."""
        return last_lines(self._errors, 1)


def start(arguments: Sequence[str], data: Path, say: Callable[[str], None]) -> tuple[Background, State]:
    """Start ``barnraise join ARGUMENTS`` in the background and wait until it shows its state.

    Raises:
        StorageError: the folder cannot be used.
        BarnraiseError: it did not come up in time; it is ended.
        typer.Exit: it ended on the way up; its complaint was shown, the code is its own.
    """
    errors = data / "node.err"
    try:
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "barnraise.node.supervise", str(data), "--"),
                    *barnraise("join", *arguments, "--background"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd=data,
                start_new_session=True,
            )
    except OSError as error:
        raise StorageError(f"cannot use the data folder {data}: {error.strerror or error}") from error
    it = Background(process, errors)
    say(f"starting the node in the background; its log is {data / 'node.log'}")
    try:
        return it, _until_up(it, data)
    except BaseException:  # Ctrl-C included: nothing that was not seen to work stays behind
        it.terminate()
        raise


def _until_up(it: Background, data: Path) -> State:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        state = state_in(data)
        if state is not None:
            return state
        code = it.ended()
        if code is not None:
            typer.echo(
                it.complaint() or f"barnraise: the node {cause(code)}; see {data / 'node.log'}", err=True
            )
            raise typer.Exit(code or 1)
        time.sleep(LOOK_EVERY_S)
    raise BarnraiseError(f"the node did not come up within {START_S:.0f} s; see {data / 'node.log'}")
