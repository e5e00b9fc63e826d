"""What must not grow and what must not last: the coordinator's memory, leases, waiting nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sized
from dataclasses import fields
from typing import Any

from barnraise.coordinator.block_fold import REMEMBERED_ROUNDS, BlockHold
from barnraise.coordinator.block_fold import SETTLED as BLOCKS_SETTLED
from barnraise.coordinator.hub import MAX_PER_PEER, MAX_REPORTS, Hub
from barnraise.coordinator.scheduler import capacity, outstanding_groups
from barnraise.coordinator.state import CLOSED_KEPT, DURATIONS_KEPT, REMEMBERED_VERSIONS, SETTLED, State
from barnraise.coordinator.state_parts import Lease
from barnraise.coordinator.submissions import GRACE_MS
from barnraise.node.model import State as NodeState
from barnraise.protocol.pretrain import PretrainSpec, last_block_version
from barnraise.protocol.spec import RunSpec
from barnraise.simulation.invariant_work import Broken

SPARE = 64  # what any collection may hold besides
PER_NODE = 16
PER_OPEN = 4
EXPIRY_SLACK_MS = 5_000  # the coordinator looks several times a second, and commits
WAIT_S = 600.0
_AT_WORK = frozenset({"generating", "training", "loading"})
_AT_REST = frozenset({"paused", "complete", "stopped", "leaving", "finishing"})


def check_state(state: State, hub: Hub, open_units: int) -> None:
    """That no collection is larger than nodes, open units and the versions remembered explain.

    ``open_units``: submissions that some version remembered may still need. Also finds collections
    that are added later: whatever is in ``State`` and ``Hub`` is looked at.

    Raises:
        Broken: one is.
    """
    oldest = state.head - state.max_lag - REMEMBERED_VERSIONS
    for key, item in state.submissions.items():
        if item.status in SETTLED and item.lease.policy_version < oldest and key not in state.appeals:
            raise Broken(
                "memory-bounded",
                f"a {item.status} submission of version {item.lease.policy_version} is remembered at version "
                f"{state.head}",
            )
    if any(version < oldest for _, version in state.closed.values()):
        raise Broken("memory-bounded", f"leases ended before version {oldest} are remembered at {state.head}")
    check_blocks(state)
    remembered = (
        len(state.submissions) + len(state.closed) + len(state.blocks.work) + len(state.blocks.closed)
    )
    most = SPARE + PER_NODE * max(1, len(state.nodes)) + PER_OPEN * (open_units + remembered)
    besides = {"closed": CLOSED_KEPT * 5 // 4, "durations": DURATIONS_KEPT, "reports": MAX_REPORTS}
    blocks = [(f"blocks.{name}", size) for name, size in _sizes(state.blocks)]
    for name, size in (*_sizes(state), *_sizes(hub), *blocks):
        if name == "versions":
            continue  # bounded by number: see VERSIONS_KEPT
        if size > besides.get(name, most):
            raise Broken("memory-bounded", f"{name} holds {size} things, at most {most} are explained")
    for live_key in state.nodes:
        if len(state.nodes[live_key].leases) > PER_NODE:
            raise Broken("memory-bounded", f"a node holds {len(state.nodes[live_key].leases)} leases")
    if len(hub.sessions) > MAX_PER_PEER * (len(state.nodes) + SPARE):
        raise Broken("memory-bounded", f"{len(hub.sessions)} sessions of {len(state.nodes)} nodes")


def check_blocks(state: State) -> None:
    """That nothing of block units is remembered beyond the rounds that need it.

    Raises:
        Broken: something is.
    """
    blocks, oldest = state.blocks, state.head - REMEMBERED_ROUNDS - 1
    for item in blocks.work.values():
        if item.status in BLOCKS_SETTLED and item.lease.policy_version < oldest:
            raise Broken(
                "memory-bounded",
                f"a {item.status} unit of round {item.lease.policy_version} is remembered at {state.head}",
            )
    if any(version < oldest for _, version in blocks.closed.values()):
        raise Broken("memory-bounded", f"block leases ended before round {oldest} are remembered")


def _sizes(value: Any) -> Iterator[tuple[str, int]]:
    for item in fields(value):
        held = getattr(value, item.name)
        if isinstance(held, Sized) and not isinstance(held, str | bytes):
            yield item.name, len(held)


def check_leases(state: State, now_ms: int) -> None:
    """That every lease whose time is up was released, and every one whose deadline passed is gone.

    Raises:
        Broken: one outlives both.
    """
    leases: list[Lease | BlockHold] = [*state.leases.values(), *state.blocks.leases.values()]
    for lease in leases:
        terms = lease.terms
        if now_ms > terms.deadline_at + GRACE_MS + EXPIRY_SLACK_MS:
            late = (now_ms - terms.deadline_at) / 1000
            raise Broken("leases-expire", f"unit {terms.unit_id} is lent {late:.0f} s beyond its deadline")
        if not lease.timed_out and now_ms > terms.timeout_at + EXPIRY_SLACK_MS:
            late = (now_ms - terms.timeout_at) / 1000
            raise Broken("leases-expire", f"unit {terms.unit_id} is reserved {late:.0f} s beyond its timeout")


def work_for(state: State, spec: RunSpec, key: bytes, now_ms: int) -> bool:
    """Whether the coordinator has work for ``key`` just now."""
    node = state.nodes.get(key)
    if state.head < 0 or state.made >= spec.rollout.versions:
        return False
    if node is not None and (node.banned_until > now_ms or node.quiet_until > now_ms or node.strikes):
        return False
    if spec.pretrain is not None and state.head <= last_block_version(spec.pretrain):
        return _has_place(state, spec.pretrain, key)
    return outstanding_groups(state) < capacity(state, spec.rollout)


def _has_place(state: State, spec: PretrainSpec, key: bytes) -> bool:
    """Whether a place of the round is free that this node may have."""
    blocks, node = state.blocks, state.nodes.get(key)
    busy = blocks.round is not None or state.unpublished is not None
    if busy or state.head == last_block_version(spec) or (node is not None and node.unjudged > 0):
        return False
    taken = Counter(block for block, _ in blocks.reserved(state.head))
    mine = blocks.blocks_of(key, state.head)
    return any(taken[block] < spec.contributors for block in range(spec.blocks) if block not in mine)


def check_newcomers(known: Counter[str], now_s: float, per_day: int) -> None:
    """That no internet address brought more new keys than there may be; ``known``: keys by address.

    Raises:
        Broken: one did.
    """
    most = per_day * (1 + int(now_s // 86_400))
    for address, count in known.items():
        if address and count > most:
            raise Broken("newcomers-bounded", f"{count} new keys came from {address}, at most {most} may")


def is_waiting(state: NodeState) -> bool:
    """Whether a node waits for something, by its own word."""
    return state.activity.name not in _AT_WORK | _AT_REST


def check_waiting(name: str, state: NodeState, waits_s: float, most_s: float = WAIT_S) -> None:
    """That a node which could have had work did not wait for longer than ``most_s``.

    Raises:
        Broken: it did.
    """
    if waits_s > most_s:
        activity = state.activity
        raise Broken(
            "waiting-bounded",
            f"{name} waits for {waits_s:.0f} s, at last {activity.name} ({activity.reason}), with the "
            "coordinator in reach and work to be had",
        )
