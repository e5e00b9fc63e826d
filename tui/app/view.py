"""What the screens are drawn from: the newest state, the connection, a short history; all of one moment."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from barnraise.protocol.credit_words import credit_words
from barnraise.tui.console import duration, size

SAMPLE_S = 3.0
SAMPLES = 100

State = Mapping[str, Any]


@dataclass
class History:
    """Rates since the app was attached, a sample every ``SAMPLE_S``; bytes/s, tokens/s."""

    down: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    up: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    speed: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _last: tuple[float, float, float, Any] | None = None

    def add(self, state: State, now: float) -> None:
        """Note ``state`` at ``now`` (s); most calls only wait for the next sample."""
        bytes_in, bytes_out = number(state.get("bytes_in")), number(state.get("bytes_out"))
        pid = state.get("pid")
        if self._last is None or self._last[3] != pid or now < self._last[0]:
            self._last = (now, bytes_in, bytes_out, pid)
            return
        at, was_in, was_out, _ = self._last
        if now - at < SAMPLE_S:
            return
        self.down.append(max(0.0, bytes_in - was_in) / (now - at))
        self.up.append(max(0.0, bytes_out - was_out) / (now - at))
        at_work = state.get("state") in ("generating", "training")
        self.speed.append(number(state.get("tokens_per_s")) if at_work else 0.0)
        self._last = (now, bytes_in, bytes_out, pid)


@dataclass(frozen=True)
class View:
    """One moment.

    Attributes:
        state: the newest state tree, clean; empty before the first.
        now: Unix time in s.
        lost: why there is no daemon, or ``""``.
        restarts: what a node that crashed waits for before it starts again, or ``""``.
        retry_at: when it is looked for again (Unix, s).
        seen_at: when the state came (Unix, s).
        folder: the data folder as a person wrote it.
    """

    state: State
    now: float
    history: History
    lost: str = ""
    retry_at: float = 0.0
    seen_at: float = 0.0
    folder: str = ""
    restarts: str = ""

    @property
    def live(self) -> bool:
        """Whether the state is the daemon's present one."""
        return bool(self.state) and not self.lost

    def part(self, name: str) -> Mapping[str, Any]:
        """A mapping in the state; empty where it is absent or something else."""
        value = self.state.get(name)
        return value if isinstance(value, dict) else {}

    def items(self, name: str, within: str = "") -> list[Mapping[str, Any]]:
        """A list of mappings in the state or in its mapping ``within``."""
        holder = self.part(within) if within else self.state
        value = holder.get(name)
        return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

    def ago(self, at_ms: Any) -> str:
        """``3m 05s`` since a moment, or ``""``."""
        return duration(max(0.0, self.now - at_ms / 1000)) if is_moment(at_ms) else ""

    def left(self, at_ms: Any) -> str:
        """``3m 05s`` until a moment, or ``""``."""
        return duration(max(0.0, at_ms / 1000 - self.now)) if is_moment(at_ms) else ""


def is_moment(at_ms: Any) -> bool:
    """Whether it is a time that a clock can show (ms since the epoch, before the year 10,000)."""
    good = isinstance(at_ms, int | float) and not isinstance(at_ms, bool)
    return good and 0 < at_ms < 253_402_300_800_000


def number(value: Any) -> float:
    """A number, or 0 for anything else."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def text(value: Any, otherwise: str = "") -> str:
    """A string, or ``otherwise`` for anything else."""
    return value if isinstance(value, str) else otherwise


def count(value: Any) -> str:
    """``12,345``"""
    return f"{number(value):,.0f}"


def rate(value: Any) -> str:
    """``1.2 MB/s``"""
    return f"{size(number(value))}/s"


def credit(value: Any) -> str:
    """Credit, which is millions of useful operations, in units for people: ``48.2 Gflop``."""
    return credit_words(number(value))


def version(value: Any) -> str:
    """A version's number, or ``none``."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else "none"


def short(peer: Any) -> str:
    """A peer id that fits a column; every key's id begins alike."""
    return f"..{text(peer)[-8:]}" if text(peer) else "?"


def clock(at_s: float, form: str = "%H:%M:%S") -> str:
    """A moment by the clock on the wall; ``?`` for what no clock shows."""
    return time.strftime(form, time.localtime(at_s)) if is_moment(at_s * 1000) else "?"


def told(sentence: Callable[..., str], *arguments: Any) -> str:
    """What ``sentence`` says of parts of the state; ``""`` of parts that it does not understand."""
    try:
        return sentence(*arguments)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
        return ""
