"""The policies of recent versions, as far as memory holds them."""

from __future__ import annotations

from pathlib import Path

from barnraise.coordinator.workers import checkpoint_folder
from barnraise.kernels.models import ModelError, Policy, load_policy, swap_weights
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.spec import RunSpec

_POLICY_BYTES = 1024**3  # weights of recent versions held besides the one in use


class HeldPolicies:
    """Loads what is asked for; what was asked for least recently makes room. ``folder``: the run's."""

    def __init__(self, spec: RunSpec, folder: Path, device: str) -> None:
        self._spec, self._folder, self._device = spec, folder, device
        self._held: dict[int, Policy] = {}  # by version, least recently used first

    def __contains__(self, version: int) -> bool:
        return version in self._held

    def __len__(self) -> int:
        return len(self._held)

    def of(self, version: int) -> Policy:
        """The policy of ``version``, from memory, from an older one's memory, or from its checkpoint.

        Raises:
            RunFolderError: the checkpoint is gone.
            ModelError: it is there and cannot be loaded.
        """
        policy = self._held.pop(version, None)
        if policy is None:
            folder = checkpoint_folder(self._folder, version)
            if not folder.is_dir():
                raise RunFolderError(f"the weights of version {version} are no longer kept ({folder.name})")
            if self._held and len(self._held) >= self.room():
                policy = self._held.pop(next(iter(self._held)))  # dropped if swapping fails
                swap_weights(policy, folder)
            else:
                policy = load_policy(folder, self._spec.model.compute_dtype, self._device)
            if policy.vocabulary < self._spec.model.vocabulary:
                raise ModelError(
                    f"{folder} has a vocabulary of {policy.vocabulary}, the run spec says "
                    f"{self._spec.model.vocabulary}: it is another run's model"
                )
        self._held[version] = policy
        return policy

    def room(self) -> int:
        """How many versions to hold: those within the allowed lag, as far as memory goes; one is held."""
        policy = next(iter(self._held.values()))
        size = policy.parameters * policy.head_weight.element_size()
        return max(1, min(self._spec.rollout.max_lag + 2, _POLICY_BYTES // max(size, 1)))

    def hidden_size(self) -> int:
        """The model's width: the same for all versions.

        Raises:
            RunFolderError: there is no version at all.
        """
        if not self._held:
            folders = sorted((self._folder / "checkpoints").glob("v[0-9]*"))
            if not folders:
                raise RunFolderError(f"there is no checkpoint in {self._folder}")
            return self.of(int(folders[-1].name[1:])).hidden_size
        return next(iter(self._held.values())).hidden_size
