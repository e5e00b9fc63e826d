"""Parts of a run spec for tests that do not care what they say."""

from typing import Any

import msgspec

from barnraise.protocol.pretrain import BlockRecipe, BlockTolerance, JointRecipe, PretrainSpec
from barnraise.protocol.spec import GrpoSpec, Noise, VerifySpec

GRPO = GrpoSpec(
    learning_rate=1e-3,
    warmup_steps=0,
    beta1=0.9,
    beta2=0.99,
    weight_decay=0.0,
    grad_clip=1.0,
    inner_epochs=1,
    minibatches=1,
    clip_low=0.2,
    clip_high=0.2,
    clip_delta=4.0,
    normalise_std=True,
    kl_coefficient=0.0,
    entropy_coefficient=0.0,
    loss_aggregation="token",
)
VERIFY = VerifySpec(
    toploc_top_k=128,
    toploc_chunk=32,
    max_exponent_mismatches=38,
    max_mantissa_mean=10.0,
    max_mantissa_median=8.0,
    eos_min_probability=0.1,
    false_alarm=1e-7,
    draws=Noise(mean=0.1, variance=0.01, scale=0.1),
    logprobs=Noise(mean=0.1, variance=0.02, scale=0.1),
    bias=0.1,
)

JOINT = JointRecipe(
    steps=4,
    learning_rate=1e-3,
    warmup_fraction=0.1,
    floor=0.1,
    weight_decay=0.0,
    clip=1.0,
    batch=4,
)


def pretrain_spec(**changes: Any) -> PretrainSpec:
    """Two blocks, two rounds of six steps; no post-training: the model is version 3."""
    spec = PretrainSpec(
        blocks=2,
        scaffold_layers=2,
        scaffold=None,
        scaffold_recipe=JOINT,
        corpus=bytes(32),
        sequence=16,
        init="grown",
        data="disjoint",
        rounds=2,
        steps=6,
        commit_every=2,
        contributors=2,
        quorum=1,
        round_s=60.0,
        recipe=BlockRecipe(
            learning_rate=1e-3,
            warmup_steps=2,
            settle_steps=2,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            clip=1.0,
            batch=4,
        ),
        delta="float32",
        outer_rate=0.7,
        outer_momentum=0.9,
        trim=0.0,
        tolerance=BlockTolerance(update=0.1, first=0.1, second=0.1, worst_tensor=0.3, loss_increase=0.1),
        adapt=JOINT,
        held_out=4,
        timeout_s=60.0,
        deadline_s=120.0,
        then_posttrain=False,
    )
    return msgspec.structs.replace(spec, **changes)
