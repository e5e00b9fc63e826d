"""The run spec: everything about a run that its peers must agree on, signed once, named by its hash.

A run's id is the SHA-256 of the spec's canonical encoding; the run's key signs it
(``Signed``), and so a volunteer can read what they are asked to join before a
byte of the model is fetched.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from barnraise.protocol.messages import Count, Digest, Message, Millis, Name, PublicKey, Text
from barnraise.protocol.pretrain import PretrainSpec

Positive = Annotated[float, Meta(gt=0.0, le=1e6)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e6)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Small = Annotated[int, Meta(ge=1, le=65_536)]
Dtype = Literal["float32", "bfloat16"]
Admission = Literal["open", "invite", "allow"]  # anybody; with an invite or on the list; on the list alone


class AdapterSpec(Message, frozen=True):
    """Low-rank adapters (arXiv 2106.09685), which alone are trained and published anew in every version.

    The base is the file with SHA-256 ``base`` in every version, so that nobody fetches it twice.
    ``barnraise.kernels.lora`` says what is computed.
    """

    rank: Annotated[int, Meta(ge=1, le=1024)]
    alpha: Positive  # the low-rank term is multiplied by alpha / rank
    targets: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)]  # last parts of layers' names
    parameters: Annotated[int, Meta(ge=1, le=2**50)]  # of the adapters together
    dtype: Dtype  # as published
    base: Digest


class ModelSpec(Message, frozen=True, omit_defaults=True):
    """The policy. Architecture and tokenizer are files of every manifest, pinned by ``assets``.

    The last fields are left out of the encoding where they say nothing.
    """

    name: Name
    parameters: Annotated[int, Meta(ge=1, le=2**50)]
    vocabulary: Annotated[int, Meta(ge=2, le=2**24)]
    weights_dtype: Dtype  # as published
    compute_dtype: Dtype  # what engines compute in; the thresholds of ``VerifySpec`` are calibrated for it
    eos_token: Count
    assets: Annotated[dict[Name, Digest], Meta(max_length=32)]  # file name -> SHA-256, all but weights
    other_ends: Annotated[tuple[Count, ...], Meta(max_length=16)] = ()  # tokens that end a completion as well
    adapter: AdapterSpec | None = None

    @property
    def ends(self) -> frozenset[int]:
        """All tokens that end a completion."""
        return frozenset((self.eos_token, *self.other_ends))


class EnvironmentSpec(Message, frozen=True):
    """Where tasks come from: a name known to ``barnraise.protocol.environments`` and its settings (JSON)."""

    name: Name
    settings: Annotated[str, Meta(max_length=4096)]
    prompt_format: Literal["plain", "chat"]
    system_prompt: Text


class SamplingSpec(Message, frozen=True):
    """How tokens are drawn. ``top_k`` 0 and ``top_p`` 1.0 mean no truncation."""

    temperature: Annotated[float, Meta(gt=0.0, le=10.0)]
    top_k: Count
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)]
    max_new_tokens: Small


class RolloutSpec(Message, frozen=True):
    """How work is cut, and how a policy version's batch fills.

    A batch closes when ``groups_per_version`` groups with a non-zero advantage are
    verified, or when ``max_groups_per_version`` groups were verified and at least
    one is usable. Rollouts more than ``max_lag`` versions old are not trained on.
    """

    prompts_per_unit: Small
    group_size: Annotated[int, Meta(ge=2, le=4096)]
    groups_per_version: Small
    max_groups_per_version: Small
    max_lag: Annotated[int, Meta(ge=0, le=64)]
    versions: Small  # the run is complete when this policy version is published
    timeout_s: Positive
    deadline_s: Positive


class GrpoSpec(Message, frozen=True):
    """GRPO with two-sided clipping (INTELLECT-2, section 3.4) and the optimiser's settings."""

    learning_rate: Positive
    warmup_steps: Count
    beta1: Fraction
    beta2: Fraction
    weight_decay: NonNegative
    grad_clip: Positive
    inner_epochs: Small
    minibatches: Small
    clip_low: Positive  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: Positive
    clip_delta: Positive  # upper bound on the ratio for negative advantages ("delta")
    normalise_std: bool
    kl_coefficient: NonNegative
    entropy_coefficient: NonNegative
    loss_aggregation: Literal["token", "sequence"]


class Noise(Message, frozen=True):
    """Bounds on what rounding does to honest work, per token, in nats of logits (nats x temperature).

    ``log E exp(l (x - mean)) <= l^2 variance / (2 (1 - l scale))`` for 0 < l < 1 / scale
    (a sub-gamma variable; Boucheron, Lugosi and Massart, "Concentration Inequalities",
    section 2.4). ``barnraise.coordinator.draw_checks`` makes limits of it.
    """

    mean: NonNegative
    variance: NonNegative
    scale: Positive


class VerifySpec(Message, frozen=True):
    """Thresholds of the checks; every verdict quotes the one that it used."""

    toploc_top_k: Annotated[int, Meta(ge=1, le=1024)]
    toploc_chunk: Annotated[int, Meta(ge=1, le=1024)]
    max_exponent_mismatches: Count
    max_mantissa_mean: NonNegative
    max_mantissa_median: NonNegative
    eos_min_probability: Fraction
    false_alarm: Annotated[float, Meta(gt=0.0, le=1.0)]  # chance that one limit below refuses honest work
    draws: Noise  # how far a token lies below the best perturbed logit
    logprobs: Noise  # |claimed - recomputed| log-probability
    bias: NonNegative  # mean of claimed - recomputed that is let pass in any case, nats


class EvalSpec(Message, frozen=True, omit_defaults=True):
    """Held-out evaluation of the greedy policy, by the learner, every ``every`` versions and at the ends.

    ``environment``: whose held-out tasks, where not the run's own; left out of the encoding else.
    """

    tasks: Small
    every: Small
    environment: EnvironmentSpec | None = None


class RunSpec(Message, frozen=True):
    """One run. *Signed* by ``operator``, the run's key."""

    format: Literal[1]
    name: Name
    description: Text
    operator: PublicKey
    created_at: Millis
    phase: Literal["posttrain", "pretrain"]  # where it begins
    seed: Annotated[int, Meta(ge=0, le=2**53)]
    model: ModelSpec
    environment: EnvironmentSpec
    sampling: SamplingSpec
    rollout: RolloutSpec
    grpo: GrpoSpec
    verify: VerifySpec
    evaluation: EvalSpec
    admission: Admission  # at first; see ``barnraise.protocol.amendments``
    pretrain: PretrainSpec | None = None  # with phase "pretrain", and only then
