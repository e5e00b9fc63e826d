"""Compares this machine's clock with the coordinator's, and tells sleep from skew (R26)."""

from __future__ import annotations

from collections.abc import Callable

SKEW_WARNING_MS = 5 * 60 * 1000
JUMP_MS = 30_000


class Clock:
    """The coordinator's time, estimated from the replies that quote it.

    ``now_ms`` is this machine's wall clock (ms since the epoch); ``mono`` arguments
    are seconds of a clock that never jumps and stands still while the machine sleeps.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._last: tuple[int, float] | None = None  # wall, mono of the last comparison
        self.offset_ms: int | None = None  # coordinator minus us; None before the first comparison

    def wall_ms(self) -> int:
        """This machine's own time."""
        return self._now_ms()

    def coordinator_ms(self) -> int:
        """The coordinator's time now, as well as we know it."""
        return self._now_ms() + (self.offset_ms or 0)

    def local(self, coordinator_ms: int, mono: float) -> float:
        """When, on the clock of ``mono``, the coordinator's clock will show ``coordinator_ms``."""
        return mono + (coordinator_ms - self.coordinator_ms()) / 1000

    def slept(self, seconds: float) -> None:
        """The machine slept, which is known and told: the next comparison need not."""
        if self._last is not None:
            self._last = (self._last[0] + round(seconds * 1000), self._last[1])

    def compare(self, sent_ms: int, received_ms: int, theirs_ms: int, mono: float) -> list[str]:
        """Take in one reply that quotes the coordinator's time; return warnings for a person.

        The quoted moment lies between ``sent_ms`` and ``received_ms``; half the
        round trip is the error bar, so a slow reply only refines a missing offset.
        """
        warnings = []
        before = self.offset_ms
        jump = 0 if self._last is None else int((received_ms - self._last[0]) - (mono - self._last[1]) * 1000)
        if before is None or received_ms - sent_ms < 10_000:
            self.offset_ms = theirs_ms - (sent_ms + received_ms) // 2
        now = self.offset_ms or 0
        if abs(jump) > JUMP_MS and before is not None:
            if abs(now - before) < JUMP_MS:
                warnings.append(f"this machine slept for about {duration(jump)}; its clock is fine")
            else:
                warnings.append(f"this machine's clock was set by {duration(jump)}")
        skewed_before = before is not None and abs(before) > SKEW_WARNING_MS
        if abs(now) > SKEW_WARNING_MS and (not skewed_before or abs(now - (before or 0)) > 60_000):
            side = "behind" if now > 0 else "ahead of"
            warnings.append(
                f"this machine's clock is {duration(abs(now))} {side} the coordinator's; deadlines are "
                "judged with the difference, but set the clock (timedatectl set-ntp true)"
            )
        self._last = (received_ms, mono)
        return warnings


def duration(milliseconds: float) -> str:
    """``90_000`` -> ``"1 min 30 s"``: two units at most."""
    sign, seconds = ("-" if milliseconds < 0 else ""), round(abs(milliseconds) / 1000)
    parts = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {unit}")
    return sign + (" ".join(parts[:2]) or "0 s")
