"""What flows: work of the last minutes, and counts and latencies since the start. Fed by durable writes."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from barnraise.coordinator.block_events import BlockJudged, BlockSubmitted
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import (
    LeaseClosed,
    LeaseIssued,
    SubmissionJudged,
    Submitted,
    VersionPublished,
)
from barnraise.coordinator.journal import Write

STEP_MS: Final = 10_000
STEPS: Final = 60  # ten minutes
BOUNDS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)


@dataclass(slots=True)
class Step:
    """Work that was judged within ``STEP_MS`` from ``at_ms`` on. ``credit`` in Mflop."""

    at_ms: int
    accepted: int = 0
    rejected: int = 0
    tokens: int = 0
    credit: int = 0


@dataclass(slots=True)
class Histogram:
    """How many seconds things took. ``counts``: those of at most each of ``bounds``, and the longer ones."""

    bounds: tuple[float, ...] = BOUNDS_S
    total_s: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def note(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> Iterator[tuple[str, float]]:
        """As Prometheus wants them: cumulative, by the text of their bound."""
        so_far = 0
        for bound, count in zip((*map(_plain, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            yield bound, so_far


def _plain(bound: float) -> str:
    return f"{bound:g}" if bound != int(bound) else f"{bound:.1f}"


@dataclass(slots=True)
class Rates:
    """Averages over ``seconds`` until now."""

    seconds: float
    accepted_per_min: float
    rejected_per_min: float
    tokens_per_s: float
    mflop_per_s: float


class Flow:
    """Make it before anything is recorded; it listens to the core."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._began_ms = core.now_ms()
        self.leased = self.submitted = self.expired = self.returned = 0
        self.accepted = self.rejected = self.tokens = self.credit = self.versions = 0
        self.working = Histogram()  # lease to submission
        self.judging = Histogram()  # submission to verdict
        self.http = Histogram()  # request to the first byte of its reply
        core.listeners.append(self._note)

    def _note(self, write: Write) -> None:
        state = self._core.state
        for event in write.events:
            match event:
                case LeaseIssued():
                    self.leased += 1
                case LeaseClosed():
                    self.expired += event.reason == "expired"
                    self.returned += event.reason == "returned"
                case Submitted() | BlockSubmitted():
                    self.submitted += 1
                    work = state.submissions.get(event.submission_id) or state.blocks.work.get(
                        event.submission_id
                    )
                    if work is not None:
                        self.working.note(max(0, event.at_ms - work.lease.issued_at) / 1000)
                case SubmissionJudged() | BlockJudged():
                    self._judged(event)
                case VersionPublished():
                    self.versions += 1
                case _:
                    pass

    def _judged(self, event: SubmissionJudged | BlockJudged) -> None:
        state = self._core.state
        step = self._step(event.at_ms)
        if event.verdict.accepted:
            step.accepted += 1
            self.accepted += 1
        else:
            step.rejected += 1
            self.rejected += 1
        step.tokens += event.tokens
        step.credit += event.credit
        self.tokens += event.tokens
        self.credit += event.credit
        work = state.submissions.get(event.submission_id) or state.blocks.work.get(event.submission_id)
        if work is not None:
            self.judging.note(max(0, event.at_ms - work.at_ms) / 1000)

    def _step(self, at_ms: int) -> Step:
        start = at_ms - at_ms % STEP_MS
        if not self._steps or self._steps[-1].at_ms < start:
            self._steps.append(Step(start))
        return self._steps[-1]

    def rates(self) -> Rates:
        """Of the last ten minutes, or since the start if that is later."""
        now = self._core.now_ms()
        since = max(self._began_ms, now - STEP_MS * STEPS)
        seconds = max(1.0, (now - since) / 1000)
        steps = [step for step in self._steps if step.at_ms > since - STEP_MS]
        return Rates(
            seconds=seconds,
            accepted_per_min=60 * sum(step.accepted for step in steps) / seconds,
            rejected_per_min=60 * sum(step.rejected for step in steps) / seconds,
            tokens_per_s=sum(step.tokens for step in steps) / seconds,
            mflop_per_s=sum(step.credit for step in steps) / seconds,
        )

    def recent(self) -> list[tuple[int, int, int]]:
        """(start in ms, accepted, rejected) of every step of the last ten minutes, empty ones included."""
        now = self._core.now_ms()
        last = now - now % STEP_MS
        known = {step.at_ms: step for step in self._steps}
        places = range(last - STEP_MS * (STEPS - 1), last + 1, STEP_MS)
        return [(at, known[at].accepted, known[at].rejected) if at in known else (at, 0, 0) for at in places]
