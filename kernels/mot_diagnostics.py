"""What happens at the seams between blocks, measured.

A block learns to be read by the scaffold's next slice, not by the next block. How far
f_i strays from a_i at its output says how well the parts will fit: Barnraise's own
diagnostics, which the paper lists as missing (arXiv 2608.13277, limitations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from barnraise.kernels.mot import Cut, find_layers


@dataclass(frozen=True)
class Seam:
    """Hidden states behind block ``block``, the recombined model's against the scaffold's, all tokens pooled.

    ``relative_error``: ||x - y|| / ||y||. ``cosine``: mean over tokens. ``norm_ratio``:
    mean ||x|| / ||y|| over tokens. ``cka``: linear centred kernel alignment, 0 to 1
    (Kornblith et al., "Similarity of neural network representations revisited", ICML 2019).
    """

    block: int
    relative_error: float
    cosine: float
    norm_ratio: float
    cka: float


@torch.no_grad()
def seams(target: nn.Module, scaffold: nn.Module, cut: Cut, batches: Sequence[Tensor]) -> list[Seam]:
    """Compare the two models at each of the K - 1 inner boundaries and at the last block's output.

    Args:
        batches: token ids, int64 [B, L] each; all tokens are pooled in float32.
    """
    ours = _outputs(target, [places[-1] for places in map(cut.places, range(cut.blocks))], batches)
    theirs = _outputs(scaffold, [slots[-1] for slots in map(cut.slots, range(cut.blocks))], batches)
    return [_compare(block, x, y) for block, (x, y) in enumerate(zip(ours, theirs, strict=True))]


def _outputs(model: nn.Module, places: Sequence[int], batches: Sequence[Tensor]) -> list[Tensor]:
    """Residual stream behind each layer of ``places``: float32 [tokens, H]."""
    found: list[list[Tensor]] = [[] for _ in places]
    layers = find_layers(model)[1]

    def keep(into: list[Tensor]) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            into.append(state.float().reshape(-1, state.shape[-1]))

        return hook

    hooks = [
        layers[place].register_forward_hook(keep(into)) for place, into in zip(places, found, strict=True)
    ]
    try:
        for batch in batches:
            model(input_ids=batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(parts) for parts in found]


def _compare(block: int, x: Tensor, y: Tensor) -> Seam:
    norms_x, norms_y = x.norm(dim=1), y.norm(dim=1).clamp_min(1e-12)
    return Seam(
        block=block,
        relative_error=float((x - y).norm() / y.norm().clamp_min(1e-12)),
        cosine=float(nn.functional.cosine_similarity(x, y, dim=1).mean()),
        norm_ratio=float((norms_x / norms_y).mean()),
        cka=linear_cka(x, y),
    )


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of two representations of the same N items, float [N, P] and [N, Q]."""
    x = (x - x.mean(dim=0)).double()
    y = (y - y.mean(dim=0)).double()
    cross = (x.T @ y).square().sum()
    scale = (x.T @ x).norm() * (y.T @ y).norm()
    return float(cross / scale.clamp_min(1e-30))
