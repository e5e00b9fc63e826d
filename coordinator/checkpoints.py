"""Checkpoint folders: written whole or not at all, found again after any crash.

A version is made in ``checkpoints/.saving-v000012``, synced, and renamed; so a
folder ``v000012`` with its ``state.json`` is complete by construction, and whatever
a killed process left behind is thrown away by the next one. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from barnraise.coordinator.workers import Trained, checkpoint_folder
from barnraise.protocol.durable import link_or_copy, replace_file, sync_folder
from barnraise.protocol.errors import RunFolderError, StorageError

WEIGHTS_FILE = "model.safetensors"
MASTER_FILE = "master.safetensors"
"""Float32 weights, where the published ones are of another dtype."""
OPTIMIZER_FILE = "optimizer.safetensors"
SHARDS_FOLDER = "shards"
"""Instead of master and optimiser, where several processes trained: both, a file per process."""
OUTER_FILE = "outer.safetensors"
"""Momentum of the outer step, in versions of the block stage."""
RECORD_FILE = "state.json"
TEMPORARY = ".saving-"
"""A version's folder is called that and its name until it is whole."""
_MAX_RECORD = 1024 * 1024


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``state.json``: what a finished version is, besides its tensors.

    ``step`` counts optimiser steps since the run began. ``trained.weights`` is the
    bare file name here, so that a run folder can be moved. ``fresh_optimizer``: the
    version has no optimiser state, and the next one begins with an empty one.
    """

    format: Literal[1] = 1
    version: int
    step: int
    trained: Trained
    fresh_optimizer: bool = False


def save_checkpoint(run_folder: Path, record: Record, write: Callable[[Path], Record | None]) -> None:
    """Make the folder of ``record.version``; config and tokenizer come from version 0 by hard link.

    Args:
        write: puts the version's synced tensor files into the folder that it is given; what it
            returns takes the place of ``record``.

    Raises:
        StorageError: the disk refused; nothing is left of the attempt.
    """
    final = checkpoint_folder(run_folder, record.version)
    temporary = final.with_name(TEMPORARY + final.name)
    try:
        _remove(temporary)
        temporary.mkdir()
        for source in _assets(checkpoint_folder(run_folder, 0)):
            link_or_copy(source, temporary / source.name)
        write_record(temporary, write(temporary) or record)
        if final.exists():  # no state.json inside, or we would not train it: not ours, not whole
            _remove(final)
        os.rename(temporary, final)
        sync_folder(final.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            _remove(temporary)
        raise StorageError(f"cannot write checkpoint {final}: {error}; free some space there") from error
    except StorageError:
        with contextlib.suppress(OSError):
            _remove(temporary)
        raise


def write_record(folder: Path, record: Record) -> None:
    """Write ``state.json`` into ``folder``: temporary file, sync, rename.

    Raises:
        StorageError: the disk refused.
    """
    path = folder / RECORD_FILE
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(record)))
        sync_folder(folder)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}; free some space there") from error


def read_record(run_folder: Path, version: int) -> Record | None:
    """The record of a complete version with ``trained.weights`` as a full path; None if there is none.

    Raises:
        RunFolderError: the record is there but damaged.
    """
    folder = checkpoint_folder(run_folder, version)
    path = folder / RECORD_FILE
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_RECORD)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
    try:
        record = msgspec.json.decode(data, type=Record)
    except msgspec.MsgspecError as error:
        raise RunFolderError(
            f"{path} is damaged ({error}): remove the folder {folder.name} to have it trained again"
        ) from error
    if record.version != version:
        raise RunFolderError(f"{path} says version {record.version}: the folder was renamed by hand")
    weights = str(folder / record.trained.weights)
    return msgspec.structs.replace(record, trained=msgspec.structs.replace(record.trained, weights=weights))


def complete_versions(run_folder: Path) -> list[int]:
    """Versions whose folder and record exist, ascending."""
    return sorted(version for version, folder in _versions(run_folder) if (folder / RECORD_FILE).is_file())


def version_folders(run_folder: Path) -> list[int]:
    """Versions that have a folder, whole or not, ascending."""
    return sorted(version for version, _ in _versions(run_folder))


def discard_leftovers(run_folder: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    with contextlib.suppress(OSError):
        for path in (run_folder / "checkpoints").glob(TEMPORARY + "*"):
            _remove(path)


def _versions(run_folder: Path) -> Iterator[tuple[int, Path]]:
    for path in (run_folder / "checkpoints").glob("v*"):
        digits = path.name[1:]
        if digits.isascii() and digits.isdecimal() and path.is_dir():
            yield int(digits), path


def _assets(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        tensors = path.suffix in (".safetensors", ".bin", ".pt") or ".safetensors.index" in path.name
        if path.is_file() and not tensors and path.name != RECORD_FILE and not path.name.startswith("."):
            yield path


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
