"""Low-rank adapters: a frozen model, and beside some of its linear layers what training changes.

Hu et al., "LoRA", arXiv 2106.09685: y = W x + (alpha / rank) B (A x), with A [rank, in] and
B [out, rank]; B begins at zero, so that version 0 is the base itself.

The product is never merged into W while a run goes on. In bfloat16 a merged weight cannot be
taken back exactly, and W + B A is another number than W x + B (A x): node, verifier and learner
all compute the latter, in the run's compute dtype, so that a proof means the same everywhere,
and a new version is a few megabytes copied in place without a second copy of the base.

The files are PEFT's (``adapter_config.json``, ``adapter_model.safetensors``): every version can
be used by whatever reads those.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from barnraise.kernels.model_files import DTYPES, read_headers, save_tensors
from barnraise.kernels.model_json import ModelError, read_json
from barnraise.protocol.manifest import ADAPTER_CONFIG

MAX_RANK = 1024
MAX_TARGETS = 64
_PREFIX = "base_model.model."  # of names in the file, as PEFT writes them
_PARTS = ("lora_A", "lora_B")


class Adapter(NamedTuple):
    """Which layers are adapted and how. ``targets``: last parts of module names, such as ``q_proj``."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank term, which runs in the dtype of its input.

    ``weight`` and ``bias`` keep their names, so that the base's files fit a model with and
    without adapters alike. ``lora_A`` [rank, in], ``lora_B`` [out, rank].
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, linear: nn.Linear, adapter: Adapter, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = adapter.scale
        self.applied = True
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.zeros(adapter.rank, self.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, adapter.rank, dtype=dtype, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        plain = nn.functional.linear(input, self.weight, self.bias)
        if not self.applied:
            return plain
        low = nn.functional.linear(input, self.lora_A.to(input.dtype))
        return plain + self.scale * nn.functional.linear(low, self.lora_B.to(input.dtype))


def linear_targets(model: nn.Module) -> tuple[str, ...]:
    """Last parts of the names of all linear layers but the output head: PEFT's "all-linear".

    Raises:
        ModelError: there are none.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    }
    if not found:
        raise ModelError(f"{type(model).__name__} has no linear layers that adapters could go to")
    return tuple(sorted(found))


def attach_adapter(model: nn.Module, adapter: Adapter, dtype: torch.dtype) -> None:
    """Put zero adapters of ``dtype`` beside the layers that ``adapter`` names.

    Raises:
        ModelError: a target names no layer, or one that is not linear, or the output head.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    places: list[tuple[nn.Module, str, nn.Linear]] = []
    for target in adapter.targets:
        matches = [
            (name, module)
            for name, module in model.named_modules()
            if name == target or name.endswith("." + target)
        ]
        if not matches:
            raise ModelError(
                f"adapter target {target!r} names no layer of {type(model).__name__}; "
                f"there are {', '.join(linear_targets(model))}"
            )
        for name, module in matches:
            if type(module) is not nn.Linear or module is head:
                kind = "the output head" if module is head else f"a {type(module).__name__}, no linear layer"
                raise ModelError(f"adapter target {target!r} names {name}, {kind}")
            parent, _, last = name.rpartition(".")
            places.append((model.get_submodule(parent), last, module))
    for owner, last, linear in places:
        setattr(owner, last, LoraLinear(linear, adapter, dtype))


@torch.no_grad()
def start_adapter(model: nn.Module, seed: int) -> None:
    """First weights: A uniform as PEFT draws it (He et al.'s bound for a = sqrt 5), B zero. By ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in adapted_layers(model):
        bound = 1 / math.sqrt(layer.in_features)
        drawn = (2 * torch.rand(layer.lora_A.shape, generator=generator) - 1) * bound
        layer.lora_A.copy_(drawn)
        layer.lora_B.zero_()


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The layers with adapters, by name, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The live adapter parameters by their names in the file."""
    return {
        f"{_PREFIX}{name}.{part}.weight": getattr(layer, part)
        for name, layer in adapted_layers(model)
        for part in _PARTS
    }


def train_adapter_only(model: nn.Module) -> None:
    """Freeze the base; adapters become float32 and require gradients."""
    model.requires_grad_(False)
    for _, layer in adapted_layers(model):
        for part in _PARTS:
            parameter: nn.Parameter = getattr(layer, part)
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what the base alone does: the reference policy without a second copy."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.applied = False
    try:
        yield
    finally:
        for layer in layers:
            layer.applied = True


@torch.no_grad()
def merge_adapter(model: nn.Module) -> None:
    """Add every adapter to its layer's weight, in float32; plain linear layers remain.

    For export, not within a run.
    """
    for name, layer in [*adapted_layers(model)]:
        change = layer.scale * (layer.lora_B.float() @ layer.lora_A.float())
        layer.weight.copy_(layer.weight.float() + change)
        plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
        plain.weight, plain.bias = layer.weight, layer.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)


# --- files


def save_adapter(model: nn.Module, path: Path, dtype: str) -> None:
    """Write the adapters in ``dtype`` as one safetensors file, atomically and synced.

    Raises:
        StorageError: the disk refused.
    """
    target = DTYPES[dtype]
    tensors = {
        name: parameter.detach().to("cpu", target).contiguous()
        for name, parameter in adapter_tensors(model).items()
    }
    save_tensors(tensors, path)


@torch.no_grad()
def load_adapter(model: nn.Module, path: Path) -> None:
    """Copy the adapters in ``path`` into ``model`` in place; the base is not touched.

    Names and shapes are checked first: a file that does not fit leaves the model as it was.

    Raises:
        ModelError: missing, damaged, or for other layers or another rank.
    """
    if not path.is_file():
        raise ModelError(f"{path} is missing: {ADAPTER_CONFIG} beside it promises adapters")
    own = adapter_tensors(model)
    shapes = read_headers((path,))
    odd = sorted(own.keys() ^ shapes.keys())
    odd += [name for name in own.keys() & shapes.keys() if list(own[name].shape) != shapes[name]]
    if odd:
        raise ModelError(f"the adapters in {path} do not fit the model and {ADAPTER_CONFIG}: {odd[0]}")
    try:
        with safe_open(path, framework="pt") as file:
            for name, tensor in own.items():
                tensor.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def write_adapter_config(adapter: Adapter, folder: Path) -> None:
    """Write PEFT's ``adapter_config.json`` into ``folder``; the same adapter gives the same bytes."""
    data = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(data, indent=2) + "\n")


def read_adapter_config(folder: Path) -> Adapter | None:
    """What ``adapter_config.json`` in ``folder`` says; None if there is none.

    Raises:
        ModelError: damaged, or of a kind that this module does not compute.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    data = read_json(path)
    rank, alpha, targets = data.get("r"), data.get("lora_alpha"), data.get("target_modules")
    if data.get("peft_type") != "LORA" or data.get("bias", "none") != "none" or _variants(data):
        raise ModelError(f"{path} describes adapters other than plain LoRA without biases")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{path}: r is {rank!r}, not 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= 1e6:
        raise ModelError(f"{path}: lora_alpha is {alpha!r}, not a positive number")
    if not isinstance(targets, list) or not 1 <= len(targets) <= MAX_TARGETS:
        raise ModelError(f"{path}: target_modules is no list of 1 to {MAX_TARGETS} names")
    if not all(isinstance(name, str) and name for name in targets) or len(set(targets)) < len(targets):
        raise ModelError(f"{path}: target_modules holds something that is no name, or one twice")
    return Adapter(rank, float(alpha), tuple(sorted(targets)))


def _variants(data: dict[str, Any]) -> bool:
    """Whether a setting changes what is computed beyond rank, alpha and targets."""
    flags = ("use_rslora", "use_dora", "fan_in_fan_out", "alora_invocation_tokens", "lora_bias")
    kinds = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "target_parameters")
    return any(data.get(name) for name in (*flags, *kinds))
