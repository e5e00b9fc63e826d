"""Limits on draws and log-probabilities: what they refuse, and how seldom they refuse honest work."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from barnraise.coordinator.checks import CheckFailure, Completion, default_verify_spec
from barnraise.coordinator.draw_checks import (
    check_end,
    check_logprobs,
    check_sampling,
    sum_limit,
    token_limit,
)
from barnraise.protocol.messages import Verdict
from barnraise.protocol.spec import Noise

VERIFY = default_verify_spec()
Floats = npt.NDArray[np.float32]


def _floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def _failure(check: str, call: Callable[..., None], *arguments: Any) -> Verdict:
    with pytest.raises(CheckFailure) as caught:
        call(*arguments)
    verdict = caught.value.verdict()
    assert verdict.check == check
    assert math.isfinite(verdict.value)
    assert math.isfinite(verdict.threshold)
    return verdict


def _completion(ended: bool = True) -> Completion:
    return Completion(np.array([1, 0], dtype=np.int64), _floats(0, 0), b"", ended)


def test_one_token_that_was_not_the_draw_is_found() -> None:
    check_sampling([_floats(0, 0.2), _floats(*[0] * 30)], VERIFY)
    for bad in (4.0, math.inf, math.nan):
        verdict = _failure("sampling-margin", check_sampling, [_floats(0), _floats(0, bad, 0)], VERIFY)
        assert verdict.position == "rollout 1 token 1"


def test_many_small_margins_are_found() -> None:
    verdict = _failure("sampling-mean", check_sampling, [_floats(*[0.02] * 500)] * 3, VERIFY)
    assert verdict.value == pytest.approx(0.02)


def test_an_improbable_end_is_refused_and_an_honest_one_is_not() -> None:
    strict = structs.replace(VERIFY, eos_min_probability=0.01)
    _failure("eos-probability", check_end, _completion(), _floats(-1, -5), 0, strict)
    check_end(_completion(), _floats(-1, -4), 0, strict)
    check_end(_completion(ended=False), _floats(-1, -50), 0, strict)
    check_end(_completion(), _floats(-1, -16), 0, VERIFY)


def test_one_log_probability_that_is_not_the_policys_is_found() -> None:
    claimed = [_floats(-1, -2), _floats(-3)]
    check_logprobs(claimed, [_floats(-1.1, -2), _floats(-3)], VERIFY)
    verdict = _failure("logprob-max", check_logprobs, claimed, [_floats(-1, -5), _floats(-3)], VERIFY)
    assert verdict.position == "rollout 0 token 1"
    _failure("logprob-max", check_logprobs, claimed, [_floats(-1, -2), _floats(-math.inf)], VERIFY)


def test_log_probabilities_of_another_policy_are_found_by_their_mean_or_their_bias() -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 2000).astype(np.float32)
    zeros = np.zeros(2000, dtype=np.float32)
    check_logprobs([noise / 5], [zeros], VERIFY)
    _failure("logprob-mean", check_logprobs, [noise], [zeros], VERIFY)
    for sign in (1, -1):
        verdict = _failure(
            "logprob-bias", check_logprobs, [noise / 5 + np.float32(0.04 * sign)], [zeros], VERIFY
        )
        assert verdict.value * sign > 0


@pytest.mark.parametrize("tokens", [1, 10, 300, 10_000, 1_000_000])
@pytest.mark.parametrize("false_alarm", [1e-2, 1e-5, 1e-7])
def test_noise_as_bad_as_the_spec_allows_exceeds_a_limit_no_oftener_than_budgeted(
    tokens: int, false_alarm: float
) -> None:
    # A gamma variable attains the shape of the bound; its sum is gamma again, so that the
    # tail is known exactly, far beyond what could be simulated.
    for shape, scale in ((0.02, 0.075), (0.5, 0.03), (3.0, 0.1)):
        noise = Noise(mean=shape * scale, variance=shape * scale**2, scale=scale)
        limit = sum_limit(noise, tokens, false_alarm, 1.0)
        tail = torch.special.gammaincc(
            torch.tensor(tokens * shape, dtype=torch.float64),
            torch.tensor(limit / scale, dtype=torch.float64),
        )
        assert float(tail) <= false_alarm
        assert float(tail) > false_alarm**4  # and the limit is not absurdly far away
        limit = token_limit(noise, tokens, false_alarm, 1.0)
        one = torch.special.gammaincc(
            torch.tensor(shape, dtype=torch.float64), torch.tensor(limit / scale, dtype=torch.float64)
        )
        assert tokens * float(one) <= false_alarm


def test_simulated_submissions_are_refused_no_oftener_than_budgeted() -> None:
    # Logits that differ by heavy-tailed noise of the calibrated size, real draws from them, at a
    # budget large enough to see: 1e-2 for each of six limits.
    generator = np.random.default_rng(1)
    verify = structs.replace(VERIFY, false_alarm=1e-2)
    submissions, tokens, vocabulary = 400, 150, 12
    shape = (submissions * tokens, vocabulary)
    ours = generator.normal(0, 2, shape)
    theirs = ours + generator.laplace(0, 1, shape) * generator.gamma(1.0, 0.03, (shape[0], 1))
    gumbel = generator.gumbel(size=shape)
    drawn = (theirs + gumbel).argmax(1)[:, None]
    margin = (ours + gumbel).max(1) - np.take_along_axis(ours + gumbel, drawn, 1)[:, 0]
    errors = [np.take_along_axis(x, drawn, 1)[:, 0] - np.log(np.exp(x).sum(1)) for x in (theirs, ours)]
    refused = 0
    for start in range(0, shape[0], tokens):
        part = slice(start, start + tokens)
        try:
            check_sampling([margin[part].astype(np.float32)], verify)
            check_logprobs([errors[0][part].astype(np.float32)], [errors[1][part].astype(np.float32)], verify)
        except CheckFailure:
            refused += 1
    assert refused <= 0.06 * submissions


@given(
    st.integers(1, 10**6),
    st.floats(1e-9, 0.5),
    st.floats(0.05, 5.0),
    st.floats(1.01, 3.0),
    st.integers(1, 1000),
)
def test_limits_grow_with_tokens_and_confidence_and_the_mean_they_allow_falls(
    tokens: int, false_alarm: float, temperature: float, factor: float, more: int
) -> None:
    noise = VERIFY.draws
    limit = sum_limit(noise, tokens, false_alarm, temperature)
    assert sum_limit(noise, tokens + more, false_alarm, temperature) > limit
    assert sum_limit(noise, tokens, false_alarm / factor, temperature) > limit
    mean = sum_limit(noise, tokens + more, false_alarm, temperature) / (tokens + more)
    assert mean < limit / tokens
    assert mean > noise.mean


def test_a_limit_is_the_documented_formula() -> None:
    noise = Noise(mean=0.01, variance=0.004, scale=0.05)
    surprise = math.log(1e7)
    assert sum_limit(noise, 100, 1e-7, 0.5) == pytest.approx(
        200 * 0.01 + math.sqrt(2 * 200 * 0.004 * surprise) + 0.05 * surprise
    )
    assert token_limit(noise, 100, 1e-7, 2.0) == pytest.approx(
        0.01 + math.sqrt(2 * 0.004 * math.log(1e9)) + 0.05 * math.log(1e9)
    )


def test_the_budget_of_all_limits_together_is_below_one_in_a_million() -> None:
    assert 9 * VERIFY.false_alarm < 1e-6
