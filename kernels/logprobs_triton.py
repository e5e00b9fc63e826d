"""Log-probabilities and entropies on a GPU, without logits in memory: one pass, online softmax.

Forward: a program holds a block of rows and walks over vocabulary blocks. Each block's
logits are made by the tensor cores, capped, scaled and folded at once into four numbers
a row: the maximum m, the sum s of exp(z - m), the sum t of (z - m) exp(z - m), and the
target's logit (online softmax: Milakov and Gimelshein, arXiv 1805.02867; over blocks of
a head as in Wijmans et al., "Cut your losses", arXiv 2411.09009). So

    log p(target) = z(target) - m - log s        entropy = log s - t / s

Few rows alone would leave most of a GPU idle: then the vocabulary is split between
programs, and their numbers are joined afterwards. Backward: logits are made again, a
slice of the vocabulary at a time, and turned into gradients before they leave the
program; two plain products per slice finish the work. A slice's gradient of the head is
complete when it is written: no float32 copy of the head, no atomic adds, and the same
bits on every run. At most ``SLICE_ELEMENTS`` gradients exist at once.

Logits stay float32 from the tensor cores on; the reference in
``barnraise.kernels.logprobs`` rounds them to the dtype of ``hidden`` first, and so in
bfloat16 this kernel is the more exact of the two.

Importing this module needs the package ``triton`` (the extra ``gpu``). These kernels have
run in Triton's interpreter only, never yet on a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICE_ELEMENTS = 2**26
"""Gradients of logits alive at once in the backward pass: 128 MiB in bfloat16."""
_ROWS, _COLUMNS = 128, 128  # of a program's block of logits
_BYTES = 128  # of a row of states in one step of the product: 64 values in bfloat16, 32 in float32


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(  # type: ignore[no-untyped-def]
    hidden, weight, bias, row, column, rows, columns, width,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SUM: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scaled logits of a block, -inf beyond the vocabulary, and the soft cap's slope (1 without one)."""
    step = tl.arange(0, WIDTH)
    at_hidden = hidden + row.to(tl.int64)[:, None] * width + step[None, :]
    at_weight = weight + column.to(tl.int64)[None, :] * width + step[:, None]
    within_rows, within_columns = row < rows, column < columns
    z = tl.zeros((ROWS, COLUMNS), dtype=SUM)
    for start in range(0, width, WIDTH):
        within = start + step < width
        left = tl.load(at_hidden + start, mask=within_rows[:, None] & within[None, :], other=0.0)
        right = tl.load(at_weight + start, mask=within[:, None] & within_columns[None, :], other=0.0)
        if WIDEN:
            left, right = left.to(SUM), right.to(SUM)
        z = tl.dot(left, right, z, input_precision=PRECISION, out_dtype=SUM)
    if HAS_BIAS:
        z += tl.load(bias + column, mask=within_columns, other=0.0).to(SUM)[None, :]
    slope = tl.full((ROWS, COLUMNS), 1.0, SUM)
    if SOFTCAP is not None:
        # tanh by an exponential that cannot overflow; absolute error about one unit of 1.
        small = tl.exp(-2.0 * tl.abs(z / SOFTCAP))
        bent = (1.0 - small) / (1.0 + small)
        bent = tl.where(z < 0, -bent, bent)
        # A NaN would fall to neither side of a comparison: it must reach the result.
        bent = tl.where(z == z, bent, z)
        slope = 4.0 * small / ((1.0 + small) * (1.0 + small))  # 1 - tanh^2 without its cancellation
        slope = tl.where(z == z, slope, z)
        z = bent * SOFTCAP
    z = z / TEMPERATURE
    return tl.where(within_columns[None, :], z, -float("inf")), slope


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    hidden, weight, bias, targets, found, rows, columns, width, share,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SUM: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Columns [split * share, (split + 1) * share) of a block of rows; ``found`` is [splits, 4, rows]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    first = split * share
    within = row < rows
    target = tl.load(targets + row, mask=within, other=-1)
    high = tl.full((ROWS,), -float("inf"), SUM)
    total = tl.zeros((ROWS,), dtype=SUM)
    moment = tl.zeros((ROWS,), dtype=SUM)
    picked = tl.zeros((ROWS,), dtype=SUM)
    for start in range(first, tl.minimum(first + share, columns), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        z, _ = _scaled(
            hidden, weight, bias, row, column, rows, columns, width,
            HAS_BIAS, SOFTCAP, TEMPERATURE, PRECISION, ROWS, COLUMNS, WIDTH, SUM, WIDEN,
        )  # fmt: skip
        picked += tl.sum(tl.where(column[None, :] == target[:, None], z, 0.0), axis=1)
        higher = tl.maximum(high, tl.max(z, axis=1))
        # As long as all were -inf there is nothing to shift, and -inf - -inf would be NaN.
        level = tl.where(higher == -float("inf"), 0.0, higher)
        below = tl.where(high == -float("inf"), 0.0, high - level)
        shrink = tl.exp(below)
        z -= level[:, None]
        likely = tl.exp(z)
        moment = shrink * (moment + total * below)
        moment += tl.sum(likely * tl.where(z == -float("inf"), 0.0, z), axis=1)
        total = shrink * total + tl.sum(likely, axis=1)
        high = higher
    at = found + split.to(tl.int64) * 4 * rows + row
    tl.store(at, high, mask=within)
    tl.store(at + rows, total, mask=within)
    tl.store(at + 2 * rows, moment, mask=within)
    tl.store(at + 3 * rows, picked, mask=within)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    hidden, weight, bias, targets, level, entropy, along_chosen, along_entropy, grad,
    first, slice_columns, rows, columns, width,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SUM: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Gradients of logits [first, first + slice_columns), rows after one another in ``grad``.

    ``level`` is [2, rows]: the maximum and the logarithm of the sum. Kept apart, as with
    large logits their sum would have lost the digits that the probabilities need.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = first + place
    z, slope = _scaled(
        hidden, weight, bias, row, column, rows, columns, width,
        HAS_BIAS, SOFTCAP, TEMPERATURE, PRECISION, ROWS, COLUMNS, WIDTH, SUM, WIDEN,
    )  # fmt: skip
    within = row < rows
    target = tl.load(targets + row, mask=within, other=-1)
    high = tl.load(level + row, mask=within, other=0.0)
    log_total = tl.load(level + rows + row, mask=within, other=0.0)
    around = tl.load(entropy + row, mask=within, other=0.0)
    to_chosen = tl.load(along_chosen + row, mask=within, other=0.0)
    to_entropy = tl.load(along_entropy + row, mask=within, other=0.0)
    log_p = z - high[:, None] - log_total[:, None]
    p = tl.exp(log_p)
    log_p = tl.where(log_p == -float("inf"), 0.0, log_p)  # p log p is 0 where p is 0
    # d log p(target) / dz = 1[target] - p;  d entropy / dz = -p (log p + entropy)
    g = -p * (to_chosen[:, None] + to_entropy[:, None] * (log_p + around[:, None]))
    g += tl.where(column[None, :] == target[:, None], to_chosen[:, None], 0.0)
    g = g * slope / TEMPERATURE
    at = grad + row.to(tl.int64)[:, None] * slice_columns + place[None, :]
    inside = within[:, None] & (place < slice_columns)[None, :]
    tl.store(at, g.to(grad.dtype.element_ty), mask=inside)


def token_logprobs_triton(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``barnraise.kernels.logprobs.token_logprobs`` without truncation; shapes are checked there.

    Args:
        hidden: [N, H], float64, float32, bfloat16 or float16; weight: [V, H]; bias: [V], may hold -inf;
            targets: int64 [N]. All on one GPU (on a CPU in Triton's interpreter).
            Under autocast products run in its dtype.

    Returns:
        (logprobs [N], entropy [N]), nats, float32 (float64 of float64), differentiable once. A
        target outside [0, V) gives NaN: to raise, the host would have to wait for the GPU.
    """
    device = hidden.device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Casts are outside of the function, so that gradients come back in each argument's own dtype.
    arguments = (hidden.to(product), weight.to(product), None if bias is None else bias.to(product))
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(*arguments, targets, temperature, softcap)  # type: ignore[no-untyped-call]
    return found


class _TokenLogprobs(torch.autograd.Function):
    """Keeps states and three numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        plan = _plan(hidden, weight, bias, temperature, softcap)
        hidden, weight = hidden.contiguous(), weight.contiguous()
        rows, columns = len(hidden), len(weight)
        targets = targets.to(device=hidden.device, dtype=torch.int64).contiguous()
        blocks = triton.cdiv(rows, plan.rows)
        # Two programs per processor, where there are so many vocabulary blocks.
        splits = max(1, min(triton.cdiv(columns, plan.columns), 2 * plan.processors // max(blocks, 1)))
        share = triton.cdiv(triton.cdiv(columns, plan.columns), splits) * plan.columns
        splits = triton.cdiv(columns, share)
        found = torch.empty(splits, 4, rows, dtype=plan.sum, device=hidden.device)
        if rows:
            _forward[(blocks, splits)](
                hidden, weight, weight if bias is None else bias.contiguous(), targets, found,
                rows, columns, hidden.shape[1], share, **plan.settings,
            )  # fmt: skip
        high, log_total, entropy, picked = _joined(found)
        chosen = picked - high - log_total
        chosen.masked_fill_((targets < 0) | (targets >= columns), torch.nan)
        ctx.plan = plan
        ctx.set_materialize_grads(True)
        ctx.save_for_backward(hidden, weight, bias, targets, torch.stack([high, log_total]), entropy)
        return chosen, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along_chosen: Tensor, along_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, level, entropy = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wanted_hidden, wanted_weight, wanted_bias = ctx.needs_input_grad[:3]
        rows, columns = len(hidden), len(weight)
        along_chosen, along_entropy = along_chosen.contiguous(), along_entropy.contiguous()
        # A sum over slices, so in float32; the other two are complete with each slice.
        grad_hidden = torch.zeros(hidden.shape, dtype=plan.sum, device=hidden.device)
        grad_weight = torch.zeros_like(weight) if wanted_weight else None
        grad_bias = torch.zeros_like(bias) if wanted_bias else None
        blocks = max(1, SLICE_ELEMENTS // max(rows, 1) // plan.columns)
        step = blocks * plan.columns
        for first in range(0, columns if rows else 0, step):
            part = slice(first, min(first + step, columns))
            size = part.stop - first
            grad = torch.empty(rows, size, dtype=hidden.dtype, device=hidden.device)
            _backward[(triton.cdiv(rows, plan.rows), triton.cdiv(size, plan.columns))](
                hidden, weight, weight if bias is None else bias.contiguous(), targets, level, entropy,
                along_chosen, along_entropy, grad, first, size, rows, columns, hidden.shape[1],
                **plan.settings,
            )  # fmt: skip
            if wanted_hidden:
                grad_hidden += grad @ weight[part]
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[part])
            if grad_bias is not None:
                grad_bias[part] = grad.sum(dim=0, dtype=plan.sum)
        return (
            grad_hidden.to(hidden.dtype) if wanted_hidden else None,
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


def _joined(found: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits' numbers [splits, 4, N] in one: maximum, log of the sum, entropy, target's logit; [N] each."""
    highs, totals, moments, picked = found.unbind(dim=1)
    high = highs.amax(dim=0)
    below = (highs - high).masked_fill(totals == 0, 0.0)  # a split that was -inf throughout adds nothing
    shrink = below.exp()
    total = (shrink * totals).sum(dim=0)
    moment = (shrink * (moments + totals * below)).sum(dim=0)
    log_total = total.log()
    return high, log_total, log_total - moment / total, picked.sum(dim=0)


@dataclass(frozen=True)
class _Plan:
    """How a call is cut up: block sizes, the dtype of sums, processors, and what the kernels are told."""

    rows: int
    columns: int
    sum: torch.dtype
    processors: int
    settings: dict[str, Any]


def _plan(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> _Plan:
    width = max(16, _BYTES // hidden.element_size())
    processors, shared = _device(hidden.device)
    # What a tensor core's operands take in shared memory, once per stage of the pipeline.
    stage = (_ROWS + _COLUMNS) * width * hidden.element_size()
    exact = hidden.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    double = hidden.dtype == torch.float64
    settings = {
        "HAS_BIAS": bias is not None,
        "SOFTCAP": softcap,
        "TEMPERATURE": temperature,
        "PRECISION": "ieee" if exact else "tf32",
        "ROWS": _ROWS,
        "COLUMNS": _COLUMNS,
        "WIDTH": width,
        "SUM": tl.float64 if double else tl.float32,
        # Triton 3.7's interpreter multiplies the bit patterns of bfloat16; widened they are exact.
        "WIDEN": hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16,
        "num_warps": 8,
        "num_stages": max(1, min(3, shared // stage)),
    }
    return _Plan(_ROWS, _COLUMNS, torch.float64 if double else torch.float32, processors, settings)


@functools.lru_cache(maxsize=16)
def _device(device: torch.device) -> tuple[int, int]:
    """Processors, and the shared memory in bytes that one block of threads may have."""
    if device.type != "cuda":
        return 2, 96 * 1024  # the interpreter: two, so that the vocabulary is split there too
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
