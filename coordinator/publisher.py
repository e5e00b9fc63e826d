"""From a finished checkpoint to a published version: hash, sign, serve.

Shards are served from inside the checkpoint folder (``DiskStore.adopt``), so a
version lies on the disk once. Everything here blocks on files: off the event loop.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Container
from pathlib import Path

import msgspec

from barnraise.coordinator.checkpoints import MASTER_FILE, OPTIMIZER_FILE, OUTER_FILE, SHARDS_FOLDER
from barnraise.coordinator.opening import OpeningWriter, Tell
from barnraise.coordinator.patching import Previous, expected_bases, offer_patches, patch_places
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.manifest import (
    ADAPTER_FILE,
    WEIGHTS_FILE,
    build_manifest,
    entry_shards,
    fitting_shard_size,
)
from barnraise.protocol.messages import MAX_SHARD, FileEntry, Manifest, Message, Signed
from barnraise.protocol.pretrain import last_block_version, part_name
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.store import DiskStore

log = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"v([0-9]{6,})")


def version_files(run_folder: Path, spec: RunSpec, version: int, weights: str) -> dict[str, Path]:
    """What a version consists of: published name -> file. ``weights`` may be relative to the run folder."""
    folder = checkpoint_folder(run_folder, version)
    files = {name: folder / name for name in spec.model.assets}
    if spec.pretrain is not None and version <= last_block_version(spec.pretrain):
        parts = (part_name(spec.pretrain, part) for part in range(spec.pretrain.blocks + 1))
        return files | {name: folder / name for name in parts}
    files[WEIGHTS_FILE] = run_folder / weights
    if spec.model.adapter is not None:
        files[ADAPTER_FILE] = folder / ADAPTER_FILE
    return files


def publish(
    run_folder: Path,
    spec: RunSpec,
    run_id: bytes,
    version: int,
    weights: str,
    store: DiskStore,
    sign: Callable[[Message], Signed],
    now_ms: int,
    shard_size: int = MAX_SHARD,
    previous: Previous | None = None,
    mirrors: tuple[str, ...] = (),
    tell: Tell | None = None,
) -> tuple[Signed, Manifest]:
    """Cut a version into shards that ``store`` serves, and sign its manifest.

    With ``previous``, the version before, patches from it are made and offered too.
    ``tell`` is told of openings while files are hashed (``barnraise.coordinator.opening``).
    ``shard_size`` is the largest: a small version is cut finer. ``mirrors`` are named in
    the manifest (``barnraise.protocol.mirrors``).

    Raises:
        RunFolderError: a file of the checkpoint is missing, or an asset is not the one that the spec pins.
        StorageError: a file cannot be read.
    """
    files = version_files(run_folder, spec, version, weights)
    try:
        total = sum(path.stat().st_size for path in files.values())
        shard_size = min(shard_size, fitting_shard_size(total))
        for name, digest in spec.model.assets.items():
            if hashlib.sha256(files[name].read_bytes()).digest() != digest:
                raise RunFolderError(
                    f"{files[name]} is not the file that the run spec names; restore it from checkpoint 0"
                )
        writer = None
        known = {} if previous is None else _unchanged(spec, previous.manifest, shard_size)
        if tell is not None and not known:
            bases = expected_bases(version, previous)
            writer = OpeningWriter(run_id, version, files, shard_size, now_ms, bases, store, sign, tell)
        put = _keep_nothing if writer is None else writer.put
        manifest = build_manifest(run_id, version, files, shard_size, now_ms, put, known)
        if writer is not None and bases:
            writer.finish()
    except FileNotFoundError as error:
        raise RunFolderError(
            f"checkpoint {version} is incomplete: {error.filename} is missing; delete its folder, "
            "and the learner makes it again"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot read checkpoint {version} of {run_folder}: {error}") from error
    if previous is not None and spec.model.adapter is None:  # adapters change in every number
        patches = offer_patches(run_folder, manifest, files, previous)
        manifest = msgspec.structs.replace(manifest, patches=patches)
    manifest = msgspec.structs.replace(manifest, mirrors=mirrors)
    serve(run_folder, store, manifest, files)
    return sign(manifest), manifest


def _unchanged(spec: RunSpec, previous: Manifest, shard_size: int) -> dict[str, FileEntry]:
    """What of the version before need not be cut and hashed again: the base of a run with adapters."""
    if spec.model.adapter is None or previous.shard_size != shard_size:
        return {}
    return {entry.path: entry for entry in previous.files if entry.path == WEIGHTS_FILE}


def _keep_nothing(digest: bytes, data: bytes) -> None:
    """Shards stay where they are, inside the checkpoint."""


def serve(run_folder: Path, store: DiskStore, manifest: Manifest, files: dict[str, Path]) -> None:
    """Offer a manifest's shards out of the files that they were cut from."""
    for entry in manifest.files:
        store.adopt(files[entry.path], entry_shards(entry, manifest.shard_size))
    for patch, path in patch_places(run_folder, manifest):
        if path.is_file():
            store.adopt(path, entry_shards(patch, manifest.shard_size))


def prune(run_folder: Path, store: DiskStore, keep_from: int, keep: Container[int] = (0,)) -> list[int]:
    """Delete checkpoints older than ``keep_from``, except ``keep``, and stop serving their shards.

    Returns the versions deleted. A folder that cannot be deleted is logged and left.
    """
    gone = []
    root = run_folder / "checkpoints"
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        match = _CHECKPOINT.fullmatch(folder.name)
        if match is None or int(match[1]) in keep or int(match[1]) >= keep_from:
            continue
        store.disown(folder)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("cannot delete the old checkpoint %s: %s", folder, error)
            continue
        gone.append(int(match[1]))
    return gone


def slim(run_folder: Path, head: int, keep: Container[int] = ()) -> None:
    """Free what only the learner needs in checkpoints that it will not start from again.

    Optimiser state and float32 masters are six sevenths of a checkpoint that publishes
    bfloat16; the two newest keep them, so that a damaged head can be made again, and so do
    those in ``keep``.
    """
    for folder in (run_folder / "checkpoints").glob("v*"):
        match = _CHECKPOINT.fullmatch(folder.name)
        if match is None or int(match[1]) in keep or not 0 < int(match[1]) < head - 1:
            continue
        for name in (MASTER_FILE, OPTIMIZER_FILE, OUTER_FILE):
            try:
                (folder / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot delete %s: %s", folder / name, error)
        shutil.rmtree(folder / SHARDS_FOLDER, ignore_errors=True)
