"""Seeded sampling: the noise is derived from public seeds, and so every draw can be checked.

A token is drawn as ``argmax(logits / T + gumbel)``, which is a draw from
``softmax(logits / T)`` (Gumbel-max). The Gumbel noise is a pure function of the
sample's seed, the token's position in its completion (0 for the first) and the
vocabulary index. It comes from Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011), a counter-based generator: no state, the
same integers on every device, in every batch shape and order.

    key      = (seed mod 2^32, seed div 2^32)
    counter  = (index div 4, position, 0, 0), output word index mod 4
    uniform  = ((word >> 9) + 1/2) * 2^-23, exact in float32, never 0 or 1
    gumbel   = -log(-log(uniform)), taken in float64, rounded to float32

The logarithms run in float64 because float32 ones differ by a unit in the last
place between devices and between the body and the tail of a vectorised loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from barnraise.kernels.checked_triton import fused_sampling

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Rows are taken a few at a time so that Philox's 64-bit intermediates stay in cache.
_BLOCK_ELEMENTS = 32_768
_LADDER = tuple(2.0 ** (step / 2) for step in range(-20, 9))

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10 of broadcastable counters and keys.

    All tensors are int64 holding values in [0, 2^32), on one device; so is the
    result, of the broadcast shape. The 32 x 32 -> 64 bit products wrap in int64,
    which leaves their bits right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        if number:
            k0 = (k0 + _WEYL[0]) & _MASK
            k1 = (k1 + _WEYL[1]) & _MASK
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_MASK)
        c2 = ((p0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_MASK)
        c1, c3 = p1, p0  # their high halves go when they have been mixed in
    return c0, c1 & _MASK, c2, c3 & _MASK


@lru_cache(maxsize=16)
def _lanes(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counter word 0 for every group of four vocabulary entries, and a zero; both int64 [1, *]."""
    return (
        torch.arange(count, dtype=torch.int64, device=device).unsqueeze(0),
        torch.zeros(1, 1, dtype=torch.int64, device=device),
    )


def gumbel(seeds: Sequence[int], positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise, float32 [B, vocab], on the device of ``positions``.

    Args:
        seeds: B unsigned 64-bit integers.
        positions: int64 [B], each in [0, 2^32): the token's index within its completion.
        vocab: size of the vocabulary.

    Row i depends on ``seeds[i]``, ``positions[i]`` and nothing else, to the bit.
    """
    device = positions.device
    rows = len(seeds)
    if positions.shape != (rows,):
        raise ValueError(f"{rows} seeds need {rows} positions, not shape {tuple(positions.shape)}")
    if device.type == "cuda" and (fused := fused_sampling(device)) is not None:
        return fused[0](seeds, positions, vocab)
    low, high = _keys(seeds, device)
    place = positions.to(torch.int64).unsqueeze(1)
    groups = (vocab + 3) // 4
    lanes, zero = _lanes(groups, device)
    noise = torch.empty(rows, groups, 4, dtype=torch.float32, device=device)
    step = rows if device.type != "cpu" else max(1, _BLOCK_ELEMENTS // groups)
    for start in range(0, rows, max(step, 1)):
        part = slice(start, start + step)
        words = philox4x32((lanes, place[part], zero, zero), (low[part], high[part]))
        for lane, word in enumerate(words):
            noise[part, :, lane] = noise_of_words(word)
    return noise.view(rows, groups * 4)[:, :vocab]


def _keys(seeds: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Low and high halves of the seeds, int64 [B, 1] each."""
    low = torch.tensor([seed & _MASK for seed in seeds], dtype=torch.int64, device=device)
    high = torch.tensor([seed >> 32 & _MASK for seed in seeds], dtype=torch.int64, device=device)
    return low.unsqueeze(1), high.unsqueeze(1)


def noise_of_words(words: Tensor) -> Tensor:
    """Gumbel noise, float64, of Philox words, int64 in [0, 2^32); it depends on a word's upper 23 bits."""
    uniform = (words >> 9).to(torch.float64).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def truncation_border(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """The smallest scaled logit that truncation keeps, [B, 1]; -inf where it keeps all.

    Top-k first, then top-p on what top-k left, renormalised: the smallest set of
    most likely tokens whose probability reaches ``top_p``. A border by value, not by
    rank: tokens that tie with the last kept one are kept, whatever their order.
    """
    vocab = scaled.shape[-1]
    border = scaled.new_full((scaled.shape[0], 1), -torch.inf)
    keep = top_k if 0 < top_k < vocab else vocab
    if keep == vocab and top_p >= 1.0:
        return border
    ordered = scaled.topk(keep, dim=-1).values
    if keep < vocab:
        border = ordered[:, -1:]
    if top_p < 1.0:
        mass = ordered.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        count = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
        border = ordered.gather(1, count - 1)
    return border


def draw(
    logits: Tensor,
    seeds: Sequence[int],
    positions: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [B, V], any floating dtype; taken to float32 first.
        seeds: B unsigned 64-bit integers, one per row.
        positions: int64 [B], the index of the token within its completion.
        temperature: > 0.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens up to this probability; 1.0 keeps all.

    Returns:
        tokens, int64 [B]; and their log-probabilities in nats, float32 [B], under
        ``softmax(logits / temperature)`` truncated and renormalised.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and (fused := fused_sampling(logits.device)):
        return fused[1](logits, seeds, positions, temperature, top_k, top_p)
    scaled = logits.float() / temperature
    if top_k or top_p < 1.0:
        scaled = scaled.masked_fill(scaled < truncation_border(scaled, top_k, top_p), -torch.inf)
    tokens = (scaled + gumbel(seeds, positions.to(scaled.device), scaled.shape[-1])).argmax(dim=-1)
    chosen = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, chosen - scaled.logsumexp(dim=-1)


def margins(
    logits: Tensor,
    tokens: Tensor,
    seeds: Sequence[int],
    positions: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """How far each claimed token is from being the one that ``draw`` gives.

    Arguments as ``draw``, with ``tokens`` int64 [N] the claimed ones, within the
    vocabulary.

    Without truncation a token's margin is the best perturbed value minus its own. With
    it, the margin is the smallest d of the ladder 2^-10, 2^-9.5, ... 2^4 (nats) at which
    the claim is explained, or what remains to be explained there if that is more: logits
    that differ by d may move the border of top-k by d, and the odds of a set of tokens by
    a factor e^d, so tokens that such a shift could bring in are not refused as claims,
    and those it could put out are not held against one.

    Returns:
        margin, float32 [N], nats >= 0: 0 where the token is exactly ours, infinite where
        no d of the ladder admits it. And the log-probability, float32 [N], of the claimed
        token, as ``draw`` reports it; a token that our truncation excludes counts as kept.
    """
    scaled = logits.float() / temperature
    positions = positions.to(scaled.device)
    index = tokens.unsqueeze(1)
    claimed = scaled.gather(1, index)
    perturbed = scaled + gumbel(seeds, positions, scaled.shape[-1])
    target = perturbed.gather(1, index)
    if not top_k and top_p >= 1.0:
        margin = perturbed.amax(dim=-1, keepdim=True) - target
        return margin.squeeze(1), (claimed - scaled.logsumexp(-1, keepdim=True)).squeeze(1)
    border = truncation_border(scaled, top_k, top_p)
    kept = scaled >= border
    best = perturbed.masked_fill(~kept, -torch.inf).amax(dim=-1, keepdim=True)
    margin = (best - target).clamp(min=0.0).masked_fill(claimed < border, torch.inf).squeeze(1)
    total = scaled.masked_fill(~kept.scatter(1, index, True), -torch.inf).logsumexp(dim=-1, keepdim=True)
    open_ = margin.nonzero().squeeze(1)  # usually few
    if len(open_):
        margin[open_] = _explained(scaled[open_], perturbed[open_], index[open_], top_k, top_p)
    return margin, (claimed - total).squeeze(1)


def _explained(scaled: Tensor, perturbed: Tensor, index: Tensor, top_k: int, top_p: float) -> Tensor:
    """The margin under truncation, [N], as ``margins`` defines it."""
    claimed, target = scaled.gather(1, index), perturbed.gather(1, index)
    result = torch.full_like(target, torch.inf)
    for rung in _LADDER:
        fewer, more = _odds_moved(top_p, -rung), _odds_moved(top_p, rung)
        sure = scaled >= truncation_border(scaled, top_k, fewer) + rung
        possible = claimed >= truncation_border(scaled, top_k, more) - rung
        rest = perturbed.masked_fill(~sure, -torch.inf).amax(dim=-1, keepdim=True) - target
        result = torch.minimum(result, rest.clamp(min=rung).masked_fill(~possible, torch.inf))
    return result.squeeze(1)


def _odds_moved(probability: float, by: float) -> float:
    """The probability whose odds are e^by times as large; 1 stays 1."""
    return probability if probability >= 1.0 else 1.0 / (1.0 + (1.0 / probability - 1.0) * math.exp(-by))
