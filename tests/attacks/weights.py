"""Other weights than those of the version: smaller, coarser, older, trained on the side.

Each is tried twice: lazily, with the proofs that the wrong weights give, and
``proven``, where one prefill with the right weights makes the proofs and
log-probabilities around the tokens that the wrong ones drew.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from attacks.registry import attack
from attacks.stage import Outcome, Stage
from barnraise.kernels.models import Policy
from barnraise.kernels.prefill import prefill
from barnraise.protocol.identity import Identity

FINE_ROUNDING = (
    "where an honest engine may compute in bfloat16 these weights differ from the right ones by no more; "
    "a run whose engines are all exact tells them apart"
)
BFLOAT16 = (
    "honest bfloat16 engines differ from each other by as much as these weights from the right ones; a run "
    "that must not be served in 8 bits computes in float32"
)
MODEL_CHECKS = ("toploc-", "sampling-", "logprob-")
TUNE_STEPS = 20


def smaller(policy: Policy) -> None:
    """A model without its last layer: about what a well distilled smaller one is."""
    base: Any = policy.base
    base.layers = base.layers[:-1]
    policy.config.num_hidden_layers -= 1


def int8(policy: Policy) -> None:
    """8 bits, one scale per output row: the best that is common."""
    _round_weights(policy, 127, lambda weight: weight)


def int4(policy: Policy) -> None:
    """4 bits, one scale per 32 weights."""
    _round_weights(policy, 7, lambda weight: weight.reshape(-1, 32) if weight.numel() % 32 == 0 else weight)


def _round_weights(policy: Policy, levels: int, group: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim == 2:
                rows = group(parameter)
                scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
                parameter.copy_(((rows / scale).round() * scale).view_as(parameter))


def _drawn(stage: Stage, me: Identity, policy: Policy, *, proven: bool) -> Outcome:
    lease = stage.lend(me)
    drawn = stage.draw(lease, policy)
    if proven:
        rollouts = stage.forge(lease, [completion.tokens for completion in drawn])
    else:
        rollouts = stage.pack(lease, drawn)
    return stage.submit(me, stage.sign(me, lease, rollouts))


@attack("a model without its last layer", *MODEL_CHECKS)
def smaller_model(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="smaller", change=smaller), proven=False)


@attack("its tokens, prefilled by the right model", "sampling-")
def smaller_model_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="smaller", change=smaller), proven=True)


@attack("weights in 8 bits", *MODEL_CHECKS, least=0.0, limits=FINE_ROUNDING)
def int8_weights(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="int8", change=int8), proven=False)


@attack(
    "tokens of 8-bit weights, prefilled by the right ones",
    "sampling-",
    least=0.0,
    least_exact=0.0,
    limits=FINE_ROUNDING,
)
def int8_weights_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="int8", change=int8), proven=True)


@attack("weights in 4 bits", *MODEL_CHECKS)
def int4_weights(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="int4", change=int4), proven=False)


@attack("tokens of 4-bit weights, prefilled by the right ones", "sampling-", least=0.0, limits=FINE_ROUNDING)
def int4_weights_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="int4", change=int4), proven=True)


@attack("8-bit weights in a bfloat16 run", *MODEL_CHECKS, precision="bfloat16", least=0.0, limits=BFLOAT16)
def int8_weights_in_bfloat16(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="int8", change=int8), proven=False)


@attack(
    "tokens of 8-bit weights in a bfloat16 run, prefilled by the right ones",
    "sampling-",
    precision="bfloat16",
    least=0.0,
    limits=BFLOAT16,
)
def int8_weights_in_bfloat16_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="int8", change=int8), proven=True)


@attack(
    "tokens of 4-bit weights in a bfloat16 run, prefilled by the right ones",
    "sampling-",
    precision="bfloat16",
    least=0.0,
    limits=BFLOAT16,
)
def int4_weights_in_bfloat16_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="int4", change=int4), proven=True)


@attack("honest bfloat16 engine, float32 verifier", honest=True, precision="bfloat16")
def bfloat16_engine(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(), proven=False)


@attack("a bfloat16 engine in a float32 run", *MODEL_CHECKS, least=0.0, limits=FINE_ROUNDING)
def half_precision(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="bfloat16:"), proven=False)


@attack(
    "tokens of a bfloat16 engine in a float32 run, prefilled in float32",
    "sampling-",
    least=0.0,
    least_exact=0.0,
    limits=FINE_ROUNDING,
)
def half_precision_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(kind="bfloat16:"), proven=True)


@attack("the version before, claimed as the head", *MODEL_CHECKS)
def previous_version(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(stage.head - 1), proven=False)


@attack("tokens of the version before, prefilled by the head", "sampling-")
def previous_version_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(stage.head - 1), proven=True)


@attack("the version before in a bfloat16 run", *MODEL_CHECKS, precision="bfloat16")
def previous_version_in_bfloat16(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, stage.policy(stage.head - 1), proven=False)


def _tuned(stage: Stage) -> Policy:
    """The head, trained on the right answers by the node itself."""

    def train(policy: Policy) -> None:
        policy.model.requires_grad_(True)
        optimizer = torch.optim.AdamW(
            policy.model.parameters(), lr=1e-4 if policy.parameters < 10**7 else 1e-6
        )
        tasks = [stage.environment.task(seed, held_out=False) for seed in range(TUNE_STEPS * 4)]
        for step in range(TUNE_STEPS):
            some = tasks[step * 4 : step * 4 + 4]
            prompts = [stage.codec.encode_prompt(task.prompt) for task in some]
            answers = [
                [*stage.codec.encode_prompt(task.key[::-1]), stage.spec.model.eos_token] for task in some
            ]
            states = prefill(policy, prompts, answers, grad=True)
            targets = torch.tensor([token for answer in answers for token in answer])
            loss = torch.nn.functional.cross_entropy(policy.logits(states), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        policy.model.requires_grad_(False)

    return stage.policy(kind="tuned", change=train)


@attack("a copy that the node has tuned on the right answers", *MODEL_CHECKS)
def fine_tuned_copy(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, _tuned(stage), proven=False)


@attack("its tokens, prefilled by the right model", "sampling-")
def fine_tuned_copy_proven(stage: Stage, me: Identity, rng: Random) -> Outcome:
    return _drawn(stage, me, _tuned(stage), proven=True)
