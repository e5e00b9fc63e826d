"""What every engine does with a unit before and after it draws: prompts and seeds in, rollouts out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from barnraise.kernels.tokens import Codec
from barnraise.node.engine import Progress, Work
from barnraise.protocol.environments import Environment
from barnraise.protocol.messages import Rollout
from barnraise.protocol.seeds import sample_seed, task_seed

_PROGRESS_S = 0.05


def draw_tasks(environment: Environment, codec: Codec, work: Work) -> tuple[list[list[int]], list[int]]:
    """Prompt tokens and noise seed of every sample, ordered by prompt, then sample."""
    prompts: list[list[int]] = []
    seeds: list[int] = []
    for prompt in range(work.prompts):
        seed = task_seed(work.run_id, work.lease_id, work.node, prompt)
        task = environment.task(seed, held_out=False)
        prompts += [codec.encode_prompt(task.prompt)] * work.group_size
        seeds += [
            sample_seed(work.run_id, work.lease_id, prompt, sample) for sample in range(work.group_size)
        ]
    return prompts, seeds


def pack(work: Work, row: int, tokens: Sequence[int], logprobs: Sequence[float], proofs: bytes) -> Rollout:
    """Completion ``row`` of the unit as it is sent."""
    return Rollout(
        prompt=row // work.group_size,
        sample=row % work.group_size,
        tokens=np.asarray(tokens, dtype="<u4").tobytes(),
        logprobs=np.asarray(logprobs, dtype="<f4").tobytes(),
        proofs=proofs,
    )


class Throttle:
    """Passes progress on at most every 50 ms: a tiny model makes thousands of steps a second."""

    def __init__(self, progress: Callable[[Progress], None]) -> None:
        self._progress = progress
        self._next = 0.0

    def __call__(self, completions: int, tokens: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_S
            self._progress(Progress(completions=completions, tokens=tokens))
