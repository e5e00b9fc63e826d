"""A few questions over D-Bus: who is logged in (logind), and for how long GNOME has seen no input."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

_TIMEOUT_S = 1.0
_AGAIN_S = 30.0
_LOGIND = "org.freedesktop.login1"
_SESSION = "org.freedesktop.login1.Session"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_PEOPLE = frozenset({"user", "user-early", "user-light", "user-incomplete", ""})


class Bus:
    """A connection to a message bus, made when it is needed, and anew half a minute after it broke."""

    def __init__(self, which: Literal["SYSTEM", "SESSION"], address: str = "") -> None:
        """``address``: of the bus; by default the one that the environment names, or the usual one."""
        self._which = which
        self._address = address
        self._connection: Any = None
        self._tried_at = -float("inf")

    def call(
        self, service: str, path: str, interface: str, method: str, signature: str = "", *arguments: Any
    ) -> tuple[Any, ...] | None:
        """What a method returns; None: it refused, or nobody is there. Starts no service."""
        try:
            from jeepney import DBusAddress, HeaderFields, MessageFlag, MessageType, new_method_call

            if self._connection is None:
                self._open()
            if self._connection is None:
                return None
            request = new_method_call(
                DBusAddress(path, service, interface), method, signature or None, arguments
            )
            request.header.flags = MessageFlag.no_auto_start
            reply = self._connection.send_and_get_reply(request, timeout=_TIMEOUT_S)
            good = reply.header.message_type == MessageType.method_return
            return tuple(reply.body) if good and HeaderFields else None
        except Exception:  # a bus may fail in many ways, none of which is ours to repair
            self.close()
            return None

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
        self._connection = None

    def _open(self) -> None:
        now = time.monotonic()
        if now - self._tried_at < _AGAIN_S:
            return
        self._tried_at = now
        from jeepney.io.blocking import open_dbus_connection

        self._connection = open_dbus_connection(bus=self._address or self._usual())

    def _usual(self) -> str:
        if self._which == "SESSION" and not os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
            return f"unix:path=/run/user/{os.getuid()}/bus"  # where a service has no desktop's environment
        return self._which


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody who is logged in. ``kind``: ``x11``, ``wayland``, ``tty``...; ``tty`` below ``/dev``."""

    path: str
    kind: str
    display: str = ""
    tty: str = ""
    user: int = -1


class Logind:
    """systemd's (or elogind's) list of sessions."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def sessions(self) -> list[Session] | None:
        """Those of people; None: there is no logind."""
        reply = self._bus.call(
            _LOGIND, "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "ListSessions"
        )
        if reply is None:
            return None
        found: list[Session] = []
        with suppress(TypeError, ValueError, IndexError, AttributeError, KeyError):
            for entry in reply[0]:
                session = self._session(str(entry[4]), int(entry[1]))
                if session is not None:
                    found.append(session)
        return found

    def idle_s(self, session: Session) -> float:
        """Seconds since the desktop said that nobody is there; 0 while it says that somebody is."""
        if self._get(session.path, "IdleHint") is not True:
            return 0.0
        since = self._get(session.path, "IdleSinceHint")
        if not isinstance(since, int) or since <= 0:
            return 0.0
        return max(0.0, time.time() - since / 1e6)

    def _session(self, path: str, user: int) -> Session | None:
        reply = self._bus.call(_LOGIND, path, _PROPERTIES, "GetAll", "s", _SESSION)
        if reply is None:
            return None
        values = {str(name): value[1] for name, value in reply[0].items()}
        if str(values.get("Class", "")) not in _PEOPLE or values.get("State") == "closing":
            return None
        kind, tty = str(values.get("Type", "")), str(values.get("TTY", ""))
        return Session(path, kind, str(values.get("Display", "")), tty, user)

    def _get(self, path: str, name: str) -> Any:
        reply = self._bus.call(_LOGIND, path, _PROPERTIES, "Get", "ss", _SESSION, name)
        return reply[0][1] if reply else None


def gnome_idle_s(bus: Bus) -> float | None:
    """Seconds since GNOME saw input; None: no GNOME."""
    where = "/org/gnome/Mutter/IdleMonitor/Core"
    reply = bus.call("org.gnome.Mutter.IdleMonitor", where, "org.gnome.Mutter.IdleMonitor", "GetIdletime")
    return reply[0] / 1000 if reply and isinstance(reply[0], int) else None
