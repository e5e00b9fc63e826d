"""A version by patch: from the weights of a version on disk and some shards to the very bytes published.

A patch is only ever a shorter way. Its shards are checked like any others, the
result is compared with the manifest shard by shard and as a whole before it counts,
and whatever goes wrong is a ``BarnraiseError`` after which the caller fetches the
file's own shards. Patch files stay beside the version that they led to
(``v000012.patches``), to be served to others and to tell an engine what changed.

The codec and numpy are imported when first needed: an idle node does without them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from barnraise.protocol.errors import StorageError
from barnraise.protocol.manifest import entry_shards
from barnraise.protocol.messages import FileEntry, Manifest, PatchEntry
from barnraise.protocol.version_folder import version_name

PATCHES = ".patches"
_WEIGHTS = ".safetensors"
_PATCH = re.compile(r"from-v([0-9]{6,10})\.(.{1,64})\.patch")


class Route(NamedTuple):
    """How one file is to be made: ``steps`` applied to that file of ``base_version``."""

    entry: FileEntry
    base_version: int
    base_sha256: bytes
    steps: tuple[PatchEntry, ...]

    @property
    def patch_bytes(self) -> int:
        """The size of the steps together, in bytes."""
        return sum(step.size for step in self.steps)


def patches_folder(version_folder: Path) -> Path:
    """Where the patches lie that led to the version in ``version_folder``."""
    return version_folder.with_name(version_folder.name + PATCHES)


def patch_path(version_folder: Path, patch: PatchEntry) -> Path:
    """Where one of them lies."""
    return patches_folder(version_folder) / f"from-{version_name(patch.base_version)}.{patch.path}.patch"


def plan(manifest: Manifest, held: Mapping[int, Manifest], missing: Mapping[bytes, int]) -> tuple[Route, ...]:
    """The files of which patches save bytes. Pure.

    Args:
        held: manifests of the versions on disk.
        missing: shards of the files that are not on disk, digest -> size in bytes.
    """
    routes = []
    for entry in manifest.files:
        whole = sum({d: missing[d] for d in entry.shards if d in missing}.values())
        steps = [patch for patch in manifest.patches if patch.path == entry.path]
        best: Route | None = None
        for position, first in enumerate(steps):
            base = _file_of(held.get(first.base_version), entry.path)
            if base is None or base.size != entry.size:
                continue
            route = Route(entry, first.base_version, base.sha256, tuple(steps[position:]))
            if route.patch_bytes < (whole if best is None else best.patch_bytes):
                best = route
        if best is not None:
            routes.append(best)
    return tuple(routes)


def route_patches(routes: Iterable[Route]) -> tuple[PatchEntry, ...]:
    """All patches that the routes need."""
    return tuple(step for route in routes for step in route.steps)


def write_patch(
    patch: PatchEntry, shard_size: int, get: Callable[[bytes], bytes | None], target: Path
) -> None:
    """Put a patch's shards together in ``target``, which appears whole and checked or not at all. Blocking.

    Raises:
        StorageError: a shard is not there, the result is another, or the disk refused.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    whole = sha256()
    try:
        target.parent.mkdir(exist_ok=True)
        with temporary.open("wb") as file:
            for digest, _, size in entry_shards(patch, shard_size):
                data = get(digest)
                if data is None or len(data) != size:
                    raise StorageError(f"shard {digest.hex()[:16]} of a patch is missing or damaged on disk")
                whole.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if whole.digest() != patch.sha256:
            raise StorageError("a patch does not have the SHA-256 that its manifest names")
        temporary.rename(target)
    except OSError as error:
        raise StorageError(f"cannot write the patch {target}: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def apply_route(
    route: Route,
    versions: Path,
    version_folder: Path,
    target: Path,
    shard_size: int,
    observe: Callable[[int], None] = lambda size: None,
) -> None:
    """Make the route's file at ``target`` from its patch files and the version they begin with. Blocking.

    ``observe`` is told the bytes of each piece that is done.

    Raises:
        PatchError: a patch is damaged or not for this file, or the result is not the manifest's.
        StorageError: the disk refused.
    """
    from barnraise.kernels.patch_format import PatchError
    from barnraise.kernels.patch_reader import read_header
    from barnraise.kernels.patches import apply_chain

    files = [patch_path(version_folder, step) for step in route.steps]
    if read_header(files[0]).base_sha256 != route.base_sha256:
        raise PatchError(f"the patch does not begin with version {route.base_version} as it was published")
    if read_header(files[-1]).target_sha256 != route.entry.sha256:
        raise PatchError("the patch does not lead to the file that the manifest names")
    wrong = (
        f"what the patch makes has other shards than the manifest names: {route.entry.path} of version "
        f"{route.base_version} is damaged on disk, or the patch was published so"
    )
    check = _ShardCheck(route.entry.shards, shard_size)

    def put(piece: bytes) -> None:
        if not check.put(piece):
            raise PatchError(wrong)
        observe(len(piece))

    base = versions / version_name(route.base_version) / route.entry.path
    apply_chain(base, files, target, observe=put)
    if not check.finish():  # too late to stop the rename, not to refuse the file
        raise PatchError(wrong)


def patches_since(version_folder: Path, base_version: int) -> dict[str, tuple[Path, ...]] | None:
    """The patches, in order, that lead to a version's weight files from those of ``base_version``.

    Returns:
        Weight file's name -> patch files; None unless the version was made by patch, from
        ``base_version`` or an earlier one, and so they were applied and checked before.
    """
    steps: dict[str, dict[int, Path]] = {}
    try:
        for path in patches_folder(version_folder).iterdir():
            match = _PATCH.fullmatch(path.name)
            if match:
                steps.setdefault(match[2], {})[int(match[1])] = path
        weights = [path.name for path in version_folder.iterdir() if path.name.endswith(_WEIGHTS)]
    except OSError:
        return None
    if not weights or any(base_version not in steps.get(name, {}) for name in weights):
        return None
    return {
        name: tuple(path for base, path in sorted(steps[name].items()) if base >= base_version)
        for name in weights
    }


class _ShardCheck:
    """Compares a stream of bytes with the digests of the shards that it should have."""

    def __init__(self, digests: tuple[bytes, ...], shard_size: int) -> None:
        self._digests = digests
        self._size = shard_size
        self._hash = sha256()
        self._filled = 0
        self._place = 0

    def put(self, piece: bytes) -> bool:
        """Whether all shards that are complete by now are right."""
        view = memoryview(piece)
        while view:
            part = view[: self._size - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self._size and not self._close():
                return False
        return True

    def finish(self) -> bool:
        """Whether the last shard is right, and no more are expected."""
        return (not self._filled or self._close()) and self._place == len(self._digests)

    def _close(self) -> bool:
        right = self._place < len(self._digests) and self._hash.digest() == self._digests[self._place]
        self._place += 1
        self._hash, self._filled = sha256(), 0
        return right


def _file_of(manifest: Manifest | None, name: str) -> FileEntry | None:
    if manifest is None:
        return None
    return next((entry for entry in manifest.files if entry.path == name), None)
