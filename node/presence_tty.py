"""Input at terminals: of people who are logged in, here or over ssh.

The system notes when a terminal was last read from; Linux does so every eight seconds at
most, so that somebody who comes back at a terminal is seen up to eight seconds late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from barnraise.node.presence import Answer

DEV = Path("/dev")
_USERS_S = 5.0


class Terminals:
    """Asks the terminals of everybody who is logged in; where nobody is listed, all that are open."""

    name = "terminals"

    def __init__(self, dev: Path = DEV, users: Callable[[], Iterable[str]] | None = None) -> None:
        """``users``: names of the terminals of those who are logged in, below ``dev``."""
        self._dev = dev
        self._users = users or logged_in
        self._looked_at = -float("inf")
        self._paths: list[Path] = []

    def ask(self) -> Answer | None:
        """See ``Source.ask``."""
        now = time.monotonic()
        if now - self._looked_at >= _USERS_S:
            self._looked_at = now
            self._paths = self._terminals()
        read_at = 0.0
        there = 0
        for path in self._paths:
            with suppress(OSError):
                read_at = max(read_at, path.stat().st_atime)
                there += 1
        if not there:
            return None
        count = f"{there} terminal{'s' if there > 1 else ''}"
        return Answer(self.name, max(0.0, time.time() - read_at), count)

    def _terminals(self) -> list[Path]:
        listed = [self._dev / name for name in self._users() if name]
        if listed:
            return listed
        found: list[Path] = []
        with suppress(OSError):
            found = [entry for entry in (self._dev / "pts").iterdir() if entry.name.isdigit()]
        return found


def logged_in() -> list[str]:
    """The terminals of those who are logged in, below ``/dev``, as the system's list has them."""
    try:
        names = [user.terminal for user in psutil.users()]
    except (OSError, psutil.Error):
        return []
    return [name for name in names if name and not name.startswith((":", "/"))]
