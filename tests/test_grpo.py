"""GRPO against hand-computed values and a float64 reference written token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from barnraise.kernels.grpo import LossStats, group_advantages, policy_loss, token_weights
from barnraise.protocol.spec import GrpoSpec


def spec(**changes: Any) -> GrpoSpec:
    values: dict[str, Any] = {
        "learning_rate": 1e-4,
        "warmup_steps": 0,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "grad_clip": 1.0,
        "inner_epochs": 1,
        "minibatches": 1,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "clip_delta": 4.0,
        "normalise_std": False,
        "kl_coefficient": 0.0,
        "entropy_coefficient": 0.0,
        "loss_aggregation": "token",
    }
    return GrpoSpec(**{**values, **changes})


def one_token(ratio: float, advantage: float, **changes: Any) -> tuple[float, float]:
    """Loss of a single token, and its gradient with respect to the new log-probability."""
    new = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    loss, _ = policy_loss(
        new, torch.tensor([-1.0]), torch.tensor([advantage]), torch.zeros(1), torch.ones(1), spec(**changes)
    )
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), float(new.grad)


def test_advantages_are_rewards_less_their_groups_mean() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    expected = [[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75]]
    assert group_advantages(rewards, normalise_std=False).tolist() == expected


def test_advantages_can_be_divided_by_the_standard_deviation() -> None:
    found = group_advantages(torch.tensor([[1.0, 0.0]]), normalise_std=True)
    std = math.sqrt(0.5)  # of a sample: n - 1
    assert found.tolist() == [[pytest.approx(0.5 / (std + 1e-6)), pytest.approx(-0.5 / (std + 1e-6))]]


@pytest.mark.parametrize("normalise_std", [True, False])
def test_equal_rewards_give_exact_zeros(normalise_std: bool) -> None:
    for reward in (0.0, 0.1, 1 / 3, 1.0):
        for size in (2, 3, 7, 10):
            rewards = torch.full((1, size), reward, dtype=torch.float64)
            assert not group_advantages(rewards, normalise_std).any()


# Every region of the two-sided clip, by hand: eps 0.2, delta 4.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),  # on policy: gradient is the advantage
        (1.0, -1.0, 1.0, 1.0),
        (1.1, 2.0, -2.2, -2.2),  # within the clip
        (1.5, 1.0, -1.2, 0.0),  # good and likelier already: clipped
        (0.5, 1.0, -0.5, -0.5),  # good but less likely: never clipped
        (0.5, -1.0, 0.8, 0.0),  # bad and less likely already: clipped
        (2.0, -1.0, 2.0, 2.0),  # bad and likelier: pushed down ...
        (9.0, -1.0, 4.0, 0.0),  # ... up to delta; plain PPO would say 9
        (9.0, 1.0, -1.2, 0.0),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_two_sided_clipping_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    found = one_token(ratio, advantage)
    assert found == (pytest.approx(loss, rel=1e-5, abs=1e-6), pytest.approx(gradient, rel=1e-5, abs=1e-6))


def test_asymmetric_bounds_are_each_their_own() -> None:
    assert one_token(1.25, 1.0, clip_low=0.1, clip_high=0.28)[0] == pytest.approx(-1.25)
    assert one_token(1.5, 1.0, clip_low=0.1, clip_high=0.28)[0] == pytest.approx(-1.28)
    assert one_token(0.5, -1.0, clip_low=0.1, clip_high=0.28)[0] == pytest.approx(0.9)


def test_the_kl_penalty_is_k3_by_hand() -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    arguments = (
        new,
        torch.tensor([-1.0]),
        torch.zeros(1),
        torch.zeros(1),
        torch.ones(1),
        spec(kl_coefficient=0.5),
    )
    loss, _ = policy_loss(*arguments, reference=torch.tensor([-1.0 + math.log(2)]))
    loss.backward()
    assert float(loss) == pytest.approx(0.5 * (2 - math.log(2) - 1))
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(0.5 * (1 - 2))  # pulls the token's probability up
    assert float(policy_loss(*arguments)[0]) == 0.0  # on policy, held to the behaviour


def test_the_entropy_bonus_lowers_the_loss() -> None:
    new = torch.tensor([-1.0])
    entropy = torch.tensor([2.0], requires_grad=True)
    loss, _ = policy_loss(new, new, torch.zeros(1), entropy, torch.ones(1), spec(entropy_coefficient=0.1))
    loss.backward()
    assert float(loss) == pytest.approx(-0.2)
    assert entropy.grad is not None
    assert float(entropy.grad) == pytest.approx(-0.1)


def test_token_weights_count_tokens_or_sequences() -> None:
    lengths = torch.tensor([1, 3])
    assert token_weights(lengths, "token").tolist() == [0.25] * 4
    assert token_weights(lengths, "sequence").tolist() == [0.5] + [pytest.approx(1 / 6)] * 3


@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    aggregation=st.sampled_from(["token", "sequence"]),
    kl=st.sampled_from([0.0, 0.3]),
    bonus=st.sampled_from([0.0, 0.2]),
    held=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_loss_and_gradient_match_a_float64_reference(
    data: st.DataObject, lengths: list[int], aggregation: Any, kl: float, bonus: float, held: bool
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    count = sum(lengths)

    def normal(scale: float) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    old, advantages, entropy = normal(1) - 4, normal(1), normal(1).abs()
    new = old + normal(0.8)
    reference = new + normal(0.5) if held else None
    options = spec(
        clip_low=0.1,
        clip_high=0.3,
        clip_delta=2.0,
        kl_coefficient=kl,
        entropy_coefficient=bonus,
        loss_aggregation=aggregation,
    )
    weights = token_weights(torch.tensor(lengths), aggregation)
    parameter = new.float().requires_grad_()
    loss, stats = policy_loss(
        parameter,
        old.float(),
        advantages.float(),
        entropy.float(),
        weights,
        options,
        None if reference is None else reference.float(),
    )
    loss.backward()

    expected, gradients, clipped, drift = 0.0, [], 0, 0.0
    place = 0
    for length in lengths:
        for _ in range(length):
            weight = 1 / count if aggregation == "token" else 1 / (len(lengths) * length)
            n, o, a, h = (float(values[place]) for values in (new, old, advantages, entropy))
            ratio = math.exp(n - o)
            plain, bounded = min(ratio, 2.0) * a, min(max(ratio, 0.9), 1.3) * a
            active = (plain <= bounded and ratio < 2.0) or (plain > bounded and 0.9 < ratio < 1.3)
            anchor = o if reference is None else float(reference[place])
            penalty = kl * (math.exp(anchor - n) - (anchor - n) - 1)
            expected -= weight * (min(plain, bounded) - penalty + bonus * h)
            gradients.append(-weight * (ratio * a * active - kl * (1 - math.exp(anchor - n))))
            clipped += not active
            drift += ratio - 1 - (n - o)
            place += 1
    assert float(loss) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx(gradients, rel=1e-3, abs=1e-5)
    assert stats.tokens == count
    assert stats.clipped == clipped
    assert stats.ratio_max == pytest.approx(float((new - old).exp().max()), rel=1e-4)
    assert stats.kl == pytest.approx(drift, rel=1e-3, abs=1e-4)
    assert stats.entropy == pytest.approx(float(entropy.sum()), rel=1e-5)


def test_micro_batches_add_up_to_their_minibatch() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([2, 5, 3])
    values = [torch.randn(10, generator=generator) for _ in range(3)]
    entropy, weights = values[2].abs(), token_weights(lengths, "sequence")
    columns = (values[0], values[0] + 0.3 * values[1], values[1], entropy, weights)
    whole, stats = policy_loss(*columns, spec())
    parts = [policy_loss(*(column[cut] for column in columns), spec()) for cut in (slice(0, 2), slice(2, 10))]
    assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(whole), rel=1e-5)
    total = parts[0][1] + parts[1][1]
    assert (total.tokens, total.clipped, total.ratio_max) == (stats.tokens, stats.clipped, stats.ratio_max)
    assert total.kl == pytest.approx(stats.kl)
    assert LossStats() + stats == stats


def test_a_hopelessly_stale_token_gives_finite_loss_and_no_gradient() -> None:
    for advantage in (1.0, -1.0):
        new = torch.tensor([0.0], requires_grad=True)
        options = spec(kl_coefficient=0.1)
        loss, stats = policy_loss(
            new, torch.tensor([-500.0]), torch.tensor([advantage]), torch.zeros(1), torch.ones(1), options
        )
        loss.backward()
        assert math.isfinite(float(loss))
        assert new.grad is not None
        assert bool(new.grad.isfinite().all())
        assert math.isfinite(stats.kl)
        assert stats.clipped == 1
