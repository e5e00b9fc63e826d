"""Cutting a model into blocks, training one inside the scaffold, putting them together again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from barnraise.kernels.models import ModelError, build_model
from barnraise.kernels.mot import (
    Cut,
    Scaffold,
    block_parameters,
    first_block,
    layer_count,
    make_cut,
    recombine,
    scaffold_config,
    scaffolded,
    split_model,
    split_scaffold,
)
from barnraise.kernels.mot_diagnostics import linear_cka, seams

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 6,
}
CONFIGS = {
    "llama": LlamaConfig,
    "llama-tied": lambda **k: LlamaConfig(**k, tie_word_embeddings=True),
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "olmo2": Olmo2Config,
}
IDS = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(0))


def setup(kind: str, blocks: int = 2, depth: int = 2) -> tuple[Any, Cut, torch.nn.Module, Scaffold]:
    config = CONFIGS[kind](**SHAPE)
    cut = make_cut(6, blocks, depth)
    model = build_model(scaffold_config(config, cut), torch.float32, seed=1)
    return config, cut, model, split_scaffold(model, cut)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@given(layers=st.integers(1, 60), data=st.data())
def test_a_cut_covers_every_layer_once_and_as_evenly_as_can_be(layers: int, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, layers))
    depth = data.draw(st.integers(blocks, layers))
    cut = make_cut(layers, blocks, depth)
    assert [place for block in range(blocks) for place in cut.places(block)] == list(range(layers))
    assert [slot for block in range(blocks) for slot in cut.slots(block)] == list(range(depth))
    assert max(cut.block_layers) - min(cut.block_layers) <= 1
    for block in range(blocks):
        kept = cut.kept(block)
        assert kept[0] == 0
        assert all(a < b for a, b in pairwise(kept))
        assert kept[-1] < cut.block_layers[block]


@pytest.mark.parametrize(("layers", "blocks", "depth"), [(4, 5, 5), (4, 0, 4), (4, 2, 1), (4, 2, 5)])
def test_an_impossible_cut_is_refused(layers: int, blocks: int, depth: int) -> None:
    with pytest.raises(ModelError):
        make_cut(layers, blocks, depth)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_grown_block_computes_what_its_slice_computes(kind: str) -> None:
    config, cut, model, scaffold = setup(kind)
    for block in range(cut.blocks):
        state = first_block(config, cut, scaffold, block, "grown", seed=3)
        inside = scaffolded(config, cut, scaffold, block, state)
        assert layer_count(inside.config) == 1 + 3
        torch.testing.assert_close(logits(inside), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_only_the_block_gets_gradients_and_every_weight_of_it_can_move(kind: str) -> None:
    config, cut, _, scaffold = setup(kind)
    state = first_block(config, cut, scaffold, 1, "grown", seed=3)
    inside = scaffolded(config, cut, scaffold, 1, state)
    mine = block_parameters(inside, cut, 1)
    assert mine.keys() == state.keys()
    before = {name: parameter.detach().clone() for name, parameter in inside.named_parameters()}
    optimizer = torch.optim.SGD(mine.values(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        inside(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    live = {id(parameter) for parameter in mine.values()}
    for name, parameter in inside.named_parameters():
        moved = not torch.equal(parameter.detach(), before[name])
        assert moved is (id(parameter) in live), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_stacked_blocks_are_the_target_with_the_scaffolds_frame(kind: str) -> None:
    config, cut, model, scaffold = setup(kind)
    blocks = [first_block(config, cut, scaffold, block, "grown", seed=3) for block in range(cut.blocks)]
    target = recombine(config, cut, scaffold.shared, blocks)
    assert layer_count(target.config) == 6
    # grown blocks that never trained make up a deeper copy of the scaffold
    torch.testing.assert_close(logits(target), logits(model), rtol=1e-5, atol=1e-5)


def test_cutting_and_joining_gives_the_same_model() -> None:
    config = LlamaConfig(**SHAPE)
    cut = make_cut(6, 4, 4)
    model = build_model(config, torch.float32, seed=5)
    shared, parts = split_model(model, cut.block_layers)
    again = recombine(config, cut, shared, list(parts))
    assert torch.equal(logits(again), logits(model))


def test_a_random_block_is_new_and_the_same_for_its_seed() -> None:
    config, cut, _, scaffold = setup("qwen3")
    one, same, other = (first_block(config, cut, scaffold, 0, "random", seed) for seed in (7, 7, 8))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_building_a_model_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_model(LlamaConfig(**SHAPE), torch.float32, seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_layers_of_two_kinds_keep_their_order_in_scaffold_and_target() -> None:
    config, cut, model, _ = setup("gemma3", blocks=2, depth=4)
    kinds = config.layer_types
    kept = [cut.places(block)[index] for block in range(2) for index in cut.kept(block)]
    assert model.config.layer_types == [kinds[place] for place in kept]


def test_parts_that_do_not_fit_are_refused() -> None:
    config, cut, _, scaffold = setup("llama")
    state = first_block(config, cut, scaffold, 0, "grown", seed=0)
    missing = {name: value for name, value in state.items() if name != "0.mlp.up_proj.weight"}
    with pytest.raises(ModelError, match="up_proj"):
        scaffolded(config, cut, scaffold, 0, missing)
    wrong = state | {"0.mlp.up_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(ModelError, match="shape"):
        scaffolded(config, cut, scaffold, 0, wrong)
    with pytest.raises(ModelError, match="blocks"):
        recombine(config, cut, scaffold.shared, [state])


def test_diagnostics_see_no_difference_in_a_grown_model_and_one_in_a_random_model() -> None:
    config, cut, model, scaffold = setup("llama")
    for init, same in (("grown", True), ("random", False)):
        blocks = [first_block(config, cut, scaffold, block, init, seed=3) for block in range(2)]
        found = seams(recombine(config, cut, scaffold.shared, blocks), model, cut, [IDS])
        assert [seam.block for seam in found] == [0, 1]
        for seam in found:
            assert (seam.relative_error < 1e-4) is same
            assert (seam.cosine > 1 - 1e-4) is same
            assert (abs(seam.norm_ratio - 1) < 1e-4) is same


def test_cka_ignores_rotation_and_scale_and_sees_independence() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0]
    assert linear_cka(x, 3 * x @ rotation) == pytest.approx(1, abs=1e-5)
    assert linear_cka(x, torch.randn(400, 8, generator=generator)) < 0.1
