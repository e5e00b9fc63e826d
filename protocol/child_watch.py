"""Is a child process at work, or does it hang? Judged from its beats and from what the system says of it.

A thread of the child sends a beat every second while a request is at work, with the
number of steps done so far (``barnraise.protocol.child_serve``). That alone tells little: a
child that is stuck in a library may beat on, and one that reads a large file may not.
So the parent also looks at the processor time and the input that the process used.

``Watch`` is pure: it is told what was heard and seen, and when, in seconds of any
clock that does not jump.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from barnraise.protocol.errors import ChildError

# Of one processor: the beats take a hundredth of a per cent, who stands back on a busy machine one or two.
_IDLE_SHARE = 0.003
_AWAY = 3.0  # looks that are missing: it was us who did not run


class ChildHungError(ChildError):
    """The child did nothing for too long and was killed."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which a child at work counts as hung.

    Attributes:
        still_s: neither a beat nor any use of processor or disk: stopped, or deadlocked in C code.
        stuck_s: beats, but no step, and no use of processor or disk: it waits for what never comes.
        mute_s: it computes or reads, but not a beat comes: it is caught in C code.
        busy_s: beats, and it computes or reads, but no step ends. As long as the slowest honest step.
        look_s: between two looks at the process.
    """

    still_s: float = 30.0
    stuck_s: float = 120.0
    mute_s: float = 300.0
    busy_s: float = 1800.0
    look_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the system says of a process: processor seconds, bytes read and written, whether it is stopped."""

    cpu_s: float
    io_bytes: int
    stopped: bool


def vitals(pid: int) -> Vitals | None:
    """Look at a process; None if it is gone, or may not be looked at."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            stopped = process.status() == psutil.STATUS_STOPPED
        try:
            io = process.io_counters()
            # write_chars has the beats themselves in it
            size = io.read_bytes + io.write_bytes + getattr(io, "read_chars", 0)
        except (AttributeError, NotImplementedError, psutil.Error):  # macOS
            size = 0
    except (psutil.Error, OSError):
        return None
    return Vitals(times.user + times.system, size, stopped)


class Watch:
    """One request at work."""

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._beat_at = self._step_at = self._used_at = self._looked_at = now
        self._steps = -1
        self._last: Vitals | None = None

    def heard(self, now: float) -> None:
        """An event came."""
        self._beat_at = self._step_at = now

    def beat(self, steps: int, now: float) -> None:
        """A beat came, with so many steps done."""
        self._beat_at = now
        if steps != self._steps:
            self._steps, self._step_at = steps, now

    def due(self, now: float) -> bool:
        """Whether it is time for another ``look``."""
        return now >= self._looked_at + self._patience.look_s

    def look(self, seen: Vitals | None, now: float) -> str:
        """What is wrong, for a person; ``""``: nothing. Call it every ``look_s``."""
        patience, elapsed = self._patience, now - self._looked_at
        self._looked_at = now
        if elapsed > _AWAY * patience.look_s:
            # We did not run either (a suspended machine, a frozen container): that is nobody's silence.
            self._beat_at = self._step_at = self._used_at = now
            self._last = seen
            return ""
        before, self._last = self._last, seen
        if seen is None or before is None:
            used = before is None and seen is not None
        else:
            used = seen.cpu_s - before.cpu_s > _IDLE_SHARE * elapsed or seen.io_bytes > before.io_bytes
        if used:
            self._used_at = now
        silent, stepless, unused = now - self._beat_at, now - self._step_at, now - self._used_at
        if min(silent, unused) >= patience.still_s:
            if seen is not None and seen.stopped:
                return f"it was stopped from outside (SIGSTOP) {_seconds(min(silent, unused))} ago"
            return (
                f"no sign of life, and neither processor nor disk used, for {_seconds(min(silent, unused))}"
            )
        if silent >= patience.mute_s:
            return f"no sign of life for {_seconds(silent)}, though it is busy: caught in a library"
        if min(stepless, unused) >= patience.stuck_s:
            return f"no progress, and neither processor nor disk used, for {_seconds(min(stepless, unused))}"
        if stepless >= patience.busy_s:
            return f"busy, but not one step done for {_seconds(stepless)}"
        return ""


def _seconds(value: float) -> str:
    return f"{value:.0f} s"
