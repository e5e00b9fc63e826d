"""Each check of a simulated swarm is fed what it is there to find, without a swarm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from barnraise.coordinator import events
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal import Payload, Write
from barnraise.coordinator.state import State
from barnraise.coordinator.state_parts import Lease, Submission
from barnraise.node.core import initial
from barnraise.protocol.envelope import content_id, sign
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import RolloutLease, RolloutSubmission, Verdict
from barnraise.simulation.invariant_bounds import check_leases, check_state, check_waiting, is_waiting
from barnraise.simulation.invariant_nodes import Nodes, check_store
from barnraise.simulation.invariant_record import Broken, Record, check_lag, check_submission
from barnraise.simulation.invariant_steps import NODE_STEPS, check_steps

RUN = bytes(32)
ANN = Identity.from_private_bytes(bytes([1]) * 32)
BOB = Identity.from_private_bytes(bytes([2]) * 32)


@pytest.fixture
def record() -> Record:
    spec: Any = SimpleNamespace(rollout=SimpleNamespace(max_lag=2), operator=ANN.public_key)
    made = Record(spec, RUN)
    made.head = 0
    return made


def lease(number: int = 0, identity: Identity = ANN, version: int = 0) -> RolloutLease:
    return RolloutLease(
        run_id=RUN,
        lease_id=number.to_bytes(16, "big"),
        unit_id=number,
        node=identity.public_key,
        policy_version=version,
        prompts=1,
        group_size=2,
        issued_at=0,
        timeout_at=1_000,
        deadline_at=2_000,
    )


def work(terms: RolloutLease, identity: Identity) -> Payload:
    submission = RolloutSubmission(
        run_id=RUN,
        lease_id=terms.lease_id,
        policy_version=terms.policy_version,
        engine="e",
        generate_ms=1,
        rollouts=(),
    )
    signed = sign(submission, identity)
    return Payload(content_id(signed), 0, signed)


def test_work_signed_by_somebody_else_is_found() -> None:
    terms = lease()
    good, other = work(terms, ANN), work(terms, BOB)
    check_submission(good.signed, good.submission_id, terms)
    with pytest.raises(Broken, match="submission-signed"):
        check_submission(other.signed, other.submission_id, terms)
    with pytest.raises(Broken, match="submission-signed"):
        check_submission(structs.replace(good.signed, signature=bytes(64)), good.submission_id, terms)
    with pytest.raises(Broken, match="another id"):
        check_submission(good.signed, bytes(32), terms)


@pytest.mark.parametrize(
    ("version", "of", "holds"), [(3, 2, True), (3, 0, True), (4, 0, False), (1, 1, False)]
)
def test_rollouts_are_neither_too_old_nor_from_the_future(version: int, of: int, holds: bool) -> None:
    if holds:
        check_lag(version, lease(version=of), 2)
        return
    with pytest.raises(Broken, match="within-lag"):
        check_lag(version, lease(version=of), 2)


def test_a_lease_beyond_its_time_is_found() -> None:
    state = State(max_lag=2)
    state.leases[bytes(16)] = Lease(lease(), b"")
    check_leases(state, 1_000)
    with pytest.raises(Broken, match="reserved"):
        check_leases(state, 60_000)
    state.leases[bytes(16)].timed_out = True
    check_leases(state, 60_000)
    with pytest.raises(Broken, match="deadline"):
        check_leases(state, 600_000)


def test_what_is_remembered_without_need_is_found() -> None:
    state, hub = State(max_lag=0, head=30), Hub()
    check_state(state, hub, 0)
    state.submissions[b"old"] = Submission(b"old", lease(), 1, 0, status="used")
    with pytest.raises(Broken, match="remembered"):
        check_state(state, hub, 0)
    state.submissions.clear()
    state.free_units.extend(range(1000))
    with pytest.raises(Broken, match="free_units"):
        check_state(state, hub, 0)


def test_a_node_that_waits_for_too_long_is_found() -> None:
    state = initial(False, 0.0)
    assert is_waiting(state)
    check_waiting("ann", state, 599.0)
    with pytest.raises(Broken, match="ann waits for 601 s"):
        check_waiting("ann", state, 601.0)


def test_steps_beyond_what_happens_are_found_and_named() -> None:
    check_steps(Counter({"ann": round(NODE_STEPS * 9)}), 10.0, 1)
    with pytest.raises(Broken, match="ann"):
        check_steps(Counter({"ann": round(NODE_STEPS * 11)}), 10.0, 1)


def test_a_shard_under_a_false_name_is_found(tmp_path: Path) -> None:
    check_store("ann", tmp_path)
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / ("ab" * 32)).write_bytes(b"something else")
    with pytest.raises(Broken, match="shards-verified"):
        check_store("ann", tmp_path)


def test_the_record_finds_what_cannot_follow(record: Record) -> None:
    first, again = lease(1), structs.replace(lease(2, BOB), unit_id=1)
    record.hear(Write(events=[events.LeaseIssued(lease=first, instance=b"")]))
    with pytest.raises(Broken, match="lent-once"):
        record.hear(Write(events=[events.LeaseIssued(lease=again, instance=b"")]))
    with pytest.raises(Broken, match="lease-open"):
        record.hear(Write(events=[events.LeaseTimedOut(lease_id=bytes(16), at_ms=1)]))
    payload = work(first, ANN)
    submitted = events.Submitted(
        submission_id=payload.submission_id, lease_id=first.lease_id, size=1, at_ms=1
    )
    with pytest.raises(Broken, match="restart-forgets"):
        record.check_restart(State(max_lag=2))
    record.hear(Write(events=[submitted], payloads=[payload]))
    with pytest.raises(Broken, match="submitted-once"):
        record.hear(Write(events=[submitted], payloads=[payload]))
    batch = events.BatchFormed(version=1, submissions=(payload.submission_id,), groups=1, usable=1, at_ms=2)
    with pytest.raises(Broken, match="used-accepted"):
        record.hear(Write(events=[batch]))
    verdict = Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message="")
    judged = events.SubmissionJudged(
        submission_id=payload.submission_id,
        verdict=verdict,
        rewards=(0.0, 1.0),
        tokens=1,
        credit=5,
        blameless=False,
        at_ms=2,
    )
    record.hear(Write(events=[judged]))
    assert record.credit[ANN.public_key] == 5
    with pytest.raises(Broken, match="judged-once"):
        record.hear(Write(events=[judged]))
    record.hear(Write(events=[batch]))
    with pytest.raises(Broken, match="used-once"):
        record.hear(Write(events=[structs.replace(batch, version=2)]))


def test_an_acknowledgement_of_what_is_not_there_is_found(record: Record) -> None:
    nodes = Nodes(record, lambda: 0)
    nodes.acknowledged.add(b"kept")
    nodes.check_acknowledged({b"kept"})
    with pytest.raises(Broken, match="acknowledged-kept"):
        nodes.check_acknowledged(set())
