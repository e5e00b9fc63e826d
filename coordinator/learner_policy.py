"""What of a policy is trained, and what a version of it leaves on the disk.

Without adapters all of it: float32 in memory and, where another dtype is published, in a file
of its own. With adapters (``barnraise.kernels.lora``) the base stays as it was published, in the
run's compute dtype and without gradients, moments or a float32 copy; a version is the
adapters, beside a hard link to the base.
"""

from __future__ import annotations

from pathlib import Path

from barnraise.coordinator.checkpoints import MASTER_FILE, WEIGHTS_FILE
from barnraise.kernels.lora import load_adapter, save_adapter, train_adapter_only
from barnraise.kernels.models import Policy, load_policy, save_weights, swap_weights
from barnraise.protocol.durable import link_or_copy
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.manifest import ADAPTER_FILE
from barnraise.protocol.spec import RunSpec


def trained_policy(folder: Path, spec: RunSpec, device: str) -> Policy:
    """The policy in checkpoint ``folder``; what is trained is float32 and has ``requires_grad``.

    Raises:
        ModelError: files are missing, damaged, or of another model.
        RunFolderError: the folder has adapters and the run spec none, or the other way round.
    """
    adapter = spec.model.adapter
    policy = load_policy(folder, "float32" if adapter is None else spec.model.compute_dtype, device)
    if (adapter is None) != (policy.adapter is None):
        raise RunFolderError(
            f"{folder} does not fit the run spec: one speaks of adapters, the other does not"
        )
    master = folder / MASTER_FILE
    if adapter is None:
        if master.is_file():
            swap_weights(policy, master)
        policy.model.requires_grad_(True)
    else:
        train_adapter_only(policy.model)
        load_adapter(policy.model, master if master.is_file() else folder / ADAPTER_FILE)
    return policy


def write_policy(policy: Policy, spec: RunSpec, folder: Path, first: Path) -> None:
    """Write the tensor files of a version into ``folder``: as published, and as trained where that differs.

    ``first``: checkpoint 0, whose base a version with adapters shares.

    Raises:
        StorageError: the disk refused.
        OSError: the base could be neither linked nor copied.
    """
    adapter = spec.model.adapter
    dtype = spec.model.weights_dtype if adapter is None else adapter.dtype
    if adapter is None:
        save_weights(policy.model, folder / WEIGHTS_FILE, dtype)
        if dtype != "float32":
            save_weights(policy.model, folder / MASTER_FILE, "float32")
        return
    link_or_copy(first / WEIGHTS_FILE, folder / WEIGHTS_FILE)
    save_adapter(policy.model, folder / ADAPTER_FILE, dtype)
    if dtype != "float32":
        save_adapter(policy.model, folder / MASTER_FILE, "float32")
