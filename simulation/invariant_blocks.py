"""What must hold of block units and their rounds, by other rules than the coordinator's own.

Part of a ``Record``, which does what is common to all work (signatures, one answer to a lease, credit).
Pure; raises ``Broken``. The names are described in ``barnraise.simulation.invariants``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from barnraise.coordinator import events
from barnraise.coordinator.block_draws import PROVEN_AFTER, drawn
from barnraise.coordinator.block_events import (
    BlockJudged,
    BlockLeased,
    BlockOverdue,
    BlockSubmitted,
    RoundFormed,
)
from barnraise.coordinator.block_workers import BlockVerifyJob, RecombineJob, RoundJob
from barnraise.coordinator.journal import Write
from barnraise.coordinator.workers import TrainJob
from barnraise.protocol.pretrain import BlockLease, PretrainSpec, last_block_version, segments
from barnraise.simulation.invariant_record import Record
from barnraise.simulation.invariant_work import Broken, short

FORM_S = 60.0  # a round that may close does so within
_Slot = tuple[int, int, int]  # version, block, slot


@dataclass(slots=True)
class _Work:
    """A stored unit. ``proven``: its node had a record by then. ``again``: part of it was done again."""

    terms: BlockLease
    proven: bool
    status: str = "waiting"  # overdue, accepted, late, rejected, used
    again: bool = False


class BlockRecord:
    """The block stage of one run, as its journal grew.

    Attributes:
        rounds: version -> the submissions that it was formed of.
    """

    def __init__(self, record: Record, spec: PretrainSpec) -> None:
        self.rounds: dict[int, tuple[bytes, ...]] = {}
        self._record, self._spec = record, spec
        self._work: dict[bytes, _Work] = {}
        self._taken: dict[_Slot, bytes] = {}  # place -> the stored unit that it waits for, or has
        self._streaks: Counter[bytes] = Counter()  # node -> units accepted in a row
        self._opened_at = 0
        self._may_close_since: float | None = None
        self._jobs = self._judged = 0
        record.others.append(self.hear)

    def hear(self, event: events.Event, write: Write) -> bool:
        """Take in one durable event; whether it was about block units alone.

        Raises:
            Broken: it contradicts what came before.
        """
        record = self._record
        match event:
            case BlockLeased():
                self._leased(event.lease)
            case BlockSubmitted():
                record.store(event, write.payloads)
                self._stored(event.submission_id)
            case BlockOverdue():
                self._overdue(event)
            case BlockJudged():
                record.judge(event)
                self._verdict(event.submission_id, event.verdict.accepted, event.blameless)
            case RoundFormed():
                self._formed(event)
            case events.AppealDecided() if event.submission_id in self._work and event.verdict.accepted:
                self._verdict(event.submission_id, True, False)
                return False
            case events.VersionPublished():
                self._published(event)
                return False
            case _:
                return False
        return True

    def _leased(self, terms: BlockLease) -> None:
        place, node = _place(terms), terms.node.hex()[:8]
        if terms.policy_version != self._record.head:
            raise Broken(
                "lent-published",
                f"a place of round {terms.policy_version} is lent, the head is {self._record.head}",
            )
        if place in self._taken:
            raise Broken(
                "place-lent-once", f"{_words(place)} is lent to {node}, and has {short(self._taken[place])}"
            )
        for lease_id, loan in self._record.leases.items():
            held = isinstance(loan.terms, BlockLease) and loan.terms.node == terms.node and not loan.released
            if held and loan.terms.timeout_at > terms.issued_at:
                raise Broken(
                    "leases-bounded",
                    f"{node} gets {_words(place)} while it holds lease {short(lease_id)} of a block",
                )
        self._once(terms)
        self._record.lend(terms)

    def _once(self, terms: BlockLease) -> None:
        """That the node has nothing else of this block and round."""
        block = terms.policy_version, terms.block
        held = [
            loan.terms
            for loan in self._record.leases.values()
            if isinstance(loan.terms, BlockLease) and loan.terms.node == terms.node
        ]
        sent = [item.terms for item in self._work.values() if item.status != "rejected"]
        for other in (*held, *(item for item in sent if item.node == terms.node)):
            if (other.policy_version, other.block) == block and other.lease_id != terms.lease_id:
                raise Broken(
                    "block-once",
                    f"{terms.node.hex()[:8]} has two places of block {terms.block} in round {block[0]}: "
                    f"slots {other.slot} and {terms.slot}",
                )

    def _stored(self, submission_id: bytes) -> None:
        terms = self._record.submitted[submission_id]
        assert isinstance(terms, BlockLease)
        self._work[submission_id] = _Work(terms, self._streaks[terms.node] >= PROVEN_AFTER)
        if terms.policy_version == self._record.head:
            self._taken.setdefault(_place(terms), submission_id)

    def _overdue(self, event: BlockOverdue) -> None:
        item = self._of(event.submission_id)
        if item.status != "waiting" or event.at_ms < item.terms.timeout_at:
            raise Broken(
                "place-lent-once",
                f"{short(event.submission_id)} ({item.status}) loses {_words(_place(item.terms))} too early",
            )
        item.status = "overdue"
        self._free(event.submission_id, item)

    def _free(self, submission_id: bytes, item: _Work) -> None:
        self._record.freed(item.terms)
        if self._taken.get(_place(item.terms)) == submission_id:
            del self._taken[_place(item.terms)]

    def _verdict(self, submission_id: bytes, accepted: bool, blameless: bool) -> None:
        item, place = self._of(submission_id), _place(self._of(submission_id).terms)
        if not accepted:
            item.status = "rejected"
            self._free(submission_id, item)
            if not blameless:
                self._streaks[item.terms.node] = 0
            return
        self._streaks[item.terms.node] += 1
        open_round = place[0] == self._record.head and place[0] + 1 not in self.rounds
        holder = self._taken.get(place)
        free = holder is None or holder == submission_id or self._of(holder).status == "waiting"
        item.status = "accepted" if open_round and free else "late"
        if item.status == "accepted":
            self._taken[place] = submission_id

    def _formed(self, event: RoundFormed) -> None:
        version, head = event.version, self._record.head
        if version in self.rounds or version != head + 1:
            raise Broken(
                "round-grows", f"round {version} is formed at version {head}, after {len(self.rounds)}"
            )
        self._check_used(version, event.submissions)
        filled = Counter(self._of(item).terms.block for item in event.submissions)
        if head < last_block_version(self._spec):
            self._check_quota(version, filled, event.at_ms)
            left = [key for key in self._ready(head) if key not in event.submissions]
            if left:
                raise Broken(
                    "round-whole", f"round {version} leaves {short(left[0])} out, which was accepted"
                )
        elif event.submissions or head != last_block_version(self._spec):
            raise Broken("round-grows", f"round {version} comes after the last")
        self.rounds[version] = event.submissions
        self._may_close_since = None
        for submission_id in event.submissions:
            self._of(submission_id).status = "used"
            self._record.used[submission_id] = version

    def _check_used(self, version: int, submissions: Sequence[bytes]) -> None:
        places = Counter(_place(self._of(item).terms) for item in submissions)
        for submission_id in submissions:
            item, name = self._of(submission_id), short(submission_id)
            before = self._record.used.get(submission_id)
            if before is not None:
                raise Broken("difference-once", f"{name} goes into version {version} and went into {before}")
            if item.terms.policy_version != version - 1:
                raise Broken(
                    "difference-of-round",
                    f"{name} was made from version {item.terms.policy_version} and goes into {version}",
                )
            if submission_id not in self._record.accepted or item.status == "rejected":
                raise Broken("used-accepted", f"version {version} uses {name}, which is {item.status}")
            if places[_place(item.terms)] > 1:
                raise Broken("difference-once", f"version {version} has {_words(_place(item.terms))} twice")

    def _check_quota(self, version: int, filled: Counter[int], at_ms: int) -> None:
        over = at_ms >= self._opened_at + self._spec.round_s * 1000 - 1
        needed = self._spec.quorum if over else self._spec.contributors
        for block in range(self._spec.blocks):
            if filled[block] < needed:
                raise Broken(
                    "round-quota",
                    f"version {version} is formed of {filled[block]} units of block {block}, {needed} are "
                    f"needed {(at_ms - self._opened_at) / 1000:.0f} s after the round began",
                )

    def _published(self, event: events.VersionPublished) -> None:
        if event.version != self._record.head + 1:
            raise Broken("round-grows", f"version {event.version} follows {self._record.head}")
        in_blocks = 0 < event.version <= last_block_version(self._spec) + 1
        if in_blocks and event.version not in self.rounds:
            raise Broken(
                "round-quota", f"version {event.version} is published, and no round was formed for it"
            )
        self._opened_at = event.at_ms
        self._may_close_since = None
        self._taken.clear()
        oldest = event.version - 2
        for key, item in list(self._work.items()):
            if item.status == "accepted":
                item.status = "late"
            age = oldest - item.terms.policy_version
            if (age > 0 and item.status in ("used", "late")) or (age > 8 and item.status == "rejected"):
                del self._work[key]

    def _of(self, submission_id: bytes) -> _Work:
        item = self._work.get(submission_id)
        if item is None:
            raise Broken("difference-of-round", f"{short(submission_id)} is no block unit of the last rounds")
        return item

    def _ready(self, version: int) -> list[bytes]:
        """The accepted differences of a round that is still open."""
        return [
            key
            for key, item in self._work.items()
            if item.status == "accepted" and item.terms.policy_version == version
        ]

    # --- looked at now and then

    def check_jobs(self, jobs: Sequence[TrainJob | RoundJob | RecombineJob]) -> None:
        """That the learner added up what was accepted for the round, all of it and nothing else.

        Raises:
            Broken: it got something else.
        """
        for job in jobs[self._jobs :]:
            self._jobs += 1
            if not isinstance(job, RoundJob):
                continue
            got = {PurePosixPath(item.delta).parent.name for item in job.contributions}
            wanted = {key.hex() for key in self.rounds.get(job.version, ())}
            if got != wanted:
                raise Broken(
                    "difference-kept",
                    f"version {job.version} is made of {len(got)} differences, {len(wanted)} were accepted "
                    f"for it ({len(wanted - got)} are gone, {len(got - wanted)} are not of this round)",
                )

    def check_judged(self, jobs: Sequence[BlockVerifyJob], draw: Callable[[bytes], bytes]) -> None:
        """That what was judged was done again where the secret draw says, and often enough.

        Raises:
            Broken: it was not.
        """
        count = len(segments(self._spec))
        for job in jobs[self._judged :]:
            self._judged += 1
            item = self._work.get(job.submission_id)
            if item is None:
                continue
            least = 1 if item.proven else 2
            chosen = drawn(draw(job.submission_id), count, len(job.segments))
            if len(job.segments) < min(least, count) or job.segments != chosen:
                raise Broken(
                    "judged-as-drawn",
                    f"of {short(job.submission_id)} segments {job.segments} were done again, {least} at "
                    f"least and {chosen} were drawn",
                )
            item.again = True
        for key, item in self._work.items():
            if item.status in ("accepted", "late", "used") and not item.again:
                raise Broken("judged-as-drawn", f"{short(key)} counts, and nothing of it was done again")

    def rest(self) -> None:
        """The coordinator is down, or cannot write: nothing closes."""
        self._may_close_since = None

    def check_closes(self, now_s: float, now_ms: int, learn_s: float) -> None:
        """That a round which may close does, and becomes a version. Call while the coordinator can.

        ``learn_s``: how long the learner takes.

        Raises:
            Broken: it does not.
        """
        head = self._record.head
        if not 0 <= head <= last_block_version(self._spec):
            self._may_close_since = None
            return
        if head + 1 in self.rounds or head == last_block_version(self._spec):
            since = self._may_close_since = self._may_close_since or now_s
            if now_s - since > FORM_S + learn_s:
                raise Broken("round-closes", f"round {head + 1} is no version after {now_s - since:.0f} s")
            return
        filled = Counter(self._of(key).terms.block for key in self._ready(head))
        over = now_ms >= self._opened_at + self._spec.round_s * 1000
        needed = self._spec.quorum if over else self._spec.contributors
        if any(filled[block] < needed for block in range(self._spec.blocks)):
            self._may_close_since = None
            return
        since = self._may_close_since = self._may_close_since or now_s
        if now_s - since > FORM_S:
            raise Broken("round-closes", f"round {head + 1} has all it needs for {now_s - since:.0f} s")


def _place(terms: BlockLease) -> _Slot:
    return terms.policy_version, terms.block, terms.slot


def _words(place: _Slot) -> str:
    return f"slot {place[2]} of block {place[1]} in round {place[0] + 1}"
