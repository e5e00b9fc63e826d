"""The optimiser's state between two processes' lives: one safetensors file in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from barnraise.coordinator.learner_shards import read_whole
from barnraise.coordinator.learner_step import trainable_parameters
from barnraise.kernels.models import Policy, save_tensors
from barnraise.protocol.errors import RunFolderError


def write_optimizer(policy: Policy, optimizer: torch.optim.AdamW, path: Path) -> None:
    """Write the state of one process's optimiser, a tensor for each parameter and kind."""
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    save_tensors(tensors, path)


def read_optimizer(policy: Policy, optimizer: torch.optim.AdamW, path: Path) -> None:
    """The optimiser's state from a file that one process wrote; each process takes its part.

    Raises:
        RunFolderError: it is damaged, or another run's.
    """
    parameters = trainable_parameters(policy)
    try:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
    except Exception as error:  # SafetensorError, OSError
        raise RunFolderError(
            f"{path} is damaged ({error}): remove its folder to have it trained again"
        ) from error
    targets: list[tuple[str, Tensor]] = []
    for key in keys:
        kind, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None:
            raise RunFolderError(f"{path} does not fit the model ({key}): it is another run's")
        value = torch.zeros(()) if kind == "step" else torch.zeros_like(parameter.detach())
        optimizer.state[parameter][kind] = value
        targets.append((key, value))
    read_whole(targets, path)
