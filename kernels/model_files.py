"""Weights on disk: safetensors alone, headers compared before a byte is copied.

Written atomically and synced; the same weights give the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from barnraise.kernels.model_json import ModelError, read_json
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import StorageError

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, sorted.

    Raises:
        ModelError: there are none, or the index names a file outside the folder or a missing one.
    """
    single = folder / WEIGHTS_NAME
    if single.is_file():
        return (single,)
    index = folder / INDEX_NAME
    if not index.is_file():
        raise ModelError(
            f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; only safetensors are read "
            "(pickled .bin files are refused: convert them first)"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map")
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    for file in files:
        if file.parent != folder or not file.is_file():
            raise ModelError(f"{index} names {file.name}, which is not in {folder}")
    return files


def read_headers(files: tuple[Path, ...]) -> dict[str, list[int]]:
    """Shape of every tensor in ``files``; nothing but headers is read."""
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in shapes:
                        raise ModelError(f"{path} holds {name} a second time")
                    shapes[name] = list(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
    return shapes


def check_fit(model: nn.Module, shapes: dict[str, list[int]], where: Path) -> None:
    own = {name: list(tensor.shape) for name, tensor in own_tensors(model)}
    missing = sorted(own.keys() - shapes.keys())
    unknown = sorted(shapes.keys() - own.keys() - model.state_dict(keep_vars=True).keys())
    wrong = sorted(name for name in own.keys() & shapes.keys() if own[name] != shapes[name])
    for what, names in (
        ("missing", missing),
        ("not of this architecture", unknown),
        ("of another shape", wrong),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"weights in {where} do not fit config.json: {', '.join(names[:3])}{more} {what}"
            )


@torch.no_grad()
def copy_weights(model: nn.Module, files: tuple[Path, ...]) -> None:
    own = dict(own_tensors(model))
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in own:  # the other name of a tied weight is not read
                    own[name].copy_(file.get_tensor(name))


def own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once, under their first name) and persistent buffers, by name."""
    parameters = dict(model.named_parameters())  # removes duplicates
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from parameters.items()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in aliases:
            yield name, tensor


def save_weights(model: nn.Module, path: Path, dtype: str) -> None:
    """Write ``model``'s weights to ``path`` as one safetensors file, atomically and synced.

    Tied weights are written once. The same weights give the same bytes.

    Args:
        dtype: ``"float32"`` or ``"bfloat16"``; floating-point tensors are cast to it.

    Raises:
        StorageError: the disk refused.
    """
    target = DTYPES[dtype]
    tensors = {
        name: tensor.detach().to("cpu", target if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in own_tensors(model)
    }
    save_tensors(tensors, path)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write ``tensors`` (CPU, contiguous) to ``path`` as safetensors: temporary file, sync, rename.

    Raises:
        StorageError: the disk refused.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        raise StorageError(f"cannot write {path} ({size / 1e6:.1f} MB): {error}") from error
