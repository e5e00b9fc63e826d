"""Batched generation with a key-value cache, and the hidden state behind every token.

Rows are padded on the left, so that all last positions line up; a prompt's prefill is
done once for all of its samples; rows that ended are dropped from the batch and the
cache at once. Noise comes from ``barnraise.kernels.sampling``: which token is drawn
depends on seed, position and logits alone, not on the batch it was drawn in.

State ``t`` of a completion is the final (post-norm) hidden state whose logits gave
token ``t``; the first is that of the last prompt position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from barnraise.kernels.models import Policy
from barnraise.kernels.prefill import check_tokens
from barnraise.kernels.sampling import draw
from barnraise.kernels.shared_prefill import new_cache
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.spec import SamplingSpec

# (logits [B, V], original row of each, position) -> (tokens int64 [B], log-probabilities float32 [B])
Pick = Callable[[Tensor, list[int], int], tuple[Tensor, Tensor]]


class GenerationStopped(BarnraiseError):
    """``should_stop`` said so; what had been drawn is discarded."""


@dataclass(frozen=True)
class Completion:
    """One sample: T tokens (the end-of-sequence token included if drawn).

    ``logprobs``: T floats, nats, under the truncated distribution at the run's temperature.
    ``states``: [T, H] in the compute dtype.
    """

    tokens: list[int]
    logprobs: list[float]
    states: Tensor


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampling: SamplingSpec,
    eos: int | Collection[int],
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, int], None] = lambda completions, tokens: None,
    max_batch: int = 256,
) -> list[Completion]:
    """Draw one completion per (prompt, seed), in the order given.

    Args:
        prompts: token ids; equal prompts share one prefill.
        seeds: unsigned 64-bit, one per prompt; token ``t`` uses counter ``t``.
        eos: id, or ids, that end a completion; others end after ``sampling.max_new_tokens``.
        should_stop: polled before every forward pass.
        on_progress: told, after every step, the completions ended and the tokens drawn so far.
        max_batch: rows held at once.

    Raises:
        ValueError: an empty prompt, or a token id outside the vocabulary.
        GenerationStopped: ``should_stop`` returned true.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds")

    def pick(logits: Tensor, rows: list[int], position: int) -> tuple[Tensor, Tensor]:
        positions = torch.full((len(rows),), position, dtype=torch.int64, device=logits.device)
        return draw(
            logits,
            [seeds[row] for row in rows],
            positions,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
        )

    return _run(
        policy, prompts, pick, sampling.max_new_tokens, _ends(eos), should_stop, on_progress, max_batch
    )


def greedy(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos: int | Collection[int],
    should_stop: Callable[[], bool] = lambda: False,
    max_batch: int = 256,
) -> list[list[int]]:
    """The most likely token at every step, for evaluation; completions end as in ``generate``."""

    def pick(logits: Tensor, rows: list[int], position: int) -> tuple[Tensor, Tensor]:
        best = logits.max(dim=-1)
        return best.indices, best.values

    done = _run(
        policy,
        prompts,
        pick,
        max_new_tokens,
        _ends(eos),
        should_stop,
        lambda completions, tokens: None,
        max_batch,
    )
    return [completion.tokens for completion in done]


def _ends(eos: int | Collection[int]) -> frozenset[int]:
    return frozenset((eos,) if isinstance(eos, int) else eos)


def _run(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    pick: Pick,
    max_new_tokens: int,
    ends: frozenset[int],
    should_stop: Callable[[], bool],
    on_progress: Callable[[int, int], None],
    max_batch: int,
) -> list[Completion]:
    check_tokens(policy, prompts)
    completions: dict[int, Completion] = {}
    ended = drawn = 0

    def report(newly_ended: int, newly_drawn: int) -> None:
        nonlocal ended, drawn
        ended += newly_ended
        drawn += newly_drawn
        on_progress(ended, drawn)

    # Equal prompts lie side by side (stable sort), so that a batch shares prefills.
    order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), tuple(prompts[row])))
    for start in range(0, len(order), max_batch):
        rows = order[start : start + max_batch]
        done = _batch(policy, prompts, rows, pick, max_new_tokens, ends, should_stop, report)
        completions.update(zip(rows, done, strict=True))
    return [completions[row] for row in range(len(prompts))]


@torch.no_grad()
def _batch(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    rows: list[int],
    pick: Pick,
    max_new_tokens: int,
    ends: frozenset[int],
    should_stop: Callable[[], bool],
    report: Callable[[int, int], None],
) -> list[Completion]:
    steps = _Steps()
    alive = list(range(len(rows)))  # places in ``rows`` still drawing, in the order of the cache
    for position, hidden in enumerate(_forward(policy, [prompts[row] for row in rows], steps, should_stop)):
        tokens, logprobs = pick(policy.logits(hidden), [rows[place] for place in alive], position)
        ids = tokens.tolist()
        steps.add(alive, ids, logprobs, hidden)
        last = position + 1 == max_new_tokens
        keep = [] if last else [i for i, token in enumerate(ids) if token not in ends]
        report(len(alive) - len(keep), len(ids))
        if not keep:
            break
        steps.next_input = tokens if len(keep) == len(alive) else tokens[keep]
        steps.keep = None if len(keep) == len(alive) else torch.tensor(keep, device=policy.device)
        alive = [alive[i] for i in keep]
    return steps.completions(len(rows))


def _forward(
    policy: Policy, prompts: list[Sequence[int]], steps: _Steps, should_stop: Callable[[], bool]
) -> Iterator[Tensor]:
    """Hidden states [alive, H] of the last position, step after step; ``steps`` says what to feed next."""
    unique = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    width = max(len(prompt) for prompt in unique)
    padding = [width - len(prompt) for prompt in unique]
    ids = torch.tensor(
        [[0] * pad + list(p) for pad, p in zip(padding, unique, strict=True)], device=policy.device
    )
    start = torch.tensor(padding, device=policy.device)
    cache = new_cache(policy)
    arguments: dict[str, Any] = {policy.cache_argument: cache, "use_cache": True}

    def run(ids: Tensor, first: int, start: Tensor) -> Tensor:
        if should_stop():
            raise GenerationStopped("generation was stopped")
        columns = torch.arange(first, first + ids.shape[1], device=policy.device)
        positions = (columns[None] - start[:, None]).clamp_(min=0)
        mask = None
        if ragged:  # without padding the model's own causal mask is all that is needed
            mask = (torch.arange(first + ids.shape[1], device=policy.device)[None] >= start[:, None]).long()
        return policy.hidden(ids, attention_mask=mask, position_ids=positions, **arguments)[:, -1]

    ragged = any(padding)
    hidden = run(ids, 0, start)
    if len(unique) < len(prompts):
        place = {prompt: i for i, prompt in enumerate(unique)}
        spread = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=policy.device)
        cache.batch_select_indices(spread)
        hidden, start = hidden[spread], start[spread]
    yield hidden
    while True:
        if steps.keep is not None:
            cache.batch_select_indices(steps.keep)
            start = start[steps.keep]
        yield run(steps.next_input[:, None], width, start)
        width += 1


class _Steps:
    """What every step drew, and what the next one is fed."""

    def __init__(self) -> None:
        self.next_input: Tensor
        self.keep: Tensor | None = None  # places of the last step's rows to keep; None: all
        self._places: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[Tensor] = []
        self._states: list[Tensor] = []

    def add(self, places: list[int], tokens: list[int], logprobs: Tensor, states: Tensor) -> None:
        self._places += places
        self._tokens += tokens
        self._logprobs.append(logprobs)
        self._states.append(states)

    def completions(self, count: int) -> list[Completion]:
        """Regroup the steps' rows by place; within a place they are in order already."""
        order = sorted(range(len(self._places)), key=self._places.__getitem__)  # stable
        lengths = [0] * count
        for place in self._places:
            lengths[place] += 1
        index = torch.tensor(order, device=self._states[0].device)
        states = torch.split(torch.cat(self._states)[index], lengths)
        logprobs = torch.cat(self._logprobs).tolist()
        result = []
        first = 0
        for length, state in zip(lengths, states, strict=True):
            own = order[first : first + length]
            first += length
            result.append(Completion([self._tokens[i] for i in own], [logprobs[i] for i in own], state))
        return result
