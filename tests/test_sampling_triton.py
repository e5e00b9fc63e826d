"""Triton's noise and draws against the torch reference: equal to the bit, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from triton_support import kernels

from barnraise.kernels import sampling
from barnraise.kernels.sampling import philox4x32

fused = kernels("sampling_triton")

SEEDS = [0, 1, 0x0123456789ABCDEF, 2**64 - 1]
PLACES = torch.tensor([0, 7, 2**31, 2**32 - 1])


@pytest.mark.parametrize("vocab", [1, 30, 1024, 4099])
def test_the_noise_is_that_of_the_reference_to_the_bit(vocab: int) -> None:
    groups = (vocab + 3) // 4
    keys = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32] for seed in SEEDS])
    zero = torch.zeros(1, 1, dtype=torch.int64)
    words = philox4x32((torch.arange(groups)[None], PLACES[:, None], zero, zero), (keys[:, :1], keys[:, 1:]))
    expected = torch.stack(words, dim=-1).view(4, groups * 4)[:, :vocab] >> 9
    assert torch.equal(fused.uniform_integers(SEEDS, PLACES, vocab).long(), expected)
    assert torch.equal(fused.gumbel(SEEDS, PLACES, vocab), sampling.gumbel(SEEDS, PLACES, vocab))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "temperature", "top_k", "top_p"),
    [(1, 1.0, 0, 1.0), (1000, 0.7, 0, 1.0), (1025, 1.3, 50, 0.9), (2100, 0.6, 0, 0.8)],
)
def test_draws_are_those_of_the_reference_to_the_bit(
    dtype: torch.dtype, vocab: int, temperature: float, top_k: int, top_p: float
) -> None:
    rows = 8
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    logits[1] = 0  # all tie, so that only the noise decides, and truncation keeps all
    logits[2, : vocab // 2] = -torch.inf  # a mask, with blocks that hold nothing else
    logits[3] *= 1e4
    seeds, places = [5**row for row in range(rows)], torch.arange(rows)
    own = sampling.draw(logits, seeds, places, temperature, top_k, top_p)
    tokens, logprobs = fused.draw(logits, seeds, places, temperature, top_k, top_p)
    assert torch.equal(tokens, own[0])
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, own[1], rtol=1e-6, atol=1e-5)


def test_of_equal_perturbed_values_the_lower_index_wins_across_blocks() -> None:
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, [500, 2500]] = 1e30  # noise is lost in them: both are the same float32
    tokens, _ = fused.draw(logits, [3], torch.tensor([0]), 1.0)
    assert tokens.tolist() == [500]


def test_broken_logits_give_a_token_of_the_vocabulary_and_a_broken_log_probability() -> None:
    tokens, logprobs = fused.draw(torch.full((1, 5), torch.nan), [3], torch.tensor([0]), 1.0)
    assert 0 <= int(tokens) < 5
    assert bool(logprobs.isnan().all())


def test_rows_with_gaps_between_them_are_read_where_they_are() -> None:
    wide = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    for part in (wide[:, :40], wide[::2], wide[:3].T):
        rows = len(part)
        arguments = (list(range(rows)), torch.arange(rows), 0.9)
        assert torch.equal(fused.draw(part, *arguments)[0], sampling.draw(part, *arguments)[0])


def test_no_rows_give_no_draws() -> None:
    tokens, logprobs = fused.draw(torch.empty(0, 9), [], torch.empty(0, dtype=torch.int64), 1.0)
    assert tokens.shape == logprobs.shape == (0,)
    assert fused.gumbel([], torch.empty(0, dtype=torch.int64), 9).shape == (0, 9)
