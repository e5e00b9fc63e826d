"""The part of the state that block units live in: a fold like the rest (``barnraise.coordinator.state``).

A round belongs to one policy version, the head: its units start from that version's
blocks, and closing it makes the next version. Work of an earlier round that comes too
late is judged and credited, and used no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, assert_never

from barnraise.coordinator.audit_fold import (
    APPEAL_EVERY_MS,
    FORGIVEN_AFTER,
    make_good,
    note_unfinished,
    strike,
)
from barnraise.coordinator.block_draws import depth_for
from barnraise.coordinator.block_events import (
    BlockEvent,
    BlockJudged,
    BlockLeased,
    BlockOverdue,
    BlockSubmitted,
    RoundFormed,
)
from barnraise.coordinator.events import AppealDecided, AppealFiled, EventError, LeaseClosed, LeaseTimedOut
from barnraise.protocol.pretrain import BlockLease
from barnraise.protocol.standing import UNVERIFIABLE

if TYPE_CHECKING:
    from barnraise.coordinator.state import Node, State

WITHHELD = "block-withheld"  # the check of units whose files were never served
HIDDEN = "block-hidden"  # ... or not once it could be told which segments were drawn
Status = Literal["waiting", "accepted", "rejected", "appealing", "training", "used", "late"]
SETTLED: frozenset[Status] = frozenset({"rejected", "used", "late"})
REMEMBERED_ROUNDS = 8


@dataclass(slots=True)
class BlockHold:
    """A block lease that still counts: a ``timed_out`` one is honoured but no longer reserves its slot."""

    terms: BlockLease
    instance: bytes
    timed_out: bool = False


@dataclass(slots=True)
class BlockWork:
    """A stored block submission.

    ``depth``: how many of its segments are done again. ``overdue``: its files were not to be
    had for so long that its place may go to somebody else. ``at_ms``: when it was handed in,
    or appealed. ``ended_streak``: its node's, if this was a failure that ended one.
    """

    submission_id: bytes
    lease: BlockLease
    size: int
    at_ms: int
    depth: int
    status: Status = "waiting"
    overdue: bool = False
    appealed: bool = False
    ended_streak: int | None = None
    offence: bool = False


@dataclass(slots=True)
class Blocks:
    """Everything about block units that decisions read. ``opened_at``: when the head was published, ms."""

    leases: dict[bytes, BlockHold] = field(default_factory=dict)
    held: dict[bytes, dict[bytes, None]] = field(default_factory=dict)  # node -> its leases, oldest first
    closed: dict[bytes, tuple[str, int]] = field(default_factory=dict)  # lease -> (why, policy version)
    work: dict[bytes, BlockWork] = field(default_factory=dict)
    waiting: dict[bytes, None] = field(default_factory=dict)  # stored, not judged, oldest first
    appeals: dict[bytes, None] = field(default_factory=dict)  # open, oldest first
    accepted: dict[tuple[int, int], bytes] = field(default_factory=dict)  # this round's (block, slot)
    last_block: dict[bytes, int] = field(default_factory=dict)  # node -> the block it worked on last
    streaks: dict[bytes, int] = field(default_factory=dict)  # node -> units verified in a row
    round: RoundFormed | None = None  # closed, the learner is at it
    opened_at: int = 0

    def reserved(self, version: int) -> set[tuple[int, int]]:
        """The (block, slot) places of a round that need nobody: lent, stored and not overdue, or accepted."""
        places = {
            (hold.terms.block, hold.terms.slot)
            for hold in self.leases.values()
            if not hold.timed_out and hold.terms.policy_version == version
        }
        for submission_id in self.waiting:
            item = self.work[submission_id]
            if item.lease.policy_version == version and not item.overdue:
                places.add((item.lease.block, item.lease.slot))
        return places | self.accepted.keys()

    def blocks_of(self, node: bytes, version: int) -> set[int]:
        """The blocks that a node holds, or has handed in, in a round."""
        mine = {
            hold.terms.block
            for hold in self.leases.values()
            if hold.terms.node == node and hold.terms.policy_version == version
        }
        return mine | {
            item.lease.block
            for item in self.work.values()
            if item.lease.node == node
            and item.lease.policy_version == version
            and item.status not in ("rejected", "appealing")
        }


def apply_blocks(state: State, event: BlockEvent) -> None:
    """Let a block event happen. Raises EventError, with the state unchanged, where it cannot."""
    match event:
        case BlockLeased():
            _leased(state, event)
        case BlockSubmitted():
            _submitted(state, event)
        case BlockOverdue():
            _overdue(state, event)
        case BlockJudged():
            _judged(state, event)
        case RoundFormed():
            _formed(state, event)
        case _:
            assert_never(event)


def _leased(state: State, event: BlockLeased) -> None:
    blocks, terms = state.blocks, event.lease
    if terms.node not in state.nodes:
        raise EventError("lease for a node that never joined")
    if terms.lease_id in blocks.leases or terms.lease_id in blocks.closed:
        raise EventError("lease id used twice")
    if terms.policy_version != state.head:
        raise EventError("block lease for another version than the head")
    if (terms.block, terms.slot) in blocks.reserved(state.head):
        raise EventError("that place in the round is taken")
    blocks.leases[terms.lease_id] = BlockHold(terms, event.instance)
    blocks.held.setdefault(terms.node, {})[terms.lease_id] = None
    blocks.last_block[terms.node] = terms.block


def timed_out(blocks: Blocks, event: LeaseTimedOut) -> None:
    """A block lease's place may go to somebody else."""
    hold = blocks.leases[event.lease_id]
    if hold.timed_out:
        raise EventError("lease timed out already")
    hold.timed_out = True


def banned(blocks: Blocks, node: bytes) -> None:
    """The places of a banned node may go to somebody else."""
    for lease_id in blocks.held.get(node, ()):
        blocks.leases[lease_id].timed_out = True


def closed(state: State, event: LeaseClosed) -> None:
    """A block lease ended without a submission; doing so often costs a pause, as with rollouts."""
    hold = state.blocks.leases[event.lease_id]
    _close(state.blocks, hold.terms, event.reason)
    note_unfinished(state.nodes[hold.terms.node], event.at_ms)


def _close(blocks: Blocks, terms: BlockLease, why: str) -> None:
    del blocks.leases[terms.lease_id]
    mine = blocks.held[terms.node]
    del mine[terms.lease_id]
    if not mine:
        del blocks.held[terms.node]
    blocks.closed[terms.lease_id] = (why, terms.policy_version)


def _submitted(state: State, event: BlockSubmitted) -> None:
    blocks = state.blocks
    hold = blocks.leases.get(event.lease_id)
    if hold is None:
        raise EventError(f"block lease {event.lease_id.hex()} is not open")
    if event.submission_id in blocks.work:
        raise EventError("submission stored twice")
    terms = hold.terms
    _close(blocks, terms, "used")
    node = state.nodes[terms.node]
    depth = depth_for(blocks.streaks.get(node.key, 0), node.offences)
    blocks.work[event.submission_id] = BlockWork(event.submission_id, terms, event.size, event.at_ms, depth)
    blocks.waiting[event.submission_id] = None
    node.unjudged += 1
    node.unfinished = max(0, node.unfinished - 1)
    node.last_duration = max(0, event.at_ms - terms.issued_at)


def _overdue(state: State, event: BlockOverdue) -> None:
    item = state.blocks.work.get(event.submission_id)
    if item is None or item.status != "waiting" or item.overdue:
        raise EventError("only a block submission that waits can become overdue, once")
    item.overdue = True


def _judged(state: State, event: BlockJudged) -> None:
    blocks = state.blocks
    item = blocks.work.get(event.submission_id)
    if item is None or item.status != "waiting":
        raise EventError("verdict on a block submission that is not waiting for one")
    if not event.verdict.accepted and event.credit:
        raise EventError("credit for a rejected submission")
    node = state.nodes[item.lease.node]
    node.unjudged -= 1
    node.last_verdict = event.verdict
    del blocks.waiting[event.submission_id]
    if event.verdict.accepted:
        state.accepted += 1
        node.accepted += 1
        _credit(state, node, event.credit, event.at_ms)
        _use(state, item)
        return
    item.status = "rejected"
    state.rejected += 1
    state.rejections[event.verdict.check] = state.rejections.get(event.verdict.check, 0) + 1
    node.rejected += 1
    if not event.blameless:
        item.ended_streak = blocks.streaks.pop(node.key, 0)
        item.offence = event.verdict.check != WITHHELD  # being away is no lie
        strike(node, event.at_ms, offence=item.offence)


def _use(state: State, item: BlockWork) -> None:
    """Accepted work fills its place, if its round is still open and nobody else has filled it."""
    blocks, place = state.blocks, (item.lease.block, item.lease.slot)
    current = item.lease.policy_version == state.head and blocks.round is None
    if current and place not in blocks.accepted:
        item.status = "accepted"
        blocks.accepted[place] = item.submission_id
    else:
        item.status = "late"


def _credit(state: State, node: Node, credit: int, at_ms: int) -> None:
    node.credit += credit
    make_good(node, at_ms)
    streak = state.blocks.streaks[node.key] = state.blocks.streaks.get(node.key, 0) + 1
    if streak >= FORGIVEN_AFTER:
        node.offences = 0


def appealed(state: State, event: AppealFiled) -> None:
    """A rejected unit is judged again, by the same segments, from the files that its node still has."""
    item = state.blocks.work[event.submission_id]
    if item.status != "rejected" or item.appealed:
        raise EventError("only a rejected block unit can be appealed, once")
    item.status, item.appealed, item.at_ms = "appealing", True, event.at_ms
    state.blocks.appeals[event.submission_id] = None
    state.nodes[item.lease.node].next_appeal_at = event.at_ms + APPEAL_EVERY_MS


def decided(state: State, event: AppealDecided) -> None:
    """The outcome of an appeal: what the rejection cost is made good, or it stands."""
    item = state.blocks.work[event.submission_id]
    verdict, blocks = event.verdict, state.blocks
    if item.status != "appealing" or event.rewards or (event.credit and not verdict.accepted):
        raise EventError("an appeal of a block unit that is not open was decided, or by other rules")
    del blocks.appeals[event.submission_id]
    node = state.nodes[item.lease.node]
    node.last_verdict = verdict
    item.status = "rejected"
    if (verdict.accepted or verdict.check == UNVERIFIABLE) and item.ended_streak is not None:
        blocks.streaks[node.key] = blocks.streaks.get(node.key, 0) + item.ended_streak
        if item.offence:
            node.offences = max(0, node.offences - 1)
            node.ban_offences = max(0, node.ban_offences - 1)
        item.ended_streak = None
        make_good(node, event.at_ms)
    if verdict.accepted:
        state.accepted += 1
        state.rejected -= 1
        node.accepted += 1
        node.rejected -= 1
        _credit(state, node, event.credit, event.at_ms)
        _use(state, item)


def _formed(state: State, event: RoundFormed) -> None:
    blocks = state.blocks
    if blocks.round is not None:
        raise EventError("a round is being added up already")
    if event.version != state.head + 1 or state.unpublished is not None:
        raise EventError("round for another version than the next")
    if any(blocks.work[item].status != "accepted" for item in event.submissions):
        raise EventError("a round takes work that was not accepted for it")
    for item in event.submissions:
        blocks.work[item].status = "training"
    for place, item in list(blocks.accepted.items()):
        if blocks.work[item].status == "accepted":
            blocks.work[item].status = "late"
            del blocks.accepted[place]
    blocks.round = event


def published(state: State, at_ms: int) -> None:
    """The head moved: the round before is over, what it used is used up, and its slots are open anew."""
    blocks = state.blocks
    if blocks.round is not None:
        for item in blocks.round.submissions:
            blocks.work[item].status = "used"
    for item in blocks.accepted.values():
        if blocks.work[item].status == "accepted":
            blocks.work[item].status = "late"
    blocks.accepted.clear()
    blocks.round = None
    blocks.opened_at = at_ms
    before = state.head - REMEMBERED_ROUNDS
    for key in [
        key
        for key, work in blocks.work.items()
        if work.status in SETTLED and work.lease.policy_version < before
    ]:
        del blocks.work[key]
    for key in [key for key, (_, version) in blocks.closed.items() if version < before]:
        del blocks.closed[key]
