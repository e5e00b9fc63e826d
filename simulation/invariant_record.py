"""What a coordinator has made durable, folded once more by other rules than its own.

Pure: ``Record.hear`` is a listener of ``Core`` (``barnraise.coordinator.core``) and raises ``Broken``
where an event contradicts what came before. It outlives the coordinator: after a crash, the next
one is held to what the one before had said.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from barnraise.coordinator import events
from barnraise.coordinator.block_events import BlockJudged, BlockSubmitted
from barnraise.coordinator.block_workers import RecombineJob, RoundJob
from barnraise.coordinator.journal import Payload, Write
from barnraise.coordinator.scheduler import HELD_PER_NODE, LEASES_PER_NODE
from barnraise.coordinator.state import State
from barnraise.coordinator.submissions import GRACE_MS
from barnraise.coordinator.workers import TrainJob
from barnraise.protocol.identity import verify
from barnraise.protocol.ledger import LedgerError, LedgerFold, decode_entry
from barnraise.protocol.merkle import MerkleLog
from barnraise.protocol.messages import Signed
from barnraise.protocol.spec import RunSpec
from barnraise.simulation.invariant_work import (
    Broken,
    Terms,
    check_lag,
    check_submission,
    short,
    unit_of,
)

_MANIFEST = b"barnraise/1/Manifest\0"  # written out: a fault in the envelope must not hide here
Hears = Callable[[events.Event, Write], bool]


@dataclass(slots=True)
class Loan:
    """A lease that is open. ``released``: somebody else may have its unit."""

    terms: Terms
    released: bool = False


class Record:
    """One run, as its journal grew.

    Attributes:
        events: how many were heard. ``entries``: the ledger's, as bytes.
        leases: open ones, by id. ``submitted``: submission -> its lease. ``waiting``: not judged yet.
        credit: by node's key. ``manifests``: version -> SHA-256 of what was published.
        others: asked first about each event; what one of them returns true for was its alone.
    """

    def __init__(self, spec: RunSpec, run_id: bytes) -> None:
        self.events = 0
        self.entries: list[bytes] = []
        self.log = MerkleLog()
        self.ledger = LedgerFold(spec)
        self.leases: dict[bytes, Loan] = {}
        self.submitted: dict[bytes, Terms] = {}
        self.waiting: set[bytes] = set()
        self.accepted: dict[bytes, int] = {}  # submission -> credit that counts
        self.used: dict[bytes, int] = {}  # submission -> the version it went into
        self.credit: Counter[bytes] = Counter()
        self.manifests: dict[int, bytes] = {}
        self.banned_until: dict[bytes, int] = {}
        self.batches: dict[int, tuple[bytes, ...]] = {}
        self.head = -1
        self.others: list[Hears] = []
        self._spec, self._run_id = spec, run_id
        self._judged: set[bytes] = set()
        self._credited: Counter[int] = Counter()  # by unit
        self._released: Counter[int] = Counter()  # by unit: how often it became free for somebody else
        self._holder: dict[int, bytes] = {}  # unit -> the lease that reserves it
        self._of_node: dict[bytes, set[bytes]] = {}
        self._voided: dict[bytes, int] = {}  # submission -> credit clawed back
        self._jobs = 0
        self._replaying = False

    def replay(self, happened: Iterable[events.Event], entries: Iterable[bytes]) -> None:
        """Take in what was durable before anybody listened; of its payloads nothing is known any more.

        Raises:
            Broken: see ``hear``.
        """
        self._replaying = True
        self.hear(Write(events=tuple(happened), entries=tuple(entries)))
        self._replaying = False

    def hear(self, write: Write) -> None:
        """Take in one durable write.

        Raises:
            Broken: it contradicts what was durable before.
        """
        for data in write.entries:
            self.log.append(data)
            self.entries.append(data)
            try:
                self.ledger.add(decode_entry(data))
            except LedgerError as error:
                raise Broken("ledger-rules", str(error)) from None
        for event in write.events:
            self.events += 1
            self._hear(event, write)

    def _hear(self, event: events.Event, write: Write) -> None:
        if any(hears(event, write) for hears in self.others):
            return
        match event:
            case events.LeaseIssued(lease=lease):
                self.lend(lease)
            case events.LeaseTimedOut():
                self.release(event.lease_id)
            case events.LeaseClosed():
                self.release(event.lease_id)
                self.close(event.lease_id, "closed")
            case events.Submitted():
                self.store(event, write.payloads)
            case events.SubmissionJudged():
                self.judge(event)
            case events.AppealDecided():
                if event.verdict.accepted:
                    self.earn(event.submission_id, event.credit)
            case events.CreditClawedBack():
                lost = self._voided[event.submission_id] = self.accepted.pop(event.submission_id, 0)
                self.credit[self._node(event.submission_id)] -= lost
            case events.CreditRestored():
                again = self.accepted[event.submission_id] = self._voided.pop(event.submission_id, 0)
                self.credit[self._node(event.submission_id)] += again
            case events.BatchFormed():
                self._batch(event)
            case events.VersionPublished():
                self._published(event, write.manifest)
            case events.NodeBanned():
                self.banned_until[event.node] = event.until
                for lease_id in self._of_node.get(event.node, ()):
                    self.release(lease_id)
            case events.BanLifted():
                self.banned_until.pop(event.node, None)
            case _:
                pass

    def _node(self, submission_id: bytes) -> bytes:
        lease = self.submitted.get(submission_id)
        if lease is None:
            raise Broken("submitted-first", f"submission {short(submission_id)} was never stored")
        return lease.node

    def lend(self, lease: Terms) -> None:
        """Raises Broken: somebody else holds it, or the node holds too many."""
        holder = self._holder.get(unit_of(lease))
        if holder is not None:
            raise Broken(
                "lent-once",
                f"unit {lease.unit_id} is lent to {short(lease.node)} while lease {short(holder)} of "
                f"{short(self.leases[holder].terms.node)} reserves it",
            )
        if lease.policy_version > self.head:
            raise Broken("lent-published", f"unit {lease.unit_id} is lent at version {lease.policy_version}")
        self.leases[lease.lease_id] = Loan(lease)
        self._holder[unit_of(lease)] = lease.lease_id
        mine = self._of_node.setdefault(lease.node, set())
        mine.add(lease.lease_id)
        reserved = sum(not self.leases[key].released for key in mine)
        if reserved > LEASES_PER_NODE or len(mine) > HELD_PER_NODE:
            raise Broken(
                "leases-bounded", f"{short(lease.node)} holds {len(mine)} leases, {reserved} of them reserved"
            )

    def release(self, lease_id: bytes) -> None:
        """A lease's unit may go to somebody else. Raises Broken: it is not open."""
        loan = self._open(lease_id, "released")
        if not loan.released:
            loan.released = True
            self.freed(loan.terms)
            self._holder.pop(unit_of(loan.terms), None)

    def freed(self, terms: Terms) -> None:
        """Somebody else may do the same unit from now on, and be paid for it, too."""
        self._released[unit_of(terms)] += 1

    def _open(self, lease_id: bytes, why: str) -> Loan:
        loan = self.leases.get(lease_id)
        if loan is None:
            raise Broken("lease-open", f"lease {short(lease_id)} is {why} and is not open")
        return loan

    def close(self, lease_id: bytes, why: str) -> Terms:
        """A lease is no more; what it was. Raises Broken: it is not open."""
        terms = self._open(lease_id, why).terms
        del self.leases[lease_id]
        self._of_node[terms.node].discard(lease_id)
        if self._holder.get(unit_of(terms)) == lease_id:
            del self._holder[unit_of(terms)]
        return terms

    def store(self, event: events.Submitted | BlockSubmitted, payloads: Sequence[Payload]) -> None:
        """Work on an open lease is on the disk. Raises Broken: it is not the lease holder's, or late."""
        name = short(event.submission_id)
        if event.submission_id in self.submitted:
            raise Broken("submitted-once", f"submission {name} is stored twice")
        terms = self.close(event.lease_id, "answered")
        self.submitted[event.submission_id] = terms
        self.waiting.add(event.submission_id)
        if event.at_ms > terms.deadline_at + GRACE_MS:
            raise Broken("in-time", f"submission {name} came {event.at_ms - terms.deadline_at} ms late")
        payload = next((item for item in payloads if item.submission_id == event.submission_id), None)
        if self._replaying:
            return
        if payload is None:
            raise Broken("stored-with-payload", f"submission {name} is acknowledged without its bytes")
        check_submission(payload.signed, event.submission_id, terms)

    def judge(self, event: events.SubmissionJudged | BlockJudged) -> None:
        """Raises Broken: it was judged before, or never stored."""
        if event.submission_id in self._judged:
            raise Broken("judged-once", f"submission {short(event.submission_id)} is judged twice")
        self._node(event.submission_id)
        self._judged.add(event.submission_id)
        self.waiting.discard(event.submission_id)
        if event.verdict.accepted:
            self.earn(event.submission_id, event.credit)
        elif event.credit:
            raise Broken("credited-once", f"rejected submission {short(event.submission_id)} earns credit")

    def earn(self, submission_id: bytes, credit: int) -> None:
        """Raises Broken: it, or its unit, earned before."""
        if submission_id in self.accepted:
            raise Broken("credited-once", f"submission {short(submission_id)} is credited twice")
        unit = unit_of(self.submitted[submission_id])
        self._credited[unit] += 1
        if self._credited[unit] > 1 + self._released[unit]:
            raise Broken(
                "credited-once", f"unit {unit} is credited {self._credited[unit]} times, lent on too few"
            )
        self.accepted[submission_id] = credit
        self.credit[self._node(submission_id)] += credit

    def _batch(self, event: events.BatchFormed) -> None:
        self.batches[event.version] = event.submissions
        self._check_use(event.version, event.submissions)
        for submission_id in event.submissions:
            self.used[submission_id] = event.version

    def _check_use(self, version: int, submissions: Sequence[bytes]) -> None:
        if len(set(submissions)) < len(submissions):
            raise Broken("used-once", f"version {version} is made from one submission several times")
        for submission_id in submissions:
            before = self.used.get(submission_id)
            if before is not None:
                raise Broken(
                    "used-once",
                    f"submission {short(submission_id)} goes into version {version} and went into {before}",
                )
            if submission_id not in self.accepted:
                raise Broken("used-accepted", f"version {version} uses work that does not count")
            check_lag(version, self.submitted[submission_id], self._spec.rollout.max_lag)

    def _published(self, event: events.VersionPublished, manifest: tuple[int, Signed] | None) -> None:
        self.head, self.manifests[event.version] = event.version, event.manifest
        if self._replaying:
            return
        if manifest is None:
            raise Broken("published-signed", f"version {event.version} is published without a manifest")
        signed = manifest[1]
        if hashlib.sha256(signed.payload).digest() != event.manifest:
            raise Broken("published-signed", f"version {event.version}: the ledger and the manifest disagree")
        self.check_manifest(event.version, signed)

    def check_manifest(self, version: int, signed: Signed) -> None:
        """That this is what the operator signed and published as ``version``.

        Raises:
            Broken: it is not.
        """
        if signed.signer != self._spec.operator or not verify(
            self._spec.operator, _MANIFEST + signed.payload, signed.signature
        ):
            raise Broken("version-signed", f"the manifest of version {version} is not signed by the operator")
        if self.manifests.get(version) != hashlib.sha256(signed.payload).digest():
            raise Broken("version-signed", f"this manifest was never published as version {version}")

    def check_jobs(self, jobs: Sequence[TrainJob | RoundJob | RecombineJob]) -> None:
        """What the learner really got since the last call: the batches, each rollout once, none too old.

        Raises:
            Broken: it got something else.
        """
        for job in jobs[self._jobs :]:
            self._jobs += 1
            if not isinstance(job, TrainJob):
                continue
            batch = self.batches.get(job.version)
            found = tuple(hashlib.sha256(part.payload).digest() for part in job.parts)
            if found != batch:
                raise Broken("used-once", f"version {job.version} is trained on other work than its batch")
            for submission_id, part in zip(found, job.parts, strict=True):
                if part.lease != self.submitted[submission_id]:
                    raise Broken("used-once", f"version {job.version}: a part under somebody else's lease")
                check_lag(job.version, part.lease, self._spec.rollout.max_lag)

    def check_restart(self, state: State) -> None:
        """That a coordinator which has just begun knows all that was durable.

        Raises:
            Broken: something is forgotten.
        """
        blocks = state.blocks
        known = state.leases.keys() | state.closed.keys() | blocks.leases.keys() | blocks.closed.keys()
        lost = [key for key in self.leases if key not in known]
        if lost:
            raise Broken(
                "restart-forgets-nothing", f"{len(lost)} open leases are gone, such as {short(lost[0])}"
            )
        stored = state.submissions.keys() | state.blocks.work.keys()
        gone = [key for key in self.waiting if key not in stored]
        if gone:
            raise Broken("restart-forgets-nothing", f"{len(gone)} acknowledged submissions are gone")
        if state.head < self.head:
            raise Broken("restart-forgets-nothing", f"version {self.head} is gone, the head is {state.head}")

    def check_credit(self, state: State) -> None:
        """That the balances agree: state, ledger, and this record. ``state`` must be on the disk.

        Raises:
            Broken: credit came from nowhere, or is lost.
        """
        for key, balance in self.ledger.balances.items():
            node = state.nodes.get(key)
            shown = None if node is None else node.credit
            mine = self.credit[key]
            if shown != balance or mine != balance:
                raise Broken(
                    "credit-conserved",
                    f"{short(key)} has {shown} by the state, {balance} by the ledger, {mine} by the verdicts",
                )


def check_log(record: Record, size: int, root: bytes) -> None:
    """That a signed tree head is one of the entries that were durable.

    Raises:
        Broken: it is of other entries.
    """
    try:
        mine = record.log.root(size)
    except IndexError:
        raise Broken("ledger-grows", f"a tree head of {size} entries, {len(record.log)} exist") from None
    if mine != root:
        raise Broken("ledger-grows", f"the first {size} entries are not those that were there before")


__all__ = ["Broken", "Loan", "Record", "check_lag", "check_log", "check_submission"]
