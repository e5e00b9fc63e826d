"""Seeded sampling: published vectors, exact reproducibility, and the right distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.kernels.sampling import (
    draw,
    gumbel,
    margins,
    philox4x32,
)


def _word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (_word(value) for value in counter)
    words = philox4x32((c0, c1, c2, c3), (_word(key[0]), _word(key[1])))
    assert tuple(int(word) for word in words) == expected


def test_noise_is_the_documented_function_of_seed_position_and_index() -> None:
    seed, position, vocab = 0x0123_4567_89AB_CDEF, 7, 11
    noise = gumbel([seed], torch.tensor([position]), vocab)[0]
    for index in range(vocab):
        words = philox4x32(
            (_word(index // 4), _word(position), _word(0), _word(0)),
            (_word(0x89AB_CDEF), _word(0x0123_4567)),
        )
        uniform = torch.tensor(((int(words[index % 4]) >> 9) + 0.5) * 2.0**-23, dtype=torch.float32)
        assert uniform.double() == ((int(words[index % 4]) >> 9) + 0.5) * 2.0**-23
        assert noise[index] == (-(-uniform.double().log()).log()).float()


def test_the_extreme_uniforms_give_finite_noise() -> None:
    for word in (0, 0xFFFFFFFF):
        uniform = ((word >> 9) + 0.5) * 2.0**-23
        assert 0.0 < uniform < 1.0
        assert torch.tensor(uniform, dtype=torch.float32).double() == uniform


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=9),
    st.integers(1, 300),
    st.randoms(use_true_random=False),
)
def test_noise_has_the_same_bits_in_every_batch_shape_and_order(rows, vocab, random) -> None:  # type: ignore[no-untyped-def]
    seeds = [seed for seed, _ in rows]
    positions = torch.tensor([position for _, position in rows])
    whole = gumbel(seeds, positions, vocab)
    assert torch.isfinite(whole).all()
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = gumbel([seeds[i] for i in order], positions[order], vocab)
    assert torch.equal(shuffled, whole[order])
    for i in order:
        assert torch.equal(gumbel([seeds[i]], positions[i : i + 1], vocab), whole[i : i + 1])
        assert torch.equal(gumbel([seeds[i]], positions[i : i + 1], vocab + 5)[:, :vocab], whole[i : i + 1])


def test_a_large_vocabulary_has_the_same_bits_alone_and_in_a_batch() -> None:
    seeds, positions = [3, 2**63 + 1, 5], torch.tensor([0, 9, 1000])
    whole = gumbel(seeds, positions, 49_152)
    for i in range(3):
        assert torch.equal(gumbel(seeds[i : i + 1], positions[i : i + 1], 49_152)[0], whole[i])


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])
    count, temperature = 40_000, 1.7
    tokens, logprobs = draw(
        logits.expand(count, 5), list(range(count)), torch.zeros(count, dtype=torch.int64), temperature
    )
    expected = (logits / temperature).softmax(0)
    observed = tokens.bincount(minlength=5) / count
    chi_square = (count * (observed - expected) ** 2 / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_noise_is_independent_between_positions_of_one_seed() -> None:
    noise = gumbel([42] * 2000, torch.arange(2000), 8).double()
    correlation = torch.corrcoef(noise.T)
    assert (correlation - torch.eye(8)).abs().max() < 0.1
    assert torch.corrcoef(torch.stack([noise[:-1, 0], noise[1:, 0]]))[0, 1].abs() < 0.1


def test_top_k_keeps_the_k_most_likely_and_renormalises() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(500, 4)
    tokens, logprobs = draw(logits, list(range(500)), torch.zeros(500, dtype=torch.int64), 1.0, top_k=2)
    assert set(tokens.tolist()) == {1, 3}
    expected = torch.tensor([3.0, 2.0]).log_softmax(0)
    torch.testing.assert_close(logprobs, torch.where(tokens == 1, expected[0], expected[1]))


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(800, 4)
    zeros = torch.zeros(800, dtype=torch.int64)
    tokens, logprobs = draw(logits, list(range(800)), zeros, 1.0, top_p=0.75)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs.exp().unique(), torch.tensor([0.375, 0.625]))
    assert set(draw(logits, list(range(800)), zeros, 1.0, top_p=1e-6)[0].tolist()) == {0}


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (7, 0.7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_honest_token_has_margin_zero_and_the_same_logprob(
    top_k: int, top_p: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(64, 37) * 2).to(dtype)
    seeds, positions = list(range(64)), torch.arange(64)
    tokens, logprobs = draw(logits, seeds, positions, 0.9, top_k, top_p)
    margin, again = margins(logits, tokens, seeds, positions, 0.9, top_k, top_p)
    assert margin.dtype == again.dtype == torch.float32
    assert torch.equal(margin, torch.zeros(64))
    torch.testing.assert_close(again, logprobs)


def test_another_token_has_the_gap_of_its_perturbed_value_as_margin() -> None:
    torch.manual_seed(2)
    logits = torch.randn(10, 6)
    seeds, positions = list(range(10)), torch.arange(10)
    perturbed = logits / 0.8 + gumbel(seeds, positions, 6)
    for token in range(6):
        margin, _ = margins(logits, torch.full((10,), token), seeds, positions, 0.8)
        torch.testing.assert_close(margin, perturbed.amax(1) - perturbed[:, token])


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.6}])
def test_a_token_outside_the_allowed_set_has_the_shift_that_would_admit_it_as_margin(
    options: dict[str, Any],
) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    margin, logprob = margins(logits, torch.tensor([0]), [1], torch.tensor([0]), 1.0, **options)
    assert margin.item() > 0.5
    assert logprob.item() < -2  # as if it had been kept
    hopeless, _ = margins(50 * logits, torch.tensor([0]), [1], torch.tensor([0]), 1.0, **options)
    assert hopeless.item() == float("inf")


TRUNCATIONS = [(0, 1.0), (4, 1.0), (0, 0.6), (6, 0.8), (0, 0.97)]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(TRUNCATIONS),
    st.floats(0.3, 2.0),
    st.sampled_from([0.003, 0.05, 0.3]),
    st.integers(0, 2**32),
)
def test_honest_noise_in_the_logits_costs_little_more_than_its_size(
    truncation: tuple[int, float], temperature: float, noise: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(400, 12) * 2
    noisy = logits + noise * (torch.rand(400, 12) - 0.5)
    seeds, positions = list(range(seed, seed + 400)), torch.arange(400)
    tokens, logprobs = draw(noisy, seeds, positions, temperature, *truncation)
    margin, again = margins(logits, tokens, seeds, positions, temperature, *truncation)
    # Any two logits differ by less than ``noise`` more or less; the ladder's steps are sqrt(2) apart.
    assert margin.max() <= max(noise / temperature * 1.42, 2.0**-10) + 1e-5
    assert torch.isfinite(again).all()
    # The border may move by a token, which is then in one sum and not in the other.
    assert (again - logprobs).abs().max() < (0.7 if truncation != (0, 1.0) else 0) + noise / temperature


@pytest.mark.parametrize(
    ("spec", "cheat"),
    [
        ((1.0, 0, 1.0), (0.8, 0, 1.0)),
        ((1.0, 0, 1.0), (1.2, 0, 1.0)),
        ((1.0, 0, 1.0), (1.0, 8, 1.0)),
        ((1.0, 0, 1.0), (1.0, 0, 0.9)),
        ((1.0, 8, 1.0), (1.0, 0, 1.0)),
        ((1.0, 0, 0.9), (1.0, 0, 1.0)),
        ((0.7, 0, 0.9), (0.7, 0, 0.6)),
        ((0.7, 20, 0.9), (1.0, 20, 0.9)),
    ],
)
def test_tokens_drawn_by_other_settings_have_large_margins(
    spec: tuple[float, int, float], cheat: tuple[float, int, float]
) -> None:
    torch.manual_seed(8)
    logits = torch.randn(1000, 60) * 2
    seeds, positions = list(range(1000)), torch.arange(1000)
    tokens, _ = draw(logits, seeds, positions, *cheat)
    margin, _ = margins(logits, tokens, seeds, positions, *spec)
    assert margin.mean() > 0.01  # honest bfloat16: 0.001 to 0.002
    assert margin.max() > 1.0


def test_seeds_and_positions_must_pair_up() -> None:
    with pytest.raises(ValueError, match="2 seeds need 2 positions"):
        gumbel([1, 2], torch.tensor([0]), 4)
