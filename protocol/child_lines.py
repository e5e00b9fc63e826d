"""A child process's log: lines on its stderr, which its parent opened (``barnraise.protocol.child_log``)."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import suppress

from barnraise.protocol.log_keeping import write_all
from barnraise.protocol.log_lines import MOST_MESSAGE, JsonLines, as_line, chosen_level

STDERR = 2


class _ToStderr(logging.Handler):
    """A child's lines: its parent gave it the file."""

    def emit(self, record: logging.LogRecord) -> None:
        data = as_line(self, record)
        with suppress(OSError):
            write_all(STDERR, data)


class _Printed(io.TextIOBase):
    """What is printed in a child, as lines of its log: a library's words may be a stranger's."""

    encoding = "utf-8"

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level
        self._rest = ""
        self._logger = logging.getLogger("printed")

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


def log_in_child(role: str) -> None:
    """Set a child process up: all that is logged or printed there becomes lines on its stderr.

    What compiled code writes to the descriptor itself stays as it is.
    """
    handler = _ToStderr()
    handler.setFormatter(JsonLines(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)  # libraries' details help nobody
    logging.getLogger("barnraise").setLevel(chosen_level())
    logging.captureWarnings(True)
    sys.stdout = _Printed(logging.INFO)
    sys.stderr = _Printed(logging.WARNING)
