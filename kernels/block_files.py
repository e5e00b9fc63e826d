"""Scaffold and blocks as a version's files hold them, read with the suspicion that files deserve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from barnraise.kernels.models import ModelError, read_model
from barnraise.kernels.mot import Cut, Scaffold, Tensors, scaffold_config, split_scaffold


def read_scaffold(path: Path, config: Any, cut: Cut) -> Scaffold:
    """The scaffold in ``path``, a model of its own, for a target of ``config``; float32.

    Raises:
        ModelError: missing, damaged, or not a scaffold of this model.
    """
    return split_scaffold(read_model(scaffold_config(config, cut), path), cut)


def read_block(path: Path) -> Tensors:
    """The weights of one block, relative names, float32. Whether they fit is found when they are put in.

    Raises:
        ModelError: missing or damaged, or a number in it is not finite.
    """
    try:
        weights = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:  # KeyError: a dtype that torch has not
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
    for name, value in weights.items():
        if not value.is_floating_point() or not bool(torch.isfinite(value).all()):
            raise ModelError(f"{name} in {path} is not made of finite numbers")
    return {name: value.float() for name, value in weights.items()}
