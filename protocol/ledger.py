"""The ledger: what changes credit, in order, and the audit that re-derives every balance from it.

Each entry's canonical bytes (``wire.encode``) are one leaf of an RFC 6962 Merkle log.
Balances are a pure fold over the entries (``barnraise.protocol.ledger_fold``): an
auditor with the entries, the signed run spec and a signed tree head re-derives every
one of them, and needs nobody's word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.identity import fingerprint
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
    decode_entry,
    encode_entry,
    evidence_of,
)
from barnraise.protocol.ledger_fold import LedgerError, LedgerFold, balances
from barnraise.protocol.ledger_problems import (
    ALTERED,
    CUT,
    NOTHING,
    Keys,
    Problem,
    Problems,
    subjects,
)
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Message, Receipt, Signed, TreeHead
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.runid import run_id as run_id_of
from barnraise.protocol.signatures import Check, check_here, claim_of
from barnraise.protocol.standing import CLAWED_BACK, RESTORED
from barnraise.protocol.tlog_checkpoint import Head, log_key, open_checkpoint
from barnraise.protocol.wire import decode

__all__ = [
    "Amended",
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
    "RolledBack",
    "RunCreated",
    "Submitted",
    "VersionPublished",
    "balances",
    "credit_for",
    "credit_for_block",
    "decode_entry",
    "encode_entry",
    "evidence_of",
    "receipt_differs",
    "verify_ledger",
]

M = TypeVar("M", bound=Message)

_TELL_EVERY = 4096  # entries


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
    signatures: int = 0  # how many were checked: of tree heads, receipts and the run spec
    unnamed: int = 0  # problems beyond those that are named

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_ledger(
    entries: Iterable[LedgerEntry],
    heads: Sequence[Signed],
    run_spec: Signed,
    receipts: Sequence[Signed] = (),
    check: Check = check_here,
    progress: Callable[[int], None] | None = None,
    also: Callable[[MerkleLog, int], Iterable[Problem]] | None = None,
    checkpoint: bytes | None = None,
) -> LedgerReport:
    """Audit a ledger: rules, signed tree heads, and a node's receipts against its entries.

    ``run_spec`` brings the operator's key and the run id; compare the report's
    ``run_id`` with the one known from elsewhere. ``heads`` may be of any earlier
    sizes, and one must cover all entries. Everything found wrong is a ``Problem``
    (at most ``MAX_PROBLEMS``); an entry that breaks a rule earns nothing and the
    audit goes on. ``check`` checks the signatures of heads and receipts (see
    ``signatures.process_pool``); ``progress`` hears now and then how many entries were read.
    ``also``: looks for more problems, given the whole log and when its newest good tree head was signed
    (ms since the Unix epoch, 0 without one). ``checkpoint``: a signed note that counts as a tree head does.

    Raises:
        SignatureError, MalformedError: ``run_spec`` itself is not to be believed.
    """
    spec = open_run_spec(run_spec)
    run_id = run_id_of(run_spec)
    problems = Problems()
    opened_heads = _opened(heads, TreeHead, spec.operator, run_id, check, problems)
    claims = [claim for _, claim in _opened(receipts, Receipt, spec.operator, run_id, check, problems)]
    wanted = {claim.ledger_index for claim in claims}
    kept: dict[int, LedgerEntry] = {}
    fold, log = LedgerFold(spec), MerkleLog()
    try:
        for index, entry in enumerate(entries):
            log.append(encode_entry(entry))
            if index in wanted:
                kept[index] = entry
            if progress is not None and not index % _TELL_EVERY:
                progress(index)
            try:
                fold.add(entry)
            except LedgerError as error:
                problems.add(index, error.rule, str(error), *subjects(entry, error.rule))
    except MalformedError as error:  # from a reader of bytes: nothing after it can be trusted
        problems.add(len(log), "readable", str(error), makes=frozenset({CUT}))
    if fold.run_id not in (None, run_id):
        problems.add(0, "own-run", "the ledger was made for another run than the spec's")
    for node in fold.owing():
        text = f"credit of node {node.hex()} is owed since its last failed audit"
        problems.add(None, "claw-back-owed", text, due_to=frozenset({("claw-back-first", node), CUT}))
    covering: list[tuple[int, TreeHead | Head]] = [*opened_heads]
    if checkpoint is not None:
        try:
            covering.append((len(heads), open_checkpoint(checkpoint, log_key(run_id, spec.operator))))
        except (SignatureError, MalformedError) as error:
            problems.add(None, "head-signed", f"the file's checkpoint: {error}")
    sound = _check_heads(covering, log, problems)
    for claim in claims:
        due_to = frozenset({CUT, ALTERED}) if claim.ledger_index >= sound else NOTHING
        _check_receipt(claim, kept.get(claim.ledger_index), len(log), problems, due_to)
    if also is not None:
        for problem in also(log, max((head.issued_at for _, head in opened_heads), default=0)):
            problems.take(problem)
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
        signatures=1 + len(heads) + len(receipts) + (checkpoint is not None),
        unnamed=problems.unnamed,
    )


def _opened(
    given: Sequence[Signed],
    type_: type[M],
    operator: bytes,
    run_id: bytes,
    check: Check,
    problems: Problems,
) -> list[tuple[int, M]]:
    """What the operator signed for this run, with its number among those given."""
    what, rule = ("tree head", "head") if type_ is TreeHead else ("receipt", "receipt")
    opened: list[tuple[int, M]] = []
    holds = check([claim_of(signed, type_) for signed in given])
    for number, (signed, held) in enumerate(zip(given, holds, strict=True)):
        about: Keys = NOTHING
        if signed.signer != operator:
            about = frozenset({(what, signed.signer)})
            text = f"signed by key {fingerprint(signed.signer)}, not by the run's {fingerprint(operator)}"
        elif not held:
            text = "its signature does not match its content: it was altered, or signed as something else"
        else:
            try:
                message = decode(signed.payload, type_)
            except MalformedError as error:
                text = str(error)
            else:
                if getattr(message, "run_id", None) == run_id:
                    opened.append((number, message))
                else:
                    about = frozenset({(what, getattr(message, "run_id", None))})
                    text = f"{what} {number} belongs to another run"
                    problems.add(None, f"{rule}-of-run", text, about, about)
                continue
        problems.add(None, f"{rule}-signed", f"{what} {number}: {text}", about, about)
    return opened


def _check_heads(heads: Sequence[tuple[int, TreeHead | Head]], log: MerkleLog, problems: Problems) -> int:
    """How many entries the largest head covers that is theirs."""
    covered = 0
    for number, head in sorted(heads, key=lambda item: item[1].size):
        if head.size > len(log):
            problems.add(
                None,
                "entries-missing",
                f"tree head {number} was signed for {head.size} entries; only {len(log)} are here",
                frozenset({CUT}),
                frozenset({CUT, ALTERED}),
            )
        elif head.root != log.root(head.size):
            among = f"the first that is not is one of {covered} to {head.size - 1}" if covered else "not all"
            problems.add(
                None,
                "head-root",
                f"the first {head.size} entries are not those of tree head {number}: {among}",
                frozenset({ALTERED}),
                frozenset({ALTERED}),
            )
        else:
            covered = max(covered, head.size)
    if covered < len(log) or not heads:
        text = f"no valid tree head covers entries {covered} to {len(log) - 1}"
        problems.add(covered, "head-covers", text, due_to=frozenset({CUT, ALTERED}))
    return covered


def _check_receipt(
    receipt: Receipt, entry: LedgerEntry | None, size: int, problems: Problems, due_to: Keys
) -> None:
    index = receipt.ledger_index
    if entry is None:
        text = f"a receipt names entry {index}; only {size} are here"
        problems.add(index, "receipt-entry", text, due_to=due_to)
    elif not isinstance(entry, Judged | Reviewed | ClawedBack | Restored):
        text = f"a receipt names entry {index}, which is no verdict"
        problems.add(index, "receipt-entry", text, due_to=due_to)
    elif differing := receipt_differs(receipt, entry):
        problems.add(
            index,
            "receipt-matches",
            f"a receipt for entry {index} was signed with other values: {', '.join(differing)}",
            due_to=due_to,
        )


def receipt_differs(receipt: Receipt, entry: Judged | Reviewed | ClawedBack | Restored) -> list[str]:
    """The names of what a receipt says otherwise than the entry that it names; none where they agree."""
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
    return [name for name, a, b in zip(names, claimed, logged, strict=True) if a != b]
