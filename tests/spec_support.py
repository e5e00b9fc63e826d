"""Parts of a run spec for tests that do not care what they say."""

from barnraise.protocol.spec import GrpoSpec, VerifySpec

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
    sampling_margin=0.5,
    sampling_mean=0.1,
    logprob_mean=0.1,
    logprob_max=1.0,
)
