"""Checks 5 and 6, over a whole submission: was each token the seeded draw of this policy,
and are the claimed log-probabilities this policy's?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from barnraise.coordinator.checks import CheckFailure, Completion
from barnraise.protocol.spec import VerifySpec

Floats = npt.NDArray[np.float32]


def check_sampling(margins: Sequence[Floats], verify: VerifySpec) -> None:
    """Margins per rollout and token (``barnraise.kernels.sampling.margins``), nats.

    Raises:
        CheckFailure: ``sampling-margin`` (one token) or ``sampling-mean`` (the submission).
    """
    for number, values in enumerate(margins):
        at = int(values.argmax())  # of NaN the first, which then fails
        if not values[at] <= verify.sampling_margin:
            raise CheckFailure(
                "sampling-margin",
                verify.sampling_margin,
                float(values[at]),
                f"rollout {number} token {at}",
                f"the token lies {values[at]:.4g} nats below the draw that its seed gives",
            )
    mean = _mean(margins)
    if not mean <= verify.sampling_mean:
        raise CheckFailure(
            "sampling-mean",
            verify.sampling_mean,
            mean,
            "all rollouts",
            f"tokens lie {mean:.4g} nats below their seeded draws on average: another policy drew them",
        )


def check_end(completion: Completion, logprobs: Floats, number: int, verify: VerifySpec) -> None:
    """A completion that ended by itself did so with some probability, by our log-probabilities.

    Raises:
        CheckFailure: ``eos-probability``.
    """
    probability = math.exp(min(float(logprobs[-1]), 0.0))
    if completion.ended and not probability >= verify.eos_min_probability:
        raise CheckFailure(
            "eos-probability",
            verify.eos_min_probability,
            probability,
            f"rollout {number} token {len(logprobs) - 1}",
            f"the policy ends here with probability {probability:.3g} only",
        )


def check_logprobs(claimed: Sequence[Floats], ours: Sequence[Floats], verify: VerifySpec) -> None:
    """Claimed log-probabilities against ours, per rollout and token, nats.

    Raises:
        CheckFailure: ``logprob-max`` (one token) or ``logprob-mean`` (the submission).
    """
    errors = [np.abs(a - b) for a, b in zip(claimed, ours, strict=True)]
    for number, values in enumerate(errors):
        at = int(values.argmax())
        if not values[at] <= verify.logprob_max:
            raise CheckFailure(
                "logprob-max",
                verify.logprob_max,
                float(values[at]),
                f"rollout {number} token {at}",
                f"claimed log-probability {claimed[number][at]:.5g}, the policy's is {ours[number][at]:.5g}",
            )
    mean = _mean(errors)
    if not mean <= verify.logprob_mean:
        raise CheckFailure(
            "logprob-mean",
            verify.logprob_mean,
            mean,
            "all rollouts",
            f"claimed log-probabilities are off by {mean:.4g} nats on average: another policy's",
        )


def _mean(parts: Sequence[npt.NDArray[Any]]) -> float:
    count = sum(len(part) for part in parts)
    return sum(float(part.sum(dtype=np.float64)) for part in parts) / max(count, 1)
