"""Generation and prefill agree, whatever the batch and the architecture."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.kernels.generate import Completion, GenerationStopped, generate, greedy
from barnraise.kernels.models import Policy, _wrap
from barnraise.kernels.prefill import prefill
from barnraise.kernels.sampling import margins
from barnraise.kernels.shared_prefill import saves, shared_states
from barnraise.protocol.spec import SamplingSpec

torch.set_num_threads(1)
EOS = 1
ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "mistral", "gemma2", "gpt2")


@lru_cache
def policy_of(architecture: str) -> Policy:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(1)
    values: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6 if architecture == "gemma3_text" else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        # Shorter than the sequences below. Llama ignores it, and so must the cache.
        "sliding_window": 6,
        "initializer_range": 0.2,  # peaked distributions, as a trained model's
    }
    if architecture == "gpt2":
        values = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**values))
    return _wrap(model.eval(), torch.device("cpu"), torch.float32)


def some_prompts(count: int = 6, longest: int = 13) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, 40) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def sampling(**changes: Any) -> SamplingSpec:
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 16}
    return SamplingSpec(**(values | changes))


def same(left: list[Completion], right: list[Completion]) -> None:
    assert [completion.tokens for completion in left] == [completion.tokens for completion in right]
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.states, b.states, atol=1e-4, rtol=1e-4)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_of_generation_are_those_of_prefill(architecture: str) -> None:
    policy = policy_of(architecture)
    prompts = [prompt for prompt in some_prompts() for _ in range(4)]
    done = generate(policy, prompts, range(len(prompts)), sampling(), EOS)
    assert len({len(completion.tokens) for completion in done}) > 1  # some ended early
    states = prefill(policy, prompts, [completion.tokens for completion in done], max_tokens=100)
    for completion, state in zip(done, states, strict=True):
        torch.testing.assert_close(completion.states, state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_token_does_not_depend_on_the_batch_it_was_drawn_in(architecture: str) -> None:
    policy = policy_of(architecture)
    prompts = [prompt for prompt in some_prompts() for _ in range(2)]
    seeds = [2**64 - 1 - i for i in range(len(prompts))]
    together = generate(policy, prompts, seeds, sampling(), EOS)
    same(together, generate(policy, prompts, seeds, sampling(), EOS, max_batch=5))
    alone = [generate(policy, [p], [s], sampling(), EOS)[0] for p, s in zip(prompts, seeds, strict=True)]
    same(together, alone)
    backwards = generate(policy, prompts[::-1], seeds[::-1], sampling(), EOS)
    same(together, backwards[::-1])


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}])
def test_every_token_is_the_sample_that_its_seed_gives(changes: dict[str, Any]) -> None:
    policy, spec = policy_of("qwen3"), sampling(**changes)
    prompts = some_prompts()
    done = generate(policy, prompts, range(6), spec, EOS)
    states = torch.cat(prefill(policy, prompts, [completion.tokens for completion in done]))
    tokens = torch.tensor([token for completion in done for token in completion.tokens])
    seeds = [seed for seed, completion in enumerate(done) for _ in completion.tokens]
    positions = torch.tensor([t for completion in done for t in range(len(completion.tokens))])
    with torch.no_grad():
        margin, logprob = margins(
            policy.logits(states),
            tokens,
            seeds,
            positions,
            spec.temperature,
            spec.top_k,
            spec.top_p,
        )
    assert margin.max() < 1e-3
    claimed = torch.tensor([value for completion in done for value in completion.logprobs])
    torch.testing.assert_close(claimed, logprob, atol=1e-3, rtol=1e-3)


def test_completions_end_with_the_end_token_or_at_the_limit() -> None:
    done = generate(policy_of("llama"), [[5, 6]] * 40, range(40), sampling(max_new_tokens=12), EOS)
    for completion in done:
        tokens = completion.tokens
        assert EOS not in tokens[:-1]
        assert tokens[-1] == EOS or len(tokens) == 12
        assert len(completion.logprobs) == len(completion.states) == len(tokens)
        assert max(completion.logprobs) <= 0.0
    assert {completion.tokens[-1] == EOS for completion in done} == {True, False}


def test_any_of_several_end_tokens_ends_a_completion() -> None:
    ends = {EOS, 3, 9}
    done = generate(policy_of("llama"), [[5, 6]] * 20, range(20), sampling(max_new_tokens=12), ends)
    assert all(not ends.intersection(completion.tokens[:-1]) for completion in done)
    assert len(ends.intersection(completion.tokens[-1] for completion in done)) > 1


def test_greedy_takes_the_most_likely_token_at_every_step() -> None:
    policy, prompts = policy_of("gemma3_text"), some_prompts(4)
    tokens = greedy(policy, prompts, 8, EOS)
    for states, chosen in zip(prefill(policy, prompts, tokens), tokens, strict=True):
        assert policy.logits(states).argmax(dim=-1).tolist() == chosen


def test_progress_counts_finished_work_and_ends_complete() -> None:
    seen: list[tuple[int, int]] = []
    done = generate(
        policy_of("llama"),
        some_prompts(8),
        range(8),
        sampling(),
        EOS,
        on_progress=lambda completions, tokens: seen.append((completions, tokens)),
        max_batch=3,
    )
    assert seen == sorted(seen)
    assert seen[-1] == (8, sum(len(completion.tokens) for completion in done))


def test_should_stop_is_asked_before_every_forward_pass() -> None:
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 4

    with pytest.raises(GenerationStopped):
        generate(policy_of("llama"), [[5, 6]], [0], sampling(), 39, should_stop)
    assert asked == 4


def test_one_token_completions_and_one_token_prompts_work() -> None:
    policy = policy_of("qwen3")
    done = generate(policy, [[2], [3, 4]], [0, 1], sampling(max_new_tokens=1), EOS)
    assert [len(completion.tokens) for completion in done] == [1, 1]
    assert generate(policy, [], [], sampling(), EOS) == []


def test_tokens_outside_the_vocabulary_and_empty_prompts_are_refused() -> None:
    policy = policy_of("qwen3")
    for prompt in ([], [40], [-1]):
        with pytest.raises(ValueError, match=r"no tokens|outside the vocabulary"):
            generate(policy, [prompt], [0], sampling(), EOS)
        with pytest.raises(ValueError, match=r"no tokens|outside the vocabulary"):
            prefill(policy, [prompt], [[2]])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        prefill(policy, [[2]], [[2, 40]])


@pytest.mark.parametrize(
    ("architecture", "max_tokens"),
    [*((name, 60) for name in ARCHITECTURES), ("llama", 1), ("qwen3", 10_000)],
)
def test_prompts_that_many_completions_share_give_the_states_of_plain_prefill(
    architecture: str, max_tokens: int
) -> None:
    policy = policy_of(architecture)
    rng = random.Random(2)
    prompts = [prompt for prompt in some_prompts(4) for _ in range(5)]
    completions = [[rng.randrange(40) for _ in range(rng.randrange(1, 20))] for _ in prompts]
    order = rng.sample(range(len(prompts)), len(prompts))
    prompts, completions = [prompts[i] for i in order], [completions[i] for i in order]
    shared = shared_states(policy, prompts, completions, max_tokens)
    for prompt, completion, state in zip(prompts, completions, shared, strict=True):
        assert state.shape == (len(completion), policy.hidden_size)
        torch.testing.assert_close(state, prefill(policy, [prompt], [completion])[0], atol=1e-4, rtol=1e-4)


def test_sharing_is_chosen_where_it_saves_and_leaves_out_empty_completions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = policy_of("qwen3")
    long, short = list(range(2, 14)), [3]
    assert saves(policy, [long] * 4, [[5]] * 4)
    assert not saves(policy, [long], [[5]])
    assert not saves(policy, [short] * 4, [[5] * 9] * 4)
    completions = [[5, 6], [], [7], [8, 9, 10], [1]]
    states = prefill(policy, [long] * 5, completions)
    monkeypatch.setattr("barnraise.kernels.prefill.saves", lambda *_: False)
    for mine, plain in zip(states, prefill(policy, [long] * 5, completions), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


def test_prefill_with_gradients_gives_the_same_states_and_a_graph() -> None:
    policy = policy_of("qwen3")
    prompts, completions = [[2, 3], [4], [5, 6, 7]], [[8, 9, 10], [], [11]]
    plain = prefill(policy, prompts, completions)
    assert [len(states) for states in plain] == [3, 0, 1]
    states = prefill(policy, prompts, completions, grad=True)
    torch.testing.assert_close(states, torch.cat(plain))
    states.sum().backward()
    gradient = policy.base.embed_tokens.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    policy.model.zero_grad()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 39), min_size=1, max_size=9), st.lists(st.integers(0, 39), max_size=9)
        ),
        max_size=6,
    ),
    st.integers(1, 40),
)
def test_prefill_does_not_depend_on_batching(
    pairs: list[tuple[list[int], list[int]]], max_tokens: int
) -> None:
    policy = policy_of("llama")
    together = prefill(policy, [p for p, _ in pairs], [c for _, c in pairs], max_tokens)
    for (prompt, completion), states in zip(pairs, together, strict=True):
        assert states.shape == (len(completion), policy.hidden_size)
        torch.testing.assert_close(states, prefill(policy, [prompt], [completion])[0], atol=1e-5, rtol=1e-5)


def test_a_cache_that_grows_in_place_holds_what_transformers_own_does() -> None:
    """Across prompts, single tokens, rows that end, are repeated, and positions that are cut off."""
    from transformers import DynamicCache

    from barnraise.kernels.growing_cache import LEAST_SPARE, growing_cache

    ours, theirs = growing_cache(), DynamicCache()
    random = torch.Generator().manual_seed(0)

    def add(rows: int, tokens: int) -> None:
        new = [torch.randn(rows, 2, tokens, 3, generator=random) for _ in range(2)]
        with torch.no_grad():
            for mine, other in zip(ours.update(*new, 0), theirs.update(*new, 0), strict=True):
                assert torch.equal(mine, other)

    add(2, 5)
    for cache in (ours, theirs):
        cache.batch_select_indices(torch.tensor([1, 0, 1, 1]))
    for _ in range(LEAST_SPARE + 2):
        add(4, 1)
    for cache in (ours, theirs):
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
    add(4, 3)
    for cache in (ours, theirs):
        cache.crop(-2)
    add(4, 1)
    assert ours.get_seq_length() == theirs.get_seq_length()
    with torch.enable_grad():
        added = [torch.ones(4, 2, 1, 3, requires_grad=True) for _ in range(2)]
        keys, _ = ours.update(*added, 0)
        keys.sum().backward()
    assert added[0].grad is not None
