"""Prefill of many completions of few prompts: every prompt is run once, its keys and values are reused.

A group of G samples costs P + sum C_i tokens instead of G P + sum C_i. Prompts are padded
on the left, so that all of them end at the same position; completions follow in batches
of like length, padded on the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from barnraise.kernels.models import Policy

# Sharing adds masks and copies of keys and values: it must save this share of the tokens.
LEAST_SAVING = 0.2
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def only_attends(policy: Policy) -> bool:
    """Whether all layers are attention, whose masks make a plain cache right for every row."""
    text = policy.config.get_text_config(decoder=True)
    return set(getattr(text, "layer_types", None) or ()) <= _ATTENTION


def new_cache(policy: Policy) -> Any:
    """An empty key-value cache (transformers' ``DynamicCache``) that keeps every position.

    One made from the config drops what is outside of any "sliding_window" it finds there,
    even where the architecture ignores that setting. One that keeps all is right for every
    attention, whose masks do the rest; only layers of another kind need to be told apart.
    """
    from transformers import DynamicCache

    from barnraise.kernels.growing_cache import growing_cache

    return growing_cache() if only_attends(policy) else DynamicCache(config=policy.config)


def saves(policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> bool:
    """Whether ``shared_states`` is worth it here, and possible."""
    prompt_tokens = sum(map(len, prompts))
    unique = sum(map(len, {tuple(prompt) for prompt in prompts}))
    total = prompt_tokens + sum(map(len, completions))
    return prompt_tokens - unique > LEAST_SAVING * total and only_attends(policy)


@torch.no_grad()
def shared_states(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    max_tokens: int,
) -> list[Tensor]:
    """As ``barnraise.kernels.prefill.prefill`` without gradients, for completions of at least one token.

    ``max_tokens`` bounds the tokens of a forward pass, and those whose keys and values are held.
    """
    states: list[Tensor] = [torch.empty(0)] * len(prompts)
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    for unique in _prompt_batches(list(rows_of), max_tokens):
        width = len(unique[0])
        padding = [width - len(prompt) for prompt in unique]
        cache = new_cache(policy)
        ids = [[0] * pad + list(prompt) for pad, prompt in zip(padding, unique, strict=True)]
        hidden = _run(policy, ids, padding, 0, cache)
        place = {row: i for i, prompt in enumerate(unique) for row in rows_of[prompt]}
        for row, i in place.items():
            states[row] = hidden[i, -1:]
        longer = [row for row in place if len(completions[row]) > 1]
        for batch in _completion_batches(longer, completions, width, max_tokens):
            # The last token is never fed.
            longest = len(completions[batch[0]]) - 1
            ids = [[*completions[row][:-1], *[0] * (longest + 1 - len(completions[row]))] for row in batch]
            chosen = torch.tensor([place[row] for row in batch], device=policy.device)
            part = new_cache(policy)
            for number, layer in enumerate(cache.layers):
                part.update(layer.keys[chosen], layer.values[chosen], number)
            hidden = _run(policy, ids, [padding[place[row]] for row in batch], width, part)
            for row, values in zip(batch, hidden, strict=True):
                states[row] = torch.cat([states[row], values[: len(completions[row]) - 1]])
    return states


def _run(policy: Policy, ids: list[list[int]], padding: list[int], first: int, cache: Any) -> Tensor:
    """Feed ``ids`` behind the ``first`` positions that ``cache`` holds; states [B, L, H]."""
    tokens = torch.tensor(ids, dtype=torch.int64, device=policy.device)
    start = torch.tensor(padding, device=policy.device)[:, None]
    end = first + tokens.shape[1]
    positions = (torch.arange(first, end, device=policy.device)[None] - start).clamp_(min=0)
    # What is padded on the right needs no mask: nothing real comes after it.
    mask = (torch.arange(end, device=policy.device)[None] >= start).long() if any(padding) else None
    arguments = {policy.cache_argument: cache, "use_cache": True}
    return policy.hidden(tokens, attention_mask=mask, position_ids=positions, **arguments)


def _prompt_batches(prompts: list[tuple[int, ...]], max_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Prompts of like length, longest first, at most ``max_tokens`` padded tokens together."""
    batch: list[tuple[int, ...]] = []
    for prompt in sorted(prompts, key=lambda prompt: -len(prompt)):
        if batch and (len(batch) + 1) * len(batch[0]) > max_tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def _completion_batches(
    rows: list[int], completions: Sequence[Sequence[int]], width: int, max_tokens: int
) -> Iterator[list[int]]:
    """Rows of like completion length, longest first; prompts count, for their keys and values are copied."""
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: -len(completions[row])):
        if batch and (len(batch) + 1) * (width + len(completions[batch[0]])) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
