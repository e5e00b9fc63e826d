"""Hidden states of given completions by batched prefill: what verifier and learner see.

Aligned as in ``barnraise.kernels.generate``: state ``t`` produced completion token
``t``; the first is that of the last prompt position, and the last token is never fed.

Where many completions share few prompts, those are run once (``barnraise.kernels.shared_prefill``).
Else rows are padded on the right: under a causal mask no real position can see what comes after it,
so no attention mask is needed and the fast causal kernels apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from barnraise.kernels.models import Policy
from barnraise.kernels.shared_prefill import saves, shared_states


@overload
def prefill(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    max_tokens: int = ...,
    *,
    grad: Literal[False] = ...,
) -> list[Tensor]: ...
@overload
def prefill(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    max_tokens: int = ...,
    *,
    grad: Literal[True],
) -> Tensor: ...
def prefill(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    max_tokens: int = 16_384,
    *,
    grad: bool = False,
) -> list[Tensor] | Tensor:
    """States of every completion token under ``policy``.

    Args:
        prompts: token ids of each prompt, at least one each.
        completions: T_i token ids each; zero is allowed and gives no states.
        max_tokens: padded tokens per forward pass (a longer sequence runs alone).
        grad: keep the graph; then the caller bounds memory by how many sequences it passes.

    Returns:
        One tensor [T_i, H] per sequence; with ``grad``, their concatenation [sum T_i, H] with its graph.
        In the policy's compute dtype, in the order given.

    Raises:
        ValueError: lengths differ, a prompt is empty, or a token id is outside the vocabulary.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts but {len(completions)} completions")
    rows = [[*prompt, *completion[:-1]] for prompt, completion in zip(prompts, completions, strict=True)]
    check_tokens(policy, prompts)
    check_tokens(policy, (completion for completion in completions if completion))
    states: list[Tensor] = [torch.empty(0, policy.hidden_size, dtype=policy.compute_dtype)] * len(rows)
    wanted = [i for i, completion in enumerate(completions) if completion]
    if not grad:
        asked, given = [prompts[i] for i in wanted], [completions[i] for i in wanted]
        if saves(policy, asked, given):
            for i, state in zip(wanted, shared_states(policy, asked, given, max_tokens), strict=True):
                states[i] = state
            return states
    with torch.set_grad_enabled(grad):
        for batch in _batches(wanted, [len(row) for row in rows], max_tokens):
            hidden = policy.hidden(_right_padded([rows[i] for i in batch], policy.device), use_cache=False)
            for i, row in zip(batch, hidden, strict=True):
                states[i] = row[len(prompts[i]) - 1 : len(rows[i])]
        return torch.cat(states) if grad else states


def check_tokens(policy: Policy, sequences: Sequence[Sequence[int]] | Iterator[Sequence[int]]) -> None:
    """Raise ValueError where a sequence is empty or an id is outside the vocabulary (torch would crash)."""
    for tokens in sequences:
        if not tokens:
            raise ValueError("a prompt has no tokens")
        if min(tokens) < 0 or max(tokens) >= policy.vocabulary:
            raise ValueError(f"a token id is outside the vocabulary of {policy.vocabulary}")


def _batches(wanted: list[int], lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Cut ``wanted`` into batches of like length and at most ``max_tokens`` padded tokens, longest first."""
    batch: list[int] = []
    for i in sorted(wanted, key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _right_padded(rows: list[list[int]], device: torch.device) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64, device=device)
