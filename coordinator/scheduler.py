"""Who gets work, and when a batch is full: pure functions of the state, the spec and the time.

Three forces are balanced here. Volunteers should not wait; rollouts should not be
so far ahead of the learner that they are too old when their turn comes; and a node
whose work was rejected should get geometrically less (R19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from barnraise.coordinator.audit import ban_text, is_banned, quiet_ms
from barnraise.coordinator.events import BatchFormed, Event, LeaseClosed, LeaseTimedOut, SubmissionsSkipped
from barnraise.coordinator.state import Node, State
from barnraise.protocol.spec import RolloutSpec

LEASES_PER_NODE = 2  # one being generated, one whose submission is under way
HELD_PER_NODE = 8  # timed-out leases included: bounds what reconnecting for ever can pile up
DURATIONS_NEEDED = 8
BUSY_RETRY_MS = 1_000
DONE_RETRY_MS = 60_000
MAX_RETRY_MS = 600_000
NOT_MOVED: Mapping[bytes, int] = {}


@dataclass(frozen=True, slots=True)
class Grant:
    """Lend ``unit_id``. Leases in ``release`` of the same node stop reserving their units first."""

    unit_id: int
    timeout_at: int
    deadline_at: int
    release: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Resend:
    """The node holds this lease already (its reply got lost, or it asks early): send the same again."""

    lease_id: bytes


@dataclass(frozen=True, slots=True)
class Wait:
    """No work now: why, and when to ask again (ms)."""

    reason: str
    retry_after_ms: int


def decide_lease(
    state: State,
    spec: RolloutSpec,
    node: Node,
    instance: bytes,
    policy_version: int,
    now_ms: int,
    leases_per_node: int = LEASES_PER_NODE,
) -> Grant | Resend | Wait:
    """Answer a lease request of ``node``, whose process is ``instance`` and holds ``policy_version``."""
    if is_banned(node, now_ms):
        return Wait(ban_text(node), min(node.banned_until - now_ms, MAX_RETRY_MS))
    version = _refuse_version(state, spec, policy_version)
    if version is not None:
        return version
    if pause := quiet_ms(node, now_ms):
        return Wait(
            f"{why_quiet(node)}: the next lease comes in {pause / 1000:.0f} s", min(pause, MAX_RETRY_MS)
        )
    release: list[bytes] = []
    mine: list[bytes] = []
    for lease_id in node.leases:
        lease = state.leases[lease_id]
        if lease.timed_out:
            continue
        stays = lease.instance == instance and lease.terms.policy_version == policy_version
        stays = stays and lease.terms.timeout_at > now_ms  # else it is over, and nobody has noted it yet
        (mine if stays else release).append(lease_id)
    on_probation = node.accepted == 0 or node.strikes > 0
    if len(mine) >= (1 if on_probation else leases_per_node):
        return Resend(mine[-1])
    if len(node.leases) >= HELD_PER_NODE:
        return Wait(f"{len(node.leases)} leases are still open under this key", 30_000)
    if on_probation and node.unjudged > 0:
        return Wait("the verdict on this key's last submission comes first", BUSY_RETRY_MS // 2)
    released = sum(_counted(state, lease_id) for lease_id in release)
    if outstanding_groups(state) - released >= capacity(state, spec):
        return Wait(
            f"{outstanding_groups(state)} groups are lent or waiting, enough until the learner has caught up",
            BUSY_RETRY_MS,
        )
    unit_id = state.free_units[0] if state.free_units else state.next_unit
    return Grant(
        unit_id=unit_id,
        timeout_at=now_ms + timeout_ms(state, spec, node),
        deadline_at=now_ms + deadline_ms(spec),
        release=tuple(release),
    )


def why_quiet(node: Node) -> str:
    """Why a node must wait, in words."""
    if node.strikes == 0:
        return f"{node.unfinished} leases were not answered (given back or expired)"
    last = node.last_verdict.check if node.last_verdict is not None else "a check"
    return f"{node.strikes} rejections not yet made good, the last by {last}"


def _refuse_version(state: State, spec: RolloutSpec, policy_version: int) -> Wait | None:
    if is_complete(state, spec):
        return Wait(f"the run is complete: version {spec.versions} is published", DONE_RETRY_MS)
    if state.head < 0:
        return Wait("the first policy version is not published yet", BUSY_RETRY_MS)
    if state.made >= spec.versions:
        return Wait("the last version is being published", DONE_RETRY_MS // 12)
    if policy_version > state.head:
        return Wait(f"version {policy_version} does not exist, the head is {state.head}", BUSY_RETRY_MS)
    if state.operations.rollback is not None or state.operations.is_given_up(policy_version):
        return Wait(
            f"version {policy_version} was given up: the run goes back to an earlier one; load the newest "
            "version and ask again",
            BUSY_RETRY_MS,
        )
    if policy_version < state.made - spec.max_lag:
        if policy_version == state.head:
            return Wait(f"version {state.made} is being published", BUSY_RETRY_MS // 2)
        return Wait(
            f"version {policy_version} is too old: the head is {state.head}, at most {spec.max_lag} behind "
            "is of use; load a newer one and ask again",
            500,
        )
    if state.batch is not None and state.batch.version >= spec.versions:
        return Wait("the last batch is full and being trained on", DONE_RETRY_MS // 12)
    return None


def is_complete(state: State, spec: RolloutSpec) -> bool:
    """Whether the last version that the spec asks for is published."""
    return state.head >= spec.versions


def timeout_ms(state: State, spec: RolloutSpec, node: Node) -> int:
    """Adaptive timeout (R27): median + 6 MAD of recent units, never under twice the node's own last one.

    Between a tenth of ``spec.timeout_s`` (at least 2 s) and ``spec.timeout_s``.
    """
    longest = round(spec.timeout_s * 1000)
    if len(state.durations) < DURATIONS_NEEDED:
        return longest
    middle = median(state.durations)
    spread = median(abs(value - middle) for value in state.durations)
    wanted = max(round(middle + 6 * spread), 2 * node.last_duration, longest // 10, 2_000)
    return min(longest, wanted)


def deadline_ms(spec: RolloutSpec) -> int:
    """How long a lease is honoured; never shorter than its timeout."""
    return round(max(spec.deadline_s, spec.timeout_s) * 1000)


def _counted(state: State, lease_id: bytes) -> int:
    lease = state.leases[lease_id]
    fresh = lease.terms.policy_version >= state.made - state.max_lag
    return lease.terms.prompts if fresh and not lease.timed_out else 0


def outstanding_groups(state: State) -> int:
    """Groups that a batch may still take: lent, stored but not judged, and accepted but not used.

    A pool without a single usable group cannot close a batch, so once the learner
    waits for one it does not hold back new work.
    """
    oldest = state.made - state.max_lag
    fresh = sum(count for version, count in state.lent.items() if version >= oldest)
    fresh += sum(count for version, count in state.unjudged.items() if version >= oldest)
    holds_back = state.pool_usable > 0 or state.batch is not None
    return fresh + (state.pool_groups if holds_back else 0)


def capacity(state: State, spec: RolloutSpec) -> int:
    """How many groups may be outstanding: one full batch, and one expected batch per version of lag.

    Near the end of the run there are fewer versions left to work ahead for.
    """
    expected = min(
        max(state.last_batch_groups or spec.max_groups_per_version, spec.groups_per_version),
        spec.max_groups_per_version,
    )
    in_training = 1 if state.batch is not None else 0
    versions_left = max(1, spec.versions - max(0, state.made) - in_training)
    return max(spec.groups_per_version, spec.max_groups_per_version) + expected * min(
        spec.max_lag, versions_left - 1
    )


def form_batch(state: State, spec: RolloutSpec, now_ms: int) -> BatchFormed | SubmissionsSkipped | None:
    """The next batch if one is full, or what to drop of a pool that is full of unusable groups.

    It does not wait for the version before to be published (``State.made``).

    Submissions are taken whole, oldest verdict first.
    """
    if state.batch is not None or state.head < 0 or state.made >= spec.versions:
        return None
    if state.operations.paused is not None or state.operations.rollback is not None:
        return None
    if state.pool_usable < spec.groups_per_version and state.pool_groups < spec.max_groups_per_version:
        return None  # whatever the order in the pool: asked after every commit, answered without a walk
    taken: list[bytes] = []
    groups = usable = 0
    for submission_id in state.pool:
        item = state.submissions[submission_id]
        taken.append(submission_id)
        groups += item.lease.prompts
        usable += item.usable
        if usable >= spec.groups_per_version:
            break
        if groups >= spec.max_groups_per_version and usable > 0:
            break
    most = max(spec.groups_per_version, spec.max_groups_per_version)
    surplus: list[bytes] = []
    for submission_id in taken:
        item = state.submissions[submission_id]
        if groups - item.lease.prompts < most or item.usable:
            break
        surplus.append(submission_id)
        groups -= item.lease.prompts
    if surplus:
        # Rare and self-healing: shed the oldest useless groups first, then ask again.
        return SubmissionsSkipped(submissions=tuple(surplus), at_ms=now_ms)
    full = usable >= spec.groups_per_version or (groups >= spec.max_groups_per_version and usable > 0)
    if not full:
        return None
    return BatchFormed(
        version=state.made + 1, submissions=tuple(taken), groups=groups, usable=usable, at_ms=now_ms
    )


def expired(
    state: State,
    now_ms: int,
    spared: Callable[[bytes, int], bool] = lambda lease_id, now_ms: False,
    among: Iterable[bytes] | None = None,
    earlier: Mapping[bytes, int] = NOT_MOVED,
) -> list[Event]:
    """Timeouts and deadlines that have passed, as events; ``spared`` leases outlive their deadline.

    Of the leases ``among``, or of all. Those in ``earlier`` end so many ms before their terms say.
    """
    events: list[Event] = []
    for lease_id in state.leases if among is None else among:
        lease = state.leases.get(lease_id)
        if lease is None:
            continue
        there = now_ms + earlier.get(lease_id, 0)  # the time on the clock that the terms were set on
        if lease.terms.deadline_at <= there and not spared(lease_id, now_ms):
            events.append(LeaseClosed(lease_id=lease_id, reason="expired", at_ms=now_ms))
        elif lease.terms.timeout_at <= there and not lease.timed_out:
            events.append(LeaseTimedOut(lease_id=lease_id, at_ms=now_ms))
    return events
