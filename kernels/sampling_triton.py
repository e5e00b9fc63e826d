"""Gumbel noise on a GPU: Philox4x32-10 and both logarithms in one Triton kernel.

The same integers as ``barnraise.kernels.sampling``, bit for bit, in 32-bit arithmetic
(``umulhi`` for the high halves); tests compare them in Triton's interpreter. The
logarithms are the device's own in float64: results there are rounded to float32, and two
correct to about one unit in the last place of float64 give the same float32 except where
one falls within that of a rounding boundary, about once in 2^28 entries, and then the
neighbouring float32. So the noise is the same on all devices but for rounding far below
that of any engine's logits.

Importing this module needs the package ``triton`` (the extra ``gpu``). This kernel has
run in Triton's interpreter only, never yet on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # groups of four entries per program


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(keys, positions, noise, integers, groups, BLOCK: tl.constexpr, RAW: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k0 = tl.load(keys + 2 * row).to(tl.uint32)
    k1 = tl.load(keys + 2 * row + 1).to(tl.uint32)
    c0 = group.to(tl.uint32)
    c1 = tl.zeros((BLOCK,), tl.uint32) + tl.load(positions + row).to(tl.uint32)
    c2 = tl.zeros((BLOCK,), tl.uint32)
    c3 = tl.zeros((BLOCK,), tl.uint32)
    m0 = tl.full((BLOCK,), 0xD2511F53, tl.uint32)
    m1 = tl.full((BLOCK,), 0xCD9E8D57, tl.uint32)
    w0 = tl.full((BLOCK,), 0x9E3779B9, tl.uint32)
    w1 = tl.full((BLOCK,), 0xBB67AE85, tl.uint32)
    k0 = tl.zeros((BLOCK,), tl.uint32) + k0
    k1 = tl.zeros((BLOCK,), tl.uint32) + k1
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
    inside = group < groups
    place = (row.to(tl.int64) * groups + group) * 4
    _store(c0, place, noise, integers, inside, RAW)
    _store(c1, place + 1, noise, integers, inside, RAW)
    _store(c2, place + 2, noise, integers, inside, RAW)
    _store(c3, place + 3, noise, integers, inside, RAW)


@triton.jit  # type: ignore[untyped-decorator]
def _store(word, place, noise, integers, inside, RAW: tl.constexpr):  # type: ignore[no-untyped-def]
    top = (word >> 9).to(tl.int32)
    if RAW:
        tl.store(integers + place, top, mask=inside)
    else:
        uniform = (top.to(tl.float64) + 0.5) * 1.1920928955078125e-07  # 2^-23
        tl.store(noise + place, (-tl.log(-tl.log(uniform))).to(tl.float32), mask=inside)


def gumbel(seeds: Sequence[int], positions: Tensor, vocab: int) -> Tensor:
    """As ``barnraise.kernels.sampling.gumbel``: float32 [B, vocab] on the device of ``positions``."""
    return _run(seeds, positions, vocab, raw=False)


def uniform_integers(seeds: Sequence[int], positions: Tensor, vocab: int) -> Tensor:
    """The 23-bit integers behind the noise, Philox's word >> 9: int32 [B, vocab]."""
    return _run(seeds, positions, vocab, raw=True)


def _run(seeds: Sequence[int], positions: Tensor, vocab: int, raw: bool) -> Tensor:
    rows, groups = len(seeds), (vocab + 3) // 4
    device = positions.device
    halves = [half for seed in seeds for half in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)]
    keys = torch.tensor(halves, dtype=torch.int64, device=device)
    result = torch.empty(rows, groups * 4, dtype=torch.int32 if raw else torch.float32, device=device)
    if rows and groups:
        grid = (rows, triton.cdiv(groups, _BLOCK))
        _kernel[grid](keys, positions.to(torch.int64), result, result, groups, BLOCK=_BLOCK, RAW=raw)
    return result[:, :vocab]
