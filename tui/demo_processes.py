"""The demo's processes: started, watched, restarted when they die, and always ended.

Each runs the very command that a person would type, with its output in a log file.
They get a session of their own, so that Ctrl-C reaches this process alone and the
end is ordered; where the kernel offers it they also die with us, so that even
``kill -9`` of the demo leaves no orphan.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

PR_SET_PDEATHSIG = 1
MAX_RESTARTS = 3


def barnraise(*arguments: str) -> list[str]:
    """The command line that runs ``barnraise ARGUMENTS`` with this very interpreter."""
    return [sys.executable, "-P", "-m", "barnraise.tui.main", *arguments]


def die_with_parent() -> None:
    """For ``preexec_fn``: the kernel ends the new process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Supervised:
    """One named process and how often it had to be started again."""

    name: str
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes]
    restarts: int = 0
    gave_up: bool = False
    peak_memory: int = 0


@dataclass
class Supervisor:
    """Owns the processes of one demo; leaving the ``with`` block ends them all."""

    environment: dict[str, str]
    members: list[Supervised] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str], log: Path) -> Supervised:
        """Start a process whose output is appended to ``log``."""
        member = Supervised(name, command, log, self._spawn(command, log))
        self.members.append(member)
        return member

    def _spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def revive(self) -> list[str]:
        """Start dead processes again (each at most a few times) and return lines about it."""
        lines = []
        for member in self.members:
            code = member.process.poll()
            if code is None or code == 0 or member.gave_up:
                continue
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            if member.restarts >= MAX_RESTARTS:
                member.gave_up = True
                lines.append(f"{member.name} died again ({cause}); not restarted, see {member.log}")
                continue
            member.restarts += 1
            member.process = self._spawn(member.command, member.log)
            lines.append(f"{member.name} died ({cause}); started again")
        return lines

    def measure(self) -> None:
        """Remember the most memory (resident, bytes) that each process and its children have held."""
        for member in self.members:
            total = 0
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(member.process.pid)
                for each in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        total += each.memory_info().rss
            member.peak_memory = max(member.peak_memory, total)

    def stop(self, patience_s: float = 8.0) -> None:
        """SIGTERM to all, youngest first; SIGKILL to the process group of whoever stays.

        A second Ctrl-C does not interrupt it: it is bounded, and what it ends must not stay.
        """
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._stop(patience_s)
        finally:
            signal.signal(signal.SIGINT, before)

    def _stop(self, patience_s: float) -> None:
        for member in reversed(self.members):
            if member.process.poll() is None:
                member.process.terminate()
        deadline = time.monotonic() + patience_s
        for member in self.members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(member.process.pid, signal.SIGKILL)
                member.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def last_lines(log: Path, count: int = 5) -> str:
    """The end of a log file, for an error that must say why."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return ""
