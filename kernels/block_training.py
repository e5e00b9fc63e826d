"""Training one block inside its scaffold, step by step, so that another machine can do it again.

Stage 1 of Mixture of Training (arXiv 2608.13277, section 2): plain next-token
cross-entropy, AdamW on the block alone, warm-up then constant rate. A unit is a fixed
number of steps from a fixed start; its whole state between two steps is the block's
weights and AdamW's two moments, which fit one safetensors file whose SHA-256 the node
commits to. Whoever holds one such state, the scaffold and the corpus can compute the
next one (``barnraise.kernels.block_audit``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor, nn

from barnraise.kernels.models import ModelError
from barnraise.kernels.mot import Cut, Scaffold, Tensors, block_parameters, scaffolded

_WEIGHT, _FIRST, _SECOND = "w.", "m.", "v."
_EPSILON = 1e-8


@dataclass(frozen=True)
class Recipe:
    """How a block is trained; the same for every contributor.

    ``warmup_steps`` counts over the block's whole life. ``settle_steps`` is a short
    warm-up at the start of every unit, whose AdamW begins with empty moments: without it
    the first steps move every weight by the full rate, whatever its gradient.
    """

    learning_rate: float
    warmup_steps: int
    settle_steps: int
    beta1: float
    beta2: float
    weight_decay: float
    clip: float
    batch: int  # sequences per step

    def rate(self, lifetime_step: int, unit_step: int) -> float:
        """The learning rate of a step; both count from 0."""
        long = (lifetime_step + 1) / max(1, self.warmup_steps)
        short = (unit_step + 1) / max(1, self.settle_steps)
        return self.learning_rate * min(1.0, long, short)


@dataclass(frozen=True)
class BlockState:
    """Everything between two steps: weights and AdamW's moments, float32, relative names.

    ``step`` counts the steps of this unit.
    """

    weights: Tensors
    first: Tensors
    second: Tensors
    step: int


def start_state(weights: Tensors) -> BlockState:
    """The state before a unit's first step: moments are zero."""
    fresh = {name: value.detach().float().clone() for name, value in weights.items()}
    zeros = {name: torch.zeros_like(value) for name, value in fresh.items()}
    return BlockState(fresh, zeros, {name: value.clone() for name, value in zeros.items()}, 0)


def state_bytes(state: BlockState) -> bytes:
    """One safetensors file, the same bytes for the same state; its SHA-256 is the node's commitment."""
    tensors: Tensors = {}
    for prefix, part in ((_WEIGHT, state.weights), (_FIRST, state.first), (_SECOND, state.second)):
        for name in sorted(part):
            tensors[prefix + name] = part[name].detach().cpu().float().contiguous()
    return save_bytes(tensors, metadata={"step": str(state.step)})


def read_state(data: bytes, like: Tensors, step: int) -> BlockState:
    """Read what ``state_bytes`` wrote. ``like`` gives the names and shapes that a state of this block has.

    Raises:
        ModelError: damaged, other names, shapes or dtypes, or numbers that are not finite.
    """
    try:
        tensors = load_bytes(data)
    except (SafetensorError, ValueError, KeyError) as error:  # KeyError: a dtype that torch has not
        raise ModelError(f"a block state of {len(data)} bytes is no safetensors file: {error}") from error
    parts: list[Tensors] = []
    for prefix in (_WEIGHT, _FIRST, _SECOND):
        part: Tensors = {}
        for name, pattern in like.items():
            value = tensors.pop(prefix + name, None)
            if value is None or value.shape != pattern.shape or value.dtype != torch.float32:
                raise ModelError(f"a block state must have {prefix + name} as float32 {tuple(pattern.shape)}")
            if not bool(torch.isfinite(value).all()):
                raise ModelError(f"{prefix + name} of a block state is not finite")
            part[name] = value
        parts.append(part)
    if tensors:
        raise ModelError(f"a block state has {min(tensors)}, which is none of the block's")
    if any(bool((value < 0).any()) for value in parts[2].values()):
        raise ModelError("a block state has negative second moments")
    return BlockState(parts[0], parts[1], parts[2], step)


class BlockTrainer:
    """One block inside its scaffold, ready to step. Synchronous, one caller at a time."""

    def __init__(
        self,
        config: Any,
        cut: Cut,
        scaffold: Scaffold,
        block: int,
        recipe: Recipe,
        state: BlockState,
        lifetime_steps: int,
        device: str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        micro: int = 0,
    ) -> None:
        """Build S_i around ``state``.

        Args:
            lifetime_steps: steps that the block had before this unit.
            micro: sequences in memory at once; 0: the whole batch. Fewer take less memory and
                give the same step, but for the order of sums (``benchmarks/micro_batches.py``).

        Raises:
            ModelError: config, scaffold and state do not fit each other.
        """
        self.recipe = recipe
        self.micro = micro
        self._before = lifetime_steps
        self._compute = compute_dtype
        self._device = torch.device(device)
        self._model = scaffolded(config, cut, scaffold, block, state.weights).to(self._device)
        self._parameters = block_parameters(self._model, cut, block)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._parameters.values() if p.dim() >= 2]},
            {"params": [p for p in self._parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            eps=_EPSILON,
            weight_decay=recipe.weight_decay,
            foreach=False,  # one tensor after another: the same order of sums on every device
        )
        self._step = 0
        self.restore(state)

    @property
    def step(self) -> int:
        """Steps done in this unit."""
        return self._step

    @torch.no_grad()
    def restore(self, state: BlockState) -> None:
        """Continue from ``state``, as if its steps had been done here."""
        for name, parameter in self._parameters.items():
            parameter.copy_(state.weights[name])
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(state.step)),
                "exp_avg": state.first[name].to(self._device).clone(),
                "exp_avg_sq": state.second[name].to(self._device).clone(),
            }
        self._step = state.step

    def state(self) -> BlockState:
        """A copy of the state after the last step."""
        parts: tuple[Tensors, Tensors] = ({}, {})
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            for part, key in zip(parts, ("exp_avg", "exp_avg_sq"), strict=True):
                part[name] = moments[key].detach().cpu().clone()
        weights = {name: p.detach().cpu().clone() for name, p in self._parameters.items()}
        return BlockState(weights, *parts, self._step)

    def train(
        self, batches: Iterable[Tensor], should_stop: Callable[[], bool] = lambda: False
    ) -> list[float]:
        """One step per batch (int64 [B, L]); the loss (nats per token) before each.

        ``should_stop`` is polled between steps and micro-batches; the state stays whole.

        Raises:
            ModelError: a loss or gradient is not finite; the state is that before the step.
        """
        losses = []
        for batch in batches:
            loss = self._one(batch.to(self._device), should_stop)
            if loss is None:
                break
            losses.append(loss)
        return losses

    def _one(self, batch: Tensor, should_stop: Callable[[], bool]) -> float | None:
        """A step, and the loss before it; None: stopped, nothing has changed."""
        self._optimizer.zero_grad(set_to_none=True)
        parts = torch.split(batch, self.micro or len(batch))
        loss = torch.zeros((), device=self._device)
        for part in parts:
            if should_stop():
                return None
            share = next_token_loss(self._model, part, self._compute)
            if len(parts) > 1:  # all sequences are of one length: the mean of means, by their number
                share = share * (len(part) / len(batch))
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.recipe.clip, foreach=False)
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
            raise ModelError(f"step {self._step}: the loss is {float(loss)}, the gradient norm {float(norm)}")
        rate = self.recipe.rate(self._before + self._step, self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._step += 1
        return float(loss)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Tensor]) -> float:
        """Mean loss (nats per token) of the block in its scaffold over ``batches``."""
        losses = [float(next_token_loss(self._model, b.to(self._device), self._compute)) for b in batches]
        return sum(losses) / len(losses)


def next_token_loss(model: nn.Module, batch: Tensor, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """Cross-entropy of each next token, mean in float32, of int64 [B, L]."""
    reduced = compute_dtype != torch.float32
    with torch.autocast(batch.device.type, compute_dtype, enabled=reduced):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
