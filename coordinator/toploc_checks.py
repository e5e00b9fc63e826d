"""Checks 3 and 4 of a submission: its TOPLOC proofs, in form and in substance.

Pure functions, as in ``barnraise.coordinator.checks``, which lists the order. The
form is checked before any arithmetic; the substance is what ``barnraise.kernels.toploc``
found when it compared the proofs with the verifier's own hidden states.
``docs/verification.md`` tells where the thresholds come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from barnraise.coordinator.checks import CheckFailure, Completion
from barnraise.protocol.spec import VerifySpec

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


def check_toploc(
    scores: Sequence[ChunkScore], points: Sequence[int], number: int, verify: VerifySpec
) -> None:
    """Scores of a rollout's chunks; ``points`` says how many values each proof covers.

    A chunk with fewer values than ``toploc_top_k`` may have proportionally fewer
    exponent mismatches, rounded up.

    Raises:
        CheckFailure: ``toploc-exponents``, ``toploc-mantissa-mean`` or ``toploc-mantissa-median``.
    """
    for chunk, (score, count) in enumerate(zip(scores, points, strict=True)):
        allowed = math.ceil(verify.max_exponent_mismatches * count / verify.toploc_top_k)
        for check, value, threshold in (
            ("toploc-exponents", score.exponent_mismatches, allowed),
            ("toploc-mantissa-mean", score.mantissa_mean, verify.max_mantissa_mean),
            ("toploc-mantissa-median", score.mantissa_median, verify.max_mantissa_median),
        ):
            if not value <= threshold:
                raise CheckFailure(
                    check,
                    threshold,
                    value,
                    f"rollout {number} chunk {chunk}",
                    f"the proof does not fit this policy version and prompt: {check} {value:.4g} of "
                    f"{count} values, at most {threshold:.4g} allowed",
                )
