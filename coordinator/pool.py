"""Which accepted work waits for a batch: entering and leaving the pool, counts kept in step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the state's fold imports this module
    from barnraise.coordinator.state import State, Submission, SubmissionStatus


def usable_groups(rewards: tuple[float, ...], group_size: int) -> int:
    """How many groups of ``group_size`` consecutive rewards differ within: those have an advantage."""
    starts = range(0, len(rewards), group_size)
    return sum(1 for at in starts if len(set(rewards[at : at + group_size])) > 1)


def enter_pool(state: State, submission: Submission, rewards: tuple[float, ...]) -> None:
    """Keep accepted work for a batch, unless it is too old for the next one."""
    terms = submission.lease
    submission.rewards = rewards
    submission.usable = usable_groups(rewards, terms.group_size)
    given_up = state.operations.is_given_up(terms.policy_version)
    if given_up or state.made - terms.policy_version > state.max_lag:
        submission.status = "stale"
        return
    submission.status = "accepted"
    state.pool[submission.submission_id] = None
    state.pool_groups += terms.prompts
    state.pool_usable += submission.usable


def leave_pool(state: State, submission_id: bytes, status: SubmissionStatus) -> None:
    """Take work out of the pool; ``status`` says where it went."""
    item = state.submissions[submission_id]
    del state.pool[submission_id]
    state.pool_groups -= item.lease.prompts
    state.pool_usable -= item.usable
    item.status = status
