"""From accepted submissions to rows to train on: prompts derived again, advantages per group."""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from barnraise.coordinator.workers import BatchPart, TrainJob
from barnraise.kernels.grpo import group_advantages
from barnraise.protocol.environments import Environment
from barnraise.protocol.messages import RolloutSubmission
from barnraise.protocol.seeds import task_seed
from barnraise.protocol.wire import decode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One rollout with a non-zero advantage: T completion tokens and their proven log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    advantage: float


@dataclass(frozen=True)
class Batch:
    """A version's rollouts. ``reward_mean`` and ``lag_mean`` count every group, used or not."""

    rows: list[Row]
    reward_mean: float
    lag_mean: float
    groups: int
    groups_used: int


def read_batch(
    job: TrainJob,
    environment: Environment,
    encode_prompt: Callable[[str], list[int]],
    normalise_std: bool,
) -> Batch:
    """Unpack a job's parts, which the verifier accepted before.

    Groups whose rewards are all equal teach nothing and are dropped. A part that
    cannot be read is logged and dropped too: one bad file must not stop a version.
    """
    rows: list[Row] = []
    rewards: list[float] = []
    lags: list[int] = []
    used = 0
    for part in job.parts:
        try:
            groups = _read_part(part, environment, encode_prompt)
        except Exception as error:  # decoded before, so a defect of ours or of the disk
            log.warning("version %d: lease %s left out: %s", job.version, part.lease.lease_id.hex(), error)
            continue
        for samples, group_rewards in groups:
            advantages = group_advantages(torch.tensor([group_rewards]), normalise_std)[0].tolist()
            rewards += group_rewards
            lags.append(job.version - 1 - part.lease.policy_version)
            if any(advantages):
                used += 1
                rows += [
                    Row(prompt, tokens, logprobs, advantage)
                    for (prompt, tokens, logprobs), advantage in zip(samples, advantages, strict=True)
                    if tokens
                ]
    return Batch(
        rows=rows,
        reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
        lag_mean=sum(lags) / len(lags) if lags else 0.0,
        groups=len(lags),
        groups_used=used,
    )


Sample = tuple[list[int], list[int], list[float]]


def _read_part(
    part: BatchPart, environment: Environment, encode_prompt: Callable[[str], list[int]]
) -> list[tuple[list[Sample], list[float]]]:
    lease = part.lease
    rollouts = sorted(decode(part.payload, RolloutSubmission).rollouts, key=lambda r: (r.prompt, r.sample))
    places = [(prompt, sample) for prompt in range(lease.prompts) for sample in range(lease.group_size)]
    if [(rollout.prompt, rollout.sample) for rollout in rollouts] != places or len(part.rewards) != len(
        places
    ):
        raise ValueError("its rollouts or rewards are not one per prompt and sample")
    groups = []
    for number in range(lease.prompts):
        seed = task_seed(lease.run_id, lease.lease_id, lease.node, number)
        prompt = encode_prompt(environment.task(seed, held_out=False).prompt)
        cut = slice(number * lease.group_size, (number + 1) * lease.group_size)
        samples = []
        for rollout in rollouts[cut]:
            tokens, logprobs = _unpack("I", rollout.tokens), _unpack("f", rollout.logprobs)
            if len(tokens) != len(logprobs):
                raise ValueError("a rollout has not as many log-probabilities as tokens")
            samples.append((prompt, tokens, logprobs))
        groups.append((samples, list(part.rewards[cut])))
    return groups


def _unpack(code: str, data: bytes) -> list[Any]:
    values: array[Any] = array(code)
    assert values.itemsize == 4
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
