"""Mixture of Training: a decoder cut into blocks, each trained alone inside a frozen scaffold.

Sabry, Augenstein, Rush, Dery, "Mixture of Training" (arXiv 2608.13277), section 2.
The target F = f_K o ... o f_1 is K contiguous blocks of layers; the scaffold (the
paper's aligner) A = a_K o ... o a_1 is a shallower model of the same width, cut into
K slices. Block i trains in S_i = a_K o ... o f_i o ... o a_1: everything but f_i is
frozen, the scaffold's embedding, final norm and output head included. Afterwards the
blocks are stacked on the scaffold's embedding and head (*recombination*).

A set of tensors is a plain dict. Those of a slice or block are named relative to
their first layer (``"0.mlp.up_proj.weight"``); what belongs to no layer (*shared*)
keeps the model's own names. Any Hugging Face decoder whose layers are one
``ModuleList`` works.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from barnraise.kernels.models import ModelError, build_model

Tensors = dict[str, Tensor]
Init = Literal["grown", "random"]

# What ends a branch: a layer adds the result of these to its residual stream.
_OUTPUTS = ("o_proj", "out_proj", "dense", "down_proj", "c_proj", "dense_4h_to_h", "fc2", "wo", "w2")
# Norms after a branch, where an architecture has them (Gemma 2 and 3, OLMo 2).
_BRANCH_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Cut:
    """How target and scaffold are cut: layers per block, and per slice of the scaffold."""

    block_layers: tuple[int, ...]
    slice_layers: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """K."""
        return len(self.block_layers)

    @property
    def layers(self) -> int:
        """Layers of the target."""
        return sum(self.block_layers)

    def kept(self, block: int) -> tuple[int, ...]:
        """Which layers of a grown block are copies of its slice's; the others start as identities."""
        layers, copies = self.block_layers[block], self.slice_layers[block]
        return tuple(index * layers // copies for index in range(copies))

    def places(self, block: int) -> range:
        """The block's layers in the target."""
        start = sum(self.block_layers[:block])
        return range(start, start + self.block_layers[block])

    def slots(self, block: int) -> range:
        """The slice's layers in the scaffold."""
        start = sum(self.slice_layers[:block])
        return range(start, start + self.slice_layers[block])


@dataclass(frozen=True)
class Scaffold:
    """The frozen frame: ``shared`` (embedding, final norm, head) and one slice per block."""

    shared: Tensors
    slices: tuple[Tensors, ...]


def make_cut(layers: int, blocks: int, scaffold_layers: int) -> Cut:
    """Cut as evenly as can be, the longer parts first.

    Raises:
        ModelError: a block would have no layer, or a slice none or more than its block.
    """
    if not 1 <= blocks <= layers:
        raise ModelError(f"{layers} layers cannot be cut into {blocks} blocks: choose 1 to {layers}")
    if not blocks <= scaffold_layers <= layers:
        raise ModelError(
            f"a scaffold for {blocks} blocks of a model of {layers} layers has {blocks} to {layers}, "
            f"not {scaffold_layers}"
        )
    return Cut(_even(layers, blocks), _even(scaffold_layers, blocks))


def _even(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (1 if part < total % parts else 0) for part in range(parts))


# --- configs


def layer_count(config: Any) -> int:
    """Number of decoder layers of a transformers config."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def scaffold_config(config: Any, cut: Cut) -> Any:
    """The target's config with the scaffold's depth; layer types are those of the layers it grows into."""
    kept = [cut.places(block)[index] for block in range(cut.blocks) for index in cut.kept(block)]
    return _with_layers(config, kept)


def scaffolded_config(config: Any, cut: Cut, block: int) -> Any:
    """The config of S_i: the scaffold with slice ``block`` replaced by the block itself."""
    kept: list[int] = []
    for other in range(cut.blocks):
        places = cut.places(other)
        kept += list(places) if other == block else [places[index] for index in cut.kept(other)]
    return _with_layers(config, kept)


def _with_layers(config: Any, kept: list[int]) -> Any:
    """A copy of ``config`` with just the layers ``kept`` (indices in the target)."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config(decoder=True)
    total = int(text.num_hidden_layers)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == total and "layer" in name:
            setattr(text, name, [value[index] for index in kept])
    text.num_hidden_layers = len(kept)
    if hasattr(text, "max_window_layers"):
        text.max_window_layers = len(kept)
    return changed


# --- cutting and joining weights


def split_model(model: nn.Module, layers: tuple[int, ...]) -> tuple[Tensors, tuple[Tensors, ...]]:
    """Copies of a model's weights: what belongs to no layer, and one set per run of ``layers`` layers.

    Tied weights appear once. Raises ModelError where the layers are not one ModuleList of that length.
    """
    prefix = _layer_prefix(model)
    shared: Tensors = {}
    parts: tuple[Tensors, ...] = tuple({} for _ in layers)
    owner = [(part, index) for part, count in enumerate(layers) for index in range(count)]
    if len(owner) != layer_count(model.config):
        raise ModelError(f"a model with {layer_count(model.config)} layers cannot be cut into {layers}")
    for name, parameter in model.named_parameters():
        value = parameter.detach().clone()
        if not name.startswith(prefix):
            shared[name] = value
            continue
        number, rest = name.removeprefix(prefix).split(".", 1)
        part, index = owner[int(number)]
        parts[part][f"{index}.{rest}"] = value
    return shared, parts


def split_scaffold(model: nn.Module, cut: Cut) -> Scaffold:
    """A trained scaffold model as its shared tensors and slices."""
    shared, slices = split_model(model, cut.slice_layers)
    return Scaffold(shared, slices)


@torch.no_grad()
def join_model(config: Any, shared: Mapping[str, Tensor], parts: list[Mapping[str, Tensor]]) -> nn.Module:
    """A model of ``config`` whose layers are ``parts`` one after the other. Inverse of ``split_model``.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape.
    """
    model = build_model(config, next(iter(shared.values())).dtype)
    prefix = _layer_prefix(model)
    given = dict(shared)
    base = 0
    for part in parts:
        top = 0
        for name, value in part.items():
            number, rest = name.split(".", 1)
            given[f"{prefix}{base + int(number)}.{rest}"] = value
            top = max(top, int(number) + 1)
        base += top
    own = dict(model.named_parameters())
    if own.keys() != given.keys():
        odd = sorted(own.keys() ^ given.keys())
        raise ModelError(f"the parts do not make up the model: {odd[0]} and {len(odd) - 1} more differ")
    for name, parameter in own.items():
        if parameter.shape != given[name].shape:
            raise ModelError(f"{name} has shape {tuple(given[name].shape)}, not {tuple(parameter.shape)}")
        parameter.copy_(given[name])
    return model


def scaffolded(
    config: Any, cut: Cut, scaffold: Scaffold, block: int, state: Mapping[str, Tensor]
) -> nn.Module:
    """S_i: the scaffold around block ``block`` with weights ``state``; only the block requires gradients.

    The embedding is frozen, so autograd records nothing upstream of the block: those
    slices cost a forward pass alone (the paper's FLOP count, section 3).
    """
    parts: list[Mapping[str, Tensor]] = [*scaffold.slices]
    parts[block] = state
    model = join_model(scaffolded_config(config, cut, block), scaffold.shared, parts)
    model.requires_grad_(False)
    for parameter in block_parameters(model, cut, block).values():
        parameter.requires_grad_(True)
    return model


def block_parameters(model: nn.Module, cut: Cut, block: int) -> dict[str, nn.Parameter]:
    """The live parameters of the block inside ``scaffolded``'s model, by relative name, in fixed order."""
    prefix = _layer_prefix(model)
    start = sum(cut.slice_layers[:block])
    found = {}
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            if start <= int(number) < start + cut.block_layers[block]:
                found[f"{int(number) - start}.{rest}"] = parameter
    return found


def recombine(
    config: Any, cut: Cut, shared: Mapping[str, Tensor], blocks: list[Mapping[str, Tensor]]
) -> nn.Module:
    """The target: the blocks stacked on the scaffold's embedding, final norm and head (*cold composition*).

    All of it requires gradients, ready for the joint adaptation.
    """
    if len(blocks) != cut.blocks:
        raise ModelError(f"{len(blocks)} blocks, but the model is cut into {cut.blocks}")
    return join_model(config, shared, blocks)


# --- first weights of a block


def first_block(config: Any, cut: Cut, scaffold: Scaffold, block: int, init: Init, seed: int) -> Tensors:
    """The weights a block starts from. Deterministic for ``seed``.

    ``random``: as transformers initialises that architecture. ``grown``: copies of the
    scaffold's slice, with further layers between them that start as identities, so that
    S_i computes what the scaffold computes at step 0 (Barnraise's own; see docs/mot.md).
    """
    fresh = build_model(_with_layers(config, list(cut.places(block))), torch.float32, seed=seed)
    _, (state,) = split_model(fresh, (cut.block_layers[block],))
    if init == "random":
        return state
    kept = cut.kept(block)
    for source, target in enumerate(kept):
        for name, value in scaffold.slices[block].items():
            number, rest = name.split(".", 1)
            if int(number) == source:
                state[f"{target}.{rest}"] = value.clone().to(state[f"{target}.{rest}"].dtype)
    layers = _layers(fresh)
    for index in range(cut.block_layers[block]):
        if index not in kept:
            for rest, value in _identity(layers[index]).items():
                state[f"{index}.{rest}"] = value
    return state


@torch.no_grad()
def _identity(layer: nn.Module) -> Tensors:
    """The few weights of a decoder layer that make it pass its input through unchanged.

    Where branches end in a norm its gain is zeroed and not the projection before it:
    at a zero input the norm's gradient would be of the order of 1/sqrt(eps).
    """
    changed: Tensors = {}
    norms = [name for name in _BRANCH_NORMS if hasattr(layer, name)]
    if len(norms) == len(_BRANCH_NORMS):
        for name in norms:
            norm = getattr(layer, name)
            gain = norm.weight
            before = gain.detach().clone()
            for value in (0.0, -1.0):  # a gain of w, or of 1 + w (Gemma)
                gain.fill_(value)
                if not bool(norm(torch.ones_like(gain)[None]).any()):
                    changed[f"{name}.weight"] = gain.detach().clone()
                    break
            gain.copy_(before)
        if len(changed) == len(norms):
            return changed
    changed.clear()
    for name, parameter in layer.named_parameters():
        owner = name.rsplit(".", 2)[-2]
        if owner in _OUTPUTS:
            changed[name] = torch.zeros_like(parameter)
    if not changed:
        raise ModelError(
            f"{type(layer).__name__} names none of its output projections "
            f"{', '.join(_OUTPUTS)}: start its blocks with init 'random'"
        )
    return changed


# --- where the layers are


def _layers(model: nn.Module) -> nn.ModuleList:
    return find_layers(model)[1]


def _layer_prefix(model: nn.Module) -> str:
    return find_layers(model)[0] + "."


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of a model's decoder layers.

    Raises:
        ModelError: they are not one ModuleList.
    """
    count = layer_count(model.config)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ModelError(
        f"{type(model).__name__} keeps its {count} layers in no single ModuleList and cannot be cut"
    )
