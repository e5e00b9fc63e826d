"""The person at a Linux desktop: by Wayland, GNOME, X11 or, where none of these says it, by logind's hint.

Whoever knows exactly is believed. Under Wayland the X server sees little of what a person
does, and is not asked. A desktop's hint comes minutes late, and only from desktops that
give it; until one does, somebody counts as there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from barnraise.node.presence import Answer
from barnraise.node.presence_dbus import Bus, Logind, Session, gnome_idle_s
from barnraise.node.presence_wayland import Wayland
from barnraise.node.presence_x11 import SOCKETS, XDisplay

_LOOK_S = 5.0  # for people who log in and out
_MISSING_S = 60.0  # until GNOME is looked for again
_GRAPHICAL = frozenset({"x11", "wayland", "mir"})


class Desktop:
    """Everybody who is logged in on this machine, and their screens."""

    name = "desktop"

    def __init__(
        self,
        system: Bus | None = None,
        session: Bus | None = None,
        runtime: Path | None = None,
        x_sockets: Path = SOCKETS,
    ) -> None:
        """``runtime``: the user's folder of sockets, such as ``/run/user/1000``."""
        self._logind = Logind(system or Bus("SYSTEM"))
        self._session_bus = session or Bus("SESSION")
        default = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
        self._runtime = runtime or Path(default)
        self._x_sockets = x_sockets
        self._looked_at = -float("inf")
        self._sessions: list[Session] | None = None
        self._compositors: dict[Path, Wayland] = {}
        self._displays: dict[str, XDisplay] = {}
        self._no_gnome_until = -float("inf")

    def ask(self) -> Answer | None:
        """See ``Source.ask``."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._look()
        exact = list(self._exact(now))
        if exact:
            return min(exact, key=lambda answer: answer.idle_s or 0.0)
        if self._sessions is None:
            return None
        hints = [self._logind.idle_s(session) for session in self._sessions if session.kind in _GRAPHICAL]
        if hints:
            return Answer("logind", min(hints), "the desktop's own hint")
        # People at terminals are the terminals' to tell; where there are none, nobody is here.
        return None if self._sessions else Answer("logind", None)

    def terminals(self) -> list[str]:
        """The terminals of those who are logged in, below ``/dev``."""
        return [session.tty for session in self._sessions or () if session.tty]

    def _exact(self, now: float) -> Iterable[Answer]:
        wayland = [answer for answer in (one.ask() for one in self._compositors.values()) if answer]
        yield from wayland
        if now >= self._no_gnome_until:
            idle_s = gnome_idle_s(self._session_bus)
            if idle_s is None:
                self._no_gnome_until = now + _MISSING_S
            else:
                yield Answer("gnome", idle_s)
        for display in self._displays.values():
            answer = display.ask()
            if answer is not None:
                yield answer

    def _look(self) -> None:
        self._sessions = self._logind.sessions()
        compositors: list[Path] = []
        with suppress(OSError):
            compositors = [
                path for path in sorted(self._runtime.glob("wayland-*")) if not path.name.endswith(".lock")
            ][:4]
        for path in self._compositors.keys() - set(compositors):
            self._compositors.pop(path).close()
        for path in compositors:
            self._compositors.setdefault(path, Wayland(path))
        wanted = set() if compositors else self._x_displays()
        for name in self._displays.keys() - wanted:
            self._displays.pop(name).close()
        for name in wanted:
            self._displays.setdefault(name, XDisplay(name, sockets=self._x_sockets))

    def _x_displays(self) -> set[str]:
        """By logind's word, the environment's, or the sockets that there are."""
        kinds = {session.kind for session in self._sessions or ()}
        if "wayland" in kinds:
            return set()
        named = {session.display for session in self._sessions or () if session.kind == "x11"} - {""}
        if os.environ.get("DISPLAY"):
            named.add(os.environ["DISPLAY"])
        if named:
            return set(sorted(named)[:4])
        with suppress(OSError):
            return {f":{path.name[1:]}" for path in sorted(self._x_sockets.glob("X[0-9]*"))[:4]}
        return set()
