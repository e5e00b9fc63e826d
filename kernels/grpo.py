"""GRPO's arithmetic: advantages within a group, and a policy loss clipped on both sides.

Advantages: Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1 (without the
standard deviation: Liu et al., "Dr. GRPO", arXiv 2503.20783). Loss: INTELLECT-2,
arXiv 2505.07291, section 3.4. With the ratio r = exp(new - old) a token's objective is

    min( min(r, delta) A,  clip(r, 1 - low, 1 + high) A )

Plain PPO bounds the gain of a good token, but not the loss of a bad one: for A < 0
and r large it grows without end. ``delta`` > 1 + high is the missing bound.

Differences from the paper: ``old`` is the *proven* log-probability of the node that
drew the token, not the learner's own recomputation, so that staleness and numerical
differences are corrected too; aggregation, penalty terms and normalisation are choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from barnraise.protocol.spec import GrpoSpec

STD_EPSILON = 1e-6
_MAX_LOG_RATIO = 20.0
"""Ratios are held within e^+-20: beyond, exp overflows and a clipped token's gradient
would be 0 x infinity = NaN. ``clip_delta`` is at most 1e6 < e^20, so no objective changes."""


@dataclass(frozen=True)
class LossStats:
    """Sums over tokens, so that micro-batches add up (``+``).

    ``kl``: k3 estimate of KL(behaviour || new), nats: the sum of r - 1 - log r
    (Schulman, "Approximating KL divergence"). ``clipped``: tokens without gradient.
    """

    tokens: int = 0
    clipped: int = 0
    ratio_max: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            tokens=self.tokens + other.tokens,
            clipped=self.clipped + other.clipped,
            ratio_max=max(self.ratio_max, other.ratio_max),
            entropy=self.entropy + other.entropy,
            kl=self.kl + other.kl,
        )


def group_advantages(rewards: Tensor, normalise_std: bool) -> Tensor:
    """How much better than its group's mean each sample did.

    Args:
        rewards: [G, S], G groups of S >= 2 samples of one prompt.
        normalise_std: divide by the group's sample standard deviation (n - 1) + 1e-6.

    Returns:
        float64 [G, S]; a group of equal rewards gives exact zeros.
    """
    rewards = rewards.double()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # The mean of equal numbers need not equal them to the last bit; dropping such groups relies on it.
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    centred = centred.masked_fill(equal, 0.0)
    if normalise_std:
        centred = centred / (rewards.std(dim=1, keepdim=True, correction=1) + STD_EPSILON)
    return centred


def token_weights(lengths: Tensor, aggregation: Literal["token", "sequence"]) -> Tensor:
    """Weight of every token of a minibatch in its loss; they sum to 1.

    ``"token"``: all tokens count alike. ``"sequence"``: all sequences do, and a
    sequence's tokens share its weight.

    Args:
        lengths: int64 [S], tokens of each sequence, at least one each.

    Returns:
        float32 [sum of lengths], sequence after sequence.
    """
    each = (
        torch.full(lengths.shape, 1.0 / int(lengths.sum()), dtype=torch.float64)
        if aggregation == "token"
        else 1.0 / (lengths.double() * len(lengths))
    )
    return each.repeat_interleave(lengths).float()


def policy_loss(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    weights: Tensor,
    spec: GrpoSpec,
    reference: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Loss to minimise over N tokens: minus the weighted sum of objective - KL penalty + entropy bonus.

    The KL penalty is the k3 estimate of KL(new || reference) per token,
    exp(ref - new) - (ref - new) - 1, with gradient.

    Args:
        new: [N] log-probabilities under the policy being trained, with gradient.
        old: [N] behaviour log-probabilities, at the same temperature.
        advantages: [N], a sequence's advantage repeated over its tokens.
        entropy: [N] of the new distributions, nats, with gradient where the bonus is used.
        weights: [N] from ``token_weights`` over the whole minibatch, so that the
            losses of its micro-batches add up to the minibatch's.
        reference: [N] log-probabilities that the KL penalty holds on to; ``old`` if None.

    Returns:
        (scalar loss, sums for statistics).
    """
    advantages = advantages.to(new)
    log_ratio = (new - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    low, high, delta = 1 - spec.clip_low, 1 + spec.clip_high, spec.clip_delta
    objective = torch.minimum(ratio.clamp(max=delta) * advantages, ratio.clamp(low, high) * advantages)
    if spec.kl_coefficient:
        away = ((old if reference is None else reference) - new).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        objective = objective - spec.kl_coefficient * (away.exp() - away - 1)
    if spec.entropy_coefficient:
        objective = objective + spec.entropy_coefficient * entropy
    loss = -(weights * objective).sum()
    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > high)) | (
            (advantages < 0) & ((ratio < low) | (ratio > max(delta, high)))
        )
        stats = LossStats(
            tokens=len(new),
            clipped=int(clipped.sum()),
            ratio_max=float(ratio.max()) if len(new) else 0.0,
            entropy=float(entropy.double().sum()),
            kl=float((ratio.double() - 1 - log_ratio.double()).sum()),
        )
    return loss, stats
