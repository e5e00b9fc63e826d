"""The ledger: what changes credit, in order, and the audit that re-derives every balance from it.

Each entry's canonical bytes (``wire.encode``) are one leaf of an RFC 6962 Merkle log.
Balances are a pure fold over the entries (``barnraise.protocol.ledger_fold``): an
auditor with the entries, the signed run spec and a signed tree head re-derives every
one of them, and needs nobody's word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.ledger_entries import (
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
    RunCreated,
    Submitted,
    VersionPublished,
    credit_for,
    credit_for_block,
    decode_entry,
    encode_entry,
    evidence_of,
)
from barnraise.protocol.ledger_fold import LedgerError, LedgerFold, balances
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Receipt, Signed, TreeHead
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.standing import CLAWED_BACK, RESTORED

__all__ = [
    "Appealed",
    "AuditCommitted",
    "AuditRevealed",
    "BanLifted",
    "BlockLeased",
    "ClawedBack",
    "Judged",
    "LeaseClosed",
    "LeaseIssued",
    "LedgerEntry",
    "LedgerError",
    "LedgerFold",
    "LedgerReport",
    "NodeBanned",
    "NodeJoined",
    "Problem",
    "Restored",
    "Reviewed",
    "RunCreated",
    "Submitted",
    "VersionPublished",
    "balances",
    "credit_for",
    "credit_for_block",
    "decode_entry",
    "encode_entry",
    "evidence_of",
    "verify_ledger",
]

MAX_PROBLEMS = 1000


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
    spared: int = 0  # accepted without the model's checks
    sealed: int = 0  # those among them whose draw can only be checked when the seed is published
    clawed_back: int = 0  # credit taken back and not restored

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
    for node in fold.owing():
        problems.add(
            None, "claw-back-owed", f"credit of node {node.hex()} is owed since its last failed audit"
        )
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
        spared=fold.spared,
        sealed=fold.sealed(),
        clawed_back=fold.clawed_back,
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
    elif not isinstance(entry, Judged | Reviewed | ClawedBack | Restored):
        problems.add(index, "receipt-entry", f"a receipt names entry {index}, which is no verdict")
    else:
        verdict = receipt.verdict
        claimed: list[object] = [receipt.node, receipt.lease_id, receipt.submission_id, evidence_of(verdict)]
        logged: list[object] = [entry.node, entry.lease_id, entry.submission_id, entry.evidence]
        names = ["node", "lease_id", "submission_id", "evidence", "accepted", "check", "credit"]
        claimed += [verdict.accepted, verdict.check, receipt.credit]
        match entry:
            case Judged() | Reviewed():
                logged += [entry.accepted, entry.check, entry.credit]
            case ClawedBack():
                logged += [False, CLAWED_BACK, 0]
            case Restored():
                logged += [True, RESTORED, entry.credit]
        differing = [name for name, a, b in zip(names, claimed, logged, strict=True) if a != b]
        if differing:
            problems.add(
                index,
                "receipt-matches",
                f"a receipt for entry {index} was signed with other values: {', '.join(differing)}",
            )
