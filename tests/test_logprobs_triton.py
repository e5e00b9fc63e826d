"""Triton's log-probabilities and entropies against the float64 reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_support import kernels

from barnraise.kernels.logprobs import token_logprobs

fused = kernels("logprobs_triton")


def example(rows: int, width: int, vocab: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, ...]:
    """States, head, bias, targets and the gradients that come back, [2, rows]."""
    generator = torch.Generator().manual_seed(rows + vocab)
    states = scale * torch.randn(rows, width, generator=generator)
    head, bias = torch.randn(vocab, width, generator=generator), torch.randn(vocab, generator=generator)
    targets = torch.randint(vocab, (rows,), generator=generator)
    return (
        states.to(dtype),
        head.to(dtype),
        bias.to(dtype),
        targets,
        torch.randn(2, rows, generator=generator),
    )


def computed(function: object, dtype: torch.dtype, given: tuple[Tensor, ...], *rest: object) -> list[Tensor]:
    """Both results and the gradients of states, head and bias."""
    assert callable(function)
    states, head, bias, targets, along = given
    leaves = [part.detach().to(dtype).requires_grad_() for part in (states, head, bias)]
    temperature, with_bias, softcap = rest
    found = function(leaves[0], leaves[1], targets, temperature, leaves[2] if with_bias else None, softcap)
    (
        (found[0] * along[0].to(found[0].dtype)).sum() + (found[1] * along[1].to(found[1].dtype)).sum()
    ).backward()
    return [*found, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


# Relative to the largest of each result. Gradients of logits are rounded to the dtype of the states.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (3e-6, 1e-5),
    torch.bfloat16: (3e-6, 1e-2),
    torch.float16: (3e-6, 2e-3),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).split(".")[1])
@pytest.mark.parametrize(
    ("rows", "width", "vocab", "temperature", "with_bias", "softcap"),
    [
        (130, 70, 300, 0.6, True, 5.0),  # nothing is a multiple of a block
        (1, 33, 513, 1.3, False, 30.0),
        (37, 16, 53, 1.0, False, None),  # less than a block
        (128, 64, 256, 1.0, True, None),  # exactly blocks
    ],
)
def test_values_and_gradients_are_those_of_the_reference(
    dtype: torch.dtype,
    rows: int,
    width: int,
    vocab: int,
    temperature: float,
    with_bias: bool,
    softcap: float | None,
) -> None:
    given = example(rows, width, vocab, dtype)
    exact = computed(token_logprobs, torch.float64, given, temperature, with_bias, softcap)
    ours = computed(fused.token_logprobs_triton, dtype, given, temperature, with_bias, softcap)
    assert len(ours) == len(exact) == (5 if with_bias else 4)
    for number, (own, reference) in enumerate(zip(ours, exact, strict=True)):
        result = torch.promote_types(dtype, torch.float32)
        assert own.dtype == (result if number < 2 else dtype)
        limit = TOLERANCE[dtype][number >= 2] * float(reference.detach().abs().max())
        assert float((own.double() - reference).detach().abs().max()) <= limit, number


def test_gradients_are_the_derivatives() -> None:
    states, head, bias, targets, _ = example(5, 7, 19, torch.float64)
    leaves = [part.requires_grad_() for part in (states, head, bias)]
    for softcap in (None, 3.0):
        for function in (fused.token_logprobs_triton, token_logprobs):
            assert torch.autograd.gradcheck(
                lambda x, w, b: function(x, w, targets, 0.7, b, softcap),  # noqa: B023
                leaves,
                fast_mode=True,
            )


def test_slices_and_splits_of_the_vocabulary_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = example(9, 24, 700, torch.float32)
    whole = computed(fused.token_logprobs_triton, torch.float32, given, 0.8, True, None)
    monkeypatch.setattr(fused, "SLICE_ELEMENTS", 1)  # one block at a time
    monkeypatch.setattr(fused, "_device", lambda device: (1000, 2**17))  # one block per program
    parts = computed(fused.token_logprobs_triton, torch.float32, given, 0.8, True, None)
    for part, same in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, same, rtol=1e-5, atol=1e-5)


def test_gradients_of_logits_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    states, head, _, targets, _ = example(9, 24, 700, torch.float32)
    sizes = []
    inner = torch.empty

    def watched(*shape: int, **rest: object) -> Tensor:
        made: Tensor = inner(*shape, **rest)  # type: ignore[call-overload]
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(fused, "SLICE_ELEMENTS", 9 * 256)
    monkeypatch.setattr(torch, "empty", watched)
    chosen, entropy = fused.token_logprobs_triton(states.requires_grad_(), head.requires_grad_(), targets)
    (chosen.sum() + entropy.sum()).backward()
    assert max(sizes) == 9 * 256 < 9 * 700


def test_words_that_a_mask_excludes_count_for_nothing() -> None:
    states, head, bias, targets, along = example(6, 16, 400, torch.float32)
    bias[:300] = -torch.inf  # more than two whole blocks, the first among them
    targets = targets % 100 + 300
    given = (states, head, bias, targets, along)
    ours = computed(fused.token_logprobs_triton, torch.float32, given, 0.9, True, None)
    shown = (states, head[300:], bias[300:], targets - 300, along)
    alone = computed(token_logprobs, torch.float64, shown, 0.9, True, None)
    same = computed(token_logprobs, torch.float64, given, 0.9, True, None)
    for found in (ours, same):
        for part in found:
            assert bool(part.isfinite().all())
        torch.testing.assert_close(found[1].double(), alone[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[0].double(), alone[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[2].double(), alone[2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[3][300:].double(), alone[3], rtol=1e-5, atol=1e-5)
        assert not bool(found[3][:300].any())


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_huge_logits_stay_finite(softcap: float | None) -> None:
    given = example(5, 32, 400, torch.float32, scale=1e4)
    exact = computed(token_logprobs, torch.float64, given, 1.0, True, softcap)
    ours = computed(fused.token_logprobs_triton, torch.float32, given, 1.0, True, softcap)
    for own, reference in zip(ours, exact, strict=True):
        assert bool(own.isfinite().all())
        scale = max(1e-3, float(reference.detach().abs().max()))
        assert float((own.double() - reference).detach().abs().max()) <= 1e-3 * scale


def test_a_row_that_overflowed_and_a_target_out_of_range_are_nan_and_spoil_no_other_row() -> None:
    states, head, _, targets, _ = example(5, 16, 90, torch.float32)
    broken, wrong = states.clone(), targets.clone()
    broken[1, 3], wrong[2], wrong[3] = torch.nan, 90, -1
    for softcap in (None, 20.0):
        clean, _ = fused.token_logprobs_triton(states, head, targets, softcap=softcap)
        chosen, entropy = fused.token_logprobs_triton(broken, head, wrong, softcap=softcap)
        assert chosen.isnan().tolist() == [False, True, True, True, False]
        assert entropy.isnan().tolist() == [False, True, False, False, False]
        assert torch.equal(chosen[[0, 4]], clean[[0, 4]])


def test_only_the_gradients_that_are_wanted_are_made_and_only_one_of_two_results_may_be_used() -> None:
    states, head, _, targets, _ = example(7, 16, 90, torch.float32)
    exact = states.double().requires_grad_()
    for number in (0, 1):
        ours = states.detach().clone().requires_grad_()
        fused.token_logprobs_triton(ours, head, targets)[number].sum().backward()
        token_logprobs(exact, head.double(), targets)[number].sum().backward()
        assert ours.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
        assert head.grad is None
        exact.grad = None


def test_under_autocast_products_run_in_its_dtype_and_gradients_come_back_in_the_leaves_own() -> None:
    states, head, _, targets, _ = example(7, 16, 90, torch.float32)
    leaves = states.requires_grad_(), head.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chosen, _ = fused.token_logprobs_triton(*leaves, targets)
    rounded, _ = fused.token_logprobs_triton(states.bfloat16(), head.bfloat16(), targets)
    assert torch.equal(chosen, rounded)
    chosen.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)


def test_states_and_heads_that_are_not_contiguous_are_read_rightly_and_no_rows_give_nothing() -> None:
    states, head, _, targets, _ = example(6, 32, 90, torch.float32)
    plain = fused.token_logprobs_triton(states[:, ::2].contiguous(), head[:, ::2].contiguous(), targets)
    for one, same in zip(
        fused.token_logprobs_triton(states[:, ::2], head[:, ::2], targets), plain, strict=True
    ):
        assert torch.equal(one, same)
    none = states[:0].requires_grad_()
    chosen, entropy = fused.token_logprobs_triton(none, head.requires_grad_(), targets[:0])
    assert chosen.shape == entropy.shape == (0,)
    chosen.sum().backward()
    assert head.grad is not None
    assert not bool(head.grad.any())
