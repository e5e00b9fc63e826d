"""What the coordinator's state is made of: nodes, leases, submissions, versions. Only its fold changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from barnraise.coordinator.events import BatchFormed, VersionTrained
from barnraise.coordinator.workers import TrainStats
from barnraise.protocol.messages import RolloutLease, Verdict
from barnraise.protocol.standing import AuditRecord, Unproven

SubmissionStatus = Literal["waiting", "accepted", "rejected", "training", "used", "skipped", "stale", "void"]
CLOCK_BACK_MS = 60_000  # what was set so far ahead of now was set on a clock that has gone back since
SETTLED: frozenset[SubmissionStatus] = frozenset({"rejected", "used", "skipped", "stale", "void"})


@dataclass(slots=True)
class Node:
    """One key. ``strikes`` counts rejections not yet made good; ``quiet_until`` is when it may ask again.

    ``quiet_from``, ``banned_from``: when those pauses were set, so that one that is set on a clock that
    went back later is known.
    """

    key: bytes
    name: str
    joined_at: int
    accepted: int = 0
    rejected: int = 0
    credit: int = 0
    strikes: int = 0
    quiet_until: int = 0
    quiet_from: int = 0
    unjudged: int = 0
    unfinished: int = 0  # leases that expired or were given back, not yet made good
    leases: dict[bytes, None] = field(default_factory=dict)  # open or timed out, oldest first
    last_duration: int = 0  # ms from lease to submission
    last_verdict: Verdict | None = None
    named_at: int = 0
    audit: AuditRecord = field(default_factory=AuditRecord)
    offences: int = 0  # towards a ban
    bans: int = 0
    banned_until: int = 0
    banned_from: int = 0
    ban_reason: str = ""
    ban_offences: int = 0  # that led to the ban in force
    next_appeal_at: int = 0


@dataclass(slots=True)
class Lease:
    """A lease that still counts: ``timed_out`` ones are honoured but no longer reserve their unit."""

    terms: RolloutLease
    instance: bytes
    timed_out: bool = False


@dataclass(slots=True)
class Submission:
    """Stored work. ``usable`` counts its groups with a non-zero advantage, once judged."""

    submission_id: bytes
    lease: RolloutLease
    size: int
    at_ms: int
    status: SubmissionStatus = "waiting"
    rewards: tuple[float, ...] = ()
    usable: int = 0
    number: int = 0  # how many were submitted before it
    epoch: int = -1  # the audit seed in force when it was submitted; -1: none
    credit: int = 0
    ended_streak: int | None = None  # the node's, if this was a failed audit
    voided: dict[bytes, Unproven] = field(default_factory=dict)  # what was clawed back because of it
    appealed: bool = False

    def unproven(self, credit: int) -> Unproven:
        """What an ``AuditRecord`` keeps of it, if it is not verified in full."""
        return Unproven(self.lease.lease_id, self.number, credit)


@dataclass(slots=True)
class Unpublished:
    """The version that is being published, and what it was made from (None for version 0)."""

    trained: VersionTrained
    batch: BatchFormed | None


@dataclass(slots=True)
class VersionInfo:
    """One published version, as the history keeps it."""

    version: int
    manifest: bytes
    weights: str
    size: int
    stats: TrainStats | None
    accuracy: float
    at_ms: int
