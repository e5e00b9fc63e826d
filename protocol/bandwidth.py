"""Bandwidth caps: a token bucket that spreads bytes evenly, and trio tasks that wait for it (R12).

``Bucket`` takes clock values in and has no clock of its own. Bytes pass in pieces of
a sixty-fourth of a second's worth, and at most ``DEPTH_S`` of unused time is saved up:
over any 5 s at most 4 % more than the cap passes. ``Pacer`` is the shell: waiters
take turns piece by piece, so that streams share evenly; small urgent ones go first; and a
cap that changes is obeyed by those that wait already.

What is received has arrived before it is paced, up to a window per sender. Arrivals are
therefore counted by themselves: while they are ahead of the cap nothing is read and nothing
is asked for (``Pacer.debt``), and what is on its way and needs nothing to be read is kept
small (``Pacer.allows_more``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import trio

MIN_RATE = 32_000  # bytes/s: below it nobody could tell us from a peer that has stalled
MAX_RATE = 10**12
DEPTH_S = 0.2
ARRIVAL_DEPTH_S = 0.3  # arrivals come less evenly than what is paced
ARRIVAL_LOAD_S = 2.0
MOST_DEBT_S = 2.0  # or a sender's window: more is forgiven, or senders would take us for dead
SMALLEST_PIECE = 1024
LARGEST_PIECE = 256 * 1024
LOAD_S = 0.5  # what load is averaged over, seconds
AHEAD_S = 0.6  # seconds' worth to have on its way: a round trip's, so that senders never run dry
MOST_AHEAD = 64 * 1024 * 1024
BUSY = 0.9  # of the cap: with so much in use, asking for more would bring no more
WINDOW = 256 * 1024  # bytes that a sender may send before it feels how slowly it is read (yamux)
WINDOWS_S = 0.15  # seconds' worth of the cap that such windows may hold together
MOST_SENDERS = 16
_LUMP_S = 1.0  # so much that came at once says nothing about the next second
_SLACK = 1.0  # bytes: rounding of clock values must not make a waiter wait for nothing


class Bucket:
    """Tokens for bytes: ``rate`` a second (None: no cap), saved up for ``depth_s``. Times in seconds."""

    def __init__(self, rate: float | None = None, depth_s: float = DEPTH_S, load_s: float = LOAD_S) -> None:
        self.rate = rate
        self._load_s = load_s
        self._depth_s = depth_s
        self._tokens = 0.0
        self._at = -math.inf  # when ``_tokens`` was right
        self._load = 0.0

    @property
    def piece(self) -> int:
        """How many bytes pass at a time."""
        if self.rate is None:
            return LARGEST_PIECE
        return max(SMALLEST_PIECE, min(LARGEST_PIECE, int(self.rate) // 64))

    def set_rate(self, rate: float | None, now: float) -> None:
        """Change the cap from ``now`` on."""
        self._fill(now)
        self.rate = rate
        self._tokens = min(self._tokens, self._depth())

    def delay(self, size: int, now: float) -> float:
        """Seconds until ``size`` bytes, at most a piece, may pass; 0 is now."""
        if self.rate is None:
            return 0.0
        self._fill(now)
        short = size - self._tokens
        return 0.0 if short <= _SLACK else short / self.rate

    def spend(self, size: int, now: float, most_debt_s: float = math.inf) -> None:
        """``size`` bytes pass now, or have passed: a debt of at most ``most_debt_s`` delays the next."""
        self._fill(now)
        if self.rate is not None:
            self._tokens = max(self._tokens - size, -self.rate * most_debt_s)
            self._load += size / (self.rate * self._load_s)

    def load(self, now: float) -> float:
        """How much of the cap was used over the last second; 1.0 is all of it."""
        self._fill(now)
        return self._load

    def _depth(self) -> float:
        return 0.0 if self.rate is None else max(self.rate * self._depth_s, SMALLEST_PIECE)

    def _fill(self, now: float) -> None:
        if self._at == -math.inf:
            self._at, self._tokens = now, self._depth()
        passed = max(0.0, now - self._at)
        if self.rate is not None:
            self._tokens = min(self._depth(), self._tokens + self.rate * passed)
        self._load *= math.exp(-passed / self._load_s)
        self._at += passed


class Pacer:
    """Who may pass a ``Bucket`` next. Use from within trio.

    Attributes:
        total: bytes that have passed since the start.
    """

    def __init__(self, rate: float | None = None) -> None:
        self._bucket = Bucket(rate)
        self._arrivals = Bucket(rate, ARRIVAL_DEPTH_S, ARRIVAL_LOAD_S)
        self._caused = Bucket(rate)
        self._arrived: Callable[[], int] = lambda: 0
        self._foreseen: list[Callable[[], int]] = []
        self._seen = self._coming = 0
        self._urgent: deque[_Waiter] = deque()
        self._others: deque[_Waiter] = deque()
        self._ahead = 0.0  # bytes
        self._adjust_at = 0.0
        self._senders = 0
        self._changed = trio.Event()
        self.total = 0

    @property
    def rate(self) -> float | None:
        """The cap in bytes/s; None: none."""
        return self._bucket.rate

    @property
    def piece(self) -> int:
        """How many bytes pass at a time: whoever reads or writes does it in pieces of this size."""
        return self._bucket.piece

    def set_rate(self, rate: float | None) -> None:
        """Change the cap; whoever waits obeys it at once."""
        self._bucket.set_rate(rate, trio.current_time())
        self._arrivals.set_rate(rate, trio.current_time())
        self._caused.set_rate(rate, trio.current_time())
        self._changed.set()
        self._changed = trio.Event()
        self._wake_first()

    async def take(self, size: int, *, urgent: bool = False) -> None:
        """Return when ``size`` bytes may pass. Cancelled, what has not passed is not counted."""
        while size > 0 and self._bucket.rate is not None:
            part = min(size, self.piece)
            await self._turn(part, urgent)
            size -= part
        self.total += size

    def note(self, size: int) -> None:
        """``size`` bytes pass that ``debt`` has counted already."""
        self.total += size

    async def pause(self, seconds: float) -> None:
        """Sleep, until the cap changes at the latest."""
        changed = self._changed
        with trio.move_on_after(seconds):
            await changed.wait()

    def watch(self, arrived: Callable[[], int]) -> None:
        """Let ``arrived()``, bytes since some moment, count for the cap whether read or not."""
        self._arrived, self._seen = arrived, arrived()

    def foresee(self, coming: Callable[[], int]) -> None:
        """Let ``coming()``, bytes that will arrive even if nothing is read, count as if they had."""
        self._foreseen.append(coming)

    def forget(self, coming: Callable[[], int]) -> None:
        """Forget what ``foresee`` was told."""
        self._foreseen.remove(coming)

    def debt(self, lump: int = 0) -> float:
        """Seconds for which what arrived, or cannot be held back any more, is ahead of the cap.

        With ``lump``, bytes that would come at once: seconds until so much may be asked for. What was
        saved up, ``DEPTH_S``, and what is overdrawn by the last lump add up in what arrives over
        5 s; so of a lump that is larger than the one, half of it must be there before the other is begun.
        """
        now, rate = trio.current_time(), self._bucket.rate
        arrived, self._seen = self._arrived() - self._seen, self._arrived()
        coming, before = sum(each() for each in self._foreseen), self._coming
        self._coming = coming
        if rate is None:
            return 0.0
        most = max(MOST_DEBT_S, 1.1 * WINDOW / rate)
        self._arrivals.spend(arrived, now, most)
        self._caused.spend(arrived + coming - before, now, most)
        spared = min(max(0, lump - int(rate * DEPTH_S)), int(rate * DEPTH_S / 2))
        return max(self._arrivals.delay(0, now), self._caused.delay(spared, now))

    def arrears(self) -> float:
        """Seconds for which what arrived is ahead of the cap: reading would bring more."""
        self.debt()
        return self._arrivals.delay(0, trio.current_time())

    def allows_more(self, coming: int) -> bool:
        """Whether to ask others for more while ``coming`` bytes may arrive, read or not.

        Those are bounded to what a round trip takes, and more only as long as senders are
        so slow that this leaves the cap unused.
        """
        rate = self._bucket.rate
        if rate is None:
            return True
        now = trio.current_time()
        least = rate * AHEAD_S
        self._ahead = max(self._ahead, least)
        if now >= self._adjust_at:
            self._adjust_at = now + 1.0
            if self.busy:
                self._ahead = max(least, 0.8 * self._ahead)
            elif coming >= self._ahead:
                self._ahead = min(1.5 * self._ahead, MOST_AHEAD)
        return coming < self._ahead

    @property
    def busy(self) -> bool:
        """Whether the cap is what limits just now."""
        if self._bucket.rate is None:
            return False
        ahead, now = self.arrears(), trio.current_time()
        return ahead > _LUMP_S or max(self._bucket.load(now), self._arrivals.load(now)) >= BUSY

    def streams(self, most: int) -> int:
        """How many streams, 1 to ``most``, can share the cap and each look alive to its receiver."""
        rate = self._bucket.rate
        return most if rate is None else max(1, min(most, int(rate / MIN_RATE)))

    @property
    def windows(self) -> int:
        """How many others' windows fit into 0.15 s worth of the cap; at least one."""
        return max(1, int((self._bucket.rate or 0.0) * WINDOWS_S / WINDOW))

    def senders(self, sending: int) -> int:
        """How many others to let send at a time while ``sending`` do; 0: any. Ask once a second.

        As many as fit their windows into 0.15 s worth, at least one, and
        more only as long as they are so slow that the cap is not used.
        """
        rate = self._bucket.rate
        if rate is None:
            self._senders = 0
            return 0
        fit = self.windows
        if self.busy:
            self._senders -= 1
        elif sending >= self._senders:
            self._senders += 1
        self._senders = max(fit, min(self._senders, MOST_SENDERS))
        return self._senders

    async def _turn(self, size: int, urgent: bool) -> None:
        queue = self._urgent if urgent else self._others
        waiter = _Waiter()
        queue.append(waiter)
        try:
            await trio.lowlevel.checkpoint()  # others get their turn even when nobody has to wait
            while True:
                delay = math.inf
                if self._first() is waiter:
                    delay = self._bucket.delay(size, trio.current_time())
                    if delay <= 0:
                        break
                with trio.move_on_after(delay):
                    await waiter.event.wait()
                waiter.event = trio.Event()
            self._bucket.spend(size, trio.current_time())
            self.total += size
        finally:
            queue.remove(waiter)
            self._wake_first()

    def _first(self) -> _Waiter | None:
        queue = self._urgent or self._others
        return queue[0] if queue else None

    def _wake_first(self) -> None:
        first = self._first()
        if first is not None:
            first.event.set()


class _Waiter:
    def __init__(self) -> None:
        self.event = trio.Event()


def checked_rate(value: float | None) -> float | None:
    """``value`` as a cap in bytes/s.

    Raises:
        ValueError: it is not None and not between ``MIN_RATE`` and ``MAX_RATE``.
    """
    if value is None or MIN_RATE <= value <= MAX_RATE:
        return value
    raise ValueError(
        f"{value:g} bytes/s is no usable cap: at least {MIN_RATE * 8 / 1e6:.2f} Mbit/s, "
        "below which others take a node for one that has stalled"
    )
