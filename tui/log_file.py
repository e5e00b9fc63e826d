"""Logs as records: read from their ends across rotation, several files as one, followed as they grow.

A record is one JSON object a line (``barnraise.protocol.log_lines``), or a line as earlier releases
wrote it. Any other line (what compiled code printed in a child) belongs to the record before it.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from barnraise.protocol.log_lines import LogLine, read_line
from barnraise.protocol.wire import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOOK_EVERY_S = 0.25
NODE_LOG = ("node.log",)
MOST_OLDER = 9  # rotated files that are looked for
MOST_TEXT = 200_000  # characters of a record with all that belongs to it
_PIECE = 64 * 1024
_MOST_LINE = 512 * 1024  # bytes; what is longer is nothing that we wrote
_OLD = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S{1,200}) (.*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Record:
    """``time``: UTC, ``2026-12-02T04:05:42.123456Z``; ``text`` may have several lines.

    The others as in ``LogLine``: "" or -1 where the line has none.
    """

    time: str
    level: str
    source: str
    text: str
    role: str = ""
    pid: int = -1
    run: str = ""
    unit: str = ""
    number: int = -1
    submission: str = ""
    version: int = -1

    @property
    def moment(self) -> datetime:
        """In UTC."""
        try:
            return datetime.fromisoformat(self.time)
        except ValueError:  # a line that nobody of ours wrote
            return datetime.fromtimestamp(0, UTC)

    @property
    def at(self) -> str:
        """Local time, ``2026-12-02 04:05:42``."""
        return self.moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")

    @property
    def at_ms(self) -> int:
        """The moment, ms since the epoch."""
        return round(self.moment.timestamp() * 1000)


Keep = Callable[[Record], bool]
May = Callable[[bytes], bool]
"""Whether a line may be wanted, by its bytes alone: decides what need not be parsed."""


def any_record(record: Record) -> bool:
    """Keep everything."""
    return True


def any_line(line: bytes) -> bool:
    """Parse everything."""
    return True


def log_files(data: Path, names: Sequence[str] = NODE_LOG) -> list[Path]:
    """Logs and what they were rotated to, each oldest first."""
    return [path for name in names for path in reversed(_series(data / name))]


def records(lines: Iterable[str]) -> Iterator[Record]:
    """Group lines into records; what comes before the first whole one is dropped."""
    current: Record | None = None
    for line in lines:
        begun = _begun(line.rstrip("\n").encode("utf-8", "replace"))
        if begun is not None:
            if current is not None:
                yield current
            current = begun
        elif current is not None and len(current.text) < MOST_TEXT:
            current = replace(current, text=f"{current.text}\n{line.rstrip()}")
    if current is not None:
        yield current


def newest_first(
    data: Path,
    names: Sequence[str] = NODE_LOG,
    may: May = any_line,
    ends: dict[str, int] | None = None,
) -> Iterator[Record]:
    """The records of several logs by time, newest first, read no further than they are asked for.

    ``ends``: of a log by its name, as many bytes of the newest file as are to be read.
    """
    return heapq.merge(
        *(_backwards(data / name, may, None if ends is None else ends.get(name)) for name in names),
        key=lambda record: record.time,
        reverse=True,
    )


def tail(
    data: Path,
    count: int,
    keep: Keep = any_record,
    names: Sequence[str] = NODE_LOG,
    may: May = any_line,
    ends: dict[str, int] | None = None,
) -> list[Record]:
    """The last ``count`` records that are to be kept, oldest first."""
    found = list(islice(filter(keep, newest_first(data, names, may, ends)), count)) if count else []
    return found[::-1]


def follow(
    data: Path,
    count: int,
    over: Callable[[], bool],
    keep: Keep = any_record,
    names: Sequence[str] = NODE_LOG,
    may: May = any_line,
) -> Iterator[Record]:
    """The last ``count`` records, then new ones as they come, across rotation, until ``over()``."""
    followed = [_Followed(data / name) for name in names]
    yield from tail(data, count, keep, names, may, {item.path.name: item.position for item in followed})
    while True:
        ended = over()  # before the last look: what was written until then is shown
        fresh = [record for item in followed for record in records(item.fresh(may))]
        yield from filter(keep, sorted(fresh, key=lambda record: record.time))
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
    if as_json:
        return _as_json(record)
    return _laid_out(f"{record.at[11:]} {_mark(record)}", record)


def spoken_of_many(record: Record, as_json: bool = False) -> str:
    """A record among those of several processes, days and units."""
    if as_json:
        return _as_json(record)
    unit = f"[unit {record.number}] " if record.number >= 0 else f"[{record.unit}] " if record.unit else ""
    who = printable(record.role or record.source, 64)
    moment = f"{record.at}.{record.at_ms % 1000:03d}"  # places of one second must be told apart
    return _laid_out(f"{moment} {who}: {unit}{_mark(record)}", record)


def last_error(data: Path) -> str:
    """The last error in the log, or ``""``."""
    found = tail(data, 1, at_least("ERROR"))
    return found[0].text.split("\n")[0] if found else ""


def _as_json(record: Record) -> str:
    told: dict[str, object] = {
        "at_ms": record.at_ms,
        "time": record.time,
        "level": record.level.lower(),
        "source": record.source,
        "text": record.text,
    }
    for name in ("role", "pid", "run", "unit", "number", "submission", "version"):
        if (value := getattr(record, name)) not in ("", -1):
            told[name] = value
    return json.dumps(told)


def _mark(record: Record) -> str:
    return f"{record.level.lower()}: " if record.level not in ("DEBUG", "INFO") else ""


def _laid_out(head: str, record: Record) -> str:
    """Further lines are set off: none of them can be taken for a line of the log."""
    first, *more = record.text.split("\n")
    return "\n".join([head + printable(first, 4000), *(f"    | {printable(x, 2000)}" for x in more)])


def _begun(line: bytes) -> Record | None:
    """The record that begins with a line, if one does."""
    read = read_line(line)
    if read is not None:
        return _record(read)
    match = _OLD.fullmatch(line.decode("utf-8", "replace")) if line[:2] == b"20" else None
    if match is None:
        return None
    try:
        moment = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    utc = f"{moment:%Y-%m-%dT%H:%M:%S}.{match[2]}000Z"
    return Record(utc, match[3], match[4], match[5])


def _record(line: LogLine) -> Record:
    text = f"{line.message}\n{line.exception}" if line.exception else line.message
    return Record(
        time=line.time,
        level=line.level.upper(),
        source=line.logger,
        text=text,
        role=line.role,
        pid=line.pid,
        run=line.run,
        unit=line.unit,
        number=line.number,
        submission=line.submission,
        version=line.version,
    )


def _series(path: Path) -> list[Path]:
    """A log and what it was rotated to, newest first."""
    older = (path.with_name(f"{path.name}.{number}") for number in range(1, MOST_OLDER + 1))
    return [each for each in (path, *older) if each.is_file()]


def _backwards(path: Path, may: May, end: int | None) -> Iterator[Record]:
    more: list[bytes] = []
    for each in _series(path):
        for line in _lines_back(each, end if each == path else None):
            if line.startswith(b'{"time"') and not may(line):
                more.clear()
                continue
            begun = _begun(line)
            if begun is None:
                if sum(map(len, more[:1])) + len(more) < MOST_TEXT // 100:
                    more.append(line)
                continue
            if more:
                lines = [begun.text, *(item.decode("utf-8", "replace").rstrip() for item in reversed(more))]
                begun = replace(begun, text="\n".join(lines)[:MOST_TEXT])
                more.clear()
            yield begun


def _lines_back(path: Path, end: int | None) -> Iterator[bytes]:
    """A file's whole lines, the last one first."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        place = size if end is None else min(end, size)
        rest = b""
        while place > 0:
            step = min(_PIECE, place)
            place -= step
            file.seek(place)
            rest = file.read(step) + rest
            first, *lines = rest.split(b"\n")
            if lines:
                rest = first
                for line in reversed(lines):
                    if line:
                        yield line
            elif len(rest) > _MOST_LINE:
                rest = b""
        if rest:
            yield rest


class _Followed:
    """One log from its present end on; it may be renamed, or emptied in place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rest = b""
        self._file = self._opened()
        self.position = 0 if self._file is None else self._file.seek(0, os.SEEK_END)

    def fresh(self, may: May) -> list[str]:
        """The lines that were added."""
        data = self._read()
        if self._rotated():
            if self._file is not None:
                data += self._file.read()  # what came before the renaming
                self._file.close()
            self._file = self._opened()
            data += self._read()
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        self._rest = self._rest[-_MOST_LINE:]
        lines = [line for line in whole.split(b"\n") if not line.startswith(b'{"time"') or may(line)]
        return [line.decode("utf-8", "replace") for line in lines]

    def _read(self) -> bytes:
        if self._file is None:
            return b""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
        return self._file.read()

    def _opened(self) -> BinaryIO | None:
        try:
            return self.path.open("rb")
        except OSError:
            return None

    def _rotated(self) -> bool:
        try:
            now = self.path.stat()
        except OSError:
            return False
        return self._file is None or os.fstat(self._file.fileno()).st_ino != now.st_ino
