"""Settings that are known to work, in one place: what ``barnraise run init`` starts from.

Plain functions; whoever wants another value replaces it in the struct that is
returned (``msgspec.structs.replace``, ``dataclasses.replace``).
"""

from __future__ import annotations

import json

from barnraise.coordinator.folder import Settings
from barnraise.protocol.messages import MAX_SUBMISSION
from barnraise.protocol.spec import EnvironmentSpec, EvalSpec, GrpoSpec, RolloutSpec, SamplingSpec


def intellect2_grpo() -> GrpoSpec:
    """INTELLECT-2's settings (arXiv 2505.07291, section 3.4): for language models of billions of weights."""
    return GrpoSpec(
        learning_rate=3e-7,
        warmup_steps=25,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.01,
        grad_clip=0.1,
        inner_epochs=1,
        minibatches=8,
        clip_low=0.2,
        clip_high=0.2,
        clip_delta=4.0,
        normalise_std=True,
        kl_coefficient=0.001,
        entropy_coefficient=1e-4,
        loss_aggregation="token",
    )


def demo() -> Settings:
    """The demo model learns to reverse five letters.

    Four small optimiser steps per version reached 0.93 held-out in the least processor
    time of the shapes tried (three seeds, rollouts one version stale): about 9 s, against
    11-16 s for one large step over two epochs at half the rate.
    """
    return Settings(
        environment=EnvironmentSpec(
            name="reverse", settings=json.dumps({"letters": 5}), prompt_format="plain", system_prompt=""
        ),
        sampling=SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8),
        rollout=RolloutSpec(
            prompts_per_unit=8,
            group_size=8,
            groups_per_version=16,
            max_groups_per_version=48,
            max_lag=2,
            versions=40,
            timeout_s=60.0,
            deadline_s=180.0,
        ),
        grpo=GrpoSpec(
            learning_rate=2e-4,
            warmup_steps=0,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            grad_clip=1.0,
            inner_epochs=1,
            minibatches=4,
            clip_low=0.2,
            clip_high=0.2,
            clip_delta=4.0,
            normalise_std=False,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
            loss_aggregation="token",
        ),
        evaluation=EvalSpec(tasks=200, every=5),
        weights_dtype="float32",
        compute_dtype="float32",
    )


def smollm2() -> Settings:
    """SmolLM2-135M-Instruct on sums of two numbers: everything real, too slow on a CPU to learn much."""
    return Settings(
        environment=EnvironmentSpec(
            name="chain_sum",
            settings=json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
            prompt_format="chat",
            system_prompt="Answer with the number alone.",
        ),
        sampling=SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=16),
        rollout=RolloutSpec(
            prompts_per_unit=2,
            group_size=4,
            groups_per_version=2,
            max_groups_per_version=8,
            max_lag=2,
            versions=3,
            timeout_s=300.0,
            deadline_s=900.0,
        ),
        grpo=_with_rate(intellect2_grpo(), 1e-6),
        evaluation=EvalSpec(tasks=8, every=3),
        weights_dtype="bfloat16",
        compute_dtype="float32",
    )


def generic() -> Settings:
    """Where to start with one's own model: chain_sum, chat format, a reasoning-sized answer."""
    return Settings(
        environment=EnvironmentSpec(
            name="chain_sum", settings=json.dumps({}), prompt_format="chat", system_prompt=""
        ),
        sampling=SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=256),
        rollout=RolloutSpec(
            prompts_per_unit=4,
            group_size=8,
            groups_per_version=32,
            max_groups_per_version=128,
            max_lag=2,
            versions=100,
            timeout_s=600.0,
            deadline_s=1800.0,
        ),
        grpo=_with_rate(intellect2_grpo(), 1e-6),
        evaluation=EvalSpec(tasks=64, every=10),
        weights_dtype="bfloat16",
        compute_dtype="bfloat16",
    )


def _with_rate(grpo: GrpoSpec, rate: float) -> GrpoSpec:
    """A smaller model bears, and on few steps needs, a larger rate; one optimiser step per version."""
    from msgspec.structs import replace

    return replace(grpo, learning_rate=rate, warmup_steps=0, minibatches=1)


def largest_submission(settings: Settings) -> int:
    """Upper bound in bytes of one unit's submission; ``run init`` refuses what exceeds a message."""
    tokens = settings.sampling.max_new_tokens
    rollout = 8 * tokens + 258 * -(-tokens // 32) + 64
    return settings.rollout.prompts_per_unit * settings.rollout.group_size * rollout


def fits_a_message(settings: Settings) -> bool:
    """Whether the largest honest submission is one that peers accept."""
    return largest_submission(settings) <= MAX_SUBMISSION - 1024
