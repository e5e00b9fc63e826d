"""Block units on the coordinator: who gets which place, when a round closes, what a restart keeps."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_support import pretrain_spec

from barnraise.coordinator import block_scheduler
from barnraise.coordinator.block_draws import drawn
from barnraise.coordinator.block_events import BlockJudged, BlockLeased, BlockSubmitted, RoundFormed
from barnraise.coordinator.block_scheduler import BlockGrant, decide_block_lease, form_round, in_blocks
from barnraise.coordinator.events import (
    Event,
    EventError,
    LeaseClosed,
    LeaseTimedOut,
    NodeJoined,
    RunOpened,
    VersionPublished,
    VersionTrained,
    decode_event,
    encode_event,
)
from barnraise.coordinator.ledger_log import entries_of
from barnraise.coordinator.scheduler import Resend, Wait
from barnraise.coordinator.snapshot import decode_state, encode_state
from barnraise.coordinator.state import State, apply, fold
from barnraise.protocol.ledger import balances, credit_for_block
from barnraise.protocol.messages import Verdict
from barnraise.protocol.pretrain import BlockLease, PretrainSpec

SPEC = pretrain_spec(blocks=2, contributors=2, quorum=1, rounds=2)
RUN = bytes(32)
NODES = [bytes([number]) * 32 for number in range(1, 5)]


class World:
    """A state and everything that made it; time stands still unless it is moved."""

    def __init__(self, spec: PretrainSpec = SPEC, nodes: int = 4) -> None:
        self.spec = spec
        self.now = 1_000
        self.events: list[Event] = []
        self.state = State(max_lag=2)
        self.happen(RunOpened(run_id=RUN, operator=bytes(32), at_ms=0))
        for key in NODES[:nodes]:
            self.happen(NodeJoined(node=key, name="n", at_ms=0))
        self.publish(0)

    def happen(self, event: Event) -> None:
        event = decode_event(encode_event(event))  # whole numbers become floats where they belong
        apply(self.state, event)
        self.events.append(event)

    def publish(self, version: int) -> None:
        self.happen(VersionTrained(version=version, weights="", stats=None, accuracy=-1, at_ms=self.now))
        self.happen(
            VersionPublished(
                version=version,
                manifest=bytes(32),
                weights="",
                size=1,
                stats=None,
                accuracy=-1,
                at_ms=self.now,
            )
        )

    def ask(self, node: bytes, version: int | None = None) -> BlockGrant | Resend | Wait:
        at = self.state.head if version is None else version
        return decide_block_lease(self.state, self.spec, self.state.nodes[node], at, self.now)

    def lease(self, node: bytes) -> BlockLease | None:
        decision = self.ask(node)
        if not isinstance(decision, BlockGrant):
            return None
        terms = BlockLease(
            run_id=RUN,
            lease_id=len(self.events).to_bytes(16, "big"),
            unit_id=decision.unit_id,
            node=node,
            policy_version=self.state.head,
            block=decision.block,
            slot=decision.slot,
            issued_at=self.now,
            timeout_at=decision.timeout_at,
            deadline_at=decision.deadline_at,
        )
        for key in decision.release:
            self.happen(LeaseTimedOut(lease_id=key, at_ms=self.now))
        self.happen(BlockLeased(lease=terms, instance=bytes(16)))
        return terms

    def submit(self, terms: BlockLease) -> bytes:
        submission_id = b"s" + terms.lease_id + bytes(15)
        self.happen(
            BlockSubmitted(submission_id=submission_id, lease_id=terms.lease_id, size=100, at_ms=self.now)
        )
        return submission_id

    def judge(self, submission_id: bytes, accepted: bool = True, blameless: bool = False) -> None:
        verdict = Verdict(
            accepted=accepted,
            check="all" if accepted else "block-update",
            threshold=0.1,
            value=0.2,
            position="",
            message="",
        )
        self.happen(
            BlockJudged(
                submission_id=submission_id,
                verdict=verdict,
                tokens=10 if accepted else 0,
                credit=7 if accepted else 0,
                blameless=blameless,
                at_ms=self.now,
            )
        )

    def close_round(self) -> RoundFormed | None:
        formed = form_round(self.state, self.spec, self.now)
        if formed is not None:
            self.happen(formed)
        return formed


def test_a_round_goes_to_as_many_nodes_as_it_has_places_and_no_node_has_a_block_twice() -> None:
    world = World()
    given_out = [world.lease(node) for node in NODES]
    places = [(terms.block, terms.slot) for terms in given_out if terms is not None]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({terms.unit_id for terms in given_out if terms is not None}) == 4
    # the first node hands in and may take part in the other block, were there room
    assert given_out[0] is not None
    world.submit(given_out[0])
    assert isinstance(world.ask(NODES[0]), Wait)


def test_blocks_are_started_before_any_gets_its_second_contributor() -> None:
    world = World()
    blocks = [terms.block for node in NODES[:2] if (terms := world.lease(node))]
    assert sorted(blocks) == [0, 1]


def test_a_node_gets_the_block_that_it_had_before() -> None:
    world = World(nodes=2)
    first = [world.lease(node) for node in NODES[:2]]
    for terms in first:
        assert terms is not None
        world.judge(world.submit(terms))
    world.now += 61_000
    assert world.close_round() is not None
    world.publish(1)
    again = world.lease(NODES[1])
    assert again is not None
    assert first[1] is not None
    assert again.block == first[1].block


def test_a_round_closes_when_every_place_is_filled_or_time_is_up_with_a_quorum() -> None:
    world = World()
    terms = [world.lease(node) for node in NODES]
    for item in terms[:3]:
        assert item is not None
        world.judge(world.submit(item))
    assert world.close_round() is None
    world.now += 60_000
    formed = world.close_round()
    assert formed is not None
    assert (formed.version, len(formed.submissions)) == (1, 3)
    assert isinstance(world.ask(NODES[0]), Wait)


def test_a_round_without_a_quorum_waits_for_ever() -> None:
    world = World()
    terms = world.lease(NODES[0])
    assert terms is not None
    world.judge(world.submit(terms))
    world.now += 10**9
    assert world.close_round() is None


def test_what_comes_too_late_is_paid_and_not_used() -> None:
    world = World()
    terms = [world.lease(node) for node in NODES]
    assert all(terms)
    late = terms[3]
    assert late is not None
    for item in terms[:3]:
        assert item is not None
        world.judge(world.submit(item))
    waiting = world.submit(late)
    world.now += 60_000
    formed = world.close_round()
    assert formed is not None
    assert waiting not in formed.submissions
    world.publish(1)
    world.judge(waiting)
    assert world.state.blocks.work[waiting].status == "late"
    assert world.state.nodes[late.node].credit == 7


def test_a_timed_out_place_goes_to_somebody_else_and_the_first_answer_counts() -> None:
    world = World(spec=pretrain_spec(blocks=1, contributors=1, quorum=1))
    slow = world.lease(NODES[0])
    assert slow is not None
    assert isinstance(world.ask(NODES[1]), Wait)
    world.now = slow.timeout_at
    for event in block_scheduler.expired(world.state, world.now):
        world.happen(event)
    other = world.lease(NODES[1])
    assert other is not None
    assert other.unit_id == slow.unit_id
    world.judge(world.submit(slow))
    second = world.submit(other)
    world.judge(second)
    assert world.state.blocks.work[second].status == "late"
    formed = world.close_round()
    assert formed is not None
    assert len(formed.submissions) == 1


def test_a_rejected_unit_opens_its_place_again_and_quiets_its_node() -> None:
    world = World(spec=pretrain_spec(blocks=1, contributors=1, quorum=1))
    terms = world.lease(NODES[0])
    assert terms is not None
    world.judge(world.submit(terms), accepted=False)
    assert isinstance(world.ask(NODES[0]), Wait)
    assert world.state.nodes[NODES[0]].strikes == 1
    assert isinstance(world.ask(NODES[1]), BlockGrant)


def test_our_own_failure_costs_no_strike() -> None:
    world = World()
    terms = world.lease(NODES[0])
    assert terms is not None
    world.judge(world.submit(terms), accepted=False, blameless=True)
    assert world.state.nodes[NODES[0]].strikes == 0


def test_a_new_node_and_one_that_failed_have_more_of_their_work_done_again() -> None:
    world = World(spec=pretrain_spec(blocks=1, contributors=1, quorum=1, rounds=200))

    def one(accepted: bool) -> int:
        world.now += 10**8
        terms = world.lease(NODES[0])
        assert terms is not None
        submission = world.submit(terms)
        depth = world.state.blocks.work[submission].depth
        world.judge(submission, accepted)
        if accepted:
            assert world.close_round() is not None
            world.publish(world.state.head + 1)
        return depth

    assert [one(True) for _ in range(10)] == [2] * 8 + [1] * 2
    assert [one(False) for _ in range(3)] == [1, 3, 4]
    assert [one(True) for _ in range(9)] == [5] * 8 + [4]
    assert [one(True) for _ in range(92)][-1] == 1, "a hundred in a row, and it is forgiven"


@given(st.binary(min_size=32, max_size=32), st.integers(1, 64), st.integers(1, 70))
def test_drawn_segments_are_different_ones_and_more_of_them_contain_fewer(
    draw: bytes, count: int, depth: int
) -> None:
    found = drawn(draw, count, depth)
    assert len(set(found)) == len(found) == min(depth, count)
    assert set(found) <= set(range(count))
    assert set(drawn(draw, count, max(1, depth - 1))) <= set(found)


def test_after_the_last_round_the_model_is_put_together_and_blocks_are_over() -> None:
    world = World(spec=pretrain_spec(blocks=1, contributors=1, quorum=1, rounds=1))
    terms = world.lease(NODES[0])
    assert terms is not None
    world.judge(world.submit(terms))
    assert world.close_round() is not None
    world.publish(1)
    assert isinstance(world.ask(NODES[0]), Wait)
    assert in_blocks(world.state, world.spec)
    formed = world.close_round()
    assert formed == RoundFormed(version=2, submissions=(), at_ms=world.now)
    world.publish(2)
    assert not in_blocks(world.state, world.spec)
    assert world.close_round() is None


@pytest.mark.parametrize("version", [-1, 1, 5])
def test_only_the_head_is_trained_from(version: int) -> None:
    assert isinstance(World().ask(NODES[0], version), Wait)


def test_a_node_gets_the_lease_that_it_holds_again_and_no_second_one_for_the_same_training() -> None:
    """Whichever process asks: for a second lease of the place the same states would be paid again."""
    world = World()
    terms = world.lease(NODES[0])
    assert terms is not None
    for _ in range(3):
        world.now += 1000
        assert world.ask(NODES[0]) == Resend(terms.lease_id)


def test_a_lease_of_an_earlier_round_frees_no_place_of_this_one() -> None:
    """A straggler asks while the place of its old one's number is lent: that ended the coordinator."""
    world = World(spec=pretrain_spec(blocks=1, contributors=2, quorum=1, round_s=10.0))
    old, quick = world.lease(NODES[0]), world.lease(NODES[1])
    assert old is not None
    assert quick is not None
    world.judge(world.submit(quick))
    world.now += 10_000
    assert world.close_round() is not None
    world.publish(1)
    taken, free = world.lease(NODES[1]), world.lease(NODES[0])
    assert taken is not None
    assert free is not None
    assert (taken.slot, free.slot) == (old.slot, 1)
    world.judge(world.submit(old))
    assert world.state.nodes[NODES[0]].credit == 7  # late, and paid


def test_events_that_cannot_follow_change_nothing() -> None:
    world = World()
    terms = world.lease(NODES[0])
    assert terms is not None
    before = encode_state(world.state)
    elsewhere = msgspec.structs.replace(terms, lease_id=bytes([9]) * 16)
    for event in (
        BlockLeased(lease=elsewhere, instance=bytes(16)),
        BlockLeased(lease=msgspec.structs.replace(elsewhere, policy_version=3, slot=1), instance=bytes(16)),
        BlockLeased(lease=msgspec.structs.replace(elsewhere, node=bytes(32), slot=1), instance=bytes(16)),
        BlockSubmitted(submission_id=bytes(32), lease_id=bytes([8]) * 16, size=1, at_ms=0),
        BlockJudged(
            submission_id=bytes(32),
            verdict=Verdict(accepted=True, check="all", threshold=0, value=0, position="", message=""),
            tokens=1,
            credit=1,
            blameless=False,
            at_ms=0,
        ),
        RoundFormed(version=3, submissions=(), at_ms=0),
    ):
        with pytest.raises(EventError):
            apply(world.state, event)
        assert encode_state(world.state) == before


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 80))
def test_any_history_replays_to_the_same_state_and_pays_what_was_accepted(seed: int, steps: int) -> None:
    chance = random.Random(seed)
    world = World(spec=pretrain_spec(blocks=2, contributors=2, quorum=1, rounds=3))
    open_leases: list[BlockLease] = []
    waiting: list[bytes] = []
    for _ in range(steps):
        move = chance.randrange(6)
        if move == 0:
            terms = world.lease(chance.choice(NODES))
            open_leases += [terms] if terms else []
        elif move == 1 and open_leases:
            terms = open_leases.pop(chance.randrange(len(open_leases)))
            if terms.lease_id in world.state.blocks.leases:
                waiting.append(world.submit(terms))
        elif move == 2 and waiting:
            world.judge(waiting.pop(chance.randrange(len(waiting))), chance.random() < 0.8)
        elif move == 3:
            world.now += chance.randrange(100_000)
            for event in block_scheduler.expired(world.state, world.now):
                world.happen(event)
        elif move == 4 and open_leases:
            terms = open_leases.pop()
            if terms.lease_id in world.state.blocks.leases:
                world.happen(LeaseClosed(lease_id=terms.lease_id, reason="returned", at_ms=world.now))
        elif world.close_round() is not None:
            world.publish(world.state.head + 1)
        if chance.random() < 0.2:  # a restart from a snapshot
            world.state = decode_state(encode_state(world.state))
        blocks = world.state.blocks
        assert len(blocks.waiting) == len(waiting)
        assert all(blocks.work[key].status == "accepted" for key in blocks.accepted.values())
        assert sum(map(len, blocks.held.values())) == len(blocks.leases)
    replayed = fold([decode_event(encode_event(event)) for event in world.events], 2)
    assert encode_state(replayed) == encode_state(world.state)
    paid = balances(entries_of(world.events, 2))
    assert paid == {key: node.credit for key, node in world.state.nodes.items()}


def test_credit_counts_a_full_step_as_six_operations_a_parameter() -> None:
    assert credit_for_block(1_000_000, 500) == 3_000
