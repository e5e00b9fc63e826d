"""Terminals for tests: a pseudo-terminal by the standard library alone, and tmux where it is installed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

PATIENCE_S = 240.0
LOOK_EVERY_S = 0.1
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[P_^X].*?\x1b\\|[ -/]*[0-~])"
)


class Terminal(Protocol):
    """A terminal with one program in it."""

    def screen(self) -> str:
        """What can be read on it (of a bare pseudo-terminal: all that was written)."""

    def press(self, keys: str) -> None:
        """Type; ``\\r`` is Enter."""

    def exit_code(self) -> int | None:
        """The program's, once it has ended."""


def until(terminal: Terminal, reached: Callable[[], object], what: str) -> None:
    """Wait until ``reached``."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, f"{what}; on the screen:\n{terminal.screen()[-3000:]}"
        time.sleep(LOOK_EVERY_S)


def read(terminal: Terminal, text: str) -> None:
    """Wait until ``text`` stands on the screen."""
    until(terminal, lambda: text in terminal.screen(), f"never read {text!r}")


class Pty:
    """A pseudo-terminal of its own session; everything written to it is kept, without escape sequences."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._written = ""
        self._gone = False
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._gone:
            with suppress(OSError):
                if select.select([self._master], [], [], 0.2)[0]:
                    data = os.read(self._master, 65_536)
                    if data:
                        self._written += data.decode("utf-8", "replace")
                    continue
            if self.process.poll() is not None:
                return

    def screen(self) -> str:
        """See ``Terminal``."""
        return _ESCAPES.sub("", self._written)

    def press(self, keys: str) -> None:
        """See ``Terminal``."""
        os.write(self._master, keys.encode())

    def exit_code(self) -> int | None:
        """See ``Terminal``."""
        return self.process.poll()

    def hang_up(self) -> None:
        """The terminal goes away, as when its window is closed."""
        self._gone = True
        self._reader.join(5)
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        """End the program and the terminal."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
        self._reader.join(5)
        if self._master >= 0:
            os.close(self._master)


@contextmanager
def pseudo_terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Pty]:
    """Run ``command`` in a pseudo-terminal of 100 by 30."""
    terminal = Pty(command, {**environment, "TERM": "xterm-256color"})
    try:
        yield terminal
    finally:
        terminal.close()


class Tmux:
    """A tmux server of its own, with one window."""

    def __init__(self, socket: Path, code: Path) -> None:
        self._base = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self._code = code

    def run(self, *words: str) -> str:
        """One tmux command."""
        done = subprocess.run([*self._base, *words], capture_output=True, text=True, timeout=30)
        return done.stdout

    def screen(self) -> str:
        """See ``Terminal``."""
        return self.run("capture-pane", "-p", "-t", "node")

    def press(self, keys: str) -> None:
        """See ``Terminal``."""
        self.run("send-keys", "-t", "node", *(["Enter"] if keys == "\r" else ["-l", keys]))

    def exit_code(self) -> int | None:
        """See ``Terminal``."""
        text = self._code.read_text() if self._code.exists() else ""
        return int(text) if text.endswith("\n") else None


@contextmanager
def tmux(folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Tmux]:
    """Run ``command`` in tmux, in a window of 100 by 30; the shell stays open after it."""
    # A short name: a socket's path has room for about 100 bytes.
    socket = Path("/tmp") / f"barnraise-test-{os.getpid()}.tmux"
    code = folder / "code"
    code.unlink(missing_ok=True)
    script = f"{shlex.join(command)}; echo $? > {shlex.quote(str(code))}; exec sleep 600"
    it = Tmux(socket, code)
    settings = [f"-e{name}={value}" for name, value in environment.items() if name in ("OMP_NUM_THREADS",)]
    it.run("new-session", "-d", "-s", "node", "-x", "100", "-y", "30", *settings, "sh", "-c", script)
    try:
        yield it
    finally:
        it.run("kill-server")
        socket.unlink(missing_ok=True)
