"""Many volunteers, one block: their differences become one step.

DiLoCo (Douillard et al., arXiv 2311.08105): every contributor does H local AdamW steps
from the same start; the mean difference is a gradient for an outer SGD with Nesterov
momentum (there: rate 0.7, momentum 0.9). A coordinate-wise trimmed mean (Yin et al.,
"Byzantine-robust distributed learning", ICML 2018) bounds what a minority of liars can
do to any weight; any subset of contributors may vanish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from barnraise.kernels.models import ModelError
from barnraise.kernels.mot import Tensors


def trimmed_mean(deltas: Sequence[Mapping[str, Tensor]], trim: float) -> Tensors:
    """Mean over contributors of each coordinate, its ``floor(trim * n)`` largest and smallest left out.

    Args:
        deltas: one mapping of equal names and shapes per contributor, float32.
        trim: share left out at either end, in [0, 0.5).

    Raises:
        ModelError: nobody contributed, or the contributions differ in names or shapes.
    """
    if not deltas:
        raise ModelError("no contribution to average")
    if not 0 <= trim < 0.5:
        raise ValueError(f"trim is {trim}, not in [0, 0.5)")
    cut = int(trim * len(deltas))
    result: Tensors = {}
    for name, first in deltas[0].items():
        values = [delta[name] for delta in deltas if name in delta]
        if len(values) != len(deltas) or any(value.shape != first.shape for value in values):
            raise ModelError(f"contributions differ in {name}")
        stacked = torch.stack([value.float() for value in values])
        if cut:
            stacked = stacked.sort(dim=0).values[cut : len(deltas) - cut]
        result[name] = stacked.mean(dim=0)
    return result


def outer_step(
    weights: Mapping[str, Tensor],
    delta: Mapping[str, Tensor],
    momentum: Mapping[str, Tensor] | None,
    rate: float,
    beta: float,
) -> tuple[Tensors, Tensors]:
    """Nesterov momentum on the mean difference (end minus start); returns new weights and momentum, float32.

    With rate 1 and beta 0 the result is the start plus the mean difference: plain averaging.
    """
    after: Tensors = {}
    speed: Tensors = {}
    for name, value in weights.items():
        before = torch.zeros_like(delta[name]) if momentum is None else momentum[name]
        speed[name] = beta * before + delta[name]
        after[name] = value.float() + rate * (delta[name] + beta * speed[name])
    return after, speed
