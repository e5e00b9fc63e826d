"""Whole-model training: learns, stops, and goes on in the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig

from barnraise.kernels.joint_training import JointSchedule, JointTrainer, evaluate
from barnraise.kernels.models import ModelError, build_model

CONFIG = LlamaConfig(
    vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
)
SCHEDULE = JointSchedule(
    steps=30, learning_rate=2e-2, warmup_fraction=0.1, floor=0.1, weight_decay=0.01, clip=1.0
)


def data(steps: int) -> list[torch.Tensor]:
    counting = torch.arange(12) % 16
    return [(counting + step) % 16 + torch.zeros(4, 1, dtype=torch.int64) for step in range(steps)]


def trainer() -> JointTrainer:
    model = build_model(CONFIG, torch.float32, seed=0)
    return JointTrainer(model, SCHEDULE)


def test_a_model_learns_to_count() -> None:
    worker = trainer()
    before = evaluate(worker.model, data(4))
    seen: list[int] = []
    worker.train(data(50), lambda step, loss: seen.append(step))
    assert seen == list(range(30))  # the schedule ends, whatever data is left
    assert worker.done
    assert evaluate(worker.model, data(4)) < before / 2


def test_a_stopped_training_goes_on_in_the_same_bits() -> None:
    whole = trainer()
    whole.train(data(12))
    half = trainer()
    half.train(data(5))
    later = trainer()
    later.restore(half.tensors(), half.step)
    later.train(data(12)[5:])
    assert all(torch.equal(value, later.tensors()[name]) for name, value in whole.tensors().items())


def test_a_checkpoint_of_another_model_is_refused() -> None:
    worker = trainer()
    worker.train(data(1))
    tensors = worker.tensors()
    missing = {name: value for name, value in tensors.items() if name != min(tensors)}
    for bad in (missing, {**tensors, min(tensors): torch.zeros(1)}):
        with pytest.raises(ModelError):
            trainer().restore(bad, 1)


def test_the_rate_rises_peaks_and_falls_to_its_floor() -> None:
    rates = [SCHEDULE.rate(step) for step in range(31)]
    assert rates[2] == SCHEDULE.learning_rate
    assert rates[:3] == sorted(rates[:3])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert math.isclose(rates[30], 0.1 * SCHEDULE.learning_rate)


def test_frozen_parameters_stay() -> None:
    model = build_model(CONFIG, torch.float32, seed=0)
    frozen = model.get_input_embeddings().weight.requires_grad_(False)
    before = frozen.clone()
    JointTrainer(model, SCHEDULE).train(data(3))
    assert torch.equal(frozen, before)
