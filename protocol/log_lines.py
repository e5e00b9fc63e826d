"""Every process's log: one JSON object a line, the same keys everywhere.

::

    {"time": "2026-12-02T18:31:51.042137Z", "level": "info", "logger": "barnraise.coordinator.verify_belt",
     "role": "coordinator", "pid": 1234, "run": "9f0c...", "unit": "3fa9...", "number": 17,
     "submission": "b71d...", "version": 4, "message": "...", "exception": "Traceback ..."}

``time`` is UTC. ``unit`` (the beginning of the lease's id), ``number``, ``submission`` and ``version`` are
there while a unit is handled (``barnraise.protocol.unit_context``), ``run`` once it is known, ``exception``
with a traceback. Much of what is logged are strangers' words: names, errors, addresses. A line is ASCII
without control characters, whatever is in it, so nobody can begin a line of their own or steer a
terminal by it; it has at most ``MOST_MESSAGE`` + ``MOST_EXCEPTION`` characters of theirs, before escaping.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from barnraise.protocol.unit_context import SHORT, unit_at_hand

LEVEL_VARIABLE = "BARNRAISE_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error", "critical")
MOST_MESSAGE = 4000
MOST_EXCEPTION = 16_000
STDERR = 2

_process_run = ""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line, read again. ``time``: UTC, sorts as text; -1 and "": not in the line."""

    time: str
    level: str
    logger: str
    message: str
    role: str = ""
    pid: int = -1
    run: str = ""
    unit: str = ""
    number: int = -1
    submission: str = ""
    version: int = -1
    exception: str = ""


_decoder = msgspec.json.Decoder(LogLine)


def read_line(data: bytes) -> LogLine | None:
    """``data`` as a line of a log; None if it is none (an older release's, or what a library printed)."""
    if not data.startswith(b'{"time"'):
        return None
    try:
        line = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return line if line.level in LEVELS else None


def moment(seconds: float) -> str:
    """Seconds since the epoch as a line has them: UTC, ISO 8601, microseconds."""
    whole, micros = divmod(round(seconds * 1e6), 1_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{micros:06d}Z"


def tell_run(run_id: bytes) -> None:
    """From now on this process's lines say that they are of this run."""
    global _process_run
    _process_run = run_id.hex()[:SHORT]


def chosen_level() -> int:
    """What ``BARNRAISE_LOG_LEVEL`` asks for (children have it from their parents); INFO by default."""
    name = os.environ.get(LEVEL_VARIABLE, "").lower()
    return logging.getLevelNamesMapping()[name.upper()] if name in LEVELS else logging.INFO


class JsonLines(logging.Formatter):
    """Formats records as the module says. ``role``: what this process is, such as ``verifier``."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self._second, self._shown = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        whole, micros = divmod(round(record.created * 1e6), 1_000_000)
        if whole != self._second:  # two threads may both come here: each makes the same of the same second
            shown = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
            self._second, self._shown = whole, shown
        else:
            shown = self._shown
        line: dict[str, Any] = {
            "time": f"{shown}.{micros:06d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "role": self._role,
            "pid": record.process or os.getpid(),
        }
        unit = unit_at_hand()
        run = (unit.run if unit is not None else "") or _process_run
        if run:
            line["run"] = run
        if unit is not None and unit.id:
            line["unit"] = unit.id
            if unit.number >= 0:
                line["number"] = unit.number
            if unit.submission:
                line["submission"] = unit.submission
            if unit.version >= 0:
                line["version"] = unit.version
        line["message"] = bounded(record.getMessage(), MOST_MESSAGE)
        if record.exc_info:
            line["exception"] = bounded(self.formatException(record.exc_info), MOST_EXCEPTION, keep_end=True)
        return json.dumps(line)  # ASCII: what is neither letter nor digit there is escaped


def bounded(text: str, most: int, *, keep_end: bool = False) -> str:
    """``text``, with its middle (``keep_end``) or its end left out where it is longer than ``most``."""
    if len(text) <= most:
        return text
    if not keep_end:
        return text[: most - 1] + "…"
    return f"{text[: most // 2]}…{text[len(text) - most // 2 + 1 :]}"


class LogFile(logging.Handler):
    """Lines into ``path``: at most ``most`` bytes, and of ``kept`` older files (``.1``, ``.2``...) each.

    Every line is one write to a file opened for appending, so several processes may share it. A disk
    that refuses stops nobody: lines are lost, which is said once on stderr, until it takes them again.
    """

    def __init__(self, path: Path, most: int, kept: int) -> None:
        """
        Raises:
            OSError: the file cannot be opened.
        """
        super().__init__()
        self.path = path
        self._most, self._kept = most, kept
        self._silent = False
        self._torn = False
        self._file, self._size = -1, 0
        self._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = self.format(record).encode("ascii", "backslashreplace") + b"\n"
        except Exception as error:
            data = _unsayable(record, error)
        try:
            self._write(data)
        except OSError as error:
            self._close()
            if not self._silent:
                self._silent = True
                print(f"barnraise: cannot write {self.path}: {error.strerror or error}", file=sys.stderr)

    def close(self) -> None:
        self._close()
        super().close()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._file).st_size

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):
                os.close(file)

    def _write(self, data: bytes) -> None:
        if self._file < 0:
            self._open()
        if self._size and self._size + len(data) > self._most:
            self._rotate()
        if self._torn:  # by a full disk: the next line is whole again
            data = b"\n" + data
        self._torn = True
        self._size += _write_all(self._file, data)
        self._torn = False

    def _rotate(self) -> None:
        try:
            for number in range(self._kept, 0, -1):
                with suppress(FileNotFoundError):
                    os.replace(self._named(number - 1), self._named(number))
            self._close()
            self._open()
        except OSError:  # a folder that takes no names: bounded all the same
            if self._file < 0:
                self._open()
            os.ftruncate(self._file, 0)
        self._size = os.fstat(self._file).st_size

    def _named(self, number: int) -> str:
        return f"{self.path}.{number}" if number else str(self.path)


class _ToStderr(logging.Handler):
    """A child's lines: its parent gave it the file."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = self.format(record).encode("ascii", "backslashreplace") + b"\n"
        except Exception as error:
            data = _unsayable(record, error)
        with suppress(OSError):
            _write_all(STDERR, data)


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


@contextmanager
def logging_to(*handlers: logging.Handler, propagate: bool = True) -> Iterator[None]:
    """Send what barnraise logs, from the chosen level on, to ``handlers``, which are closed at the end.

    ``propagate``: to the root logger's handlers as well, which libraries make unasked.
    """
    root = logging.getLogger("barnraise")
    before = root.level, root.propagate
    root.setLevel(chosen_level())
    root.propagate = propagate
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(before[0])
        root.propagate = before[1]
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def said(line: str) -> str:
    """What a line says, in words: its message, or the end of its exception; other text as it is."""
    read = read_line(line.encode("utf-8", "replace"))
    if read is None:
        return line
    ending = read.exception.rstrip().rpartition("\n")[2]
    return f"{read.message}: {ending}" if ending else read.message


def written(role: str, level: str, logger: str, message: str) -> bytes:
    """A line, with its newline, for who writes one without the logging module."""
    line = {"time": moment(time.time()), "level": level, "logger": logger, "role": role, "pid": os.getpid()}
    return json.dumps(line | {"message": bounded(message, MOST_MESSAGE)}).encode() + b"\n"


def _unsayable(record: logging.LogRecord, error: Exception) -> bytes:
    """A record whose text cannot be made: a mistake of whoever logged it, which must not hide."""
    where = "".join(traceback.format_exception_only(error)).strip()
    text = f"a line of {record.pathname}:{record.lineno} could not be made: {where}"
    return written("?", "error", record.name, text)


def _write_all(file: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return len(data)
