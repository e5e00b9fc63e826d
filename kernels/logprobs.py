"""Log-probabilities of chosen tokens, and the entropy around them, without whole logits.

For N tokens and a vocabulary of V the logits are N x V, often far larger than the
model itself. They are made in chunks of rows, forward and again backward (gradient
checkpointing, Chen et al., arXiv 1604.06174), where each chunk's gradient is written in
place and multiplied away at once: two matrices of one chunk exist, three with a soft cap.
On CUDA with triton the same is done by ``barnraise.kernels.logprobs_triton``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from barnraise.kernels.checked_triton import fused_logprobs
from barnraise.kernels.sampling import truncation_border

CHUNK_ELEMENTS = 2**24
"""Logits alive at once by default on a CPU: 64 MiB in float32."""
CHUNK_ELEMENTS_CUDA = 2**27
"""On a GPU, where small products waste it: 512 MiB."""


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
    """Log-probability of each target and entropy of each distribution, float32, nats, differentiable once.

    The distribution is softmax(logits / temperature) with logits = hidden @ weight.T
    (+ bias), soft-capped as softcap * tanh(logits / softcap) where one is given.
    Products run in the dtype of ``hidden`` (under autocast in its dtype, as a linear layer
    would); everything after them in float32, or float64 where ``hidden`` is.

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
    elements = CHUNK_ELEMENTS_CUDA if hidden.is_cuda else CHUNK_ELEMENTS
    rows = max(1, elements // weight.shape[0]) if chunk is None else chunk
    if temperature <= 0 or rows <= 0:
        raise ValueError("temperature and chunk must be positive")
    if len(targets) == 0:
        empty = hidden.float().sum(dim=1)
        return empty, empty
    if hidden.is_cuda and chunk is None and not top_k and top_p >= 1.0:
        fused = fused_logprobs(hidden.device)
        if fused is not None:
            return fused(hidden, weight, targets, temperature, bias, softcap)
    device = hidden.device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    rules = _Rules(temperature, softcap, top_k, top_p, rows)
    # Casts are outside of the function, so that gradients come back in each argument's own dtype.
    arguments = (hidden.to(product), weight.to(product), None if bias is None else bias.to(product))
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(*arguments, targets, rules)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Rules:
    temperature: float
    softcap: float | None
    top_k: int
    top_p: float
    rows: int


class _TokenLogprobs(torch.autograd.Function):
    """Keeps states and two numbers a row; logits are made again, unless one chunk was all there is."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rules: _Rules
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        chosen = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(chosen)
        whole = len(targets) <= rules.rows
        kept: tuple[Tensor, ...] = ()
        for start in range(0, len(targets), rules.rows):
            cut = slice(start, start + rules.rows)
            wanted = targets[cut, None]
            shifted, slope = _shifted(hidden[cut], weight, bias, wanted, rules)
            likely = shifted.exp()
            total = likely.sum(dim=1)
            log_total = total.log()
            chosen[cut] = shifted.gather(1, wanted).squeeze(1) - log_total
            # p log p is 0 where p is 0; as -inf times 0 it would be NaN.
            excludes = _truncates(rules) or bias is not None  # a bias may be -inf
            finite = shifted.masked_fill_(shifted == -torch.inf, 0.0) if excludes else shifted
            mean = torch.bmm(likely[:, None], finite[:, :, None]).view(-1) / total
            entropy[cut] = log_total - mean
            if whole and any(ctx.needs_input_grad[:3]):
                kept = (shifted, likely.div_(total[:, None]), log_total)
                kept = kept if slope is None else (*kept, slope)
        ctx.rules, ctx.whole = rules, whole
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, *kept)
        return chosen, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, *kept = ctx.saved_tensors
        rules: _Rules = ctx.rules
        along_chosen, along_entropy = along
        wanted_hidden, wanted_weight, wanted_bias = ctx.needs_input_grad[:3]
        dtype = entropy.dtype
        grad_hidden = torch.empty_like(hidden) if wanted_hidden else None
        # Sums over many rows and chunks: in float32 whatever the products run in.
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wanted_weight else None
        grad_bias = torch.zeros(len(weight), dtype=dtype, device=weight.device) if wanted_bias else None
        for start in range(0, len(targets), rules.rows):
            cut = slice(start, start + rules.rows)
            wanted = targets[cut, None]
            if kept:
                shifted, grad, log_total = kept[:3]
                slope = kept[3] if len(kept) == 4 else None
                grad = grad.clone()  # a graph may be walked twice
            else:
                shifted, slope = _shifted(hidden[cut], weight, bias, wanted, rules)
                grad = shifted.exp()
                total = grad.sum(dim=1)
                log_total = total.log()
                grad /= total[:, None]
                if _truncates(rules) or bias is not None:
                    shifted.masked_fill_(shifted == -torch.inf, 0.0)
            zero = torch.zeros_like(log_total)
            to_chosen = zero if along_chosen is None else along_chosen[cut]
            if along_entropy is None:
                grad *= -to_chosen[:, None]
            else:
                # d entropy / d logit = -p (log p + entropy), log p = shifted - log_total
                to_entropy = along_entropy[cut, None]
                factor = shifted if not kept else shifted.clone()
                factor.add_((entropy[cut] - log_total)[:, None]).mul_(to_entropy).add_(to_chosen[:, None])
                grad.mul_(factor.neg_())
                del factor
            grad.scatter_add_(1, wanted, to_chosen[:, None].to(dtype))
            if slope is not None:
                grad *= slope
            grad = grad.div_(rules.temperature).to(hidden.dtype)
            del shifted, slope
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[cut])
            if grad_weight is not None:
                if grad.dtype == dtype:
                    grad_weight.addmm_(grad.t(), hidden[cut])
                else:
                    grad_weight += grad.t() @ hidden[cut]
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0, dtype=dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _truncates(rules: _Rules) -> bool:
    return bool(rules.top_k) or rules.top_p < 1.0


def _shifted(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, rules: _Rules
) -> tuple[Tensor, Tensor | None]:
    """One chunk's scaled logits below their maximum [n, V], and the soft cap's slope there, if any."""
    # An autocast of whoever called would turn the chosen dtype of float64 and float32 states around.
    with torch.autocast(hidden.device.type, enabled=False):
        logits = nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope = None
    if rules.softcap is not None:
        logits.div_(rules.softcap).tanh_()
        slope = 1 - logits * logits
        logits.mul_(rules.softcap)
    if rules.temperature != 1.0:
        logits.div_(rules.temperature)
    if _truncates(rules):
        kept = logits >= truncation_border(logits, rules.top_k, rules.top_p)
        logits.masked_fill_(~kept.scatter_(1, wanted, True), -torch.inf)
    return logits.sub_(logits.max(dim=1, keepdim=True).values), slope
