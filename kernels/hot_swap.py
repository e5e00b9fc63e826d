"""Copy only some tensors of another version into a policy: those that a patch says have changed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from barnraise.kernels.models import ModelError, Policy, weight_files


@torch.no_grad()
def swap_tensors(policy: Policy, path: Path, names: Collection[str]) -> int:
    """Copy the tensors ``names`` of the safetensors file or model folder ``path`` into ``policy`` in place.

    Names and shapes are checked first, so that a file that does not fit leaves the policy
    as it was. A name that the model knows only as the other end of a tied weight is
    copied like any other.

    Returns:
        How many were copied.

    Raises:
        ModelError: a file is missing or damaged, or a tensor is not in it or not the model's.
    """
    files = weight_files(path) if path.is_dir() else (path,)
    own = policy.model.state_dict(keep_vars=True)
    wanted = set(names)
    try:
        places: dict[str, Path] = {}
        for file_path in files:
            with safe_open(file_path, framework="pt") as file:
                for name in wanted.intersection(file.keys()):
                    if name not in own or list(file.get_slice(name).get_shape()) != list(own[name].shape):
                        raise ModelError(f"{file_path}: tensor {name} is none of this model's")
                    places[name] = file_path
        if len(places) != len(wanted):
            raise ModelError(f"{path} does not hold {min(wanted - places.keys())}")
        for file_path in files:
            with safe_open(file_path, framework="pt") as file:
                for name, place in places.items():
                    if place == file_path:
                        own[name].copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
    return len(places)
