"""What the model itself makes of claimed completions: one batched prefill, proofs, draws, log-probabilities.

Whatever is computed here holds for the claims of one policy version; ``barnraise.coordinator.verifier``
decides what is measured together and what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from barnraise.coordinator import toploc_checks
from barnraise.coordinator.checks import CheckFailure, Completion
from barnraise.coordinator.workers import VerifyJob
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.models import Policy
from barnraise.kernels.prefill import prefill
from barnraise.kernels.sampling import margins
from barnraise.kernels.toploc import ChunkScore, score
from barnraise.protocol.environments import Task
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.spec import RunSpec

_SLICE_TOKENS = 65_536  # completion tokens whose states are held at once
_LOGIT_ELEMENTS = 2**21  # logits held at once; the noise takes eight bytes each besides

Floats = npt.NDArray[np.float32]


@dataclass
class Case:
    """A job that passed the checks which need no model, and what was measured of it since.

    Attributes:
        completions: as claimed, ``tasks``, ``prompts`` (token ids), ``seeds``: one each for every rollout.
        failure: the first check that it did not pass.
        scores: per rollout and proof. ``margins``, ``logprobs``: per rollout, float32 [tokens].
    """

    job: VerifyJob
    completions: list[Completion]
    tasks: list[Task]
    prompts: list[list[int]]
    seeds: list[int]
    failure: CheckFailure | None = None
    scores: list[list[ChunkScore]] = field(default_factory=list)
    margins: list[Floats] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    def chunks(self, size: int) -> int:
        """Proofs of ``size`` tokens in the whole submission."""
        return sum(-(-len(completion.tokens) // size) for completion in self.completions)


def slices(cases: list[Case]) -> list[list[tuple[Case, int]]]:
    """All rollouts in order, cut so that each part has at most ``_SLICE_TOKENS`` tokens."""
    parts: list[list[tuple[Case, int]]] = []
    room = 0
    for case in cases:
        for number, completion in enumerate(case.completions):
            if len(completion.tokens) > room:
                parts.append([])
                room = max(_SLICE_TOKENS, len(completion.tokens))
            parts[-1].append((case, number))
            room -= len(completion.tokens)
    return parts


def measure(policy: Policy, rows: Sequence[tuple[Case, int]], spec: RunSpec) -> None:
    """Prefill rollouts, named by case and number; check their proofs, keep margins and log-probabilities.

    What is wrong with a proof becomes its case's ``failure``.

    Raises:
        BarnraiseError: the hidden states are not finite, which is the fault of the weights.
    """
    if not rows:
        return
    verify = spec.verify
    found = [case.completions[number] for case, number in rows]
    states = prefill(
        policy,
        [case.prompts[number] for case, number in rows],
        [completion.tokens.tolist() for completion in found],
    )
    if not all(bool(torch.isfinite(state).all()) for state in states):
        raise BarnraiseError("the policy's own hidden states are not finite: its weights are broken")
    scores = score(
        [completion.proofs for completion in found],
        states,
        verify.toploc_top_k,
        verify.toploc_chunk,
        among=toploc_checks.AMONG,
    )
    for (case, number), values in zip(rows, scores, strict=True):
        case.scores.append(values)
        try:
            if case.failure is None:
                toploc_checks.check_toploc(values, number, case.chunks(verify.toploc_chunk), verify)
        except CheckFailure as failure:
            case.failure = failure
    kept = [i for i, (case, _) in enumerate(rows) if case.failure is None]
    if kept:
        _draws(policy, [rows[i] for i in kept], [states[i] for i in kept], spec)


def _draws(policy: Policy, rows: Sequence[tuple[Case, int]], states: list[Tensor], spec: RunSpec) -> None:
    sampling = spec.sampling
    found = [case.completions[number] for case, number in rows]
    lengths = [len(completion.tokens) for completion in found]
    hidden = torch.cat(states)
    tokens = torch.from_numpy(np.concatenate([completion.tokens for completion in found]))
    positions = torch.cat([torch.arange(length) for length in lengths])
    seeds = [
        case.seeds[number]
        for (case, number), length in zip(rows, lengths, strict=True)
        for _ in range(length)
    ]
    step = max(1, _LOGIT_ELEMENTS // policy.vocabulary)
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        margin, logprob = margins(
            policy.logits(hidden[part]),
            tokens[part].to(hidden.device),
            seeds[part],
            positions[part],
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
        )
        parts.append((margin.cpu(), logprob.cpu()))
    margin_rows = torch.split(torch.cat([part[0] for part in parts]), lengths)
    logprob_rows = torch.split(torch.cat([part[1] for part in parts]), lengths)
    for (case, _), margin, logprob in zip(rows, margin_rows, logprob_rows, strict=True):
        case.margins.append(margin.numpy())
        case.logprobs.append(logprob.numpy())


@torch.no_grad()
def logprobs_under(policy: Policy, case: Case, rollouts: int, spec: RunSpec) -> Floats:
    """Log-probabilities of the first ``rollouts`` completions under ``policy``, float32 [tokens]."""
    sampling = spec.sampling
    tokens = [completion.tokens for completion in case.completions[:rollouts]]
    hidden = torch.cat(prefill(policy, case.prompts[:rollouts], [part.tolist() for part in tokens]))
    logprobs, _ = token_logprobs(
        hidden,
        policy.head_weight,
        torch.from_numpy(np.concatenate(tokens)).to(hidden.device),
        sampling.temperature,
        policy.head_bias,
        policy.softcap,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    values: Floats = logprobs.float().cpu().numpy()
    return values


def in_words(case: Case) -> str:
    """A case's numbers, before they are held against the limits."""
    chunks = [score for scores in case.scores for score in scores]
    values = sum(score.values for score in chunks)
    if not values or not case.margins:
        return "nothing" if case.failure is None else f"nothing, for {case.failure}"
    apart = np.abs(
        np.concatenate([completion.logprobs for completion in case.completions[: len(case.logprobs)]])
        - np.concatenate(case.logprobs)
    )
    off = sum(score.exponent_mismatches for score in chunks)
    mantissa = max(score.mantissa_mean for score in chunks)
    margin = min(float(row.min()) for row in case.margins if row.size)
    return (
        f"{off} of {values} exponents differ, largest mantissa mean {mantissa:.3g}, smallest margin of a "
        f"draw {margin:.3g}, log-probabilities {float(apart.max()):.3g} apart at most"
    )
