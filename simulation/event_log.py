"""What happened, one JSON object per line, with its virtual time; and a hash over all of it.

``{"t": 312.25, "what": "lease", "node": "n0007", ...}``. Two runs are the same run if their
logs have the same hash. Keys come in the order in which they were given, floats are rounded
to microseconds, and nothing of this machine (paths, process ids, wall clock) gets in.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Heard = Callable[[Event], None]


class EventLog:
    """Appends to a file.

    Attributes:
        count: lines so far. ``over``: whether the last one has been written.
        listeners: called with each event, in order.
    """

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self.path = path
        self.count = 0
        self.over = False
        self.listeners: list[Heard] = []
        self._now = now
        self._sum = hashlib.sha256()
        self._file = path.open("wb")

    def note(self, what: str, **fields: Any) -> None:
        """Write one event down. Floats are rounded to microseconds; fields that are None are left out.

        Nothing happens after ``over``: what comes then is the swarm being taken apart.
        """
        if self.over:
            return
        self.over = what == "over"
        event: Event = {"t": round(self._now(), 6), "what": what}
        for name, value in fields.items():
            if value is not None:
                event[name] = round(value, 6) if isinstance(value, float) else value
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        self._sum.update(line)
        self._file.write(line)
        self.count += 1
        for heard in self.listeners:
            heard(event)

    @property
    def digest(self) -> str:
        """SHA-256 over every line so far, in hex."""
        return self._sum.hexdigest()

    def close(self) -> None:
        """Flush and close the file; ``digest`` and ``count`` stay."""
        self._file.close()


def read_log(path: Path) -> Iterator[Event]:
    """The events of a log's file, in order."""
    with path.open("rb") as file:
        for line in file:
            event: Event = json.loads(line)
            yield event


class Said(logging.Handler):
    """Writes what the daemons log down as events ``line``.

    ``speaker``: whose line it is that is logged just now. ``aliases``: words for what differs from
    run to run, such as folders, which the log must not.
    """

    def __init__(self, log: EventLog, speaker: Callable[[], str], aliases: dict[str, str]) -> None:
        super().__init__()
        self._log, self._speaker, self._aliases = log, speaker, aliases

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        text = record.getMessage()
        for found, alias in self._aliases.items():
            text = text.replace(found, alias)
        self._log.note("line", node=self._speaker(), level=record.levelname.lower(), text=text)
