"""Where a program's lines go: files that stay within their bytes, whatever strangers and disks do."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from barnraise.protocol.log_lines import as_line, chosen_level


class Sparing(logging.Filter):
    """At most ``most`` lines in ``every_s`` seconds from one place in the program; the rest is counted.

    Strangers decide how often some lines are written: they must not push all others out of a log.
    One filter may serve several handlers: all keep the same records.
    """

    def __init__(self, most: int = 300, every_s: int = 600) -> None:
        super().__init__()
        self._most, self._every_s = most, every_s
        self._places: dict[tuple[str, int], list[int]] = {}  # -> [period, lines in it]

    def filter(self, record: logging.LogRecord) -> bool:
        found: bool | None = getattr(record, "spared", None)
        if found is None:
            found = record.spared = self._has_room(record)
        return found

    def _has_room(self, record: logging.LogRecord) -> bool:
        period = int(record.created) // self._every_s
        place = self._places.setdefault((record.name, record.lineno), [period, 0])
        if place[0] != period:
            left_out = max(0, place[1] - self._most)
            place[:] = period, 0
            if left_out:
                record.remark = f" ({left_out} more such lines were left out before)"
        place[1] += 1
        if place[1] == self._most:
            minutes = self._every_s // 60
            record.remark = f" ({self._most} such lines in {minutes} minutes: further ones are left out)"
        return place[1] <= self._most


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
        data = as_line(self, record)
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
        self._size += write_all(self._file, data)
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


@contextmanager
def logging_to(*handlers: logging.Handler, of: str = "barnraise", propagate: bool = True) -> Iterator[None]:
    """Send what is logged under ``of``, from the chosen level on, to ``handlers``, closed at the end.

    ``propagate``: to the handlers of loggers above as well. Libraries make some for the root unasked.
    """
    root = logging.getLogger(of)
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


def write_all(file: int, data: bytes) -> int:
    """Write ``data`` to a descriptor; its length.

    Raises:
        OSError: not all of it could be written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return len(data)
