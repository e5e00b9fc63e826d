"""A published version as a folder: put together from shards, appearing whole or not at all.

What a manifest says and when it is believed is ``barnraise.protocol.manifest``; here its files
get onto a disk, and are told from what a crash or a failing disk left. Everything blocks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import DamagedVersionError, StorageError
from barnraise.protocol.manifest import check_shard, cut, entry_shards, manifest_bytes
from barnraise.protocol.messages import FileEntry, Manifest

_PART = ".part-"  # marks a version folder still being written


def version_name(version: int) -> str:
    """The folder name of a version: ``v000012``."""
    return f"v{version:06d}"


def folder_matches(manifest: Manifest, folder: Path) -> bool:
    """Whether ``folder`` holds exactly the manifest's files, re-hashed. Blocking."""
    try:
        if {path.name for path in folder.iterdir()} != {entry.path for entry in manifest.files}:
            return False
        for entry in manifest.files:
            path = folder / entry.path
            if path.is_symlink() or path.stat().st_size != entry.size:
                return False
            whole = sha256()
            for piece in cut(path, manifest.shard_size):
                whole.update(piece)
            if whole.digest() != entry.sha256:
                return False
    except OSError:
        return False
    return True


def assemble(
    manifest: Manifest,
    get: Callable[[bytes], bytes | None],
    folder: Path,
    ready: Mapping[str, Path] | None = None,
) -> None:
    """Write the manifest's files into ``folder``, which appears whole or not at all.

    ``ready`` names files that lie finished on the same file system, checked against
    their SHA-256 and synced: they are moved. The others are written into a temporary
    sibling, one shard in memory at a time, checked against their SHA-256, synced and
    renamed; a ``folder`` that exists is kept if it matches and replaced if not. Blocking.

    Raises:
        StorageError: ``get`` does not have a shard, or the disk is full.
        DamagedVersionError: a file comes out different though all its shards are right.
    """
    if folder.exists() and folder_matches(manifest, folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(mkdtemp(prefix=f".{folder.name}{_PART}", dir=folder.parent))
    except OSError as error:
        raise StorageError(f"cannot write version {manifest.version} to {folder}: {error}") from error
    try:
        for entry in manifest.files:
            if ready and entry.path in ready:
                ready[entry.path].rename(part / entry.path)
            else:
                _write_file(manifest, entry, get, part / entry.path)
        sync_folder(part)
        part.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write version {manifest.version} to {folder} "
            f"({manifest_bytes(manifest) / 1e6:.1f} MB are needed there): {error}"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_file(
    manifest: Manifest, entry: FileEntry, get: Callable[[bytes], bytes | None], path: Path
) -> None:
    whole = sha256()
    with path.open("xb") as file:
        for digest, _, size in entry_shards(entry, manifest.shard_size):
            data = get(digest)
            if data is None or len(data) != size:
                raise StorageError(
                    f"version {manifest.version} is incomplete: shard {digest.hex()[:16]} of {entry.path} "
                    "is missing or damaged on disk; it must be fetched again"
                )
            whole.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if whole.digest() == entry.sha256:
        return
    for digest, _, _ in entry_shards(entry, manifest.shard_size):
        data = get(digest)
        if data is None or not check_shard(data, digest):
            raise StorageError(
                f"version {manifest.version}: shard {digest.hex()[:16]} of {entry.path} changed on the disk; "
                "it must be fetched again, and the disk may be failing"
            )
    raise DamagedVersionError(
        f"version {manifest.version} was published damaged: {entry.path} does not have the SHA-256 that the "
        "signed manifest names, though every shard does. The run's coordinator is at fault, and no peer; "
        "its operator has to publish the version again"
    )


def remove_parts(folder: Path) -> None:
    """Delete what an interrupted ``assemble`` left in ``folder``, the parent of versions. Blocking."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(".") and _PART in path.name:
                shutil.rmtree(path, ignore_errors=True)
