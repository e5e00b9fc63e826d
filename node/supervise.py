"""Keeps a background node alive: starts it again after a crash, later each time, and says so.

``python -m barnraise.node.supervise DATA -- COMMAND...`` runs COMMAND as its child. What
ends in an orderly way, or could never start, stays ended and its exit code is passed on;
what crashed (killed, a failure after it was up) is started again after 1, 2, 4 ... s, at
most 300. After eight crashes in a row, none of which followed ten minutes of life, it gives up.
Imports little: it stays in memory beside the node. Under systemd, systemd does this instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from barnraise.protocol.log_lines import written

FIRST_S = 1.0
LONGEST_S = 300.0
STOOD_S = 600.0
MOST_CRASHES = 8
READY_FD = "BARNRAISE_READY_FD"
AFTER_CRASH = "BARNRAISE_AFTER_CRASH"
ENDED_BY_PERSON = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
FINAL_CODES = frozenset({0, 2, 3, 4, 5, 130})  # see run_from_config
_MOST_STATE = 4096


@dataclass(frozen=True, slots=True)
class Crashes:
    """How often in a row the child crashed."""

    count: int = 0


def after_end(crashes: Crashes, code: int, lived_s: float, was_up: bool) -> tuple[Crashes, float | None]:
    """Decide what follows when the child has ended: the delay in seconds before the next start, None: none.

    ``code`` is as of ``subprocess`` (below 0: minus the signal); ``was_up``: it had served its
    control socket before.
    """
    if code in FINAL_CODES or -code in ENDED_BY_PERSON or (code > 0 and not was_up and crashes.count == 0):
        return crashes, None
    count = 1 if lived_s >= STOOD_S else crashes.count + 1
    if count >= MOST_CRASHES:
        return Crashes(count), None
    return Crashes(count), min(LONGEST_S, FIRST_S * 2.0 ** (count - 1))


def cause(code: int) -> str:
    """An exit code for people: ``was killed by SIGKILL``, ``ended with exit code 1``."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory, if nobody killed it)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def tell_ready() -> None:
    """In the child: say that it serves its control socket, where somebody waits for that."""
    descriptor = os.environ.pop(READY_FD, "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(descriptor), b"1")
            os.close(int(descriptor))


def lock_path(data: Path) -> Path:
    """The file that a supervisor holds."""
    return data / "supervisor.lock"


def read_supervisor(data: Path) -> dict[str, Any] | None:
    """What the living supervisor of ``data`` says of itself: ``pid``, ``crashes``, ``text``, ``until_ms``."""
    try:
        with lock_path(data).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None  # nobody holds it
            except BlockingIOError:
                told = json.loads(file.read(_MOST_STATE) or b"{}")
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and isinstance(told.get("pid"), int) else None


class _Stopped(Exception):
    pass


class Supervisor:
    """One child, started again and again."""

    def __init__(self, data: Path, command: Sequence[str]) -> None:
        self._data = data
        self._command = list(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting = False
        self._stopping = False

    def run(self) -> int:
        """Until the child has ended for good; its exit code (128 + n for signal n, 1 after giving up)."""
        descriptor = os.open(lock_path(self._data), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print(f"barnraise: a background node runs in {self._data} already", file=sys.stderr)
                return 1
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            code = self._supervise(lock.fileno())
            self._tell(lock.fileno(), None)
        return code if code >= 0 else 128 - code

    def _supervise(self, lock: int) -> int:
        crashes, said = Crashes(), ""
        while True:
            self._tell(lock, {"pid": os.getpid(), "crashes": crashes.count, "text": said, "until_ms": None})
            started = time.monotonic()
            code, was_up = self._once(said)
            if self._stopping:
                return code
            crashes, delay = after_end(crashes, code, time.monotonic() - started, was_up)
            if delay is None:
                if code not in FINAL_CODES and crashes.count >= MOST_CRASHES:
                    self._log(
                        logging.ERROR,
                        f"the node {cause(code)}: {crashes.count} crashes in a row, not started again; "
                        "see the lines above, and start it with 'barnraise join'",
                    )
                    return 1
                return code
            self._log(
                logging.WARNING,
                f"the node {cause(code)}; it starts again in {delay:.0f} s "
                f"(crash {crashes.count} in a row, given up after {MOST_CRASHES})",
            )
            said = f"started again after a crash: the node {cause(code)} (crash {crashes.count} in a row)"
            until_ms = round((time.time() + delay) * 1000)
            told = {"pid": os.getpid(), "crashes": crashes.count, "until_ms": until_ms}
            self._tell(lock, {**told, "text": f"the node {cause(code)}"})
            if not self._sleep(delay):
                return 0

    def _once(self, said: str) -> tuple[int, bool]:
        """Run the child to its end; whether it was up."""
        read, write = os.pipe()
        environment = {**os.environ, READY_FD: str(write), AFTER_CRASH: said}
        try:
            self._child = subprocess.Popen(self._command, env=environment, pass_fds=(write,))
        finally:
            os.close(write)
        if self._stopping:
            self._child.terminate()
        try:
            code = self._child.wait()
            os.set_blocking(read, False)
            with contextlib.suppress(BlockingIOError):
                return code, os.read(read, 1) == b"1"
            return code, False
        finally:
            os.close(read)
            self._child = None

    def _sleep(self, seconds: float) -> bool:
        """Wait; false: a signal ended it."""
        try:
            self._waiting = True
            if self._stopping:
                return False
            time.sleep(seconds)
        except _Stopped:
            return False
        finally:
            self._waiting = False
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._child is not None:
            self._child.send_signal(number)
        elif self._waiting:
            self._waiting = False
            raise _Stopped

    def _tell(self, lock: int, told: dict[str, Any] | None) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end a node
            text = b"" if told is None else json.dumps(told).encode()
            os.pwrite(lock, text, 0)
            os.ftruncate(lock, len(text))

    def _log(self, level: int, text: str) -> None:
        """One line in ``node.log``, as the node's own."""
        line = written("supervisor", logging.getLevelName(level).lower(), "barnraise.node", text)
        with contextlib.suppress(OSError), (self._data / "node.log").open("ab") as file:
            file.write(line)


def main() -> NoReturn:
    """The process; see the module."""
    data, dashes, *command = sys.argv[1:]
    assert dashes == "--"
    sys.exit(Supervisor(Path(data), command).run())


if __name__ == "__main__":
    main()
