"""Was this block really trained as asked? One segment is done again and compared.

The node committed to the hash of its state every k steps before it knew which segment
would be looked at. The auditor takes the committed state at the segment's start, does
the k steps itself on the data that the lease names, and measures how far its own end
state lies from the committed one, in units of how far the weights moved. Different
hardware rounds differently, and AdamW makes a full step of the sign of a gradient that
is all rounding; so the comparison is of norms and not of bits, within tolerances that
``benchmarks/calibrate_blocks.py`` measured.

What no single segment shows is bounded otherwise: AdamW cannot move a weight by more
than ``update_bound`` in so many steps, and the difference that is sent must be that of
the last committed state and the lease's start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from barnraise.kernels.block_training import BlockState, BlockTrainer, Recipe

_ROUNDING = 2.0**-22  # of a weight, per step: the update and the decay round once each


@dataclass(frozen=True)
class SegmentError:
    """How a claimed end of a segment differs from ours; 0 throughout for the same machine.

    ``update``: ||theirs - ours|| / ||ours - start|| over all weights. ``first`` and
    ``second``: the same ratio for AdamW's moments, to ours. ``worst_tensor``: the largest
    ``update`` of a single tensor, named ``tensor``. ``cosine``: between the two updates.
    """

    update: float
    first: float
    second: float
    worst_tensor: float
    tensor: str
    cosine: float


def replay(trainer: BlockTrainer, start: BlockState, batches: Iterable[Tensor]) -> BlockState:
    """Do a segment's steps again from ``start``: one per batch.

    Raises:
        ModelError: a loss or gradient is not finite.
    """
    trainer.restore(start)
    trainer.train(batches)
    return trainer.state()


def compare(start: BlockState, claimed: BlockState, ours: BlockState) -> SegmentError:
    """Measure ``claimed`` against ``ours``, both after the same steps from ``start``."""
    square = cross = moved = theirs = 0.0
    worst, name = 0.0, ""
    for key, begin in start.weights.items():
        a = (claimed.weights[key] - begin).double()
        b = (ours.weights[key] - begin).double()
        apart, length = float((a - b).square().sum()), float(b.square().sum())
        square, moved, theirs = square + apart, moved + length, theirs + float(a.square().sum())
        cross += float((a * b).sum())
        if (ratio := _ratio(apart, length)) > worst:
            worst, name = ratio, key
    return SegmentError(
        update=_ratio(square, moved),
        first=_relative(claimed.first, ours.first),
        second=_relative(claimed.second, ours.second),
        worst_tensor=worst,
        tensor=name,
        cosine=cross / math.sqrt(moved * theirs) if moved and theirs else float(moved == theirs),
    )


def update_bound(recipe: Recipe, lifetime_steps: int, steps: int, largest_weight: float) -> float:
    """The most that AdamW can move any one weight in a unit of ``steps`` steps.

    |m_hat| / (sqrt(v_hat) + eps) is at most (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2))
    by Cauchy-Schwarz on the two moving averages, times the ratio of their bias corrections,
    decay adds rate x decay x |weight|, and float32 rounds. ``largest_weight``: largest
    magnitude at the start.
    """
    b1, b2 = recipe.beta1, recipe.beta2
    ratio = b1 * b1 / b2 if b2 else math.inf
    spread, power = 0.0, 1.0  # sum of the ratio's powers below n
    total = 0.0
    weight = largest_weight
    for step in range(steps):
        rate = recipe.rate(lifetime_steps + step, step)
        n = step + 1
        spread, power = spread + power, power * ratio
        most = (1 - b1) * math.sqrt(spread / (1 - b2)) if b2 < 1 else 1.0
        most *= math.sqrt(1 - b2**n) / (1 - b1**n)
        moved = rate * (most + recipe.weight_decay * weight) + _ROUNDING * weight
        total += moved
        weight += moved
    return total


def largest_excess(
    delta: Mapping[str, Tensor], exact: Mapping[str, Tensor], room: Mapping[str, Tensor]
) -> float:
    """Largest |delta - exact| - room over all weights; above 0, more was added than encoding loses."""
    return max(
        float(((delta[name] - exact[name]).abs() - room[name]).max()) for name in exact if exact[name].numel()
    )


def _relative(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> float:
    apart = sum(float((theirs[key] - value).double().square().sum()) for key, value in ours.items())
    return _ratio(apart, sum(float(value.double().square().sum()) for value in ours.values()))


def _ratio(apart: float, length: float) -> float:
    if apart == 0:
        return 0.0
    return math.sqrt(apart / length) if length > 0 else math.inf
