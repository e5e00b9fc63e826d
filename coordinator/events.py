"""Everything that can happen to a run: a closed union, journaled before it is believed.

State is a fold over these (``barnraise.coordinator.state``), the public ledger is
derived from them (``barnraise.coordinator.ledger_log``), and nothing else is kept:
whoever holds the journal holds the run. Times are milliseconds since the Unix
epoch by the coordinator's clock; an event carries every number that its fold
needs, so that replaying it asks no clock and no generator.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from barnraise.coordinator.block_events import BlockEvent
from barnraise.coordinator.operator_events import OperatorEvent
from barnraise.coordinator.workers import TrainStats
from barnraise.protocol.messages import RolloutLease, Verdict


class RunOpened(Struct, frozen=True, kw_only=True, tag=True):
    """Always the first event: which run this journal belongs to."""

    run_id: bytes
    operator: bytes
    at_ms: int


class NodeJoined(Struct, frozen=True, kw_only=True, tag=True):
    """A key was seen for the first time, or under a new name."""

    node: bytes
    name: str
    at_ms: int


class LeaseIssued(Struct, frozen=True, kw_only=True, tag=True):
    """One unit was lent. ``instance`` is the node process that asked (``JoinRequest.instance``)."""

    lease: RolloutLease
    instance: bytes

    @property
    def at_ms(self) -> int:
        return self.lease.issued_at


class LeaseTimedOut(Struct, frozen=True, kw_only=True, tag=True):
    """The unit may go to somebody else; the lease is honoured until its deadline."""

    lease_id: bytes
    at_ms: int


class LeaseClosed(Struct, frozen=True, kw_only=True, tag=True):
    """The lease ended without a submission."""

    lease_id: bytes
    reason: Literal["expired", "returned"]
    at_ms: int


class Submitted(Struct, frozen=True, kw_only=True, tag=True):
    """A submission passed the cheap checks and its payload is on disk in this very transaction."""

    submission_id: bytes
    lease_id: bytes
    size: int  # bytes of payload
    at_ms: int


class SubmissionJudged(Struct, frozen=True, kw_only=True, tag=True):
    """The verifier's verdict.

    ``rewards``: one per rollout, by prompt, then sample; empty if rejected.
    ``credit`` is in millions of useful floating-point operations; 0 if rejected.
    ``blameless``: rejected without a mark against the node (our verifier's own failure).
    """

    submission_id: bytes
    verdict: Verdict
    rewards: tuple[float, ...]
    tokens: int
    credit: int
    blameless: bool
    at_ms: int


class BatchFormed(Struct, frozen=True, kw_only=True, tag=True):
    """The learner's next job: make ``version`` from these submissions, in this order."""

    version: int
    submissions: tuple[bytes, ...]
    groups: int
    usable: int  # groups with a non-zero advantage
    at_ms: int


class SubmissionsSkipped(Struct, frozen=True, kw_only=True, tag=True):
    """Accepted work without any usable group that is not kept for a batch any longer."""

    submissions: tuple[bytes, ...]
    at_ms: int


class VersionTrained(Struct, frozen=True, kw_only=True, tag=True):
    """The learner's checkpoint of ``version`` is durable; ``VersionPublished`` follows before the next one.

    Journals from before this event have none: there ``VersionPublished`` says both.
    """

    version: int
    weights: str  # as in VersionPublished
    stats: TrainStats | None
    accuracy: float
    at_ms: int


class VersionPublished(Struct, frozen=True, kw_only=True, tag=True):
    """A policy version's signed manifest is on disk in this very transaction."""

    version: int
    manifest: bytes  # SHA-256 of the manifest's canonical payload
    weights: str  # where the published weights lie, relative to the run folder
    size: int  # bytes of all its files
    stats: TrainStats | None
    accuracy: float  # held-out, greedy; -1 where it was not evaluated
    at_ms: int


class AuditCommitted(Struct, frozen=True, kw_only=True, tag=True):
    """A secret seed, known by its hash alone, decides from here on who is spared an audit."""

    epoch: int
    commitment: bytes
    at_ms: int


class AuditRevealed(Struct, frozen=True, kw_only=True, tag=True):
    """Nothing waits under an earlier seed any more: it is published."""

    epoch: int
    seed: bytes
    at_ms: int


class CreditClawedBack(Struct, frozen=True, kw_only=True, tag=True):
    """Credit of unaudited work is void, because the audit of ``cause`` failed."""

    submission_id: bytes
    cause: bytes
    at_ms: int


class AppealFiled(Struct, frozen=True, kw_only=True, tag=True):
    """A node wants a rejected submission verified again; its payload is on disk."""

    submission_id: bytes
    at_ms: int


class AppealDecided(Struct, frozen=True, kw_only=True, tag=True):
    """The fresh verdict on an appeal; fields as in ``SubmissionJudged``."""

    submission_id: bytes
    verdict: Verdict
    rewards: tuple[float, ...]
    tokens: int
    credit: int
    at_ms: int


class CreditRestored(Struct, frozen=True, kw_only=True, tag=True):
    """Credit that was clawed back counts again: the verdict on ``cause`` was overturned."""

    submission_id: bytes
    cause: bytes
    at_ms: int


class OffenceNoted(Struct, frozen=True, kw_only=True, tag=True):
    """A node sent what only a forger sends."""

    node: bytes
    what: Literal["bad-signature", "wrong-signer"]
    at_ms: int


class NodeBanned(Struct, frozen=True, kw_only=True, tag=True):
    """No work for a node until a moment; it ends by itself. ``by_rule``: not by the operator's hand.

    ``moved``: it is the ban in force, whose end is another because the clock went back.
    """

    node: bytes
    reason: str
    until: int
    by_rule: bool
    at_ms: int
    moved: bool = False


class BanLifted(Struct, frozen=True, kw_only=True, tag=True):
    """A ban ended early."""

    node: bytes
    reason: str
    at_ms: int


AuditEvent = (
    AuditCommitted
    | AuditRevealed
    | CreditClawedBack
    | AppealFiled
    | AppealDecided
    | CreditRestored
    | OffenceNoted
    | NodeBanned
    | BanLifted
)

Event = (
    RunOpened
    | NodeJoined
    | LeaseIssued
    | LeaseTimedOut
    | LeaseClosed
    | Submitted
    | SubmissionJudged
    | BatchFormed
    | SubmissionsSkipped
    | VersionTrained
    | VersionPublished
    | AuditEvent
    | BlockEvent
    | OperatorEvent
)


class EventError(Exception):
    """An event does not follow from the state: a defect of ours, or a damaged journal."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """The journal's bytes of one event (MessagePack map with a type tag)."""
    return _encoder.encode(event)


def decode_event(data: bytes) -> Event:
    """Inverse of ``encode_event``.

    Raises:
        msgspec.DecodeError: the journal is damaged, or was written by another version.
    """
    event: Event = _decoder.decode(data)
    return event
