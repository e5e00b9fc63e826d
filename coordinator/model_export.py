"""A version of a run as a model folder that anything can load: adapters merged, tokenizer beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from barnraise.coordinator import checkpoints
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.manifest import ADAPTER_CONFIG, WEIGHTS_FILE


def export_model(run_folder: Path, target: Path, version: int | None = None) -> int:
    """Write ``version`` (None: the newest that is whole) into the new folder ``target``; return its number.

    Adapters are added to the weights in float32 and the sum is rounded to the dtype that the run
    publishes: the same function within that rounding, not the very numbers that nodes computed.
    The run may go on meanwhile.

    Raises:
        RunFolderError: no run, no such version, or ``target`` is in use.
        ModelError: the checkpoint is damaged.
        StorageError: the disk refused.
    """
    spec, _, _ = read_spec(run_folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunFolderError(f"{target} exists and is not an empty folder: choose another, or remove it")
    whole = checkpoints.complete_versions(run_folder)
    chosen = version if version is not None else max(whole, default=0)
    folder = checkpoint_folder(run_folder, chosen)
    if not (folder / WEIGHTS_FILE).is_file():
        there = ", ".join(map(str, whole)) or "none"
        raise RunFolderError(f"version {chosen} of {run_folder} is no model on this disk; there are: {there}")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in spec.model.assets:
            if name != ADAPTER_CONFIG:
                shutil.copyfile(folder / name, target / name)
        if spec.model.adapter is None:
            shutil.copyfile(folder / WEIGHTS_FILE, target / WEIGHTS_FILE)
            sync_folder(target)
        else:
            from barnraise.kernels.lora import merge_adapter
            from barnraise.kernels.models import load_policy, save_weights

            policy = load_policy(folder, "float32")
            merge_adapter(policy.model)
            save_weights(policy.model, target / WEIGHTS_FILE, spec.model.weights_dtype)
    except OSError as error:
        raise StorageError(f"cannot write the model to {target}: {error}") from error
    return chosen
