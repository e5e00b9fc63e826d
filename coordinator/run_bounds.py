"""The least that a number of the run file, or of an amendment, may be, where its type says only "above 0".

What is positive and still absurd does harm: with ``timeout_s = 1e-300`` every lease is over when it
is given, and every node works for nothing. Signed specs are read by the types alone, whatever they
say: a run of earlier goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST: dict[str, float] = {
    "run.lora_alpha": 1e-3,
    "sampling.temperature": 0.01,
    "sampling.top_p": 1e-3,
    "rollout.timeout_s": 1.0,
    "rollout.deadline_s": 1.0,
    "grpo.learning_rate": 1e-9,
    "grpo.grad_clip": 1e-4,
    "grpo.clip_low": 1e-4,
    "grpo.clip_high": 1e-4,
    "grpo.clip_delta": 1.0,
    "pretrain.blocks": 1,
    "pretrain.scaffold_layers": 1,
    "pretrain.scaffold_steps": 1,
    "pretrain.rounds": 1,
    "pretrain.steps": 1,
    "pretrain.contributors": 1,
    "pretrain.quorum": 1,
    "pretrain.round_s": 1.0,
    "pretrain.adapt_steps": 0,
    "pretrain.sequence": 2,
    "pretrain.batch": 1,
    "pretrain.rate": 1e-9,
    "pretrain.outer_rate": 1e-3,
    "pretrain.outer_momentum": 0.0,
    "pretrain.trim": 0.0,
    "serve.upload_copies": 1.0,  # of less than one copy nobody gets a whole version
    "serve.relay_mbit": 0.01,
    "keep.disk_gb": 1e-3,
    "keep.rollouts_gb": 1e-3,
    "guards.entropy_high": 1.0,
    "guards.gradient_times": 1.0,
    "guards.kl": 1e-4,
    "guards.backlog_s": 1.0,
    "guards.stall_s": 1.0,
}
"""By section and key."""

OR_ZERO = frozenset(
    ("run.lora_alpha", "serve.upload_copies", "serve.relay_mbit", "keep.disk_gb", "keep.rollouts_gb")
)
"""Of those, the keys whose 0 means something else."""


def too_small(values: Mapping[str, Any]) -> str:
    """Which of ``values`` (by dotted key) is too small, and the cure; empty: none is."""
    for key, value in values.items():
        least = LEAST.get(key)
        if least is None or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if value < least and not (value == 0 and key in OR_ZERO):
            zero = "0, or " if key in OR_ZERO else ""
            return f"{key} is {value:g}, far below what makes sense: write {zero}{least:g} or more"
    return ""
