"""Who gets work and when a batch is full."""

from __future__ import annotations

import random

import msgspec
from coordinator_history import MAX_LAG, RUN_ID, history, judged, published, verdict
from coordinator_support import ROLLOUT
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from barnraise.coordinator.events import (
    BatchFormed,
    LeaseIssued,
    LeaseTimedOut,
    SubmissionJudged,
    SubmissionsSkipped,
    Submitted,
)
from barnraise.coordinator.scheduler import (
    HELD_PER_NODE,
    Grant,
    Resend,
    Wait,
    capacity,
    decide_lease,
    expired,
    form_batch,
    outstanding_groups,
    timeout_ms,
)
from barnraise.coordinator.state import Node, State, apply, fold
from barnraise.protocol.messages import RolloutLease
from barnraise.protocol.spec import RolloutSpec
from tests.test_coordinator_state import accept, reject, started, submit

SPEC = msgspec.structs.replace(ROLLOUT, max_lag=MAX_LAG, versions=100)
ME = b"i" * 16


def ask(state: State, node: Node | None = None, version: int | None = None, now: int = 10) -> object:
    node = node or state.nodes[b"n" * 32]
    return decide_lease(state, SPEC, node, ME, state.head if version is None else version, now)


def grant(state: State, now: int = 10, node: Node | None = None) -> RolloutLease:
    """Ask, and let it happen."""
    node = node or state.nodes[b"n" * 32]
    decision = ask(state, node, now=now)
    assert isinstance(decision, Grant), decision
    for lease_id in decision.release:
        apply(state, LeaseTimedOut(lease_id=lease_id, at_ms=now))
    terms = RolloutLease(
        run_id=RUN_ID,
        lease_id=random.Random(state.next_unit * 1000 + now).randbytes(16),
        unit_id=decision.unit_id,
        node=node.key,
        policy_version=state.head,
        prompts=SPEC.prompts_per_unit,
        group_size=SPEC.group_size,
        issued_at=now,
        timeout_at=decision.timeout_at,
        deadline_at=decision.deadline_at,
    )
    apply(state, LeaseIssued(lease=terms, instance=ME))
    return terms


def proven() -> State:
    state = started()
    accept(state, submit(state, random.Random(1)))
    return state


def test_a_newcomer_gets_one_unit_until_its_first_verdict() -> None:
    state = started()
    terms = grant(state)
    assert ask(state) == Resend(terms.lease_id)
    fresh = started()
    submit(fresh, random.Random(0))
    waiting = ask(fresh)
    assert isinstance(waiting, Wait)
    assert "verdict" in waiting.reason


def test_a_proven_node_may_hold_two_units_and_gets_the_newest_again_when_it_asks_for_more() -> None:
    state = proven()
    grant(state, 10)
    second = grant(state, 11)
    assert ask(state) == Resend(second.lease_id)


def test_a_lease_that_is_over_is_not_lent_again_though_nobody_has_noted_it_yet() -> None:
    state = started()
    terms = grant(state, 10)
    assert ask(state, now=terms.timeout_at - 1) == Resend(terms.lease_id)
    decision = ask(state, now=terms.timeout_at)
    assert isinstance(decision, Grant)
    assert decision.release == (terms.lease_id,)


def test_a_restarted_node_is_not_held_up_by_what_its_former_process_held() -> None:
    state = proven()
    grant(state, 10)
    second = grant(state, 11)
    decision = decide_lease(state, SPEC, state.nodes[b"n" * 32], b"j" * 16, 0, 12)
    assert isinstance(decision, Grant)
    assert second.lease_id in decision.release


def test_coming_back_for_ever_does_not_pile_up_leases() -> None:
    state = proven()
    node = state.nodes[b"n" * 32]
    for number in range(50):
        decision = decide_lease(state, SPEC, node, bytes([number]) * 16, 0, 10 + number)
        if isinstance(decision, Wait):
            break
        assert isinstance(decision, Grant)
        for lease_id in decision.release:
            apply(state, LeaseTimedOut(lease_id=lease_id, at_ms=10))
        terms = RolloutLease(
            run_id=RUN_ID,
            lease_id=bytes([number]) * 16,
            unit_id=decision.unit_id,
            node=node.key,
            policy_version=0,
            prompts=2,
            group_size=2,
            issued_at=10,
            timeout_at=20_000,
            deadline_at=30_000,
        )
        apply(state, LeaseIssued(lease=terms, instance=bytes([number]) * 16))
    assert len(node.leases) == HELD_PER_NODE


def test_versions_that_are_no_use_are_refused_with_reason_and_time() -> None:
    state = proven()
    for version in (1, 2):
        fresh = submit(state, random.Random(version + 10), version=state.head)
        accept(state, fresh)
        apply(state, BatchFormed(version=version, submissions=(fresh,), groups=2, usable=2, at_ms=9))
        apply(state, published(state, 10))
    old, future = ask(state, version=0), ask(state, version=3)
    assert isinstance(old, Wait)
    assert "too old" in old.reason
    assert 0 < old.retry_after_ms <= 1000
    assert isinstance(future, Wait)
    assert "does not exist" in future.reason
    assert isinstance(ask(state, version=1), Grant)


def test_a_rejected_node_waits_and_is_told_why() -> None:
    state = proven()
    reject(state, submit(state, random.Random(3)))
    decision = ask(state, now=10)
    assert isinstance(decision, Wait)
    assert "toploc" in decision.reason
    assert decision.retry_after_ms == 2_000 - 1
    assert isinstance(ask(state, now=3_000), Grant)


def test_a_complete_run_gives_no_more_work() -> None:
    state = proven()
    done = decide_lease(state, msgspec.structs.replace(SPEC, versions=1), state.nodes[b"n" * 32], ME, 0, 10)
    assert isinstance(done, Grant)
    fresh = submit(state, random.Random(5))
    accept(state, fresh)
    apply(state, BatchFormed(version=1, submissions=(fresh,), groups=2, usable=2, at_ms=9))
    last = decide_lease(state, msgspec.structs.replace(SPEC, versions=1), state.nodes[b"n" * 32], ME, 0, 10)
    assert isinstance(last, Wait)
    assert "last batch" in last.reason


def test_generation_does_not_run_ahead_of_the_learner() -> None:
    state = proven()
    names = [bytes([number]) * 32 for number in range(100)]
    for name in names:
        state.nodes[name] = Node(name, "x", 0, accepted=1)
    for number, name in enumerate(names):
        if not isinstance(ask(state, state.nodes[name]), Grant):
            break
        grant(state, 100 + number, state.nodes[name])
    limit = (1 + SPEC.max_lag) * SPEC.max_groups_per_version
    assert limit - SPEC.prompts_per_unit <= outstanding_groups(state) <= limit + SPEC.prompts_per_unit
    busy = ask(state, state.nodes[names[-1]])
    assert isinstance(busy, Wait)
    assert busy.retry_after_ms > 0


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_no_mixture_of_sizes_and_luck_ever_blocks_a_run(
    groups: int, extra: int, lag: int, prompts: int, seed: int
) -> None:
    """One node asks, works and is judged; however few groups are usable, versions keep coming."""
    spec = RolloutSpec(
        prompts_per_unit=prompts,
        group_size=2,
        groups_per_version=groups,
        max_groups_per_version=groups + extra,
        max_lag=lag,
        versions=4,
        timeout_s=60.0,
        deadline_s=120.0,
    )
    rng = random.Random(seed)
    state = started()
    state.max_lag = lag
    node = state.nodes[b"n" * 32]
    luck = rng.choice((0.02, 0.3, 1.0))
    for _ in range(4_000):
        if state.head >= spec.versions:
            break
        if state.batch is not None and rng.random() < 0.5:
            apply(state, published(state, 10))
            continue
        formed = form_batch(state, spec, 10)
        if formed is not None:
            apply(state, formed)
            assert not isinstance(formed, BatchFormed) or formed.usable > 0
            continue
        decision = decide_lease(state, spec, node, ME, state.head, 10)
        if not isinstance(decision, Grant):
            assert state.batch is not None, decision  # only a learner at work may make it wait
            apply(state, published(state, 10))
            continue
        terms = RolloutLease(
            run_id=RUN_ID,
            lease_id=rng.randbytes(16),
            unit_id=decision.unit_id,
            node=node.key,
            policy_version=state.head,
            prompts=prompts,
            group_size=2,
            issued_at=10,
            timeout_at=decision.timeout_at,
            deadline_at=decision.deadline_at,
        )
        apply(state, LeaseIssued(lease=terms, instance=ME))
        submission_id = rng.randbytes(32)
        apply(state, Submitted(submission_id=submission_id, lease_id=terms.lease_id, size=1, at_ms=10))
        rewards = tuple(value for _ in range(prompts) for value in (0.0, float(rng.random() < luck)))
        apply(
            state,
            SubmissionJudged(
                submission_id=submission_id,
                verdict=verdict(True),
                rewards=rewards,
                tokens=1,
                credit=1,
                blameless=False,
                at_ms=10,
            ),
        )
        assert state.pool_groups <= capacity(state, spec) + 2 * prompts
    assert state.head == spec.versions


def test_a_batch_closes_on_enough_usable_groups_or_on_many_groups_with_one() -> None:
    state = started()
    for number in range(2):
        assert form_batch(state, SPEC, 10) is None
        accept(state, submit(state, random.Random(number)))
    formed = form_batch(state, SPEC, 10)
    assert isinstance(formed, BatchFormed)
    assert (formed.usable, formed.groups, len(formed.submissions)) == (4, 4, 2)
    assert list(formed.submissions) == list(state.pool)


def test_a_pool_full_of_groups_without_an_advantage_is_thinned_not_blocked() -> None:
    state = started()
    rng = random.Random(0)
    for _ in range(6):
        submission_id = submit(state, rng)
        event = msgspec.structs.replace(
            judged(state, submission_id, rng, 9),
            verdict=msgspec.structs.replace(judged(state, submission_id, rng, 9).verdict, accepted=True),
            rewards=(0.0,) * 4,
        )
        apply(state, event)
    assert outstanding_groups(state) == 0
    skipped = form_batch(state, SPEC, 10)
    assert isinstance(skipped, SubmissionsSkipped)
    apply(state, skipped)
    assert state.pool_groups <= SPEC.max_groups_per_version
    assert form_batch(state, SPEC, 10) is None


@given(st.integers(0, 2**32), st.integers(1, 150), st.integers(0, 500_000))
@hypothesis_settings(max_examples=60, deadline=None)
def test_every_lease_times_out_and_expires_once_its_time_has_come(seed: int, length: int, later: int) -> None:
    state = fold(history(seed, length), MAX_LAG)
    now = 1_000 + later
    for event in expired(state, now):
        apply(state, event)
    assert expired(state, now) == []
    for lease in state.leases.values():
        assert lease.terms.deadline_at > now
        assert lease.timed_out or lease.terms.timeout_at > now


@given(st.lists(st.integers(0, 10**7), max_size=64), st.integers(0, 10**7))
def test_timeouts_adapt_within_bounds(durations: list[int], own: int) -> None:
    state = started()
    state.durations.extend(durations)
    node = state.nodes[b"n" * 32]
    node.last_duration = own
    timeout = timeout_ms(state, SPEC, node)
    assert SPEC.timeout_s * 100 <= timeout <= SPEC.timeout_s * 1000
    if len(durations) >= 8 and max(durations) < 1_000 and own < 1_000:
        assert timeout == SPEC.timeout_s * 100
