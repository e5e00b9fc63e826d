"""The checks that need no model: every malformation has a verdict that names it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from spec_support import run_spec

from barnraise.coordinator import checks
from barnraise.coordinator.checks import CheckFailure, Completion, default_verify_spec
from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission, Verdict
from barnraise.protocol.wire import decode, encode

EOS, VOCABULARY, LIMIT, HIDDEN = 0, 50, 40, 16
VERIFY = default_verify_spec()
SPEC = run_spec(
    model__parameters=1000,
    model__vocabulary=VOCABULARY,
    model__eos_token=EOS,
    sampling__max_new_tokens=LIMIT,
    rollout__group_size=2,
    verify=VERIFY,
)
LEASE = RolloutLease(
    run_id=bytes([1]) * 32,
    lease_id=bytes([2]) * 16,
    unit_id=0,
    node=bytes([3]) * 32,
    policy_version=7,
    prompts=2,
    group_size=2,
    issued_at=0,
    timeout_at=1,
    deadline_at=2,
)


def _rollout(
    tokens: list[int], logprobs: list[float] | None = None, prompt: int = 0, sample: int = 0
) -> Rollout:
    values = [-1.0] * len(tokens) if logprobs is None else logprobs
    return Rollout(
        prompt=prompt,
        sample=sample,
        tokens=np.array(tokens, dtype="<u4").tobytes(),
        logprobs=np.array(values, dtype="<f4").tobytes(),
        proofs=b"",
    )


def _submission(**changes: Any) -> RolloutSubmission:
    honest = RolloutSubmission(
        run_id=LEASE.run_id,
        lease_id=LEASE.lease_id,
        policy_version=LEASE.policy_version,
        engine="test",
        generate_ms=1,
        rollouts=tuple(_rollout([5, EOS], prompt=p, sample=s) for p in range(2) for s in range(2)),
    )
    return structs.replace(honest, **changes)


def _failure(check: str, call: Any, *arguments: Any) -> Verdict:
    with pytest.raises(CheckFailure) as caught:
        call(*arguments)
    assert caught.value.check == check
    verdict = caught.value.verdict()
    assert not verdict.accepted
    assert decode(encode(verdict), Verdict) == verdict  # fit to be signed and sent
    return verdict


def test_an_honest_message_passes() -> None:
    submission = checks.open_payload(encode(_submission()))
    checks.check_lease(submission, LEASE)
    checks.check_order(submission.rollouts, LEASE)
    for number, rollout in enumerate(submission.rollouts):
        completion = checks.read_rollout(rollout, number, SPEC)
        assert completion.tokens.tolist() == [5, EOS]
        assert completion.ended
    assert decode(encode(checks.accepted(8)), Verdict).check == "all"


@given(st.binary(max_size=300))
@settings(max_examples=50)
def test_random_bytes_are_malformed(payload: bytes) -> None:
    _failure("malformed", checks.open_payload, payload)


@given(st.data())
@settings(max_examples=50)
def test_a_truncated_payload_is_malformed(data: st.DataObject) -> None:
    payload = encode(_submission())
    _failure("malformed", checks.open_payload, payload[: data.draw(st.integers(0, len(payload) - 1))])


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("wrong-run", {"run_id": bytes(32)}),
        ("wrong-lease", {"lease_id": bytes(16)}),
        ("wrong-version", {"policy_version": 6}),
    ],
)
def test_a_submission_for_something_else_is_refused(check: str, change: dict[str, Any]) -> None:
    _failure(check, checks.check_lease, _submission(**change), LEASE)


def test_rollouts_must_be_every_prompt_and_sample_once_and_in_order() -> None:
    honest = _submission().rollouts
    for rollouts in (honest[:-1], (*honest, honest[0])):
        verdict = _failure("rollout-count", checks.check_order, rollouts, LEASE)
        assert (verdict.threshold, verdict.value) == (4, len(rollouts))
    for order in ((1, 0, 2, 3), (0, 1, 2, 2), (0, 0, 2, 3), (2, 3, 0, 1)):
        _failure("rollout-order", checks.check_order, [honest[i] for i in order], LEASE)
    verdict = _failure("rollout-order", checks.check_order, [honest[i] for i in (0, 1, 3, 2)], LEASE)
    assert verdict.position == "rollout 2"
    assert "must be prompt 1 sample 0, not prompt 1 sample 1" in verdict.message


@pytest.mark.parametrize(
    ("check", "rollout", "position"),
    [
        ("token-bytes", structs.replace(_rollout([5, EOS]), tokens=b"\0" * 7), "rollout 3"),
        ("empty-completion", _rollout([]), "rollout 3"),
        ("completion-length", _rollout([5] * (LIMIT + 1)), "rollout 3"),
        ("vocabulary", _rollout([5, VOCABULARY, EOS]), "rollout 3 token 1"),
        ("vocabulary", _rollout([2**32 - 1, EOS]), "rollout 3 token 0"),
        ("early-eos", _rollout([5, EOS, 6, EOS]), "rollout 3 token 1"),
        ("termination", _rollout([5, 6, 7]), "rollout 3 token 2"),
        ("logprob-count", _rollout([5, EOS], [-1.0]), "rollout 3"),
        ("logprob-count", structs.replace(_rollout([5, EOS]), logprobs=b"\0" * 9), "rollout 3"),
        ("logprob-range", _rollout([5, EOS], [-1.0, math.nan]), "rollout 3 token 1"),
        ("logprob-range", _rollout([5, EOS], [-math.inf, -1.0]), "rollout 3 token 0"),
        ("logprob-range", _rollout([5, EOS], [-1.0, 0.01]), "rollout 3 token 1"),
        ("logprob-range", _rollout([5, EOS], [-1.0, -40.0]), "rollout 3 token 1"),
    ],
)
def test_a_malformed_rollout_is_named(check: str, rollout: Rollout, position: str) -> None:
    assert _failure(check, checks.read_rollout, rollout, 3, SPEC).position == position


def test_the_limit_and_the_end_token_both_end_a_completion() -> None:
    assert not checks.read_rollout(_rollout([5] * LIMIT), 0, SPEC).ended
    assert checks.read_rollout(_rollout([5] * (LIMIT - 1) + [EOS]), 0, SPEC).ended
    assert checks.read_rollout(_rollout([EOS]), 0, SPEC).ended
    assert checks.read_rollout(_rollout([5, EOS], [0.0, 1e-6]), 0, SPEC).ended  # rounding


def test_each_of_several_end_tokens_ends_a_completion_and_none_stands_within_one() -> None:
    several = structs.replace(SPEC, model=structs.replace(SPEC.model, other_ends=(7, 8)))
    assert all(checks.read_rollout(_rollout([5, end]), 0, several).ended for end in (EOS, 7, 8))
    assert not checks.read_rollout(_rollout([7] * LIMIT), 0, SPEC).ended
    verdict = _failure("early-eos", checks.read_rollout, _rollout([5, 8, 6, EOS]), 3, several)
    assert verdict.position == "rollout 3 token 1"


@given(st.binary(max_size=200), st.binary(max_size=200))
@settings(max_examples=200)
def test_no_bytes_make_reading_a_rollout_raise_anything_else(tokens: bytes, logprobs: bytes) -> None:
    rollout = Rollout(prompt=0, sample=0, tokens=tokens, logprobs=logprobs, proofs=b"")
    try:
        completion = checks.read_rollout(rollout, 0, SPEC)
    except CheckFailure as failure:
        decode(encode(failure.verdict()), Verdict)
    else:
        assert 1 <= len(completion.tokens) == len(completion.logprobs) <= LIMIT


def _completion(tokens: int, proofs: bytes, ended: bool = True) -> Completion:
    return Completion(np.zeros(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.float32), proofs, ended)


def _floats(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_long_texts_are_cut_to_what_a_verdict_may_hold() -> None:
    failure = CheckFailure("malformed", -math.inf, math.inf, "p" * 900, "m" * 900)
    verdict = failure.verdict()
    assert decode(encode(verdict), Verdict) == verdict
