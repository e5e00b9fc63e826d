"""The end of a log file that grows and is rotated, line by line."""

from __future__ import annotations

import os
import re
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from barnraise.protocol.log_lines import read_line
from barnraise.tui.app.clean import clean_text

MOST_LINES = 2000
MOST_BYTES = 512 * 1024  # read at once: of a file that grew by more, the last part

_LINE = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d),\d+ ([A-Z]+) (\S+) (.*)")


@dataclass(frozen=True)
class LogLine:
    """``level`` is ``INFO`` or so; of a line that continues another, that one's. ``number`` counts from 0."""

    number: int
    day: str
    time: str
    level: str
    source: str
    text: str

    @property
    def bad(self) -> bool:
        """Whether it is an error."""
        return self.level in ("ERROR", "CRITICAL")

    @property
    def grave(self) -> bool:
        """Whether it is a warning or worse."""
        return self.bad or self.level == "WARNING"


def _lines(raw: str) -> list[str]:
    """A line of the log as an earlier release wrote it: one, and those of its traceback, set off."""
    read = read_line(raw.encode("utf-8", "replace"))
    if read is None:
        return [raw]
    try:
        moment = datetime.fromisoformat(read.time).astimezone()
    except ValueError:
        return [raw]
    first, *more = [*read.message.split("\n"), *read.exception.splitlines()]
    head = f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d} {read.level.upper()} {read.logger}"
    return [f"{head} {first}", *(f"  {text}" for text in more)]


class Tail:
    """Follows ``path``; ``read`` is cheap while nothing was added.

    Attributes:
        lines: the newest ``MOST_LINES``.
        count: lines read in all.
        problem: why there is nothing to read, or ``""``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: deque[LogLine] = deque(maxlen=MOST_LINES)
        self.problem = ""
        self._inode = -1
        self._position = 0
        self._rest = b""
        self.count = 0

    def read(self) -> bool:
        """Take in what was added; whether anything was. Blocking, at most ``MOST_BYTES``."""
        try:
            info = self.path.stat()
            if (info.st_ino, info.st_size) == (self._inode, self._position):
                return False
            with self.path.open("rb") as file:
                info = os.fstat(file.fileno())
                if info.st_ino != self._inode or info.st_size < self._position:  # rotated
                    self._inode, self._position, self._rest = info.st_ino, 0, b""
                if info.st_size == self._position:
                    return False
                skipped = max(0, info.st_size - MOST_BYTES - self._position)
                if skipped:
                    self._position += skipped
                    self._rest = b""
                file.seek(self._position)
                data = file.read(info.st_size - self._position)
        except OSError as error:
            self.problem = f"cannot read {self.path}: {error.strerror or error}"
            return False
        self.problem = ""
        self._position += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        for raw in whole[1:] if skipped else whole:  # the first began in what was skipped
            self._add(raw.decode("utf-8", "replace").rstrip("\r"))
        return True

    def _add(self, raw: str) -> None:
        begun, *more = _lines(raw)
        match = _LINE.fullmatch(begun)
        if match:
            line = LogLine(self.count, match[1], match[2], match[3], match[4], clean_text(match[5]))
        else:
            last = self.lines[-1] if self.lines else None
            level = last.level if last else "INFO"
            line = LogLine(self.count, "", "", level, "", clean_text(begun))
        self.count += 1
        self.lines.append(line)
        for text in more:
            self._add(text)
