"""Run specs for tests, which change what they care about."""

from typing import Any

import msgspec

from barnraise.protocol.pretrain import BlockRecipe, BlockTolerance, JointRecipe, PretrainSpec
from barnraise.protocol.spec import (
    EnvironmentSpec,
    EvalSpec,
    GrpoSpec,
    ModelSpec,
    Noise,
    RolloutSpec,
    RunSpec,
    SamplingSpec,
    VerifySpec,
)

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
EXACT = msgspec.structs.replace(
    VERIFY,
    max_exponent_mismatches=10,
    max_mantissa_mean=4.0,
    max_mantissa_median=3.0,
    eos_min_probability=0.0,
)
"""For models of float32, whose proofs agree nearly to the bit."""

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


def run_spec(**changes: Any) -> RunSpec:
    """A run of post-training; ``field=value`` or ``section__field=value`` changes one field."""
    spec = RunSpec(
        format=1,
        name="tiny",
        description="",
        operator=bytes(32),
        created_at=0,
        phase="posttrain",
        seed=0,
        model=ModelSpec(
            name="tiny",
            parameters=20_000,
            vocabulary=64,
            weights_dtype="float32",
            compute_dtype="float32",
            eos_token=0,
            assets={},
        ),
        environment=EnvironmentSpec(name="reverse", settings="{}", prompt_format="plain", system_prompt=""),
        sampling=SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8),
        rollout=RolloutSpec(
            prompts_per_unit=2,
            group_size=4,
            groups_per_version=4,
            max_groups_per_version=8,
            max_lag=2,
            versions=10,
            timeout_s=60.0,
            deadline_s=120.0,
        ),
        grpo=GRPO,
        verify=VERIFY,
        evaluation=EvalSpec(tasks=8, every=1),
        admission="open",
    )
    for name, value in changes.items():
        section, _, inner = name.partition("__")
        part = msgspec.structs.replace(getattr(spec, section), **{inner: value}) if inner else value
        spec = msgspec.structs.replace(spec, **{section: part})
    return spec
