"""Checks 3 and 4 of a submission: its TOPLOC proofs, in form and in substance.

Pure functions, as in ``barnraise.coordinator.checks``, which lists the order. The
form is checked before any arithmetic; the substance is what ``barnraise.kernels.toploc``
found when it compared the proofs with the verifier's own hidden states. A run spec bounds
what honest engines differ by on average; what a single proof, or all of a submission together,
may differ by follows from that and from how many values there are: few values vary more.
``docs/verification.md`` tells where the thresholds come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from barnraise.coordinator.checks import CheckFailure, Completion
from barnraise.protocol.spec import VerifySpec

AMONG = 4
"""For ``barnraise.kernels.toploc.score``: at most the largest quarter of a chunk is compared."""
TOGETHER = 4
"""Mantissa differences of one chunk that come and go together, as far as chances are concerned."""
SHARE = 0.02
"""Of the run's false alarm, for each of the four limits here: those on draws have the rest of the budget."""

if TYPE_CHECKING:  # torch comes with it, which a caller that only reads bytes need not load
    from barnraise.kernels.toploc import ChunkScore


def check_proofs(completion: Completion, number: int, hidden: int, verify: VerifySpec) -> None:
    """Length and format of a rollout's proofs; ``hidden`` is the model's width.

    Raises:
        CheckFailure: ``proof-length`` or ``proof-format``.
    """
    from barnraise.kernels.toploc import ProofError, check_format, proof_length

    tokens, size = len(completion.tokens), len(completion.proofs)
    wanted = proof_length(tokens, hidden, verify.toploc_top_k, verify.toploc_chunk)
    if size != wanted:
        raise CheckFailure(
            "proof-length",
            wanted,
            size,
            f"rollout {number}",
            f"{tokens} tokens need {wanted} bytes of proofs",
        )
    try:
        check_format(completion.proofs, tokens, hidden, verify.toploc_top_k, verify.toploc_chunk)
    except ProofError as error:
        raise CheckFailure("proof-format", 0, 1, f"rollout {number}", str(error)) from None


def mismatch_limit(values: int, verify: VerifySpec, false_alarm: float) -> float:
    """How many of ``values`` compared values may differ in their exponents.

    Where honest engines have ``max_exponent_mismatches`` in ``toploc_top_k`` values on average at most, and
    each differs or not by itself, more is as likely as ``false_alarm`` at most: Chernoff's bound for a sum of
    indicators of mean m, exp(-(a ln(a / m) - a + m)).
    """
    mean = verify.max_exponent_mismatches * values / verify.toploc_top_k
    return math.floor(mean * _ratio(math.log(1 / false_alarm) / mean, rising=True)) if mean else 0.0


def mantissa_limit(values: int, verify: VerifySpec, false_alarm: float) -> float:
    """What the mean mantissa difference of ``values`` compared values may be.

    Where it is ``max_mantissa_mean`` on average at most, and a quarter of the differences are as good as
    independent, with tails no heavier than an exponential's: Chernoff's bound for a sum of exponentials.
    """
    surprise = math.log(1 / false_alarm) * TOGETHER / values
    return verify.max_mantissa_mean * _ratio(surprise, rising=False)


def _ratio(surprise: float, *, rising: bool) -> float:
    """The r > 1 with r ln r - r + 1 (``rising``) or r - 1 - ln r equal to ``surprise`` >= 0."""
    low, high = 1.0, 2.0 + 2.0 * surprise + math.sqrt(2.0 * surprise)
    for _ in range(64):
        r = (low + high) / 2
        reached = r * math.log(r) - r + 1 if rising else r - 1 - math.log(r)
        low, high = (r, high) if reached < surprise else (low, r)
    return high


def check_toploc(scores: Sequence[ChunkScore], number: int, chunks: int, verify: VerifySpec) -> None:
    """Scores of one rollout's chunks, each by itself; ``chunks``: how many the whole submission has.

    Raises:
        CheckFailure: ``toploc-exponents``, ``toploc-mantissa-mean`` or ``toploc-mantissa-median``.
    """
    false_alarm = SHARE * verify.false_alarm / chunks
    for chunk, score in enumerate(scores):
        limits = [
            (
                "toploc-exponents",
                score.exponent_mismatches,
                mismatch_limit(score.values, verify, false_alarm),
            ),
            ("toploc-mantissa-mean", score.mantissa_mean, mantissa_limit(score.values, verify, false_alarm)),
        ]
        if score.values == verify.toploc_top_k:  # the median of a few says little
            limits.append(("toploc-mantissa-median", score.mantissa_median, verify.max_mantissa_median))
        for check, value, threshold in limits:
            if not value <= threshold:
                raise CheckFailure(
                    check,
                    threshold,
                    value,
                    f"rollout {number} chunk {chunk}",
                    f"the proof does not fit this policy version and prompt: {check} {value:.4g} of "
                    f"{score.values} values, at most {threshold:.4g} allowed",
                )


def check_toploc_sums(scores: Sequence[Sequence[ChunkScore]], verify: VerifySpec) -> None:
    """All chunks of a submission together: what no single proof shows, many do.

    Raises:
        CheckFailure: ``toploc-exponents-all`` or ``toploc-mantissa-all``.
    """
    chunks = [score for row in scores for score in row]
    values = sum(score.values for score in chunks)
    agreeing = [score.values - score.exponent_mismatches for score in chunks]
    errors = sum(count * score.mantissa_mean for count, score in zip(agreeing, chunks, strict=True))
    false_alarm = SHARE * verify.false_alarm
    for check, value, threshold in (
        (
            "toploc-exponents-all",
            float(values - sum(agreeing)),
            mismatch_limit(values, verify, false_alarm),
        ),
        (
            "toploc-mantissa-all",
            errors / max(sum(agreeing), 1),
            mantissa_limit(values, verify, false_alarm),
        ),
    ):
        if not value <= threshold:
            raise CheckFailure(
                check,
                threshold,
                value,
                f"all {len(chunks)} chunks",
                f"the proofs do not fit this policy version: {check} {value:.4g} of {values} values, "
                f"at most {threshold:.4g} allowed",
            )
