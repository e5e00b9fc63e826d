"""Every check of a submission, as pure functions: what fails, by how much, and where.

In the order of their price; the first failure is the verdict:

1. ``open_payload``, ``check_lease``, ``check_order``: the message and its lease;
2. ``read_rollout``: lengths, token ids, termination, claimed log-probabilities;
3. ``check_proofs``: the proofs' bytes, before any arithmetic on them;
4. ``check_toploc``: were these tokens computed with the weights of this version?
5. ``check_sampling``, ``check_end``: was each token the seeded draw?
6. ``check_logprobs``: are the claimed log-probabilities those of the policy?

(3 and 4 are ``barnraise.coordinator.toploc_checks``, 5 and 6 ``barnraise.coordinator.draw_checks``.)

The prompt needs no check of its own: the verifier derives it from the seed, and
proofs made for another prompt fail 4. Rewards need none: only ours are used. Lease
ownership, deadlines and replays are judged before a submission is stored
(``barnraise.coordinator.submissions``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission, Verdict
from barnraise.protocol.spec import Dtype, RunSpec, VerifySpec
from barnraise.protocol.wire import decode

# A log-probability may exceed 0 by rounding alone.
LOGPROB_CEILING = 1e-3
# Stands for infinity in verdicts, whose numbers must be finite.
_LARGEST = 1e6


def default_verify_spec(compute_dtype: Dtype = "float32") -> VerifySpec:
    """Thresholds for a run whose honest engines compute in ``compute_dtype``.

    TOPLOC: honest maxima measured with SmolLM2-135M between engines, bfloat16 and
    float32, are 6 / 2.0 / 1; float8 weights reach 11 / 6.5 / 5.

    Sampling and log-probabilities: between batch shapes of one engine in float32, on
    a small model, log-probabilities differed by 1e-6 on average and 6e-6 at most, and
    no draw changed; weights off by 1e-3 of their size gave 0.006 and 0.06. In bfloat16
    honest log-probabilities were off by 0.04 on average and 0.2 at most (SmolLM2). The
    thresholds leave room for other devices and little else: a token far from the best
    has a margin of several nats, a slightly wrong policy shows in the means. An
    engine that computes in bfloat16 does not pass the float32 thresholds.

    ``eos_min_probability`` is tiny because the seeded draw proves the end already: an
    honest policy ends with probability q once in 1/q tokens, so that a threshold
    like the customary 0.1 or 0.01 would refuse honest work.
    """
    exact = compute_dtype == "float32"
    return VerifySpec(
        toploc_top_k=128,
        toploc_chunk=32,
        max_exponent_mismatches=10,
        max_mantissa_mean=4.0,
        max_mantissa_median=3.0,
        eos_min_probability=1e-8,
        sampling_margin=0.02 if exact else 1.0,
        sampling_mean=0.0005 if exact else 0.02,
        logprob_mean=0.002 if exact else 0.1,
        logprob_max=0.02 if exact else 1.0,
    )


class CheckFailure(Exception):
    """A check was not passed. Becomes a verdict; never leaves the verifier.

    Attributes:
        check, threshold, value, position: as in ``Verdict``.
    """

    def __init__(self, check: str, threshold: float, value: float, position: str, message: str) -> None:
        super().__init__(message)
        self.check = check
        self.threshold = threshold
        self.value = value
        self.position = position

    def verdict(self) -> Verdict:
        """The rejection, with finite numbers and bounded texts."""
        return Verdict(
            accepted=False,
            check=self.check,
            threshold=_finite(self.threshold),
            value=_finite(self.value),
            position=self.position[:500],
            message=str(self)[:500],
        )


def accepted(tokens: int) -> Verdict:
    """The verdict on a submission that passed everything; ``value`` counts the tokens verified."""
    return Verdict(
        accepted=True,
        check="all",
        threshold=0.0,
        value=float(tokens),
        position="",
        message="every check passed",
    )


def _finite(value: float) -> float:
    return _LARGEST if math.isnan(value) else max(-_LARGEST, min(_LARGEST, float(value)))


# --- 1. message and lease


def open_payload(payload: bytes) -> RolloutSubmission:
    """Decode a stored payload.

    Raises:
        CheckFailure: ``malformed``.
    """
    try:
        return decode(payload, RolloutSubmission)
    except MalformedError as error:
        raise CheckFailure("malformed", 0, 1, "payload", str(error)) from None


def check_lease(submission: RolloutSubmission, lease: RolloutLease) -> None:
    """The submission answers this lease.

    Raises:
        CheckFailure: ``wrong-run``, ``wrong-lease`` or ``wrong-version``.
    """
    if submission.run_id != lease.run_id:
        raise CheckFailure("wrong-run", 0, 1, "run_id", "the submission names another run than its lease")
    if submission.lease_id != lease.lease_id:
        raise CheckFailure("wrong-lease", 0, 1, "lease_id", "the submission names another lease")
    if submission.policy_version != lease.policy_version:
        raise CheckFailure(
            "wrong-version",
            lease.policy_version,
            submission.policy_version,
            "policy_version",
            f"the lease is for policy version {lease.policy_version}, not {submission.policy_version}",
        )


def check_order(rollouts: Sequence[Rollout], lease: RolloutLease) -> None:
    """Every (prompt, sample) of the lease exactly once, by prompt, then by sample.

    Raises:
        CheckFailure: ``rollout-count`` or ``rollout-order``.
    """
    wanted = lease.prompts * lease.group_size
    if len(rollouts) != wanted:
        raise CheckFailure(
            "rollout-count",
            wanted,
            len(rollouts),
            "",
            f"{lease.prompts} prompts x {lease.group_size} samples make {wanted} rollouts",
        )
    for number, rollout in enumerate(rollouts):
        prompt, sample = divmod(number, lease.group_size)
        if (rollout.prompt, rollout.sample) != (prompt, sample):
            raise CheckFailure(
                "rollout-order",
                number,
                number,
                f"rollout {number}",
                f"rollout {number} must be prompt {prompt} sample {sample}, "
                f"not prompt {rollout.prompt} sample {rollout.sample}",
            )


# --- 2. one rollout


@dataclass(frozen=True)
class Completion:
    """A rollout that can be computed with: T tokens (int64) and claimed log-probabilities (float32)."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    proofs: bytes
    ended: bool  # by the end-of-sequence token


def read_rollout(rollout: Rollout, number: int, spec: RunSpec) -> Completion:
    """Lengths, ids, termination and claimed log-probabilities of rollout ``number``.

    Raises:
        CheckFailure: ``token-bytes``, ``empty-completion``, ``completion-length``,
            ``vocabulary``, ``early-eos``, ``termination``, ``logprob-count`` or
            ``logprob-range``.
    """
    where = f"rollout {number}"
    limit, eos, vocabulary = spec.sampling.max_new_tokens, spec.model.eos_token, spec.model.vocabulary
    size = len(rollout.tokens)
    if size % 4:
        raise CheckFailure(
            "token-bytes", 4, size, where, f"{size} bytes of tokens are not whole uint32 numbers"
        )
    count = size // 4
    if not count:
        raise CheckFailure("empty-completion", 1, 0, where, "a completion has at least one token")
    if count > limit:
        raise CheckFailure(
            "completion-length", limit, count, where, f"{count} tokens, the run allows {limit} per completion"
        )
    tokens = np.frombuffer(rollout.tokens, dtype="<u4").astype(np.int64)
    if (at := _first(tokens >= vocabulary)) is not None:
        raise CheckFailure(
            "vocabulary",
            vocabulary - 1,
            int(tokens[at]),
            f"{where} token {at}",
            f"token id {tokens[at]} is outside the vocabulary of {vocabulary}",
        )
    if (at := _first(tokens[:-1] == eos)) is not None:
        raise CheckFailure(
            "early-eos",
            count - 1,
            at,
            f"{where} token {at}",
            f"the end-of-sequence token stands at {at}, yet {count - at - 1} tokens follow it",
        )
    ended = int(tokens[-1]) == eos
    if not ended and count < limit:
        raise CheckFailure(
            "termination",
            limit,
            count,
            f"{where} token {count - 1}",
            f"the completion stops after {count} tokens, without the end-of-sequence token, before {limit}",
        )
    if len(rollout.logprobs) != size:
        raise CheckFailure(
            "logprob-count",
            count,
            len(rollout.logprobs) / 4,
            where,
            f"{len(rollout.logprobs)} bytes of log-probabilities for {count} tokens, not {size}",
        )
    logprobs = np.frombuffer(rollout.logprobs, dtype="<f4").astype(np.float32)
    if (at := _first(~(np.isfinite(logprobs) & (logprobs <= LOGPROB_CEILING)))) is not None:
        raise CheckFailure(
            "logprob-range",
            LOGPROB_CEILING,
            float(logprobs[at]),
            f"{where} token {at}",
            f"log-probability {logprobs[at]} is not a finite number of at most 0",
        )
    return Completion(tokens, logprobs, rollout.proofs, ended)


def _first(faults: npt.NDArray[np.bool_]) -> int | None:
    """Index of the first true entry."""
    return int(faults.argmax()) if faults.any() else None
