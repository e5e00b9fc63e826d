"""Who trains which block, and when a round is over: pure functions of state, spec and time.

A round has ``contributors`` places for each block. Nobody holds two places of one block
in a round, so that a trimmed mean is over as many people; whoever trained a block before
gets it again where that is possible (its residual and its shards are there already).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from barnraise.coordinator.audit import ban_text, is_banned, quiet_ms
from barnraise.coordinator.block_events import RoundFormed
from barnraise.coordinator.events import Event, LeaseClosed, LeaseTimedOut
from barnraise.coordinator.scheduler import BUSY_RETRY_MS, MAX_RETRY_MS, NOT_MOVED, Resend, Wait, why_quiet
from barnraise.coordinator.state import Node, State
from barnraise.coordinator.state_parts import CLOCK_BACK_MS
from barnraise.protocol.pretrain import PretrainSpec, last_block_version

HELD_PER_NODE = 4  # timed-out leases included
LONGEST_WAIT_MS = 30_000  # for a place; nodes ask for one of a new round as soon as it is there


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """Lend this place. Leases of earlier rounds in ``release`` stop reserving theirs first."""

    block: int
    slot: int
    unit_id: int
    timeout_at: int
    deadline_at: int
    release: tuple[bytes, ...] = ()


def in_blocks(state: State, spec: PretrainSpec | None) -> bool:
    """Whether the run is in its block stage: leases are for block units."""
    return spec is not None and state.head <= last_block_version(spec)


def decide_block_lease(
    state: State, spec: PretrainSpec, node: Node, policy_version: int, now_ms: int
) -> BlockGrant | Resend | Wait:
    """Answer a lease request of ``node``, which holds ``policy_version``; it has one place at a time."""
    blocks = state.blocks
    if is_banned(node, now_ms):
        return Wait(ban_text(node), min(node.banned_until - now_ms, MAX_RETRY_MS))
    if state.head < 0:
        return Wait("the scaffold is not published yet", BUSY_RETRY_MS)
    if policy_version != state.head:
        return Wait(f"blocks are trained from version {state.head}: load it and ask again", 500)
    if state.head == last_block_version(spec) or blocks.round is not None or state.unpublished is not None:
        return Wait("the learner is putting the blocks together", _wait_ms(spec))
    if pause := quiet_ms(node, now_ms):
        return Wait(
            f"{why_quiet(node)}: the next lease comes in {pause / 1000:.0f} s", min(pause, MAX_RETRY_MS)
        )
    release = []
    for lease_id in blocks.held.get(node.key, ()):
        hold = blocks.leases[lease_id]
        if hold.timed_out or hold.terms.timeout_at <= now_ms:
            continue
        if hold.terms.policy_version == state.head:
            # Whichever process asks: a second lease of the place would have the same training paid twice.
            return Resend(lease_id)
        release.append(lease_id)
    if len(blocks.held.get(node.key, ())) >= HELD_PER_NODE:
        return Wait("too many leases are still open under this key", 30_000)
    if (node.accepted == 0 or node.strikes > 0) and node.unjudged > 0:
        return Wait("the verdict on this key's last submission comes first", BUSY_RETRY_MS // 2)
    place = _place(state, spec, node.key)
    if place is None:
        return Wait("every place of this round that this node may take is taken", _wait_ms(spec))
    block, slot = place
    return BlockGrant(
        block=block,
        slot=slot,
        unit_id=(state.head * spec.blocks + block) * spec.contributors + slot,
        timeout_at=now_ms + round(spec.timeout_s * 1000),
        deadline_at=now_ms + round(spec.deadline_s * 1000),
        release=tuple(release),
    )


def _wait_ms(spec: PretrainSpec) -> int:
    """When to ask again for a place that somebody else may lose: a sixtieth of what a unit may take."""
    return min(LONGEST_WAIT_MS, max(BUSY_RETRY_MS, round(spec.timeout_s * 1000 / 60)))


def _place(state: State, spec: PretrainSpec, node: bytes) -> tuple[int, int] | None:
    """The free place that this node should take: its last block if it can, else the emptiest."""
    blocks = state.blocks
    taken = blocks.reserved(state.head)
    mine = blocks.blocks_of(node, state.head)
    filled = Counter(block for block, _ in taken)
    open_blocks = [
        block for block in range(spec.blocks) if block not in mine and filled[block] < spec.contributors
    ]
    if not open_blocks:
        return None
    last = blocks.last_block.get(node)
    block = min(open_blocks, key=lambda number: (filled[number] > 0, number != last, filled[number], number))
    slot = next(slot for slot in range(spec.contributors) if (block, slot) not in taken)
    return block, slot


def form_round(state: State, spec: PretrainSpec, now_ms: int) -> RoundFormed | None:
    """The round's end, if every block has all its contributors, or enough of them and time is up."""
    blocks = state.blocks
    if state.head < 0 or blocks.round is not None or state.unpublished is not None:
        return None
    if state.head > last_block_version(spec):
        return None
    if state.head == last_block_version(spec):
        return RoundFormed(version=state.head + 1, submissions=(), at_ms=now_ms)
    filled = Counter(block for block, _ in blocks.accepted)
    went_back = now_ms + CLOCK_BACK_MS < blocks.opened_at  # the clock: nobody knows how long it has been
    over = went_back or now_ms >= round_ends(state, spec)
    needed = spec.quorum if over else spec.contributors
    if any(filled[block] < needed for block in range(spec.blocks)):
        return None
    chosen = tuple(blocks.accepted[place] for place in sorted(blocks.accepted))
    return RoundFormed(version=state.head + 1, submissions=chosen, at_ms=now_ms)


def round_ends(state: State, spec: PretrainSpec) -> int:
    """When a quorum becomes enough, ms since the epoch."""
    return state.blocks.opened_at + round(spec.round_s * 1000)


def expired(
    state: State,
    now_ms: int,
    spared: Callable[[bytes, int], bool] = lambda lease_id, now_ms: False,
    among: Iterable[bytes] | None = None,
    earlier: Mapping[bytes, int] = NOT_MOVED,
) -> list[Event]:
    """Timeouts and deadlines of block leases that have passed, as events; ``spared`` ones outlive theirs.

    Of the leases ``among``, or of all. Those in ``earlier`` end so many ms before their terms say.
    """
    events: list[Event] = []
    for lease_id in state.blocks.leases if among is None else among:
        hold = state.blocks.leases.get(lease_id)
        if hold is None:
            continue
        there = now_ms + earlier.get(lease_id, 0)
        if hold.terms.deadline_at <= there and not spared(lease_id, now_ms):
            events.append(LeaseClosed(lease_id=lease_id, reason="expired", at_ms=now_ms))
        elif hold.terms.timeout_at <= there and not hold.timed_out:
            events.append(LeaseTimedOut(lease_id=lease_id, at_ms=now_ms))
    return events
