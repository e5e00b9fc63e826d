"""The ledger's rules, and the fold that makes balances of its entries.

Pure: entries in, balances out, and a ``LedgerError`` that names index and rule where
an entry breaks one. The audit policy's decisions are made again here
(``barnraise.protocol.standing``): who may be spared follows from the entries before,
and once a seed is published, so does who was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from barnraise.protocol.amendments import AmendmentError, amended
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.ledger_entries import (
    Amended,
    Appealed,
    AuditCommitted,
    AuditRevealed,
    BanLifted,
    BlockLeased,
    ClawedBack,
    Judged,
    LeaseClosed,
    LeaseIssued,
    LedgerEntry,
    NodeBanned,
    NodeJoined,
    Restored,
    Reviewed,
    RolledBack,
    RunCreated,
    Submitted,
    VersionPublished,
    credit_for,
    credit_for_block,
)
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.standing import (
    ACCEPTING,
    ALL,
    EVERYTHING_PPM,
    UNAUDITED,
    UNVERIFIABLE,
    AuditRecord,
    Unproven,
    commitment_of,
    draw_ppm,
)


class LedgerError(BarnraiseError):
    """An entry breaks a rule.

    Attributes:
        index: the entry's index.
        rule: the broken rule's name, such as ``"judged-twice"``.
    """

    def __init__(self, index: int, rule: str, text: str) -> None:
        super().__init__(f"ledger entry {index} breaks the rule {rule}: {text}")
        self.index = index
        self.rule = rule


@dataclass(slots=True)
class _Lease:
    node: bytes
    rollouts: int  # 0: a block unit
    submission: bytes | None = None
    closed: bool = False
    judged: bool = False
    accepted: bool = False
    number: int = 0  # how many were submitted before
    epoch: int = -1  # the audit seed in force when it was submitted
    ended_streak: int | None = None  # of the audit that failed here
    voided: Unproven | None = None
    voided_by: bytes = b""
    appeal: str = ""  # "", "open", "overturned", "upheld"


def _most_credit(spec: RunSpec, rollouts: int) -> int:
    """What a lease can earn at most: every completion full length, or every parameter trained."""
    if rollouts:
        return credit_for(spec.model.parameters, rollouts * spec.sampling.max_new_tokens)
    if spec.pretrain is None:
        return 0
    unit = spec.pretrain.steps * spec.pretrain.recipe.batch * spec.pretrain.sequence
    return credit_for_block(spec.model.parameters, unit)


@dataclass(slots=True)
class _Epoch:
    commitment: bytes
    revealed: bool = False
    spared: list[tuple[int, bytes, int]] = field(default_factory=list)  # index, submission, rate then


@dataclass(slots=True)
class LedgerFold:
    """What the rules remember after some entries. With a spec, a lease also bounds its credit."""

    spec: RunSpec | None = None
    run_id: bytes | None = None
    size: int = 0
    version: int = -1
    balances: dict[bytes, int] = field(default_factory=dict)
    accepted: int = 0
    rejected: int = 0
    spared: int = 0
    clawed_back: int = 0  # credit, what was restored taken off
    amendments: int = 0  # so many changes of settings; ``spec`` is as the newest left it
    _leases: dict[bytes, _Lease] = field(default_factory=dict)
    _submissions: dict[bytes, bytes] = field(default_factory=dict)  # submission -> lease
    _records: dict[bytes, AuditRecord] = field(default_factory=dict)  # by node
    _epochs: dict[int, _Epoch] = field(default_factory=dict)
    _epoch: int = -1

    def add(self, entry: LedgerEntry) -> None:
        """Apply the next entry. One that breaks a rule counts for its index and changes nothing else.

        Raises:
            LedgerError: naming index and rule.
        """
        index = self.size
        self.size += 1
        if isinstance(entry, RunCreated) != (index == 0):
            rule = "starts-with-run" if index == 0 else "one-run"
            raise LedgerError(index, rule, "RunCreated is the first entry, and no other")
        match entry:
            case RunCreated():
                self.run_id = entry.run_id
            case NodeJoined():
                self.balances.setdefault(entry.node, 0)
                self._records.setdefault(entry.node, AuditRecord())
            case LeaseIssued():
                self._lease(index, entry, entry.prompts * entry.group_size)
            case BlockLeased():
                self._lease(index, entry, 0)
            case LeaseClosed():
                lease = self._known(index, entry.lease_id)
                if lease.closed or lease.submission is not None:
                    raise LedgerError(index, "lease-over", "the lease was closed or answered before")
                lease.closed = True
            case Submitted():
                self._submit(index, entry)
            case Judged():
                self._judge(index, entry)
            case VersionPublished():
                if entry.version <= self.version:
                    raise LedgerError(
                        index, "versions-increase", f"version {entry.version} after version {self.version}"
                    )
                self.version = entry.version
            case AuditCommitted():
                if entry.epoch != self._epoch + 1:
                    raise LedgerError(index, "epochs-in-order", f"epoch {entry.epoch} after {self._epoch}")
                self._epoch = entry.epoch
                self._epochs[entry.epoch] = _Epoch(entry.commitment)
            case AuditRevealed():
                self._reveal(index, entry)
            case ClawedBack():
                self._claw_back(index, entry)
            case Appealed():
                lease = self._submitted(index, entry.lease_id, entry.submission_id, entry.node)
                if not lease.judged or lease.accepted or lease.appeal:
                    raise LedgerError(
                        index, "appeal-once", "only a rejected submission can be appealed, once"
                    )
                lease.appeal = "open"
            case Reviewed():
                self._review(index, entry)
            case Restored():
                self._restore(index, entry)
            case NodeBanned() | BanLifted():
                if entry.node not in self.balances:
                    raise LedgerError(index, "joined-first", "the node has not joined")
            case Amended():
                self._amend(index, entry)
            case RolledBack():
                if not 0 <= entry.to_version < self.version:
                    raise LedgerError(
                        index,
                        "rollback-earlier",
                        f"back to version {entry.to_version} with version {self.version} the newest",
                    )
            case _:
                assert_never(entry)

    def _amend(self, index: int, entry: Amended) -> None:
        if entry.number != self.amendments + 1:
            raise LedgerError(index, "amendments-in-order", f"number {entry.number} after {self.amendments}")
        self.amendments = entry.number
        if self.run_id is None or self.spec is None:
            return
        try:
            self.spec = amended(self.spec, entry.changes)
        except AmendmentError as error:
            raise LedgerError(index, "amendable", str(error)) from None

    def owing(self) -> list[bytes]:
        """Nodes whose audit failed and whose credit was not all taken back: none, in a whole ledger."""
        return [node for node, record in self._records.items() if record.owed]

    def sealed(self) -> int:
        """How many were spared under a seed that is still secret: their draws cannot be checked yet."""
        return sum(len(epoch.spared) for epoch in self._epochs.values())

    def _lease(self, index: int, entry: LeaseIssued | BlockLeased, rollouts: int) -> None:
        if entry.lease_id in self._leases:
            raise LedgerError(index, "lease-once", "a lease of this id was issued before")
        if entry.node not in self.balances:
            raise LedgerError(index, "joined-first", "the lease's node has not joined")
        if entry.policy_version > self.version:
            raise LedgerError(
                index, "version-published", f"policy version {entry.policy_version} was not published before"
            )
        self._leases[entry.lease_id] = _Lease(entry.node, rollouts)

    def _known(self, index: int, lease_id: bytes) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LedgerError(index, "lease-first", f"no lease {lease_id.hex()} was issued before")
        return lease

    def _submitted(self, index: int, lease_id: bytes, submission_id: bytes, node: bytes) -> _Lease:
        lease = self._known(index, lease_id)
        if lease.submission is None or lease.submission != submission_id:
            raise LedgerError(
                index, "submission-first", "this lease has no such submission before this entry"
            )
        if lease.node != node:
            raise LedgerError(index, "own-lease", "the lease belongs to another node")
        return lease

    def _submit(self, index: int, entry: Submitted) -> None:
        lease = self._known(index, entry.lease_id)
        if lease.node != entry.node:
            raise LedgerError(index, "own-lease", "the lease belongs to another node")
        if lease.closed or lease.submission is not None:
            raise LedgerError(index, "lease-over", "the lease was closed or answered before")
        if entry.submission_id in self._submissions:
            raise LedgerError(index, "submission-once", "the same content was submitted before")
        lease.number = len(self._submissions)
        epoch = self._epochs.get(self._epoch)
        lease.epoch = self._epoch if epoch is not None and not epoch.revealed else -1
        self._submissions[entry.submission_id] = entry.lease_id
        lease.submission = entry.submission_id

    def _check_verdict(self, index: int, entry: Judged | Reviewed, lease: _Lease) -> None:
        accepting = ACCEPTING if isinstance(entry, Judged) else (ALL,)
        if entry.accepted != (entry.check in accepting):
            raise LedgerError(
                index,
                "check-named",
                'an accepted entry says "all" or "unaudited", a rejected one names its check',
            )
        if entry.credit and not entry.accepted:
            raise LedgerError(index, "credit-on-accepted", "a rejected submission has earned credit")
        if self.spec is not None:
            most = _most_credit(self.spec, lease.rollouts)
            if entry.credit > most:
                raise LedgerError(
                    index, "credit-bounded", f"credit {entry.credit} exceeds the lease's possible {most}"
                )

    def _judge(self, index: int, entry: Judged) -> None:
        lease = self._submitted(index, entry.lease_id, entry.submission_id, entry.node)
        if lease.judged:
            raise LedgerError(index, "judged-twice", "the submission was judged before")
        self._check_verdict(index, entry, lease)
        record = self._records[entry.node]
        if record.owed:
            raise LedgerError(index, "claw-back-first", "credit is owed since this node's last failed audit")
        if entry.check == UNAUDITED:
            if not lease.rollouts:
                raise LedgerError(index, "blocks-audited", "a block unit is never accepted unaudited")
            self._spare(index, entry, lease, record)
        elif not lease.rollouts:
            pass  # block units are all audited: they neither clear nor void spared rollouts
        elif entry.accepted:
            record.passed(lease.number)
        elif entry.check != UNVERIFIABLE:
            lease.ended_streak = record.failed(entry.submission_id)
        lease.judged, lease.accepted = True, entry.accepted
        self._count(entry, 1)

    def _count(self, entry: Judged | Reviewed, change: int) -> None:
        if entry.accepted:
            self.accepted += change
            self.balances[entry.node] += entry.credit
        else:
            self.rejected += change

    def _spare(self, index: int, entry: Judged, lease: _Lease, record: AuditRecord) -> None:
        epoch = self._epochs.get(lease.epoch)
        if epoch is None or epoch.revealed:
            raise LedgerError(
                index, "spared-under-seed", "no secret seed was committed to when this was submitted"
            )
        rate = record.rate_ppm
        if rate >= EVERYTHING_PPM:
            raise LedgerError(
                index,
                "spared-proven",
                f"{record.streak} in a row verified, {record.needed} needed and {len(record.unaudited)} "
                "unaudited before: this one had to be verified",
            )
        epoch.spared.append((index, entry.submission_id, rate))
        record.spared(entry.submission_id, Unproven(entry.lease_id, lease.number, entry.credit))
        self.spared += 1

    def _reveal(self, index: int, entry: AuditRevealed) -> None:
        epoch = self._epochs.get(entry.epoch)
        if epoch is None or epoch.revealed:
            raise LedgerError(
                index, "seed-once", f"epoch {entry.epoch} was not committed to, or was revealed before"
            )
        if commitment_of(entry.seed) != epoch.commitment:
            raise LedgerError(index, "seed-committed", "this is not the seed that was committed to")
        epoch.revealed = True
        spared, epoch.spared = epoch.spared, []
        for at, submission_id, rate in spared:
            draw = draw_ppm(entry.seed, submission_id)
            if draw < rate:
                raise LedgerError(
                    index,
                    "spared-by-draw",
                    f"entry {at} was spared though its draw {draw} is below the rate {rate}",
                )

    def _claw_back(self, index: int, entry: ClawedBack) -> None:
        lease = self._submitted(index, entry.lease_id, entry.submission_id, entry.node)
        record = self._records[entry.node]
        owed = record.owed.get(entry.submission_id)
        if owed is None or owed.credit != entry.credit or entry.cause != record.cause:
            raise LedgerError(
                index, "claw-back-owed", "no such credit is owed because of a failed audit of this node"
            )
        del record.owed[entry.submission_id]
        lease.voided, lease.voided_by = owed, entry.cause
        self.balances[entry.node] -= entry.credit
        self.clawed_back += entry.credit

    def _review(self, index: int, entry: Reviewed) -> None:
        lease = self._submitted(index, entry.lease_id, entry.submission_id, entry.node)
        if lease.appeal != "open":
            raise LedgerError(index, "appeal-first", "no appeal of this submission is open")
        self._check_verdict(index, entry, lease)
        record = self._records[entry.node]
        blameless = entry.accepted or entry.check == UNVERIFIABLE
        lease.appeal = "overturned" if blameless else "upheld"
        if blameless and lease.ended_streak is not None:
            record.overturned(lease.ended_streak)
            lease.ended_streak = None
        if entry.accepted:
            lease.accepted = True
            self.rejected -= 1
            self._count(entry, 1)

    def _restore(self, index: int, entry: Restored) -> None:
        lease = self._submitted(index, entry.lease_id, entry.submission_id, entry.node)
        cause = self._leases.get(self._submissions.get(entry.cause, b""))
        overturned = cause is not None and cause.appeal == "overturned" and lease.voided_by == entry.cause
        if not overturned or lease.voided is None or lease.voided.credit != entry.credit:
            raise LedgerError(
                index, "restore-overturned", "no such credit was taken for a verdict that was overturned"
            )
        lease.voided = None
        self.balances[entry.node] += entry.credit
        self.clawed_back -= entry.credit


def balances(entries: Iterable[LedgerEntry], spec: RunSpec | None = None) -> dict[bytes, int]:
    """Return credit by node (public key), every node that joined included.

    Raises:
        LedgerError: an entry breaks a rule.
    """
    fold = LedgerFold(spec)
    for entry in entries:
        fold.add(entry)
    return fold.balances
