"""The fold: pure, replayable, and never half done."""

from __future__ import annotations

import copy
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from barnraise.coordinator.events import (
    BatchFormed,
    LeaseClosed,
    LeaseIssued,
    LeaseTimedOut,
    NodeJoined,
    RunOpened,
    SubmissionJudged,
    Submitted,
    decode_event,
    encode_event,
)
from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.state import (
    REMEMBERED_VERSIONS,
    EventError,
    State,
    apply,
    fold,
    strike_pause_ms,
    usable_groups,
)
from barnraise.protocol.ledger import LedgerFold
from tests.coordinator_history import MAX_LAG, RUN_ID, history, lease_for, published, verdict

seeds = st.integers(0, 2**32)
lengths = st.integers(1, 150)


@given(seeds, lengths)
@hypothesis_settings(max_examples=60, deadline=None)
def test_replaying_the_journal_gives_the_same_state(seed: int, length: int) -> None:
    events = history(seed, length)
    replayed = [decode_event(encode_event(event)) for event in events]
    assert replayed == events
    assert fold(replayed, MAX_LAG) == fold(events, MAX_LAG)


@given(seeds, lengths)
@hypothesis_settings(max_examples=25, deadline=None)
def test_an_event_that_cannot_follow_changes_nothing(seed: int, length: int) -> None:
    events = history(seed, length)
    state = fold(events, MAX_LAG)
    for event in history(seed + 1, 60):
        before = copy.deepcopy(state)
        try:
            apply(state, event)
        except EventError:
            assert state == before


@given(seeds, lengths)
@hypothesis_settings(max_examples=60, deadline=None)
def test_counters_agree_with_what_they_count(seed: int, length: int) -> None:
    state = fold(history(seed, length), MAX_LAG)
    lent: dict[int, int] = {}
    for lease in state.leases.values():
        if not lease.timed_out:
            version = lease.terms.policy_version
            lent[version] = lent.get(version, 0) + lease.terms.prompts
    assert state.lent == lent
    waiting = [state.submissions[key] for key in state.waiting]
    assert sum(state.unjudged.values()) == sum(item.lease.prompts for item in waiting)
    assert state.waiting_bytes == sum(item.size for item in waiting)
    pool = [state.submissions[key] for key in state.pool]
    assert state.pool_groups == sum(item.lease.prompts for item in pool)
    assert state.pool_usable == sum(item.usable for item in pool)
    assert state.accepted == sum(node.accepted for node in state.nodes.values())
    assert state.rejected == sum(node.rejected for node in state.nodes.values())
    on_units = Counter(lease.terms.unit_id for lease in state.leases.values() if not lease.timed_out)
    on_units.update(
        item.lease.unit_id for item in state.submissions.values() if item.status not in ("rejected", "void")
    )
    assert state.cover == on_units
    assert not state.cover.keys() & set(state.free_units)
    assert len(set(state.free_units)) == len(state.free_units)
    for node in state.nodes.values():
        mine = [item for item in waiting if item.lease.node == node.key]
        assert node.unjudged == len(mine)
        assert set(node.leases) == {
            key for key, lease in state.leases.items() if lease.terms.node == node.key
        }


@given(seeds, lengths)
@hypothesis_settings(max_examples=60, deadline=None)
def test_the_public_ledger_follows_its_own_rules_and_gives_the_same_balances(seed: int, length: int) -> None:
    events = history(seed, length)
    state = fold(events, MAX_LAG)
    ledger = LedgerFold()
    for entry in entries_of(events, MAX_LAG):
        ledger.add(entry)
    assert ledger.balances == {key: node.credit for key, node in state.nodes.items()}
    assert (ledger.accepted, ledger.rejected) == (state.accepted, state.rejected)


def test_nothing_is_credited_or_used_twice() -> None:
    state, rng = started(), random.Random(0)
    first = submit(state, rng)
    accept = SubmissionJudged(
        submission_id=first,
        verdict=verdict(True),
        rewards=(0.0, 1.0, 0.0, 1.0),
        tokens=5,
        credit=5,
        blameless=False,
        at_ms=9,
    )
    apply(state, accept)
    with pytest.raises(EventError, match="not waiting"):
        apply(state, accept)
    batch = BatchFormed(version=1, submissions=(first,), groups=2, usable=2, at_ms=9)
    apply(state, batch)
    with pytest.raises(EventError, match="trained already"):
        apply(state, batch)
    apply(state, published(state, 10))
    with pytest.raises(EventError, match="not in the pool"):
        apply(state, BatchFormed(version=2, submissions=(first,), groups=2, usable=2, at_ms=11))
    assert state.nodes[b"n" * 32].credit == 5


def test_a_lease_is_used_once() -> None:
    state, rng = started(), random.Random(0)
    terms = lease_for(state, b"n" * 32, rng, 5)
    apply(state, LeaseIssued(lease=terms, instance=b"i" * 16))
    apply(state, Submitted(submission_id=b"1" * 32, lease_id=terms.lease_id, size=1, at_ms=6))
    with pytest.raises(EventError, match="not open"):
        apply(state, Submitted(submission_id=b"2" * 32, lease_id=terms.lease_id, size=1, at_ms=7))


def test_a_refused_or_missing_late_answer_does_not_free_a_unit_that_another_node_has() -> None:
    """Lent anew because the first was late, it is nobody else's while the second is at it or has answered."""
    for second_answers, refused in ((True, True), (False, True), (True, False)):
        state, rng = started(), random.Random(0)
        late = lease_for(state, b"n" * 32, rng, 5)
        apply(state, LeaseIssued(lease=late, instance=b"i" * 16))
        apply(state, LeaseTimedOut(lease_id=late.lease_id, at_ms=6))
        assert state.free_units == [late.unit_id]
        again = msgspec.structs.replace(late, lease_id=b"2" * 16)
        apply(state, LeaseIssued(lease=again, instance=b"i" * 16))
        if second_answers:
            apply(state, Submitted(submission_id=b"2" * 32, lease_id=again.lease_id, size=1, at_ms=7))
            accept(state, b"2" * 32)
        apply(state, Submitted(submission_id=b"1" * 32, lease_id=late.lease_id, size=1, at_ms=8))
        (reject if refused else accept)(state, b"1" * 32)
        assert state.free_units == []
        if not second_answers:
            apply(state, LeaseTimedOut(lease_id=again.lease_id, at_ms=9))
            assert state.free_units == [late.unit_id]  # now nobody has it


def test_rollouts_too_old_for_the_next_version_leave_the_pool() -> None:
    state, rng = started(), random.Random(0)
    old = submit(state, rng)
    accept(state, old)
    for _ in range(2):
        fresh = submit(state, rng, version=state.head)
        accept(state, fresh)
        apply(
            state,
            BatchFormed(version=state.head + 1, submissions=(fresh,), groups=2, usable=2, at_ms=9),
        )
        apply(state, published(state, 10))
    assert state.head == 2
    assert old not in state.pool
    assert state.submissions[old].status == "stale"


def test_settled_work_is_forgotten_after_some_versions() -> None:
    state, rng = started(), random.Random(0)
    first = submit(state, rng)
    accept(state, first)
    batch = (first,)
    for _ in range(MAX_LAG + REMEMBERED_VERSIONS + 2):
        apply(state, BatchFormed(version=state.head + 1, submissions=batch, groups=2, usable=2, at_ms=9))
        apply(state, published(state, 10))
        fresh = submit(state, rng, version=state.head)
        accept(state, fresh)
        batch = (fresh,)
    assert first not in state.submissions
    assert all(version >= 1 for _, version in state.closed.values())
    assert len(state.submissions) <= MAX_LAG + REMEMBERED_VERSIONS + 2


def test_what_is_remembered_is_bounded_even_if_a_version_takes_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("barnraise.coordinator.state.CLOSED_KEPT", 40)
    monkeypatch.setattr("barnraise.coordinator.state.VERSIONS_KEPT", 20)
    state, rng = started(), random.Random(0)
    for number in range(300):
        terms = lease_for(state, b"n" * 32, rng, number)
        apply(state, LeaseIssued(lease=terms, instance=b"i" * 16))
        apply(state, LeaseClosed(lease_id=terms.lease_id, reason="returned", at_ms=number))
        assert len(state.closed) <= 50
        assert terms.lease_id in state.closed
    assert len(state.closed) >= 40
    for _ in range(100):
        fresh = submit(state, rng, version=state.head)
        accept(state, fresh)
        apply(state, BatchFormed(version=state.head + 1, submissions=(fresh,), groups=2, usable=2, at_ms=9))
        apply(state, published(state, 10))
        assert state.versions[-1].version == state.head
    assert 20 <= len(state.versions) <= 25


def test_rejections_make_the_next_lease_wait_geometrically_and_good_work_makes_up_for_them() -> None:
    assert [strike_pause_ms(strikes) for strikes in range(5)] == [0, 2_000, 4_000, 8_000, 16_000]
    state, rng = started(), random.Random(0)
    node = state.nodes[b"n" * 32]
    for strikes in range(1, 5):
        reject(state, submit(state, rng))
        assert node.strikes == strikes
        assert node.quiet_until == 9 + strike_pause_ms(strikes)
    for strikes in range(3, -1, -1):
        accept(state, submit(state, rng))
        assert node.strikes == strikes
    assert node.quiet_until <= 9


def test_a_failure_of_our_own_verifier_is_no_mark_against_the_node() -> None:
    state, rng = started(), random.Random(0)
    reject(state, submit(state, rng), blameless=True)
    node = state.nodes[b"n" * 32]
    assert (node.rejected, node.strikes, node.quiet_until) == (1, 0, 0)


def test_giving_work_back_is_free_until_it_becomes_a_habit() -> None:
    state, rng = started(), random.Random(0)
    node = state.nodes[b"n" * 32]
    for number in range(4):
        assert node.quiet_until == 0, number
        terms = lease_for(state, node.key, rng, 5)
        apply(state, LeaseIssued(lease=terms, instance=b"i" * 16))
        apply(state, LeaseClosed(lease_id=terms.lease_id, reason="returned", at_ms=9))
    assert node.quiet_until > 9
    submit(state, rng)
    assert node.unfinished == 3


def test_usable_groups_are_those_whose_rewards_differ() -> None:
    assert usable_groups((0.0, 0.0, 1.0, 0.0, 1.0, 1.0), 2) == 1
    assert usable_groups((), 8) == 0


def started() -> State:
    return fold(
        [
            RunOpened(run_id=RUN_ID, operator=b"o" * 32, at_ms=1),
            NodeJoined(node=b"n" * 32, name="ann", at_ms=2),
            published(State(max_lag=MAX_LAG), 3),
        ],
        MAX_LAG,
    )


def submit(state: State, rng: random.Random, version: int | None = None) -> bytes:
    terms = lease_for(state, b"n" * 32, rng, 5, version)
    submission_id = rng.randbytes(32)
    apply(state, LeaseIssued(lease=terms, instance=b"i" * 16))
    apply(state, Submitted(submission_id=submission_id, lease_id=terms.lease_id, size=1, at_ms=6))
    return submission_id


def accept(state: State, submission_id: bytes) -> None:
    apply(
        state,
        SubmissionJudged(
            submission_id=submission_id,
            verdict=verdict(True),
            rewards=(0.0, 1.0, 0.0, 1.0),
            tokens=5,
            credit=5,
            blameless=False,
            at_ms=9,
        ),
    )


def reject(state: State, submission_id: bytes, blameless: bool = False) -> None:
    apply(
        state,
        SubmissionJudged(
            submission_id=submission_id,
            verdict=verdict(False, "unverifiable" if blameless else "toploc"),
            rewards=(),
            tokens=0,
            credit=0,
            blameless=blameless,
            at_ms=9,
        ),
    )
