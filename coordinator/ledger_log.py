"""From events to the public ledger: one entry for each event that changes or bounds credit.

Timeouts, batches and skipped groups move no credit and stay inside. The log itself
is never stored: it is derived again from the journal, at start and for an export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, assert_never

from barnraise.coordinator.block_events import (
    BlockJudged,
    BlockLeased,
    BlockOverdue,
    BlockSubmitted,
    RoundFormed,
)
from barnraise.coordinator.events import (
    AppealDecided,
    AppealFiled,
    AuditCommitted,
    AuditRevealed,
    BanLifted,
    BatchFormed,
    CreditClawedBack,
    CreditRestored,
    Event,
    LeaseClosed,
    LeaseIssued,
    LeaseTimedOut,
    NodeBanned,
    NodeJoined,
    OffenceNoted,
    RunOpened,
    SubmissionJudged,
    SubmissionsSkipped,
    Submitted,
    VersionPublished,
    VersionTrained,
)
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_uses import UseNotes
from barnraise.coordinator.operator_events import OperatorAct, RollbackOrdered, SettingsAmended
from barnraise.coordinator.state import EventError, State, apply
from barnraise.protocol import ledger
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import LedgerEntry, encode_entry
from barnraise.protocol.ledger_file import write_ledger
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Receipt, Signed, TreeHead, Verdict
from barnraise.protocol.runid import run_id
from barnraise.protocol.standing import CLAWED_BACK, RESTORED

_FORGET_EVERY = 65_536  # entries


def entry_of(state: State, event: Event) -> ledger.LedgerEntry | None:
    """The ledger entry of ``event``, given the state *before* it; None for what the ledger leaves out.

    Raises:
        EventError: the event speaks of a lease or submission that the state does not know.
    """
    match event:
        case RunOpened():
            return ledger.RunCreated(at_ms=event.at_ms, run_id=event.run_id)
        case NodeJoined():
            return ledger.NodeJoined(at_ms=event.at_ms, node=event.node, name=event.name)
        case LeaseIssued():
            terms = event.lease
            return ledger.LeaseIssued(
                at_ms=event.at_ms,
                lease_id=terms.lease_id,
                unit_id=terms.unit_id,
                node=terms.node,
                policy_version=terms.policy_version,
                prompts=terms.prompts,
                group_size=terms.group_size,
            )
        case BlockLeased():
            block = event.lease
            return ledger.BlockLeased(
                at_ms=event.at_ms,
                lease_id=block.lease_id,
                unit_id=block.unit_id,
                node=block.node,
                policy_version=block.policy_version,
                block=block.block,
                slot=block.slot,
            )
        case BlockSubmitted():
            hold = state.blocks.leases.get(event.lease_id)
            if hold is None:
                raise EventError(f"block lease {event.lease_id.hex()} is not open")
            return ledger.Submitted(
                at_ms=event.at_ms,
                lease_id=event.lease_id,
                submission_id=event.submission_id,
                node=hold.terms.node,
            )
        case BlockJudged():
            work = state.blocks.work.get(event.submission_id)
            if work is None:
                raise EventError(f"submission {event.submission_id.hex()} is not known")
            return _judged(event, work.lease.lease_id, work.lease.node)
        case LeaseClosed():
            return ledger.LeaseClosed(at_ms=event.at_ms, lease_id=event.lease_id, reason=event.reason)
        case Submitted():
            lease = state.leases.get(event.lease_id)
            if lease is None:
                raise EventError(f"lease {event.lease_id.hex()} is not open")
            return ledger.Submitted(
                at_ms=event.at_ms,
                lease_id=event.lease_id,
                submission_id=event.submission_id,
                node=lease.terms.node,
            )
        case SubmissionJudged():
            submission = state.submissions.get(event.submission_id)
            if submission is None:
                raise EventError(f"submission {event.submission_id.hex()} is not known")
            return _judged(event, submission.lease.lease_id, submission.lease.node)
        case VersionPublished():
            return ledger.VersionPublished(at_ms=event.at_ms, version=event.version, manifest=event.manifest)
        case AuditCommitted():
            return ledger.AuditCommitted(at_ms=event.at_ms, epoch=event.epoch, commitment=event.commitment)
        case AuditRevealed():
            return ledger.AuditRevealed(at_ms=event.at_ms, epoch=event.epoch, seed=event.seed)
        case CreditClawedBack() | CreditRestored():
            return _moved(state, event)
        case AppealFiled() | AppealDecided():
            return _appeal(state, event)
        case NodeBanned():
            return ledger.NodeBanned(
                at_ms=event.at_ms, node=event.node, reason=event.reason, until=event.until
            )
        case BanLifted():
            return ledger.BanLifted(at_ms=event.at_ms, node=event.node, reason=event.reason)
        case SettingsAmended():
            return ledger.Amended(
                at_ms=event.at_ms,
                number=event.number,
                changes=event.changes,
                reason=event.reason,
                amendment=event.amendment,
            )
        case RollbackOrdered():
            return ledger.RolledBack(at_ms=event.at_ms, to_version=event.to_version, reason=event.reason)
        case OperatorAct():
            return None
        case OffenceNoted():
            return None
        case LeaseTimedOut() | BatchFormed() | SubmissionsSkipped() | VersionTrained():
            return None
        case BlockOverdue() | RoundFormed():
            return None
        case _:
            assert_never(event)


def _judged(event: SubmissionJudged | BlockJudged, lease_id: bytes, node: bytes) -> ledger.Judged:
    return ledger.Judged(
        at_ms=event.at_ms,
        lease_id=lease_id,
        submission_id=event.submission_id,
        node=node,
        accepted=event.verdict.accepted,
        check=event.verdict.check,
        credit=event.credit,
        evidence=ledger.evidence_of(event.verdict),
    )


def _moved(state: State, event: CreditClawedBack | CreditRestored) -> ledger.LedgerEntry:
    """Credit taken back or given again, with the evidence that its receipt carries."""
    cause = state.submissions.get(event.cause)
    if cause is None:
        raise EventError("credit moves because of a submission that is not known")
    back = isinstance(event, CreditClawedBack)
    held = state.nodes[cause.lease.node].audit.owed if back else cause.voided
    item = held.get(event.submission_id)
    if item is None:
        raise EventError("no such credit is there to be moved")
    kind = ledger.ClawedBack if back else ledger.Restored
    return kind(
        at_ms=event.at_ms,
        lease_id=item.lease_id,
        submission_id=event.submission_id,
        node=cause.lease.node,
        cause=event.cause,
        credit=item.credit,
        evidence=ledger.evidence_of(moved_verdict(event, item.credit)),
    )


def moved_verdict(event: CreditClawedBack | CreditRestored, credit: int) -> Verdict:
    """What the receipt of voided (or restored) work says."""
    back = isinstance(event, CreditClawedBack)
    cause = event.cause.hex()
    return Verdict(
        accepted=not back,
        check=CLAWED_BACK if back else RESTORED,
        threshold=0.0,
        value=float(credit),
        position=f"submission {cause}",
        message=(
            "this work was accepted without the model's checks, and the next one that was checked failed "
            f"({cause[:16]}): the credit of everything since the last passed check is void"
            if back
            else f"the failed check of {cause[:16]} was overturned on appeal: this credit counts again"
        ),
    )


def receipt_of(run_id: bytes, event: Event, entry: ledger.LedgerEntry, index: int) -> Receipt | None:
    """What a node is told, signed, of its submission: for verdicts, reviews, and credit moved."""
    if isinstance(event, SubmissionJudged | BlockJudged | AppealDecided):
        assert isinstance(entry, ledger.Judged | ledger.Reviewed)
        verdict, credit = event.verdict, event.credit
    elif isinstance(event, CreditClawedBack | CreditRestored):
        assert isinstance(entry, ledger.ClawedBack | ledger.Restored)
        verdict = moved_verdict(event, entry.credit)
        credit = entry.credit if verdict.accepted else 0
    else:
        return None
    return Receipt(
        run_id=run_id,
        node=entry.node,
        lease_id=entry.lease_id,
        submission_id=entry.submission_id,
        verdict=verdict,
        credit=credit,
        ledger_index=index,
        issued_at=event.at_ms,
    )


def _appeal(state: State, event: AppealFiled | AppealDecided) -> ledger.LedgerEntry:
    item = state.submissions.get(event.submission_id) or state.blocks.work.get(event.submission_id)
    if item is None:
        raise EventError(f"submission {event.submission_id.hex()} is not known")
    terms = item.lease
    if isinstance(event, AppealFiled):
        return ledger.Appealed(
            at_ms=event.at_ms, lease_id=terms.lease_id, submission_id=event.submission_id, node=terms.node
        )
    return ledger.Reviewed(
        at_ms=event.at_ms,
        lease_id=terms.lease_id,
        submission_id=event.submission_id,
        node=terms.node,
        accepted=event.verdict.accepted,
        check=event.verdict.check,
        credit=event.credit,
        evidence=ledger.evidence_of(event.verdict),
    )


def advance(state: State, ledger: MerkleLog, event: Event) -> tuple[int, LedgerEntry, bytes] | None:
    """Let ``event`` happen to both; the entry that it makes, if any, with its index and its bytes.

    Raises:
        EventError: the event does not follow from the state; nothing has changed.
    """
    entry = entry_of(state, event)
    apply(state, event)
    if entry is None:
        return None
    data = encode_entry(entry)
    return ledger.append(data), entry, data


def entries_of(events: Iterable[Event], max_lag: int) -> Iterator[ledger.LedgerEntry]:
    """The whole ledger of a journal, in order."""
    state = State(max_lag=max_lag)
    for event in events:
        entry = entry_of(state, event)
        apply(state, event)
        if entry is not None:
            yield entry


def manifest_digest(manifest: Signed) -> bytes:
    """What the ledger says of a manifest: SHA-256 of its payload."""
    return hashlib.sha256(manifest.payload).digest()


def export_ledger(
    journal: Journal, signed_spec: Signed, max_lag: int, identity: Identity, now_ms: int, target: Path
) -> None:
    """Write what is durable as a ledger file, under a tree head signed now that covers all of it.

    Blocking; safe beside a running coordinator, whose journal may grow meanwhile. The state and the
    ids of trained work are in memory, entries are not: beside ``target`` there must be room for them twice.

    Raises:
        StorageError: the disk refused.
        RunFolderError: the journal is damaged.
    """
    run, uses = run_id(signed_spec), UseNotes()
    # A reader wants heads and uses first, which are known last: the entries wait in a file, not in memory.
    try:
        with TemporaryFile(dir=target.parent) as waiting:

            def heads() -> Iterator[Signed]:
                yield from journal.tree_heads()  # before the entries: none may cover more than is written
                log = _spooled(entries_of(uses.watch(journal.events()), max_lag), waiting)
                yield sign(TreeHead(run_id=run, size=len(log), root=log.root(), issued_at=now_ms), identity)

            write_ledger(target, signed_spec, heads(), _unspooled(waiting), uses.signed(run, identity))
    except OSError as error:
        raise StorageError(f"cannot write the ledger to {target} ({error.strerror})") from None


def _spooled(entries: Iterable[LedgerEntry], file: IO[bytes]) -> MerkleLog:
    """The log over ``entries``, whose bytes are appended to ``file``; it answers for its own size alone."""
    log = MerkleLog()
    for entry in entries:
        data = encode_entry(entry)
        file.write(len(data).to_bytes(4, "big") + data)
        if not (log.append(data) + 1) % _FORGET_EVERY:
            log.forget(len(log), _forgotten)
    return log


def _unspooled(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while length := file.read(4):
        yield file.read(int.from_bytes(length, "big"))


def _forgotten(level: int, index: int) -> bytes:
    raise IndexError(f"subtree {index} at level {level} was forgotten")
