"""Chunked log-probabilities and entropies against float64, values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from barnraise.kernels import logprobs
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.sampling import draw

N, H, V = 37, 16, 53


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    probabilities = torch.softmax(logits / temperature, dim=1)
    chosen = probabilities[torch.arange(len(targets)), targets].log()
    return chosen, -(probabilities * probabilities.log()).sum(1)


@pytest.mark.parametrize("chunk", [1, 10, N, 1000, None])
@pytest.mark.parametrize(("temperature", "with_bias", "softcap"), [(1.0, False, None), (0.6, True, 5.0)])
def test_values_and_gradients_match_float64(
    chunk: int | None, temperature: float, with_bias: bool, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(6)
    along = [torch.randn(N, generator=generator, dtype=torch.float64) for _ in range(2)]
    results = []
    for dtype, function in ((torch.float64, reference), (torch.float32, token_logprobs)):
        hidden, weight, bias, targets = example(dtype)
        leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        extra = {} if function is reference else {"chunk": chunk}
        found = function(hidden, weight, targets, temperature, bias if with_bias else None, softcap, **extra)  # type: ignore[operator]
        sum((value * way.to(dtype)).sum() for value, way in zip(found, along, strict=True)).backward()
        results.append([*found, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == len(results[1]) == (5 if with_bias else 4)
    for exact, ours in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


def test_chunking_changes_no_value() -> None:
    hidden, weight, _, targets = example()
    whole = token_logprobs(hidden, weight, targets, chunk=N)
    for part, same in zip(token_logprobs(hidden, weight, targets, chunk=5), whole, strict=True):
        torch.testing.assert_close(part, same, rtol=1e-6, atol=1e-6)


def test_logits_never_exist_whole_forward_or_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, vocabulary, rows = 512, 8, 2048, 16
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows * vocabulary)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)

    def step() -> None:
        chosen, entropy = token_logprobs(hidden, weight, targets, 0.7, softcap=30.0)
        (chosen.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]

    step()  # gradients and what torch itself needs once
    chunk, both = 4 * rows * vocabulary, 4 * (hidden.numel() + weight.numel())
    assert peak_bytes(step) < 6 * chunk + 3 * both  # a quarter of the logits, which are 32 chunks


def peak_bytes(work: Callable[[], None]) -> int:
    """The most that ``work`` has allocated at once, by the CPU allocator's own records."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    changes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradients_are_those_of_finite_differences(chunk: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (7, 3), (7,))
    )
    targets = torch.randint(7, (5,), generator=generator)
    assert torch.autograd.gradcheck(
        lambda *leaves: token_logprobs(leaves[0], leaves[1], targets, 0.8, leaves[2], softcap, chunk),
        (hidden, weight, bias),
    )


def test_bfloat16_states_give_float32_results_with_gradient() -> None:
    hidden, weight, _, targets = example(torch.bfloat16)
    exact = reference(hidden.double(), weight.double(), targets, 1.0, None, None)
    chosen, entropy = token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, chunk=8)
    assert chosen.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(chosen.double(), exact[0], rtol=0.02, atol=0.1)
    (chosen.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (9, 0.8)])
def test_truncated_log_probabilities_are_those_that_sampling_reports(top_k: int, top_p: float) -> None:
    hidden, weight, _, _ = example()
    tokens, reported = draw(
        hidden @ weight.T, list(range(N)), torch.zeros(N, dtype=torch.int64), 0.8, top_k, top_p
    )
    chosen, entropy = token_logprobs(
        hidden.requires_grad_(), weight, tokens, 0.8, chunk=10, top_k=top_k, top_p=top_p
    )
    torch.testing.assert_close(chosen, reported, rtol=1e-5, atol=1e-5)
    (chosen.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


def test_a_token_outside_the_truncation_keeps_a_finite_log_probability() -> None:
    hidden, weight, _, _ = example()
    worst = (hidden @ weight.T).argmin(dim=1)
    chosen, _ = token_logprobs(hidden, weight, worst, top_k=1)
    assert bool(chosen.isfinite().all())


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    chosen, entropy = token_logprobs(hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([0, 0]))
    assert chosen.tolist() == [0.0, -1e4]
    assert entropy.tolist() == [0.0, 0.0]
    (chosen + entropy).sum().backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


def test_no_tokens_give_no_values() -> None:
    hidden, weight, _, targets = example()
    chosen, entropy = token_logprobs(hidden[:0].requires_grad_(), weight, targets[:0])
    assert chosen.shape == entropy.shape == (0,)
    chosen.sum().backward()


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, _, targets = example()
    for bad in (
        (hidden, weight[:, 1:], targets),
        (hidden, weight, targets[1:]),
        (hidden[0], weight, targets),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            token_logprobs(*bad)
    with pytest.raises(ValueError, match="positive"):
        token_logprobs(hidden, weight, targets, temperature=0.0)
