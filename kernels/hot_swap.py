"""From one version to the next inside a loaded policy: only what a patch says has changed.

``patch_weights`` changes the elements in place and reads no weights from disk at all;
``swap_tensors`` copies whole tensors, for policies whose parameters are of a narrower
type than the published file and so do not have its bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from barnraise.kernels.models import ModelError, Policy, weight_files
from barnraise.kernels.patch_reader import Change, changed_tensors, changes

_FILE_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = {2: torch.int16, 4: torch.int32}
_EXACT = {  # file type -> types of parameters that hold every value of it exactly
    torch.float32: (torch.float32,),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
}


def follow_patches(policy: Policy, folder: Path, patches: Mapping[str, Sequence[Path]]) -> None:
    """Bring ``policy`` to the version in ``folder`` the cheapest way that is exact.

    Args:
        patches: weight file in ``folder`` -> the patches that lead to it from the version that
            ``policy`` holds; each was applied to that version's file before, and checked.

    Raises:
        ModelError, PatchError: something does not fit; the policy may be half changed then.
    """
    if all(patch_weights(policy, folder / name, steps) for name, steps in patches.items()):
        return
    names = {name for steps in patches.values() for step in steps for name in changed_tensors(step)}
    swap_tensors(policy, folder, names)


@torch.no_grad()
def patch_weights(policy: Policy, path: Path, patches: Sequence[Path]) -> bool:
    """Change ``policy``'s parameters as ``patches`` say, one after the other.

    Args:
        path: the safetensors file that they lead to; only its header is read.

    Returns:
        Whether it could be done; if not, because a parameter cannot have the file's bits,
        nothing was changed.

    Raises:
        ModelError, PatchError: a file is damaged or does not fit; the policy may be half changed then.
    """
    own = policy.model.state_dict(keep_vars=True)
    kinds: dict[str, torch.dtype] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in {name for patch in patches for name in changed_tensors(patch)}:
                part = file.get_slice(name)
                kind = _FILE_TYPES.get(part.get_dtype())
                if name not in own or list(part.get_shape()) != list(own[name].shape):
                    raise ModelError(f"{path}: tensor {name} is none of this model's")
                if kind is None or own[name].dtype not in _EXACT[kind] or not own[name].is_contiguous():
                    return False
                kinds[name] = kind
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} does not fit its patches: {error}") from error
    for patch in patches:
        for change in changes(patch, path):
            _change(own[change.tensor].detach().view(-1), kinds[change.tensor], change)
    return True


def _change(flat: Tensor, kind: torch.dtype, change: Change) -> None:
    block = flat[change.start : change.start + change.size]
    bits = _BITS[kind.itemsize]
    signed = change.values.view(f"<i{kind.itemsize}").astype(np.int64)
    delta = torch.from_numpy(signed).to(flat.device).to(bits)
    if change.places is None:
        block.copy_((block.to(kind).view(bits) + delta).view(kind))
        return
    places = torch.from_numpy(change.places).to(flat.device)
    block[places] = (block[places].to(kind).view(bits) + delta).view(kind).to(flat.dtype)


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
