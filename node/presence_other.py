"""The person at a Mac or a Windows machine. Written from the systems' documentation; not tried there yet."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import subprocess
from contextlib import suppress
from typing import Any

from barnraise.node.presence import Answer

_HID_STATE, _ANY_INPUT = 1, 0xFFFFFFFF
_IOREG = ("/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4")
_IDLE = re.compile(r'"HIDIdleTime" = (\d+)')


class Mac:
    """Quartz, by CGEventSourceSecondsSinceLastEventType; where that cannot be called, ``ioreg``."""

    name = "macos"

    def __init__(self) -> None:
        self._call: Any = None
        with suppress(OSError, AttributeError, TypeError):
            library = ctypes.CDLL(ctypes.util.find_library("ApplicationServices") or "")
            call = library.CGEventSourceSecondsSinceLastEventType
            call.restype, call.argtypes = ctypes.c_double, (ctypes.c_int32, ctypes.c_uint32)
            self._call = call

    def ask(self) -> Answer | None:
        """See ``Source.ask``."""
        if self._call is not None:
            return Answer(self.name, max(0.0, float(self._call(_HID_STATE, _ANY_INPUT))))
        try:
            said = subprocess.run(_IOREG, capture_output=True, timeout=2.0, text=True, errors="replace")
        except (OSError, subprocess.SubprocessError):
            return None
        idle_s = idle_in_ioreg(said.stdout)
        return None if idle_s is None else Answer(self.name, idle_s)


def idle_in_ioreg(said: str) -> float | None:
    """Seconds without input, of what ``ioreg -c IOHIDSystem`` prints."""
    found = [int(digits) for digits in _IDLE.findall(said)]
    return min(found) / 1e9 if found else None


class Windows:
    """user32's GetLastInputInfo."""

    name = "windows"

    def ask(self) -> Answer | None:
        """See ``Source.ask``."""
        with suppress(OSError, AttributeError):
            windows: Any = ctypes.windll  # type: ignore[attr-defined]
            info = _LastInput(ctypes.sizeof(_LastInput), 0)
            if windows.user32.GetLastInputInfo(ctypes.byref(info)):
                now = windows.kernel32.GetTickCount() & 0xFFFFFFFF
                return Answer(self.name, ticks_between(info.at, now) / 1000)
        return None


class _LastInput(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint32), ("at", ctypes.c_uint32))


def ticks_between(then: int, now: int) -> int:
    """Milliseconds between two counts that begin anew every 49.7 days."""
    return (now - then) & 0xFFFFFFFF
