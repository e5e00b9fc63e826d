"""How many bytes moved, and how many a second lately. Times are seconds of a monotonic clock."""

from __future__ import annotations

import math

_FORGETS_S = 3.0  # the time constant of the average


class Meter:
    """Bytes so far, and per second lately."""

    __slots__ = ("_at", "_rate", "total")

    def __init__(self) -> None:
        self.total = 0
        self._rate = 0.0
        self._at = 0.0

    def add(self, size: int, now: float) -> None:
        """``size`` bytes moved."""
        self._rate = self.rate(now) + size / _FORGETS_S
        self._at = now
        self.total += size

    def rate(self, now: float) -> float:
        """Bytes per second, a moving average that forgets within seconds."""
        return self._rate * math.exp((self._at - now) / _FORGETS_S)
