"""A child process's log: lines on its stderr, which its parent opened (``barnraise.protocol.child_log``)."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from contextlib import suppress

from barnraise.protocol.log_keeping import Sparing, write_all
from barnraise.protocol.log_lines import MOST_MESSAGE, JsonLines, as_line, chosen_level

STDERR = 2
PRINTED = "printed"
"""The logger of what was not logged but printed."""


class _ToStderr(logging.Handler):
    """A child's lines: its parent gave it the file."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        data = as_line(self, record)
        with suppress(OSError):
            write_all(self._descriptor, data)


class _Printed(io.TextIOBase):
    """What is printed in a child, as lines of its log: a library's words may be a stranger's."""

    encoding = "utf-8"

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level
        self._rest = ""
        self._logger = logging.getLogger(PRINTED)

    def write(self, text: str, /) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            self._say(line)
        if len(self._rest) > MOST_MESSAGE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        rest, self._rest = self._rest, ""
        self._say(rest)

    def fileno(self) -> int:
        return STDERR

    def writable(self) -> bool:
        return True

    def _say(self, line: str) -> None:
        if line.strip():
            self._logger.log(self._level, "%s", line.rstrip())


def _read_printed(descriptor: int) -> None:
    """What was written to the captured descriptor, line by line, for ever."""
    out = _Printed(logging.INFO)
    with suppress(OSError):
        while data := os.read(descriptor, 65_536):
            out.write(data.decode("utf-8", "replace"))


def _capture() -> int:
    """Have whatever is written to descriptor 2 read here; a descriptor of the true stderr."""
    stderr = os.dup(STDERR)
    reading, writing = os.pipe()
    os.dup2(writing, STDERR)
    os.close(writing)
    threading.Thread(target=_read_printed, args=(reading,), daemon=True).start()
    return stderr


def log_in_child(role: str, *, capture: bool = False) -> None:
    """Set a child process up: all that is logged or printed there becomes lines on its stderr.

    What compiled code, or a process started from here, writes to the descriptors themselves stays as
    it is; with ``capture`` it becomes lines as well, for where that may be strangers' words. Of
    what is printed no more than ``Sparing`` lets through is kept.
    """
    handler = _ToStderr(_capture() if capture else STDERR)
    logging.getLogger(PRINTED).addFilter(Sparing())
    handler.setFormatter(JsonLines(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)  # libraries' details help nobody
    logging.getLogger("barnraise").setLevel(chosen_level())
    logging.captureWarnings(True)
    sys.stdout = _Printed(logging.INFO)
    sys.stderr = _Printed(logging.WARNING)
