"""What can happen to block units; part of the closed union in ``barnraise.coordinator.events``.

Timeouts and ends of block leases are the same events as those of rollout leases.
"""

from __future__ import annotations

from msgspec import Struct

from barnraise.protocol.messages import Verdict
from barnraise.protocol.pretrain import BlockLease


class BlockLeased(Struct, frozen=True, kw_only=True, tag=True):
    """One block unit was lent. ``instance`` is the node process that asked."""

    lease: BlockLease
    instance: bytes

    @property
    def at_ms(self) -> int:
        return self.lease.issued_at


class BlockSubmitted(Struct, frozen=True, kw_only=True, tag=True):
    """A block submission passed the cheap checks; its payload is on disk in this very transaction."""

    submission_id: bytes
    lease_id: bytes
    size: int  # bytes of payload
    at_ms: int


class BlockOverdue(Struct, frozen=True, kw_only=True, tag=True):
    """A stored submission's files are not to be had: its place may go to somebody else."""

    submission_id: bytes
    at_ms: int


class BlockJudged(Struct, frozen=True, kw_only=True, tag=True):
    """The verdict on a block submission; fields as in ``SubmissionJudged``. ``tokens`` were trained on."""

    submission_id: bytes
    verdict: Verdict
    tokens: int
    credit: int
    blameless: bool
    at_ms: int


class RoundFormed(Struct, frozen=True, kw_only=True, tag=True):
    """The learner's next job: make ``version`` from these contributions, by block, then slot.

    None of them, for the version after the last round: recombine and adapt.
    """

    version: int
    submissions: tuple[bytes, ...]
    at_ms: int


BlockEvent = BlockLeased | BlockSubmitted | BlockOverdue | BlockJudged | RoundFormed
