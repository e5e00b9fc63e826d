"""The coordinator's state: a fold over events, and nothing but a fold.

``apply(state, event)`` checks that the event can follow, then changes the state in
place (copying would cost more than deciding, with thousands of nodes). It reads
no clock, draws no random number and does no I/O: replaying the journal gives the
same state, always. An event that cannot follow raises and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from barnraise.coordinator import block_fold, cover
from barnraise.coordinator.audit_fold import (
    apply_audit,
    check_spared,
    check_verdict,
    note_unfinished,
    note_verdict,
    strike_pause_ms,
)
from barnraise.coordinator.block_events import (
    BlockJudged,
    BlockLeased,
    BlockOverdue,
    BlockSubmitted,
    RoundFormed,
)
from barnraise.coordinator.block_fold import Blocks, apply_blocks
from barnraise.coordinator.events import (
    AppealDecided,
    AppealFiled,
    BatchFormed,
    Event,
    EventError,
    LeaseClosed,
    LeaseIssued,
    LeaseTimedOut,
    NodeBanned,
    NodeJoined,
    RunOpened,
    SubmissionJudged,
    SubmissionsSkipped,
    Submitted,
    VersionPublished,
    VersionTrained,
)
from barnraise.coordinator.operator_events import OperatorAct
from barnraise.coordinator.operator_fold import Operations, apply_operator
from barnraise.coordinator.pool import enter_pool, leave_pool, usable_groups
from barnraise.coordinator.state_parts import (
    SETTLED,
    Lease,
    Node,
    Submission,
    SubmissionStatus,
    Unpublished,
    VersionInfo,
)
from barnraise.protocol.standing import UNAUDITED

__all__ = [
    "SETTLED",
    "EventError",
    "Lease",
    "Node",
    "State",
    "Submission",
    "SubmissionStatus",
    "Unpublished",
    "VersionInfo",
    "apply",
    "fold",
    "strike_pause_ms",
    "usable_groups",
]

# Settled work is remembered for this many versions beyond max_lag, so that a late
# duplicate is recognised as one; older ones are refused as unknown leases.
REMEMBERED_VERSIONS = 8
# ... and no more ended leases than this, should a version take for ever.
CLOSED_KEPT = 65_536
VERSIONS_KEPT = 4_096  # the journal has them all (``Journal.versions``)
DURATIONS_KEPT = 64


@dataclass(slots=True)
class State:
    """Everything that decisions read. ``max_lag`` is copied from the run spec.

    The pipeline is one deep: at most one version is trained and not published
    (``unpublished``), so a batch in training makes ``head + 2`` at most.
    """

    max_lag: int
    run_id: bytes = b""
    last_ms: int = 0  # when the newest event was, by the clock of then
    head: int = -1
    next_unit: int = 0
    free_units: list[int] = field(default_factory=list)
    cover: dict[int, int] = field(
        default_factory=dict
    )  # unit -> who is on it, see ``barnraise.coordinator.cover``
    nodes: dict[bytes, Node] = field(default_factory=dict)
    leases: dict[bytes, Lease] = field(default_factory=dict)
    closed: dict[bytes, tuple[str, int]] = field(default_factory=dict)  # lease -> (why, policy version)
    submissions: dict[bytes, Submission] = field(default_factory=dict)
    waiting: dict[bytes, None] = field(default_factory=dict)  # stored, not judged, oldest first
    waiting_bytes: int = 0
    pool: dict[bytes, None] = field(default_factory=dict)  # accepted, not used, oldest verdict first
    # groups by policy version, kept so that a decision need not walk over thousands of leases
    lent: dict[int, int] = field(default_factory=dict)
    unjudged: dict[int, int] = field(default_factory=dict)
    pool_groups: int = 0
    pool_usable: int = 0
    batch: BatchFormed | None = None
    unpublished: Unpublished | None = None
    last_batch_groups: int = 0
    versions: list[VersionInfo] = field(default_factory=list)  # the newest; see VERSIONS_KEPT
    durations: deque[int] = field(default_factory=lambda: deque(maxlen=DURATIONS_KEPT))
    accepted: int = 0
    rejected: int = 0
    rejections: dict[str, int] = field(default_factory=dict)
    submitted: int = 0  # ever
    spared: int = 0  # accepted without the model's checks
    clawed_back: int = 0  # credit, what was restored taken off
    epoch: int = -1  # the newest audit seed that was committed to
    epochs: dict[int, int] = field(default_factory=dict)  # secret seeds -> submissions waiting under them
    epoch_head: int = -1  # the head when the newest was committed to
    appeals: dict[bytes, None] = field(default_factory=dict)  # open, oldest first
    blocks: Blocks = field(default_factory=Blocks)
    operations: Operations = field(default_factory=Operations)

    @property
    def made(self) -> int:
        """The newest version whose checkpoint is durable: what the next one is trained from.

        Staleness counts from it: ``made - policy_version`` is the lag in the batch after it.
        """
        return self.head if self.unpublished is None else self.unpublished.trained.version


def fold(events: Iterable[Event], max_lag: int) -> State:
    """The state after ``events``. Raises EventError where one does not follow."""
    state = State(max_lag=max_lag)
    for event in events:
        apply(state, event)
    return state


def apply(state: State, event: Event) -> None:
    """Let ``event`` happen. Raises EventError, with the state unchanged, where it cannot."""
    match event:
        case RunOpened():
            _require(not state.run_id, "the run is open already")
            state.run_id = event.run_id
        case NodeJoined():
            _node_joined(state, event)
        case LeaseIssued():
            _lease_issued(state, event)
        case LeaseTimedOut() if event.lease_id in state.blocks.leases:
            block_fold.timed_out(state.blocks, event)
        case LeaseClosed() if event.lease_id in state.blocks.leases:
            block_fold.closed(state, event)
        case LeaseTimedOut():
            lease = _open_lease(state, event.lease_id)
            _require(not lease.timed_out, "lease timed out already")
            _release(state, lease)
        case LeaseClosed():
            lease = _open_lease(state, event.lease_id)
            _release(state, lease)
            _close_lease(state, lease, event.reason)
            note_unfinished(state.nodes[lease.terms.node], event.at_ms)
        case Submitted():
            _submitted(state, event)
        case SubmissionJudged():
            _judged(state, event)
        case BatchFormed():
            _batch_formed(state, event)
        case SubmissionsSkipped():
            _require(all(item in state.pool for item in event.submissions), "skipped work is not in the pool")
            for submission_id in event.submissions:
                leave_pool(state, submission_id, "skipped")
        case VersionTrained():
            _trained(state, event)
        case VersionPublished():
            _published(state, event)
        case BlockLeased() | BlockSubmitted() | BlockOverdue() | BlockJudged() | RoundFormed():
            apply_blocks(state, event)
        case OperatorAct():
            apply_operator(state, event)
        case AppealFiled() if event.submission_id in state.blocks.work:
            block_fold.appealed(state, event)
        case AppealDecided() if event.submission_id in state.blocks.work:
            block_fold.decided(state, event)
        case _:
            apply_audit(state, event)
            if isinstance(event, NodeBanned):
                for lease_id in state.nodes[event.node].leases:
                    _release(state, state.leases[lease_id])
                block_fold.banned(state.blocks, event.node)
    state.last_ms = event.at_ms


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise EventError(text)


def _open_lease(state: State, lease_id: bytes) -> Lease:
    lease = state.leases.get(lease_id)
    if lease is None:
        raise EventError(f"lease {lease_id.hex()} is not open")
    return lease


def _count(groups: dict[int, int], version: int, change: int) -> None:
    left = groups.get(version, 0) + change
    if left:
        groups[version] = left
    else:
        del groups[version]


def _release(state: State, lease: Lease) -> None:
    """Free the lease's unit for somebody else, once."""
    if not lease.timed_out:
        lease.timed_out = True
        cover.let_go(state, lease.terms.unit_id)
        _count(state.lent, lease.terms.policy_version, -lease.terms.prompts)


def _close_lease(state: State, lease: Lease, why: str) -> None:
    terms = lease.terms
    del state.leases[terms.lease_id]
    del state.nodes[terms.node].leases[terms.lease_id]
    state.closed[terms.lease_id] = (why, terms.policy_version)
    if len(state.closed) > CLOSED_KEPT + CLOSED_KEPT // 4:  # many at a time: a dict is slow to lose its first
        for lease_id in list(islice(state.closed, CLOSED_KEPT // 4)):
            del state.closed[lease_id]


def _node_joined(state: State, event: NodeJoined) -> None:
    _require(bool(state.run_id), "the run is not open")
    node = state.nodes.get(event.node)
    if node is None:
        state.nodes[event.node] = Node(event.node, event.name, event.at_ms, named_at=event.at_ms)
    else:
        node.name, node.named_at = event.name, event.at_ms


def _lease_issued(state: State, event: LeaseIssued) -> None:
    terms = event.lease
    node = state.nodes.get(terms.node)
    if node is None:
        raise EventError("lease for a node that never joined")
    _require(terms.lease_id not in state.leases and terms.lease_id not in state.closed, "lease id used twice")
    _require(terms.policy_version <= state.head, "lease for a version that is not published")
    if terms.unit_id == state.next_unit:
        state.next_unit += 1
    else:
        _require(_may_be_lent(state, terms.unit_id), "unit is neither new nor free")
    cover.hold(state, terms.unit_id)
    state.leases[terms.lease_id] = Lease(terms, event.instance)
    node.leases[terms.lease_id] = None
    _count(state.lent, terms.policy_version, terms.prompts)


def _may_be_lent(state: State, unit_id: int) -> bool:
    if unit_id in state.free_units:
        return True
    # Journals from before ``cover`` lent units again that a late, refused answer had freed.
    at_work = (lease.terms.unit_id for lease in state.leases.values() if not lease.timed_out)
    return unit_id < state.next_unit and unit_id not in at_work


def _submitted(state: State, event: Submitted) -> None:
    lease = _open_lease(state, event.lease_id)
    _require(event.submission_id not in state.submissions, "submission stored twice")
    terms = lease.terms
    node = state.nodes[terms.node]
    if not lease.timed_out:
        _count(state.lent, terms.policy_version, -terms.prompts)
    else:
        cover.hold(state, terms.unit_id)  # back in time after all: nobody needs to redo it
    _close_lease(state, lease, "used")
    epoch = state.epoch if state.epoch in state.epochs else -1
    state.submissions[event.submission_id] = Submission(
        event.submission_id, terms, event.size, event.at_ms, number=state.submitted, epoch=epoch
    )
    state.submitted += 1
    if epoch >= 0:
        state.epochs[epoch] += 1
    state.waiting[event.submission_id] = None
    _count(state.unjudged, terms.policy_version, terms.prompts)
    state.waiting_bytes += event.size
    node.unjudged += 1
    node.unfinished = max(0, node.unfinished - 1)  # not 0: one answer in eight is still choosing
    node.last_duration = max(0, event.at_ms - terms.issued_at)
    state.durations.append(node.last_duration)


def _judged(state: State, event: SubmissionJudged) -> None:
    submission = state.submissions.get(event.submission_id)
    if submission is None or submission.status != "waiting":
        raise EventError("verdict on a submission that is not waiting for one")
    terms = submission.lease
    verdict = event.verdict
    _require(
        not verdict.accepted or len(event.rewards) == terms.prompts * terms.group_size,
        "accepted without a reward for each rollout",
    )
    node = state.nodes[terms.node]
    check_verdict(event)
    _require(not node.audit.owed, "credit is owed since this node's last failed audit: claw it back first")
    if verdict.check == UNAUDITED:
        check_spared(state, node, submission)
    node.unjudged -= 1
    node.last_verdict = verdict
    del state.waiting[event.submission_id]
    state.waiting_bytes -= submission.size
    _count(state.unjudged, terms.policy_version, -terms.prompts)
    if submission.epoch >= 0:
        state.epochs[submission.epoch] -= 1
    note_verdict(node, submission, event)
    if verdict.accepted:
        state.accepted += 1
        state.spared += 1 if verdict.check == UNAUDITED else 0
        node.accepted += 1
        enter_pool(state, submission, event.rewards)
        return
    submission.status = "rejected"
    state.rejected += 1
    state.rejections[verdict.check] = state.rejections.get(verdict.check, 0) + 1
    cover.let_go(state, terms.unit_id)
    node.rejected += 1


def _batch_formed(state: State, event: BatchFormed) -> None:
    _require(state.batch is None, "a batch is being trained already")
    _require(state.operations.rollback is None, "a rollback comes before the next batch")
    _require(event.version == state.made + 1, "batch for another version than the next")
    _require(
        all(item in state.pool for item in event.submissions), "batch takes work that is not in the pool"
    )
    for submission_id in event.submissions:
        leave_pool(state, submission_id, "training")
    state.batch = event
    state.last_batch_groups = event.groups


def _trained(state: State, event: VersionTrained) -> None:
    _require(bool(state.run_id), "the run is not open")
    _require(state.unpublished is None, "version trained before the one before it was published")
    _require(event.version == state.head + 1, "version trained out of order")
    again = state.operations.rollback is not None
    made_of = again or state.batch is not None or state.blocks.round is not None
    _require(event.version == 0 or made_of, "version trained without its batch")
    state.unpublished = Unpublished(event, state.batch)  # its work is kept: it can be done again
    state.batch = state.operations.rollback = None
    _drop_stale(state)


def _published(state: State, event: VersionPublished) -> None:
    _require(bool(state.run_id), "the run is not open")
    _require(event.version == state.head + 1, "version published out of order")
    if state.unpublished is not None:
        batch, state.unpublished = state.unpublished.batch, None
    else:  # a journal from before VersionTrained
        _require(event.version == 0 or state.batch is not None, "version published without its batch")
        batch, state.batch = state.batch, None
    for submission_id in batch.submissions if batch is not None else ():
        state.submissions[submission_id].status = "used"
    state.head = event.version
    state.versions.append(
        VersionInfo(
            event.version,
            event.manifest,
            event.weights,
            event.size,
            event.stats,
            event.accuracy,
            event.at_ms,
        )
    )
    if len(state.versions) > VERSIONS_KEPT + VERSIONS_KEPT // 4:
        del state.versions[:-VERSIONS_KEPT]
    block_fold.published(state, event.at_ms)
    _drop_stale(state)
    _forget(state, state.head - state.max_lag - REMEMBERED_VERSIONS)


def _drop_stale(state: State) -> None:
    oldest = state.made - state.max_lag
    for submission_id in [key for key in state.pool if state.submissions[key].lease.policy_version < oldest]:
        leave_pool(state, submission_id, "stale")


def _forget(state: State, before: int) -> None:
    for submission_id in [
        key
        for key, item in state.submissions.items()
        if item.status in SETTLED and item.lease.policy_version < before and key not in state.appeals
    ]:
        item = state.submissions.pop(submission_id)
        if item.status not in ("rejected", "void"):
            cover.forget(state, item.lease.unit_id)
    for lease_id in [key for key, (_, version) in state.closed.items() if version < before]:
        del state.closed[lease_id]
