"""The ledger's entries: a closed set of canonical messages, each one leaf of the Merkle log.

Proofs and payloads stay out; they are here by their hashes. Times are not required
to increase: the order of the log is the order that counts.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from msgspec import Meta

from barnraise.protocol import wire
from barnraise.protocol.amendments import Changes
from barnraise.protocol.messages import (
    Count,
    Digest,
    Message,
    Millis,
    Name,
    Nonce,
    PublicKey,
    Size,
    Text,
    Verdict,
    Version,
)


class _Entry(Message, frozen=True, tag=True, tag_field="entry"):
    at_ms: Millis


class RunCreated(_Entry, frozen=True):
    """Always entry 0, and only there."""

    run_id: Digest


class NodeJoined(_Entry, frozen=True):
    """A key was seen for the first time, or again under a new name."""

    node: PublicKey
    name: Name


class LeaseIssued(_Entry, frozen=True):
    """A unit was lent: ``prompts * group_size`` rollouts at ``policy_version``."""

    lease_id: Nonce
    unit_id: Count
    node: PublicKey
    policy_version: Version
    prompts: Annotated[int, Meta(ge=1, le=4096)]
    group_size: Annotated[int, Meta(ge=1, le=4096)]


class BlockLeased(_Entry, frozen=True):
    """A block unit was lent: place ``slot`` of the round that starts from ``policy_version``."""

    lease_id: Nonce
    unit_id: Count
    node: PublicKey
    policy_version: Version
    block: Count
    slot: Count


class LeaseClosed(_Entry, frozen=True):
    """A lease ended without a submission."""

    lease_id: Nonce
    reason: Literal["expired", "returned"]


class Submitted(_Entry, frozen=True):
    """Work was handed in and is stored. ``submission_id``: SHA-256 of the signed payload."""

    lease_id: Nonce
    submission_id: Digest
    node: PublicKey


class Judged(_Entry, frozen=True):
    """A verdict. ``evidence``: SHA-256 of the ``Verdict``'s canonical bytes, as the receipt carries it."""

    lease_id: Nonce
    submission_id: Digest
    node: PublicKey
    accepted: bool
    check: Name
    credit: Size
    evidence: Digest


class AuditCommitted(_Entry, frozen=True):
    """From here on, audits are drawn from the seed of this hash (``barnraise.protocol.standing``)."""

    epoch: Count
    commitment: Digest


class AuditRevealed(_Entry, frozen=True):
    """The seed of an earlier commitment, when nothing waits under it: its draws can be made again."""

    epoch: Count
    seed: Digest


class ClawedBack(_Entry, frozen=True):
    """Credit of unaudited work is void, because the audit of ``cause`` failed.

    ``credit``: how much; ``evidence``: as in ``Judged``, of the verdict that its new receipt carries.
    """

    lease_id: Nonce
    submission_id: Digest
    node: PublicKey
    cause: Digest
    credit: Size
    evidence: Digest


class Appealed(_Entry, frozen=True):
    """A node asked to have a rejected submission verified again."""

    lease_id: Nonce
    submission_id: Digest
    node: PublicKey


class Reviewed(_Entry, frozen=True):
    """The outcome of an appeal; it replaces the verdict before."""

    lease_id: Nonce
    submission_id: Digest
    node: PublicKey
    accepted: bool
    check: Name
    credit: Size
    evidence: Digest


class Restored(_Entry, frozen=True):
    """Credit that was clawed back counts again: the failed audit behind it was overturned."""

    lease_id: Nonce
    submission_id: Digest
    node: PublicKey
    cause: Digest
    credit: Size
    evidence: Digest


class NodeBanned(_Entry, frozen=True):
    """No work for a node until a moment; it ends by itself."""

    node: PublicKey
    reason: Text
    until: Millis


class BanLifted(_Entry, frozen=True):
    """A ban ended early."""

    node: PublicKey
    reason: Text


class VersionPublished(_Entry, frozen=True):
    """A policy version. ``manifest``: SHA-256 of the signed manifest's payload."""

    version: Version
    manifest: Digest


class Amended(_Entry, frozen=True):
    """Settings changed while the run was under way. ``amendment``: SHA-256 of the signed payload.

    ``number`` counts from 1 without gaps; see ``barnraise.protocol.amendments``.
    """

    number: Annotated[int, Meta(ge=1, le=2**31)]
    changes: Changes
    reason: Text
    amendment: Digest


class RolledBack(_Entry, frozen=True):
    """The next version is ``to_version`` again, weights and optimiser; what came between is given up.

    Versions go on increasing: nothing that was published is unpublished, and credit stays.
    """

    to_version: Version
    reason: Text


LedgerEntry = (
    RunCreated
    | NodeJoined
    | LeaseIssued
    | BlockLeased
    | LeaseClosed
    | Submitted
    | Judged
    | VersionPublished
    | AuditCommitted
    | AuditRevealed
    | ClawedBack
    | Appealed
    | Reviewed
    | Restored
    | NodeBanned
    | BanLifted
    | Amended
    | RolledBack
)


def encode_entry(entry: LedgerEntry) -> bytes:
    """Return an entry's canonical bytes: the leaf of the Merkle log."""
    return wire.encode(entry)


def decode_entry(data: bytes) -> LedgerEntry:
    """Read one entry.

    Raises:
        MalformedError: not the canonical bytes of an entry.
    """
    kind: type[LedgerEntry] = LedgerEntry  # type: ignore[assignment]  # a union is no type to mypy
    return wire.decode(data, kind)


def evidence_of(verdict: Verdict) -> bytes:
    """Return what ``Judged.evidence`` must be for ``verdict``."""
    return hashlib.sha256(wire.encode(verdict)).digest()


def credit_for_block(parameters: int, tokens: int) -> int:
    """Credit of ``tokens`` verified training tokens: 6 x parameters x tokens / 1e6, rounded down.

    ``parameters`` is what a full step on them would cost the same: trained ones count whole,
    frozen ones above the block 4/6, below it 2/6 (forward and activation gradients).
    """
    return 6 * parameters * tokens // 1_000_000


def credit_for(parameters: int, tokens: int) -> int:
    """Credit of ``tokens`` verified completion tokens: 2 x parameters x tokens / 1e6, rounded down."""
    return 2 * parameters * tokens // 1_000_000
