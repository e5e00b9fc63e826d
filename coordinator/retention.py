"""Which checkpoints stay whole for a rollback, within the disk that the operator gives them."""

from __future__ import annotations

from pathlib import Path

from barnraise.coordinator import checkpoints
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.workers import checkpoint_folder

GB = 1e9


def kept_whole(run_folder: Path, head: int, keep: Keep, needed_from: int) -> set[int]:
    """Versions that stay with their optimiser although the run itself no longer needs them.

    Every ``keep.every``-th, the newest ``keep.most`` of them; fewer where all checkpoints together, those
    from ``needed_from`` on included, would take more than ``keep.disk_gb``. Blocking.
    """
    if not keep.every or not keep.most:
        return set()
    there = checkpoints.complete_versions(run_folder)
    wanted = [version for version in there if 0 < version <= head and version % keep.every == 0]
    wanted = wanted[-keep.most :]
    if not keep.disk_gb:
        return set(wanted)
    needed = {version for version in there if version == 0 or version >= needed_from}
    left = keep.disk_gb * GB - sum(size_of(run_folder, version) for version in needed)
    spared: set[int] = set()
    for version in reversed(wanted):
        if version not in needed:
            left -= size_of(run_folder, version)
            if left < 0:
                break
        spared.add(version)
    return spared


def size_of(run_folder: Path, version: int) -> int:
    """Bytes that a checkpoint takes on the disk; files that other versions share count in each."""
    total = 0
    for path in checkpoint_folder(run_folder, version).rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
