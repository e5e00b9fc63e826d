"""Packed sequences: what they compute is what each would alone, values and gradients, in every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from barnraise.kernels import packing
from barnraise.kernels.models import Policy, random_policy
from barnraise.kernels.packing import enable, pack, packed_states, packed_tokens
from barnraise.kernels.prefill import prefill

SMALL: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
PROMPTS = [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4], [7], [1, 2, 3, 4]]
COMPLETIONS = [[8, 9, 1, 2, 3, 4, 5], [9, 9, 9], [10], [3, 1, 4, 1, 5, 9, 2, 6], [8, 2]]


def small(kind: str) -> Policy:
    import transformers

    extra: dict[str, Any] = {
        "Mistral": {"sliding_window": 3},
        "Gemma2": {"sliding_window": 3, "query_pre_attn_scalar": 8},
        "Gemma3Text": {"sliding_window": 3, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
        "Qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    }.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**SMALL, **extra)
    return random_policy(config, "float32", "cpu", seed=3)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Mistral"])
def test_packed_sequences_are_what_each_is_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small(kind)
    policy.model.requires_grad_(True)
    alone = [
        prefill(policy, [prompt], [tokens], grad=True)
        for prompt, tokens in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    along = torch.randn(sum(map(len, COMPLETIONS)), policy.hidden_size)
    results = []
    for elements in (0, packing.PART_ELEMENTS, 60):
        policy.model.zero_grad(set_to_none=True)
        if elements:
            assert enable(policy)
            monkeypatch.setattr(packing, "PART_ELEMENTS", elements)
            packed = pack(PROMPTS, COMPLETIONS, policy.device)
            assert packed.tokens == packed_tokens(PROMPTS, COMPLETIONS) == 7 + 16
            states = packed_states(policy, packed)
        else:
            states = torch.cat(alone)
        (states * along).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
        results.append([states.detach(), *gradients])
    for each in results[1:]:
        for one, other in zip(results[0], each, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5 * float(one.abs().max()) + 1e-5)


def test_other_sequences_in_the_row_change_nothing() -> None:
    policy = small("Llama")
    assert enable(policy)
    with torch.no_grad():
        first = packed_states(policy, pack(PROMPTS, COMPLETIONS, policy.device))
        changed = [COMPLETIONS[0], [11, 12, 13], *COMPLETIONS[2:]]
        other = packed_states(policy, pack([PROMPTS[0], [14, 15], *PROMPTS[2:]], changed, policy.device))
    untouched = [*range(7), *range(10, len(first))]
    torch.testing.assert_close(first[untouched], other[untouched], rtol=0, atol=1e-6)
    assert not torch.allclose(first[7:10], other[7:10])


def test_an_enabled_policy_generates_as_before() -> None:
    policy, plain = small("Gemma3Text"), small("Gemma3Text")
    assert enable(policy)
    rows = [prefill(each, PROMPTS, COMPLETIONS) for each in (policy, plain)]
    assert all(torch.equal(one, other) for one, other in zip(*rows, strict=True))


def test_what_cannot_be_packed_says_so() -> None:
    import transformers

    assert not enable(
        random_policy(
            transformers.GPTNeoConfig(
                vocab_size=17,
                hidden_size=16,
                num_layers=2,
                num_heads=2,
                attention_types=[[["global", "local"], 1]],
            ),
            "float32",
            "cpu",
            seed=1,
        )
    )
    with pytest.raises(ValueError, match="none of them empty"):
        pack([[1]], [[]], torch.device("cpu"))
