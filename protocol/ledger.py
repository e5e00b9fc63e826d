"""The ledger: what changes credit, in order, and the rules that make a balance of it.

Each entry's canonical bytes (``wire.encode``) are one leaf of an RFC 6962 Merkle log.
Balances are a pure fold over the entries: an auditor with the entries, the signed run
spec and a signed tree head re-derives every one of them, and needs nobody's word.
Proofs and payloads stay out; they are here by their hashes.

Times are not required to increase: the order of the log is the order that counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, assert_never

from msgspec import Meta

from barnraise.protocol import wire
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import (
    Count,
    Digest,
    Message,
    Millis,
    Name,
    Nonce,
    PublicKey,
    Receipt,
    Signed,
    Size,
    TreeHead,
    Verdict,
    Version,
)
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.spec import RunSpec

MAX_PROBLEMS = 1000


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


class VersionPublished(_Entry, frozen=True):
    """A policy version. ``manifest``: SHA-256 of the signed manifest's payload."""

    version: Version
    manifest: Digest


LedgerEntry = RunCreated | NodeJoined | LeaseIssued | LeaseClosed | Submitted | Judged | VersionPublished


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


def credit_for(parameters: int, tokens: int) -> int:
    """Credit of ``tokens`` verified completion tokens: 2 x parameters x tokens / 1e6, rounded down."""
    return 2 * parameters * tokens // 1_000_000


@dataclass(slots=True)
class _Lease:
    node: bytes
    rollouts: int
    submission: bytes | None = None
    closed: bool = False
    judged: bool = False


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
    _leases: dict[bytes, _Lease] = field(default_factory=dict)
    _submissions: set[bytes] = field(default_factory=set)

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
            case LeaseIssued():
                self._lease(index, entry)
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
            case _:
                assert_never(entry)

    def _lease(self, index: int, entry: LeaseIssued) -> None:
        if entry.lease_id in self._leases:
            raise LedgerError(index, "lease-once", "a lease of this id was issued before")
        if entry.node not in self.balances:
            raise LedgerError(index, "joined-first", "the lease's node has not joined")
        if entry.policy_version > self.version:
            raise LedgerError(
                index, "version-published", f"policy version {entry.policy_version} was not published before"
            )
        self._leases[entry.lease_id] = _Lease(entry.node, entry.prompts * entry.group_size)

    def _known(self, index: int, lease_id: bytes) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LedgerError(index, "lease-first", f"no lease {lease_id.hex()} was issued before")
        return lease

    def _submit(self, index: int, entry: Submitted) -> None:
        lease = self._known(index, entry.lease_id)
        if lease.node != entry.node:
            raise LedgerError(index, "own-lease", "the lease belongs to another node")
        if lease.closed or lease.submission is not None:
            raise LedgerError(index, "lease-over", "the lease was closed or answered before")
        if entry.submission_id in self._submissions:
            raise LedgerError(index, "submission-once", "the same content was submitted before")
        self._submissions.add(entry.submission_id)
        lease.submission = entry.submission_id

    def _judge(self, index: int, entry: Judged) -> None:
        lease = self._known(index, entry.lease_id)
        if lease.submission is None or lease.submission != entry.submission_id:
            raise LedgerError(
                index, "submission-first", "this lease has no such submission before this entry"
            )
        if lease.node != entry.node:
            raise LedgerError(index, "own-lease", "the lease belongs to another node")
        if lease.judged:
            raise LedgerError(index, "judged-twice", "the submission was judged before")
        if entry.accepted != (entry.check == "all"):
            raise LedgerError(
                index, "check-named", 'an accepted entry says "all", a rejected one names its check'
            )
        if entry.credit and not entry.accepted:
            raise LedgerError(index, "credit-on-accepted", "a rejected submission has earned credit")
        if self.spec is not None:
            most = credit_for(self.spec.model.parameters, lease.rollouts * self.spec.sampling.max_new_tokens)
            if entry.credit > most:
                raise LedgerError(
                    index, "credit-bounded", f"credit {entry.credit} exceeds the lease's possible {most}"
                )
        lease.judged = True
        if entry.accepted:
            self.accepted += 1
            self.balances[entry.node] += entry.credit
        else:
            self.rejected += 1


def balances(entries: Iterable[LedgerEntry], spec: RunSpec | None = None) -> dict[bytes, int]:
    """Return credit by node (public key), every node that joined included.

    Raises:
        LedgerError: an entry breaks a rule.
    """
    fold = LedgerFold(spec)
    for entry in entries:
        fold.add(entry)
    return fold.balances


@dataclass(frozen=True)
class Problem:
    """Something wrong with a ledger. ``index`` is the entry's, or None where no single entry is at fault."""

    index: int | None
    rule: str
    text: str


@dataclass(frozen=True)
class LedgerReport:
    """What an audit found. ``ok`` only without any problem; then the balances are the run's."""

    run_id: bytes
    operator: bytes
    size: int
    root: bytes
    balances: dict[bytes, int]
    accepted: int
    rejected: int
    receipts: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_ledger(
    entries: Iterable[LedgerEntry],
    heads: Sequence[Signed],
    run_spec: Signed,
    receipts: Sequence[Signed] = (),
) -> LedgerReport:
    """Audit a ledger: rules, signed tree heads, and a node's receipts against its entries.

    ``run_spec`` brings the operator's key and the run id; compare the report's
    ``run_id`` with the one known from elsewhere. ``heads`` may be of any earlier
    sizes, and one must cover all entries. Everything found wrong is a ``Problem``
    (at most ``MAX_PROBLEMS``); an entry that breaks a rule earns nothing and the
    audit goes on.

    Raises:
        SignatureError, MalformedError: ``run_spec`` itself is not to be believed.
    """
    spec = open_run_spec(run_spec)
    run_id = run_id_of(run_spec)
    problems = _Problems()
    claims = _open_receipts(receipts, spec.operator, run_id, problems)
    wanted = {claim.ledger_index for claim in claims}
    kept: dict[int, LedgerEntry] = {}
    fold, log = LedgerFold(spec), MerkleLog()
    try:
        for index, entry in enumerate(entries):
            log.append(encode_entry(entry))
            if index in wanted:
                kept[index] = entry
            try:
                fold.add(entry)
            except LedgerError as error:
                problems.add(index, error.rule, str(error))
    except MalformedError as error:  # from a reader of bytes: nothing after it can be trusted
        problems.add(len(log), "readable", str(error))
    if fold.run_id not in (None, run_id):
        problems.add(0, "own-run", "the ledger was made for another run than the spec's")
    _check_heads(heads, log, spec.operator, run_id, problems)
    for claim in claims:
        _check_receipt(claim, kept.get(claim.ledger_index), len(log), problems)
    return LedgerReport(
        run_id=run_id,
        operator=spec.operator,
        size=len(log),
        root=log.root(),
        balances=fold.balances,
        accepted=fold.accepted,
        rejected=fold.rejected,
        receipts=len(receipts),
        problems=tuple(problems.found),
    )


class _Problems:
    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, index: int | None, rule: str, text: str) -> None:
        if len(self.found) < MAX_PROBLEMS:
            self.found.append(Problem(index, rule, text))


def _open_receipts(
    receipts: Sequence[Signed], operator: bytes, run_id: bytes, problems: _Problems
) -> list[Receipt]:
    opened = []
    for number, signed in enumerate(receipts):
        try:
            receipt = open_signed(signed, Receipt, operator)
        except (SignatureError, MalformedError) as error:
            problems.add(None, "receipt-signed", f"receipt {number}: {error}")
            continue
        if receipt.run_id == run_id:
            opened.append(receipt)
        else:
            problems.add(None, "receipt-of-run", f"receipt {number} belongs to another run")
    return opened


def _check_heads(
    heads: Sequence[Signed], log: MerkleLog, operator: bytes, run_id: bytes, problems: _Problems
) -> None:
    covered = 0
    for number, signed in enumerate(heads):
        try:
            head = open_signed(signed, TreeHead, operator)
        except (SignatureError, MalformedError) as error:
            problems.add(None, "head-signed", f"tree head {number}: {error}")
            continue
        if head.run_id != run_id:
            problems.add(None, "head-of-run", f"tree head {number} belongs to another run")
        elif head.size > len(log):
            problems.add(
                None,
                "entries-missing",
                f"tree head {number} was signed for {head.size} entries; only {len(log)} are here",
            )
        elif head.root != log.root(head.size):
            problems.add(
                None,
                "head-root",
                f"the first {head.size} entries are not those that tree head {number} was signed for",
            )
        else:
            covered = max(covered, head.size)
    if covered < len(log) or not heads:
        problems.add(covered, "head-covers", f"no valid tree head covers entries {covered} to {len(log) - 1}")


def _check_receipt(receipt: Receipt, entry: LedgerEntry | None, size: int, problems: _Problems) -> None:
    index = receipt.ledger_index
    if entry is None:
        problems.add(index, "receipt-entry", f"a receipt names entry {index}; only {size} are here")
    elif not isinstance(entry, Judged):
        problems.add(index, "receipt-entry", f"a receipt names entry {index}, which is no verdict")
    else:
        claimed = {
            "node": receipt.node,
            "lease_id": receipt.lease_id,
            "submission_id": receipt.submission_id,
            "accepted": receipt.verdict.accepted,
            "check": receipt.verdict.check,
            "credit": receipt.credit,
            "evidence": evidence_of(receipt.verdict),
        }
        differing = [name for name, value in claimed.items() if getattr(entry, name) != value]
        if differing:
            problems.add(
                index,
                "receipt-matches",
                f"a receipt for entry {index} was signed with other values: {', '.join(differing)}",
            )
