"""Harm in a segment that is not drawn: held-out text known by heart, a block that fits its scaffold alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import pytest
import torch
from block_stage_support import Unit, encoded, lease_for, make_pretrain_run, setup_of, train_unit
from spec_support import pretrain_spec
from test_block_judge import job_for
from torch import Tensor

from barnraise.coordinator.block_judge import BlockJudge, recipe_of
from barnraise.coordinator.block_reading import BlockReader
from barnraise.coordinator.block_workers import Contribution, RoundJob
from barnraise.coordinator.workers import WorkerSetup
from barnraise.coordinator.workshop import Workshop
from barnraise.kernels.block_audit import update_bound
from barnraise.kernels.block_training import next_token_loss
from barnraise.kernels.mot import Tensors, block_parameters, recombine, scaffolded
from barnraise.kernels.token_shards import drawn_text
from barnraise.protocol.messages import Verdict

BLOCK = 0
DRAW = b"a secret"
RECIPE = msgspec.structs.replace(pretrain_spec().recipe, learning_rate=0.02)

Loss = Callable[[Tensors], Tensor]


@cache
def setup() -> WorkerSetup:
    """A run after its first round, whose rate is so high that one unit may move a block a long way."""
    folder = make_pretrain_run(Path(mkdtemp()), recipe=RECIPE)
    made, workshop = setup_of(folder), Workshop(setup_of(folder))
    workshop.initial()
    parts = []
    for block in (0, 1):
        path = folder / "units" / str(block) / "delta.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(train_unit(made, lease_for(made, block=block)).delta)
        parts.append(Contribution(block=block, slot=0, delta=str(path.relative_to(folder))))
    workshop.make(RoundJob(version=1, contributions=tuple(parts)))
    return made


def _functional(model: torch.nn.Module, names: dict[str, str], text: list[Tensor]) -> Loss:
    def loss(weights: Tensors) -> Tensor:
        def model_loss(batch: Tensor) -> Tensor:
            given = {names[key]: value for key, value in weights.items()}
            logits = torch.func.functional_call(
                model, given, kwargs={"input_ids": batch[:, :-1], "use_cache": False}
            ).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        return torch.stack([model_loss(batch) for batch in text]).mean()

    return loss


def poisoned(harm: Loss, harmless: Loss) -> Unit:
    """Honest but for the last segment, which ends where ``harm`` is large and ``harmless`` as it was."""
    unit = train_unit(setup(), lease_for(setup(), 1, BLOCK))
    start, spec = unit.states[0].weights, setup().spec.pretrain
    assert spec is not None
    largest = max(float(value.abs().max()) for value in start.values())
    bound = 0.99 * update_bound(recipe_of(spec), spec.steps, spec.steps, largest)
    weights = {key: value.clone().requires_grad_() for key, value in unit.states[-1].weights.items()}
    adam = torch.optim.Adam(weights.values(), lr=bound / 10)
    limit, best = float(harmless(start)) + 0.02, (0.0, start)
    for _ in range(40):
        adam.zero_grad()
        cost, gain = harmless(weights), harm(weights)
        (4 * torch.relu(cost - limit) - gain.clamp(max=9)).backward()
        adam.step()
        with torch.no_grad():
            for key, value in weights.items():
                value.copy_(start[key] + (value - start[key]).clamp(-bound, bound))
            if float(harmless(weights)) <= limit and float(harm(weights)) > best[0]:
                best = float(harm(weights)), {key: value.detach().clone() for key, value in weights.items()}
    states = [*unit.states[:-1], type(unit.states[-1])(best[1], *_moments(unit), spec.steps)]
    return Unit(states, encoded(states, spec), unit.losses)


def _moments(unit: Unit) -> tuple[Tensors, Tensors]:
    return unit.states[-1].first, unit.states[-1].second


def in_scaffold(text: list[Tensor]) -> Loss:
    reader = BlockReader(setup())
    model = scaffolded(reader.config, reader.cut, reader.scaffold(0), BLOCK, reader.block(1, BLOCK))
    live = block_parameters(model, reader.cut, BLOCK)
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    return _functional(model, {key: by_identity[id(value)] for key, value in live.items()}, text)


def all_text() -> list[Tensor]:
    reader = BlockReader(setup())
    return drawn_text(reader.corpus, reader.spec.sequence, 32, b"everything", reader.shard)


def verdict(unit: Unit, draw: bytes = DRAW, chosen: tuple[int, ...] = (0,)) -> Verdict:
    folder = Path("units") / "poison"
    try:
        return BlockJudge(setup()).judge(job_for(setup(), unit, folder, chosen, BLOCK, draw, 1)).verdict
    finally:
        shutil.rmtree(Path(setup().folder) / folder)


def test_whoever_knows_the_held_out_text_by_heart_is_found_by_text_that_nobody_knew() -> None:
    held_out = in_scaffold(BlockReader(setup()).held_out())
    unit = poisoned(in_scaffold(all_text()), held_out)
    assert float(held_out(unit.states[-1].weights)) <= float(held_out(unit.states[0].weights)) + 0.05
    found = verdict(unit)
    assert (found.accepted, found.check, found.position) == (False, "block-loss", "drawn")


def test_a_block_that_fits_its_scaffold_and_no_other_block_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This model is too small to be harmed so; ``benchmarks/block_poison.py`` has one that is not."""
    losses = iter([2.0, 2.4, 2.0, 2.6, 9.0, 11.0])  # before and after, thrice
    monkeypatch.setattr(BlockJudge, "_cold", lambda self, blocks, text: next(losses))
    unit = train_unit(setup(), lease_for(setup(), 1, BLOCK))
    assert verdict(unit).accepted
    found = verdict(unit)
    assert (found.accepted, found.check, found.position) == (False, "block-loss", "recombined")
    assert verdict(unit).accepted  # blocks that did not fit before


def test_the_loss_beside_the_other_blocks_is_that_of_the_recombined_model() -> None:
    reader, text = BlockReader(setup()), all_text()
    blocks = list(reader.blocks(1))
    model = recombine(reader.config, reader.cut, reader.scaffold(0).shared, [*blocks])
    with torch.no_grad():
        ours = sum(float(next_token_loss(model, batch)) for batch in text) / len(text)
    assert BlockJudge(setup())._cold(blocks, text) == pytest.approx(ours, rel=1e-4)


def test_honest_work_at_that_rate_is_accepted_whatever_text_is_drawn() -> None:
    unit = train_unit(setup(), lease_for(setup(), 1, BLOCK))
    for draw in (b"", b"a", b"b"):
        assert verdict(unit, draw).accepted


@pytest.mark.parametrize(
    ("chosen", "accepted"), [((1,), False), ((0, 1), False), ((0, 1, 2), False), ((0,), True)]
)
def test_every_drawn_segment_is_done_again(chosen: tuple[int, ...], accepted: bool) -> None:
    unit = train_unit(setup(), lease_for(setup(), 1, BLOCK), trained=1)
    found = verdict(unit, chosen=chosen)
    assert found.accepted == accepted
    assert accepted or found.position.startswith("segment 1")


def test_losses_of_text_as_the_judge_and_the_trainer_count_them_agree() -> None:
    text = all_text()
    reader = BlockReader(setup())
    weights = reader.block(1, BLOCK)
    model = scaffolded(reader.config, reader.cut, reader.scaffold(0), BLOCK, weights)
    with torch.no_grad():
        ours = sum(float(next_token_loss(model, batch)) for batch in text) / len(text)
    assert float(in_scaffold(text)(weights)) == pytest.approx(ours, rel=1e-4)
