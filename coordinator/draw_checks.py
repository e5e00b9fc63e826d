"""Checks 5 and 6, over a whole submission: was each token the seeded draw of this policy,
and are the claimed log-probabilities this policy's?

Between honest engines (float32, bfloat16, other kernels, other batches) logits differ
a little. So a token's margin and the error of its log-probability are random variables,
small and with thin tails: the run spec bounds them (``barnraise.protocol.spec.Noise``),
calibrated by ``benchmarks/calibrate_sampling.py``. From such a bound follow, by
Chernoff's argument, two limits: what a sum over n tokens may reach, and what any one of
n tokens may. The bound is needed conditionally on the tokens before (a supermartingale),
not for independent tokens. It is compared in nats of logits, that is nats times
temperature: rounding moves logits alike at every temperature. Below temperature 1 near
ties are more frequent in these units: mean and variance may grow by 1 / temperature.

Two statistics need no calibrated size, since they measure the noise of the very
submission: the errors' bias (their mean is a Kullback-Leibler divergence, half their
variance; their signs are otherwise a matter of chance), and whether an earlier
version's log-probabilities explain the claimed ones better (``check_stale``).

Each limit is exceeded by honest work with a chance of ``false_alarm`` at most. There
are nine: ``sampling-margin``, ``sampling-mean``, ``logprob-max``, ``logprob-mean``,
``logprob-bias`` in two directions, ``stale-weights`` for up to three earlier versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from barnraise.coordinator.checks import CheckFailure, Completion
from barnraise.protocol.spec import Noise, VerifySpec

Floats = npt.NDArray[np.float32]

EXACT = 1e-4
"""Mean error of log-probabilities, nats, below which nothing is worth finding; float32 engines have 1e-5."""
UNEXPLAINED = 0.5
"""Share of the errors' energy that a version may leave and still count as their explanation."""
STALE_VERSIONS = 3
STALE_TOKENS = 256  # of a submission are looked at with earlier versions


def sum_limit(noise: Noise, tokens: int, false_alarm: float, temperature: float) -> float:
    """What the sum over ``tokens`` honest tokens exceeds with chance ``false_alarm`` at most.

    In nats of logits, ``n w mean + sqrt(2 n w variance L) + scale L`` with L = ln(1 / false_alarm) and
    w = max(1, 1 / temperature).
    """
    surprise = math.log(1.0 / false_alarm)
    count = tokens * max(1.0, 1.0 / temperature)
    return count * noise.mean + math.sqrt(2.0 * count * noise.variance * surprise) + noise.scale * surprise


def token_limit(noise: Noise, tokens: int, false_alarm: float, temperature: float) -> float:
    """What any of ``tokens`` honest ones exceeds with chance ``false_alarm`` at most: a sum of one at 1/n."""
    return sum_limit(noise, 1, false_alarm / max(tokens, 1), temperature)


def check_sampling(margins: Sequence[Floats], verify: VerifySpec, temperature: float = 1.0) -> None:
    """Margins per rollout and token (``barnraise.kernels.sampling.margins``), nats.

    Raises:
        CheckFailure: ``sampling-margin`` (one token) or ``sampling-mean`` (the submission).
    """
    tokens = _count(margins)
    limit = token_limit(verify.draws, tokens, verify.false_alarm, temperature) / temperature
    for number, values in enumerate(margins):
        at = int(values.argmax())  # of NaN the first, which then fails
        if not values[at] <= limit:
            raise CheckFailure(
                "sampling-margin",
                limit,
                float(values[at]),
                f"rollout {number} token {at}",
                f"the token lies {values[at]:.4g} nats below the draw that its seed gives",
            )
    mean = _sum(margins) / tokens
    limit = sum_limit(verify.draws, tokens, verify.false_alarm, temperature) / temperature / tokens
    if not mean <= limit:
        raise CheckFailure(
            "sampling-mean",
            limit,
            mean,
            "all rollouts",
            f"{tokens} tokens lie {mean:.4g} nats below their draws on average: another policy drew them",
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


def check_logprobs(
    claimed: Sequence[Floats], ours: Sequence[Floats], verify: VerifySpec, temperature: float = 1.0
) -> None:
    """Claimed log-probabilities against ours, per rollout and token, nats.

    Raises:
        CheckFailure: ``logprob-max`` (one token), ``logprob-mean`` (the submission) or
            ``logprob-bias`` (the submission; errors of one sign).
    """
    signed = [a - b for a, b in zip(claimed, ours, strict=True)]
    errors = [np.abs(values) for values in signed]
    tokens = _count(errors)
    limit = token_limit(verify.logprobs, tokens, verify.false_alarm, temperature) / temperature
    for number, values in enumerate(errors):
        at = int(values.argmax())
        if not values[at] <= limit:
            raise CheckFailure(
                "logprob-max",
                limit,
                float(values[at]),
                f"rollout {number} token {at}",
                f"claimed log-probability {claimed[number][at]:.5g}, the policy's is {ours[number][at]:.5g}",
            )
    mean = _sum(errors) / tokens
    limit = sum_limit(verify.logprobs, tokens, verify.false_alarm, temperature) / temperature / tokens
    if not mean <= limit:
        raise CheckFailure(
            "logprob-mean",
            limit,
            mean,
            "all rollouts",
            f"{tokens} claimed log-probabilities are off by {mean:.4g} nats on average: another policy's",
        )
    bias, limit = _sum(signed) / tokens, bias_limit(signed, verify) / tokens
    if not abs(bias) <= limit:
        raise CheckFailure(
            "logprob-bias",
            limit,
            bias,
            "all rollouts",
            f"{tokens} claimed log-probabilities are off by {bias:+.4g} nats on average, to one side: "
            "another policy's",
        )


def bias_limit(errors: Sequence[Floats], verify: VerifySpec) -> float:
    """How far from 0 the sum of honest errors may lie, nats: ``n bias + V + sqrt(2 V L)``.

    ``V`` is the sum of their squares. Tokens drawn from p and judged by q have errors
    ``log p - log q`` whose mean is KL(p || q), about half of their mean square; V allows
    twice that. For the rest: de la Pena, "A general class of exponential inequalities
    for martingales and ratios", 1999 (conditionally symmetric errors). ``bias`` covers
    what is systematic and too small to matter.
    """
    energy = sum(float(np.square(part, dtype=np.float64).sum()) for part in errors)
    return _count(errors) * verify.bias + energy + math.sqrt(2.0 * energy * math.log(1 / verify.false_alarm))


def is_suspicious(claimed: Sequence[Floats], ours: Sequence[Floats]) -> bool:
    """Whether ``check_stale`` is worth its price: where the mean error exceeds ``EXACT``."""
    return _sum([np.abs(a - b) for a, b in zip(claimed, ours, strict=True)]) > EXACT * _count(claimed)


def explained(errors: Floats, shift: Floats, false_alarm: float) -> float | None:
    """Whether claimed log-probabilities are decisively an earlier version's.

    Args:
        errors: claimed minus those of the version claimed, y.
        shift: the earlier version's minus those of the version claimed, d.

    Returns:
        the share of the errors' energy that the earlier version leaves unexplained,
        sum((y - d)^2) / sum(y^2), if it is at most ``UNEXPLAINED`` and the agreement of
        their signs is no chance: ``sum(sign(y d) sqrt|y d|) >= sqrt(2 L sum |y d|)`` (as in
        ``bias_limit``; the root keeps a few large values from being all there is); else None.
    """
    y, d = errors.astype(np.float64), shift.astype(np.float64)
    products = y * d
    energy = float((y * y).sum())
    agreement = float((np.sign(products) * np.sqrt(np.abs(products))).sum())
    if not agreement >= math.sqrt(2 * math.log(1 / false_alarm) * float(np.abs(products).sum())) > 0:
        return None
    left = float(((y - d) ** 2).sum()) / energy
    return left if left <= UNEXPLAINED else None


def check_stale(
    claimed: Floats,
    ours: Floats,
    earlier: Mapping[int, Floats],
    verify: VerifySpec,
    rounded: Callable[[], Floats | None] = lambda: None,
) -> None:
    """Log-probabilities of the same tokens: as claimed, by the version claimed, and by earlier ones.

    Args:
        rounded: asked only before a refusal: those by the version claimed with its weights
            rounded to bfloat16, which honest engines may do; None where the published
            weights are bfloat16 already. Small steps on weights that were bfloat16 once
            are lost in that rounding: an honest engine then works with the earlier version
            in effect, and is not refused for it.

    Raises:
        CheckFailure: ``stale-weights``.
    """
    for version, logprobs in earlier.items():
        left = explained(claimed - ours, logprobs - ours, verify.false_alarm)
        if left is None:
            continue
        honest = rounded()
        if honest is not None:
            energy = float(np.square(claimed - honest, dtype=np.float64).sum())
            if float(np.square(claimed - logprobs, dtype=np.float64).sum()) > UNEXPLAINED * energy:
                continue
        raise CheckFailure(
            "stale-weights",
            UNEXPLAINED,
            left,
            "all rollouts",
            f"the log-probabilities are those of version {version}, not of the one claimed: only "
            f"{left:.3g} of the difference is left with it",
        )


def _count(parts: Sequence[npt.NDArray[Any]]) -> int:
    return max(sum(len(part) for part in parts), 1)


def _sum(parts: Sequence[npt.NDArray[Any]]) -> float:
    return sum(float(part.sum(dtype=np.float64)) for part in parts)
