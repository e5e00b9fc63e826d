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
from barnraise.protocol.spec import Dtype, Noise, RunSpec, VerifySpec
from barnraise.protocol.standing import UNAUDITED
from barnraise.protocol.wire import decode

# A log-probability may exceed 0 by rounding alone.
LOGPROB_CEILING = 1e-3
# The noise of ``barnraise.kernels.sampling.gumbel`` lies within [-2.9, 16.7], and the likeliest of V
# tokens has at least 1/V: no draw is less likely than e^-(ln V + 19.6), and rounding is far below the rest.
LOGPROB_DEPTH = 25.0
# Stands for infinity in verdicts, whose numbers must be finite.
_LARGEST = 1e6


def default_verify_spec(compute_dtype: Dtype = "float32") -> VerifySpec:
    """Thresholds for a run whose honest engines compute in ``compute_dtype``.

    TOPLOC: honest maxima measured with SmolLM2-135M between engines, bfloat16 and
    float32, are 6 / 2.0 / 1; float8 weights reach 11 / 6.5 / 5.

    Draws and log-probabilities: whatever the run computes in, an honest engine may compute
    in bfloat16 and this verifier in float32 or the other way about. The bounds cover that
    on every model measured, with room for other hardware: see docs/verification.md,
    "Seeded sampling" (``benchmarks/calibrate_sampling.py`` measures them anew). ``run init``
    measures the run's own model besides (``barnraise.coordinator.calibration``).
    Nine limits at 1e-7 each stay below 1e-6 per submission.

    ``eos_min_probability`` is tiny because the seeded draw proves the end already: an
    honest policy ends with probability q once in 1/q tokens, so that a threshold
    like the customary 0.1 or 0.01 would refuse honest work. At 1e-12 it does so less than
    once in 1e12 tokens.
    """
    return VerifySpec(
        toploc_top_k=128,
        toploc_chunk=32,
        max_exponent_mismatches=8,
        max_mantissa_mean=3.0,
        max_mantissa_median=6.0,
        eos_min_probability=1e-12,
        false_alarm=1e-7,
        draws=Noise(mean=0.0025, variance=0.001, scale=0.095),
        logprobs=Noise(mean=0.06, variance=0.015, scale=0.075),
        bias=0.003,
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


def spared(tokens: int) -> Verdict:
    """The verdict on work that the audit policy spared the model's checks; ``value`` counts the tokens."""
    return Verdict(
        accepted=True,
        check=UNAUDITED,
        threshold=0.0,
        value=float(tokens),
        position="",
        message="accepted without the model's checks, by a draw that can be made again when its seed is "
        "published; its credit counts until an audit of this node fails",
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
    limit, vocabulary = spec.sampling.max_new_tokens, spec.model.vocabulary
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
    ends = np.isin(tokens, sorted(spec.model.ends))
    if (at := _first(ends[:-1])) is not None:
        raise CheckFailure(
            "early-eos",
            count - 1,
            at,
            f"{where} token {at}",
            f"the end-of-sequence token stands at {at}, yet {count - at - 1} tokens follow it",
        )
    ended = bool(ends[-1])
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
    floor = -(math.log(vocabulary) + LOGPROB_DEPTH)
    if (at := _first(~((logprobs >= floor) & (logprobs <= LOGPROB_CEILING)))) is not None:  # NaN is neither
        raise CheckFailure(
            "logprob-range",
            floor if logprobs[at] < floor else LOGPROB_CEILING,
            float(logprobs[at]),
            f"{where} token {at}",
            f"log-probability {logprobs[at]} is not in [{floor:.1f}, 0], where every draw lies",
        )
    return Completion(tokens, logprobs, rollout.proofs, ended)


def _first(faults: npt.NDArray[np.bool_]) -> int | None:
    """Index of the first true entry."""
    return int(faults.argmax()) if faults.any() else None
