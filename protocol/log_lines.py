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

import json
import logging
import os
import time
import traceback
from json.encoder import encode_basestring_ascii as quoted

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
    except (msgspec.MsgspecError, UnicodeError):
        try:  # half of a surrogate pair, as file names may have it, is refused by the faster decoder
            line = msgspec.convert(json.loads(data), LogLine)
        except (msgspec.MsgspecError, ValueError, RecursionError):
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


def level_asked() -> str:
    """What ``BARNRAISE_LOG_LEVEL`` asks for (children have it from their parents); "": nothing."""
    name = os.environ.get(LEVEL_VARIABLE, "").lower()
    return name if name in LEVELS else ""


def chosen_level() -> int:
    """The level to log from on; INFO by default."""
    return logging.getLevelNamesMapping()[(level_asked() or "info").upper()]


def ask_level(name: str) -> None:
    """Log from this level on, here and in processes started from now on. Not of ``LEVELS``: no change."""
    if name in LEVELS:
        os.environ[LEVEL_VARIABLE] = name
        logging.getLogger("barnraise").setLevel(chosen_level())


class JsonLines(logging.Formatter):
    """Formats records as the module says. ``role``: what this process is, such as ``verifier``."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self._second, self._shown = -1, ""
        self._known: dict[tuple[str, str], str] = {}

    def format(self, record: logging.LogRecord) -> str:
        whole, micros = divmod(round(record.created * 1e6), 1_000_000)
        if whole != self._second:  # two threads may both come here: each makes the same of the same second
            shown = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
            self._second, self._shown = whole, shown
        else:
            shown = self._shown
        # Put together by hand, of parts that are JSON already: half the price of one json.dumps.
        parts = [f'{{"time": "{shown}.{micros:06d}Z"', self._who(record.levelname, record.name)]
        unit = unit_at_hand()
        run = (unit.run if unit is not None else "") or _process_run
        if run:
            parts.append(f'"run": "{run}"')
        if unit is not None and unit.id:
            parts.append(unit.as_json())
        parts.append(f'"message": {quoted(message_of(record))}')
        if record.exc_info:
            exception = bounded(self.formatException(record.exc_info), MOST_EXCEPTION, keep_end=True)
            parts.append(f'"exception": {quoted(exception)}')
        return ", ".join(parts) + "}"

    def _who(self, level: str, logger: str) -> str:
        known = self._known.get((level, logger))
        if known is None:  # the program has a bounded number of loggers
            known = self._known[level, logger] = ", ".join(
                (
                    f'"level": {quoted(level.lower())}',
                    f'"logger": {quoted(logger)}',
                    f'"role": {quoted(self._role)}',
                    f'"pid": {os.getpid()}',
                )
            )
        return known


def bounded(text: str, most: int, *, keep_end: bool = False) -> str:
    """``text``, with its middle (``keep_end``) or its end left out where it is longer than ``most``."""
    if len(text) <= most:
        return text
    if not keep_end:
        return text[: most - 1] + "…"
    return f"{text[: most // 2]}…{text[len(text) - most // 2 + 1 :]}"


def message_of(record: logging.LogRecord) -> str:
    """A record's message, with what ``Sparing`` remarked, bounded."""
    text: str = bounded(record.getMessage(), MOST_MESSAGE) + getattr(record, "remark", "")
    return text


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


def as_line(handler: logging.Handler, record: logging.LogRecord) -> bytes:
    """What ``handler`` is to write for ``record``, with its newline; in any case something."""
    try:
        return handler.format(record).encode("ascii", "backslashreplace") + b"\n"
    except Exception as error:
        return _unsayable(record, error)


def _unsayable(record: logging.LogRecord, error: Exception) -> bytes:
    """A record whose text cannot be made: a mistake of whoever logged it, which must not hide."""
    where = "".join(traceback.format_exception_only(error)).strip()
    text = f"a line of {record.pathname}:{record.lineno} could not be made: {where}"
    return written("?", "error", record.name, text)
