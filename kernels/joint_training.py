"""Training a whole model end to end: the scaffold before the blocks, the adaptation after them.

Stages 0 and 2 of Mixture of Training (arXiv 2608.13277, section 2): AdamW, linear warm-up,
then a cosine; stage 2 starts with empty moments. Like a block unit it can be stopped
between two steps, saved, and taken up again in the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from barnraise.kernels.block_training import next_token_loss
from barnraise.kernels.models import ModelError
from barnraise.kernels.mot import Tensors


@dataclass(frozen=True)
class JointSchedule:
    """AdamW's settings over ``steps`` steps; the rate ends at ``floor`` times its peak."""

    steps: int
    learning_rate: float
    warmup_fraction: float
    floor: float
    weight_decay: float
    clip: float
    beta1: float = 0.9
    beta2: float = 0.95

    def rate(self, step: int) -> float:
        """Learning rate of step ``step``, which counts from 0."""
        warmup = max(1, round(self.warmup_fraction * self.steps))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


class JointTrainer:
    """A model in training. Every parameter that requires gradients moves. Synchronous."""

    def __init__(
        self, model: nn.Module, schedule: JointSchedule, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = model
        self.schedule = schedule
        self._compute = compute_dtype
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._named.values() if p.dim() >= 2]},
            {"params": [p for p in self._named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=schedule.learning_rate,
            betas=(schedule.beta1, schedule.beta2),
            weight_decay=schedule.weight_decay,
        )
        self.step = 0

    @property
    def done(self) -> bool:
        """Whether the schedule's last step was made."""
        return self.step >= self.schedule.steps

    def train(
        self,
        batches: Iterable[Tensor],
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """One step per batch (int64 [B, L]) until the schedule ends; the loss before each, nats per token.

        Raises:
            ModelError: a loss or gradient is not finite; nothing was changed by that step.
        """
        losses = []
        device = next(self.model.parameters()).device
        for batch in batches:
            if self.done or should_stop():
                break
            self._optimizer.zero_grad(set_to_none=True)
            loss = next_token_loss(self.model, batch.to(device), self._compute)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self._named.values(), self.schedule.clip)
            if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
                raise ModelError(f"step {self.step}: the loss is {float(loss)}, the gradient {float(norm)}")
            for group in self._optimizer.param_groups:
                group["lr"] = self.schedule.rate(self.step)
            self._optimizer.step()
            losses.append(float(loss.detach()))
            on_step(self.step, losses[-1])
            self.step += 1
        return losses

    def tensors(self) -> Tensors:
        """Weights (``w.``) and moments (``m.``, ``v.``) on the CPU, for a checkpoint; see ``restore``."""
        found: Tensors = {}
        for name, parameter in self._named.items():
            found["w." + name] = parameter.detach().cpu().clone()
            moments = self._optimizer.state.get(parameter, {})
            for prefix, key in (("m.", "exp_avg"), ("v.", "exp_avg_sq")):
                if key in moments:
                    found[prefix + name] = moments[key].detach().cpu().clone()
        return found

    @torch.no_grad()
    def restore(self, tensors: Tensors, step: int) -> None:
        """Continue after step ``step`` of a trainer whose ``tensors`` these are.

        Raises:
            ModelError: a tensor is missing or of another shape.
        """
        for name, parameter in self._named.items():
            for prefix in ("w.", "m.", "v."):
                value = tensors.get(prefix + name)
                if value is None and (prefix == "w." or step):
                    raise ModelError(f"the training checkpoint has no {prefix + name}")
                if value is not None and value.shape != parameter.shape:
                    raise ModelError(f"{prefix + name} in the training checkpoint has shape {value.shape}")
            parameter.copy_(tensors["w." + name])
            if step:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": tensors["m." + name].to(parameter.device).clone(),
                    "exp_avg_sq": tensors["v." + name].to(parameter.device).clone(),
                }
        self.step = step


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Tensor], compute_dtype: torch.dtype = torch.float32
) -> float:
    """Mean next-token loss (nats per token) over equally shaped ``batches``; exp of it is perplexity."""
    device = next(model.parameters()).device
    losses = [float(next_token_loss(model, batch.to(device), compute_dtype)) for batch in batches]
    return sum(losses) / len(losses)
