"""Gumbel noise and draws on a GPU, bit for bit those of ``barnraise.kernels.sampling``.

Philox4x32-10 in 32-bit arithmetic (``umulhi`` for the high halves) gives the reference's
integers. Only 2^23 different values of noise exist, one per integer: the reference
computes them all once, and the kernel looks them up (32 MiB on the device). So no
device's own logarithm comes into it, and a home GPU, whose float64 is 32 to 64 times slower
than its float32, need not take two of them per entry of the vocabulary.

A draw never has its noise in memory: a program makes it for a block of the vocabulary,
adds it to the scaled logits and keeps the best. Division and addition round as IEEE 754
says, so the perturbed values are those of the reference on a CPU, and so is their argmax,
the lower index winning a tie. (torch on CUDA divides by multiplying with the reciprocal,
which may differ in the last bit.)

Importing this module needs the package ``triton`` (the extra ``gpu``). These kernels have
run in Triton's interpreter only, never yet on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from barnraise.kernels.sampling import noise_of_words, truncation_border

_GROUPS = 256  # groups of four entries per program
_LEVELS = 2**23


@triton.jit  # type: ignore[untyped-decorator]
def _philox(keys, positions, row, group, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Indices into the table of noise, int32 [4 GROUPS] in the order of the vocabulary."""
    c0 = group.to(tl.uint32)
    zero = tl.zeros((GROUPS,), tl.uint32)
    c1 = zero + tl.load(positions + row).to(tl.uint32)
    c2, c3 = zero, zero
    k0 = zero + tl.load(keys + 2 * row).to(tl.uint32)
    k1 = zero + tl.load(keys + 2 * row + 1).to(tl.uint32)
    m0 = tl.full((GROUPS,), 0xD2511F53, tl.uint32)
    m1 = tl.full((GROUPS,), 0xCD9E8D57, tl.uint32)
    w0 = tl.full((GROUPS,), 0x9E3779B9, tl.uint32)
    w1 = tl.full((GROUPS,), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + w0
        k1 = k1 + w1
    # Interleaved twice: c0 c1 c2 c3 of the first group, of the second, and so on.
    words = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    return (words >> 9).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _noise(keys, positions, table, out, vocab, GROUPS: tl.constexpr, RAW: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    first = tl.program_id(1) * GROUPS
    level = _philox(keys, positions, row, first + tl.arange(0, GROUPS), GROUPS)
    index = first * 4 + tl.arange(0, 4 * GROUPS)
    place = out + row.to(tl.int64) * vocab + index
    if RAW:
        tl.store(place, level, mask=index < vocab)
    else:
        tl.store(place, tl.load(table + level), mask=index < vocab)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, stride, borders, keys, positions, table, temperature, numbers, indices, rows, vocab,
    TRUNCATED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One block of one row: its best token, that token's values, and the block's log-sum in two parts.

    ``numbers`` is float32 [blocks, 4, rows]: best perturbed value, the same token's scaled logit, the
    block's largest scaled logit and the sum of exponentials below it. ``indices`` is int32 [blocks, rows].
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    first = block * GROUPS
    index = first * 4 + tl.arange(0, 4 * GROUPS)
    inside = index < vocab
    at = logits + row.to(tl.int64) * stride + index
    scaled = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
    scaled = tl.div_rn(scaled, tl.zeros((4 * GROUPS,), tl.float32) + temperature)
    if TRUNCATED:
        # Written so that a NaN stays one.
        scaled = tl.where(scaled < tl.load(borders + row), -float("inf"), scaled)
    level = _philox(keys, positions, row, first + tl.arange(0, GROUPS), GROUPS)
    perturbed = scaled + tl.load(table + level)
    best = tl.argmax(perturbed, axis=0)
    chosen = tl.arange(0, 4 * GROUPS) == best
    high = tl.max(scaled, axis=0)
    shift = tl.where(high == -float("inf"), 0.0, high)
    out = numbers + block.to(tl.int64) * 4 * rows + row
    tl.store(out, tl.max(perturbed, axis=0))
    tl.store(out + rows, tl.sum(tl.where(chosen, scaled, 0.0), axis=0))
    tl.store(out + 2 * rows, high)
    tl.store(out + 3 * rows, tl.sum(tl.exp(scaled - shift), axis=0))
    tl.store(indices + block.to(tl.int64) * rows + row, tl.minimum(first * 4 + best, vocab - 1))


def gumbel(seeds: Sequence[int], positions: Tensor, vocab: int) -> Tensor:
    """As ``barnraise.kernels.sampling.gumbel``: float32 [B, vocab] on the device of ``positions``."""
    return _run(seeds, positions, vocab, raw=False)


def uniform_integers(seeds: Sequence[int], positions: Tensor, vocab: int) -> Tensor:
    """The 23-bit integers behind the noise, Philox's word >> 9: int32 [B, vocab]."""
    return _run(seeds, positions, vocab, raw=True)


def draw(
    logits: Tensor,
    seeds: Sequence[int],
    positions: Tensor,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """As ``barnraise.kernels.sampling.draw``: tokens int64 [B] bit for bit, log-probabilities float32 [B].

    The log-probabilities' sums run in another order, so their last bits may differ. With
    truncation the borders come from the reference's own sort, which the draw then reads.
    """
    rows, vocab = logits.shape
    device = logits.device
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    truncated = bool(top_k) or top_p < 1.0
    # By a tensor, as a CPU divides: by a number CUDA would multiply with the reciprocal.
    divisor = torch.full((1,), temperature, dtype=torch.float32, device=device)
    places = positions.to(device, torch.int64).contiguous()
    borders = truncation_border(logits.float() / divisor, top_k, top_p).contiguous() if truncated else divisor
    blocks = triton.cdiv(vocab, 4 * _GROUPS)
    numbers = torch.empty(blocks, 4, rows, dtype=torch.float32, device=device)
    indices = torch.empty(blocks, rows, dtype=torch.int32, device=device)
    if rows:
        _draw[(rows, blocks)](
            logits, logits.stride(0), borders, _keys(seeds, device), places,
            _table(device), temperature, numbers, indices, rows, vocab, TRUNCATED=truncated, GROUPS=_GROUPS,
        )  # fmt: skip
    best, chosen, high, total = numbers.unbind(dim=1)
    first = best.argmax(dim=0, keepdim=True)  # the first of equals, so the lower index
    top = high.amax(dim=0)
    log_sum = top + (total * (high - top).exp()).sum(dim=0).log()
    tokens = indices.gather(0, first).squeeze(0).to(torch.int64)
    return tokens, chosen.gather(0, first).squeeze(0) - log_sum


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    """The noise of each 23-bit integer, float32 [2^23], as the reference computes it on a CPU."""
    return noise_of_words(torch.arange(_LEVELS, dtype=torch.int64) << 9).float().to(device)


def _keys(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Low and high halves of each seed, int64 [2 B]."""
    halves = [half for seed in seeds for half in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)]
    return torch.tensor(halves, dtype=torch.int64, device=device)


def _run(seeds: Sequence[int], positions: Tensor, vocab: int, raw: bool) -> Tensor:
    rows, device = len(seeds), positions.device
    result = torch.empty(rows, vocab, dtype=torch.int32 if raw else torch.float32, device=device)
    if rows and vocab:
        table = result if raw else _table(device)
        grid = (rows, triton.cdiv(vocab, 4 * _GROUPS))
        places = positions.to(torch.int64).contiguous()
        _noise[grid](_keys(seeds, device), places, table, result, vocab, GROUPS=_GROUPS, RAW=raw)
    return result
