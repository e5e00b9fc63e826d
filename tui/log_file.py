"""``node.log`` as records: read from its end across rotation, followed while the node writes.

A record is one line as the node's log handler writes it; the lines of a traceback belong
to the record before them.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from barnraise.protocol.wire import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOOK_EVERY_S = 0.25
MOST_TAIL = 2_000_000  # bytes read from the end of one file
_LINE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S{1,200}) (.*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Record:
    """``at``: local time, ``2026-12-02 04:05:42``; ``text`` may have several lines."""

    at: str
    millis: int
    level: str
    source: str
    text: str

    @property
    def at_ms(self) -> int:
        """The moment, ms since the epoch."""
        return round(datetime.strptime(self.at, "%Y-%m-%d %H:%M:%S").timestamp() * 1000) + self.millis


Keep = Callable[[Record], bool]


def _any(record: Record) -> bool:
    return True


def log_files(data: Path) -> list[Path]:
    """The log and what it was rotated to, oldest first."""
    names = ("node.log.2", "node.log.1", "node.log")
    return [path for name in names if (path := data / name).is_file()]


def records(lines: Iterator[str]) -> Iterator[Record]:
    """Group lines into records; what comes before the first whole one is dropped."""
    current: Record | None = None
    for line in lines:
        match = _LINE.fullmatch(line.rstrip("\n"))
        if match is not None and match[3] in LEVELS:
            if current is not None:
                yield current
            current = Record(match[1], int(match[2]), match[3], match[4], match[5])
        elif current is not None and len(current.text) < MOST_TAIL:
            current = Record(
                current.at, current.millis, current.level, current.source, f"{current.text}\n{line.rstrip()}"
            )
    if current is not None:
        yield current


def tail(data: Path, count: int, keep: Keep = _any, until: int | None = None) -> list[Record]:
    """The last ``count`` records that are to be kept, oldest first; ``node.log`` as far as byte ``until``."""
    found: deque[Record] = deque(maxlen=count)
    for path in log_files(data):
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            if until is not None and path.name == "node.log":
                end = min(end, until)
            start = max(0, end - MOST_TAIL)
            file.seek(start)
            text = file.read(end - start).decode("utf-8", "replace")
        found.extend(record for record in records(iter(text.splitlines())) if keep(record))
    return list(found)


def follow(data: Path, count: int, over: Callable[[], bool], keep: Keep = _any) -> Iterator[Record]:
    """The last ``count`` records, then new ones as they come, across rotation, until ``over()``."""
    path = data / "node.log"
    file, rest = _open(path), ""
    end = file.seek(0, os.SEEK_END) if file is not None else 0
    yield from tail(data, count, keep, end)
    while True:
        ended = over()  # before the last look: what was written until then is shown
        fresh = rest + (file.read() if file is not None else "")
        if _rotated(file, path):
            if file is not None:
                fresh += file.read()
                file.close()
            file = _open(path)
            fresh += file.read() if file is not None else ""
        whole, newline, rest = fresh.rpartition("\n")
        yield from filter(keep, records(iter((whole + newline).splitlines())))
        if ended:
            return
        time.sleep(LOOK_EVERY_S)


def is_for_people(record: Record) -> bool:
    """Whether a node in the foreground would have printed it."""
    return record.source == "barnraise.node" or record.level not in ("DEBUG", "INFO")


def at_least(level: str) -> Keep:
    """A filter: this level and graver."""
    least = LEVELS.index(level.upper())
    return lambda record: LEVELS.index(record.level) >= least


def spoken(record: Record, as_json: bool = False) -> str:
    """A record as a node in the foreground prints it."""
    level = record.level.lower()
    if as_json:
        return json.dumps(
            {"at_ms": record.at_ms, "level": level, "source": record.source, "text": record.text}
        )
    mark = f"{level}: " if record.level not in ("DEBUG", "INFO") else ""
    first, *more = record.text.split("\n")
    return "\n".join(
        [f"{record.at[11:]} {mark}{printable(first, 2000)}", *(printable(x, 2000) for x in more)]
    )


def last_error(data: Path) -> str:
    """The last error in the log, or ``""``."""
    found = tail(data, 1, at_least("ERROR"))
    return found[0].text.split("\n")[0] if found else ""


def _open(path: Path) -> TextIO | None:
    try:
        return path.open(encoding="utf-8", errors="replace", newline="")
    except OSError:
        return None


def _rotated(file: TextIO | None, path: Path) -> bool:
    try:
        now = path.stat()
    except OSError:
        return False
    return file is None or os.fstat(file.fileno()).st_ino != now.st_ino
