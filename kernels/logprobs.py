"""Log-probabilities of chosen tokens, and the entropy around them, without whole logits.

For N tokens and a vocabulary of V the logits are N x V, often far larger than the
model itself. They are made in chunks of rows; under autograd each chunk is thrown
away and made again in the backward pass (gradient checkpointing, Chen et al.,
arXiv 1604.06174), so that no more than one chunk ever exists.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from barnraise.kernels.sampling import truncation_border

CHUNK_ELEMENTS = 2**24
"""Logits alive at once by default: 64 MiB in float32."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, float32, nats, differentiable.

    The distribution is softmax(logits / temperature) with logits = hidden @ weight.T
    (+ bias), soft-capped as softcap * tanh(logits / softcap) where one is given.
    Products run in the dtype of ``hidden``; everything after them in float32.

    Args:
        hidden: [N, H] final (post-norm) states.
        weight: [V, H] output head; bias: [V].
        targets: int64 [N], each in [0, V).
        chunk: rows per chunk; by default as many as ``CHUNK_ELEMENTS`` logits allow.
        top_k, top_p: truncation as in ``barnraise.kernels.sampling.draw``, renormalised,
            except that the target is always kept: a token drawn by another policy
            must have a finite log-probability under this one.

    Returns:
        (logprobs [N], entropy [N]).

    Raises:
        ValueError: shapes do not fit, or temperature or chunk is not positive.
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "do not fit: [N, H], [V, H] and [N] are wanted"
        )
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0]) if chunk is None else chunk
    if temperature <= 0 or rows <= 0:
        raise ValueError("temperature and chunk must be positive")
    if len(targets) == 0:
        empty = hidden.float().sum(dim=1)
        return empty, empty
    # A single chunk is as large with or without checkpointing: spare the second forward pass.
    again = torch.is_grad_enabled() and len(targets) > rows
    parts: list[tuple[Tensor, Tensor]] = []
    for states, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
        arguments = (states, weight, wanted, temperature, bias, softcap, top_k, top_p)
        part = checkpoint(_chunk, *arguments, use_reentrant=False) if again else _chunk(*arguments)
        parts.append(part)
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    softcap: float | None,
    top_k: int,
    top_p: float,
) -> tuple[Tensor, Tensor]:
    logits = nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    scaled = logits / temperature
    if top_k or top_p < 1.0:
        kept = scaled.detach() >= truncation_border(scaled.detach(), top_k, top_p)
        scaled = scaled.masked_fill(~kept.scatter(1, targets[:, None], True), -torch.inf)
    every = torch.log_softmax(scaled, dim=-1)
    chosen = every.gather(1, targets[:, None]).squeeze(1)
    # p log p is 0 where p is 0; as -inf times 0 it would be NaN, in the gradient too.
    return chosen, -(every.exp() * every.masked_fill(every == -torch.inf, 0.0)).sum(dim=-1)
