"""Which patches a version offers: made once, against the version before, and chained.

Every manifest describes its version whole, so that a newcomer never depends on a
patch. A node that holds the version before takes one patch; a node that is some
versions behind takes a chain of them, as long as that is worth it. Everything here
blocks on files: off the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from barnraise.coordinator.workers import checkpoint_folder
from barnraise.kernels.patch_format import PatchError
from barnraise.kernels.patches import make_patch
from barnraise.protocol.errors import StorageError
from barnraise.protocol.manifest import MAX_SHARDS, cut
from barnraise.protocol.messages import FileEntry, Manifest, PatchEntry

log = logging.getLogger(__name__)


class PatchPolicy(NamedTuple):
    """When a patch is worth offering.

    ``max_fraction``: of the file's size that a patch, and a whole chain, may have.
    ``chain``: the most patches that lead to one version.
    ``keyframe_every``: versions divisible by it offer no patch and begin a new chain,
    so that everybody fetches whole files now and then; 0 for never: the digest over
    each result makes that unnecessary.
    """

    max_fraction: float = 0.5
    chain: int = 8
    keyframe_every: int = 0


POLICY = PatchPolicy()


class Previous(NamedTuple):
    """The version before: its manifest, and where its files lie by their published names."""

    manifest: Manifest
    files: dict[str, Path]


def patch_path(run_folder: Path, version: int, base_version: int, name: str) -> Path:
    """Where the patch of file ``name`` from ``base_version`` to ``version`` lies: with its checkpoint."""
    return checkpoint_folder(run_folder, version) / f"from-v{base_version:06d}.{name}.patch"


def is_keyframe(version: int, policy: PatchPolicy = POLICY) -> bool:
    """Whether ``version`` is to be fetched whole by everybody."""
    return policy.keyframe_every > 0 and version % policy.keyframe_every == 0


def patch_file(
    previous: Path,
    following: Path,
    patch: Path,
    *,
    base_version: int,
    name: str,
    shard_size: int,
    base_sha256: bytes | None = None,
    policy: PatchPolicy = POLICY,
) -> PatchEntry | None:
    """Make ``patch``, which leads from the weights ``previous`` to ``following``, and cut it into shards.

    Returns:
        What the manifest carries, or None if the patch would not be worth it.

    Raises:
        PatchError: the files are not laid out alike, or one cannot be read.
        StorageError: the disk refused.
    """
    try:
        limit = int(following.stat().st_size * policy.max_fraction)
        made = make_patch(previous, following, patch, base_sha256=base_sha256, max_bytes=limit)
        if made is None:
            return None
        whole = sha256()
        shards = []
        for piece in cut(patch, shard_size):
            whole.update(piece)
            shards.append(sha256(piece).digest())
    except OSError as error:
        raise StorageError(f"cannot make the patch {patch}: {error}") from error
    return PatchEntry(
        path=name,
        base_version=base_version,
        size=made.patch_bytes,
        sha256=whole.digest(),
        shards=tuple(shards),
    )


def link(
    older: Sequence[PatchEntry], newest: PatchEntry, full_size: int, policy: PatchPolicy = POLICY
) -> tuple[PatchEntry, ...]:
    """The chain that ends with ``newest``: as much of ``older`` before it as is worth it.

    ``older`` is the chain of the version that ``newest`` begins with, for the same
    file, oldest first. Pure.
    """
    chain = [newest]
    total = newest.size
    for patch in reversed(older):
        total += patch.size
        if len(chain) >= policy.chain or total > policy.max_fraction * full_size:
            break
        chain.append(patch)
    return tuple(reversed(chain))


def offer_patches(
    run_folder: Path,
    manifest: Manifest,
    files: dict[str, Path],
    previous: Previous,
    policy: PatchPolicy = POLICY,
) -> tuple[PatchEntry, ...]:
    """The patches that ``manifest`` may list, made now or left from the versions before.

    Never a reason not to publish: what goes wrong is logged, and the version is then
    offered whole only.
    """
    if is_keyframe(manifest.version, policy):
        return ()
    before = {entry.path: entry for entry in previous.manifest.files}
    base = previous.manifest.version
    offered: list[PatchEntry] = []
    for entry in manifest.files:
        old = before.get(entry.path)
        if not _worth_trying(entry, old):
            continue
        assert old is not None
        target = patch_path(run_folder, manifest.version, base, entry.path)
        try:
            newest = patch_file(
                previous.files[entry.path],
                files[entry.path],
                target,
                base_version=base,
                name=entry.path,
                shard_size=manifest.shard_size,
                base_sha256=old.sha256,
                policy=policy,
            )
        except (PatchError, StorageError) as error:
            log.warning("version %d is published without a patch: %s", manifest.version, error)
            continue
        if newest is None:
            log.info("version %d: a patch of %s would not be worth it", manifest.version, entry.path)
            continue
        older = [patch for patch in previous.manifest.patches if patch.path == entry.path]
        older = _unbroken(older, lambda step: _lies(run_folder, step), base)
        offered += link(older, newest, entry.size, policy)
    shards = sum(len(entry.shards) for entry in manifest.files)
    if shards + sum(len(patch.shards) for patch in offered) > MAX_SHARDS or len(offered) > 64:
        log.warning("version %d has too many shards for its patches to be listed", manifest.version)
        return ()
    return tuple(sorted(offered, key=lambda patch: (patch.path, patch.base_version)))


def expected_bases(version: int, previous: Previous | None, policy: PatchPolicy = POLICY) -> tuple[int, ...]:
    """The versions that patches to ``version`` may begin with, as far as can be said before they are made.

    Whoever holds one of them is told to wait for the patch; should none come, that
    node fetches whole files a little later than it might have. Pure.
    """
    if previous is None or is_keyframe(version, policy):
        return ()
    bases = [patch.base_version for patch in previous.manifest.patches]
    return tuple(sorted({*bases, previous.manifest.version}))[-policy.chain :]


def patch_places(run_folder: Path, manifest: Manifest) -> list[tuple[PatchEntry, Path]]:
    """Each patch that a manifest lists, and where its file lies or lay."""
    return [
        (step, patch_path(run_folder, target, step.base_version, step.path))
        for step, target in _targets(manifest.patches, manifest.version)
    ]


def _worth_trying(entry: FileEntry, old: FileEntry | None) -> bool:
    """Weights of the same size that changed; an unchanged file has the same shards anyway."""
    return (
        entry.path.endswith(".safetensors")
        and old is not None
        and old.size == entry.size
        and old.sha256 != entry.sha256
    )


def _targets(patches: Sequence[PatchEntry], version: int) -> list[tuple[PatchEntry, int]]:
    """Each patch with the version that it leads to."""
    steps = []
    for position, patch in enumerate(patches):
        following = patches[position + 1] if position + 1 < len(patches) else None
        last = following is None or following.path != patch.path
        steps.append((patch, version if last or following is None else following.base_version))
    return steps


def _unbroken(
    older: list[PatchEntry], exists: Callable[[tuple[PatchEntry, int]], bool], version: int
) -> list[PatchEntry]:
    """The end of a chain of which every file is still there."""
    kept: list[PatchEntry] = []
    for step in reversed(_targets(older, version)):
        if not exists(step):
            break
        kept.append(step[0])
    return kept[::-1]


def _lies(run_folder: Path, step: tuple[PatchEntry, int]) -> bool:
    patch, target = step
    with suppress(OSError):
        return patch_path(run_folder, target, patch.base_version, patch.path).stat().st_size == patch.size
    return False
