"""Taking an earlier version up again: a new version with its weights and its optimiser's state."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import file_digest
from pathlib import Path

import msgspec

from barnraise.coordinator import checkpoints
from barnraise.coordinator.checkpoints import Record
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.workers import Trained, checkpoint_folder
from barnraise.protocol import wire
from barnraise.protocol.durable import link_or_copy, replace_file
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import BarnraiseError, RunFolderError
from barnraise.protocol.manifest import WEIGHTS_FILE
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.spec import RunSpec

NOTE = ".published"  # in a checkpoint's folder; no part of the version
_MAX_NOTE = 64 * 1024 * 1024


def can_return(run_folder: Path, version: int) -> str:
    """Why a version cannot be taken up again; "" if it can."""
    if _whole(run_folder, version) is not None:
        return ""
    there = checkpoints.complete_versions(run_folder)
    return (
        f"the checkpoint of version {version} is not kept any more; these are: "
        f"{', '.join(map(str, there)) or 'none'}"
    )


def note_published(run_folder: Path, version: int, signed: Signed) -> None:
    """Keep a version's signed manifest beside its files: the journal has those of the newest alone. Blocking.

    Raises:
        OSError: the disk refused, or the version is gone already.
    """
    replace_file(checkpoint_folder(run_folder, version) / NOTE, wire.encode(signed))


def published_as(run_folder: Path, journal: Journal, spec: RunSpec, version: int) -> dict[str, bytes]:
    """SHA-256 of a version's tensor files, as its signed manifest has them; {} where that is not there.

    Blocking.
    """
    signed = journal.manifest(version)
    try:
        if signed is None:
            with (checkpoint_folder(run_folder, version) / NOTE).open("rb") as file:
                signed = wire.decode(file.read(_MAX_NOTE), Signed)
        manifest = open_signed(signed, Manifest, spec.operator)
    except (OSError, BarnraiseError):  # from before they were kept, or damaged itself
        return {}
    if manifest.version != version:
        return {}
    return {entry.path: entry.sha256 for entry in manifest.files if entry.path.endswith(".safetensors")}


def cannot_be_done(run_folder: Path, version: int, earlier: int, expected: Mapping[str, bytes]) -> bool:
    """Whether ``take_up_again`` with the same arguments would fail, however often. Blocking."""
    if checkpoints.read_record(run_folder, version) is not None:
        return False
    try:
        known = _whole(run_folder, earlier)
    except RunFolderError:
        return True
    return known is None or _damaged(known, expected) is not None


def _damaged(known: Record, expected: Mapping[str, bytes]) -> Path | None:
    """A file that is not what the version was published as."""
    weights = Path(known.trained.weights)
    for name, digest in expected.items():
        path = weights if name == WEIGHTS_FILE else weights.with_name(name)
        try:
            with path.open("rb") as file:
                if file_digest(file, "sha256").digest() != digest:
                    return path
        except OSError:
            return path
    return None


def _whole(run_folder: Path, version: int) -> Record | None:
    """The record of a version whose weights are there as well."""
    record = checkpoints.read_record(run_folder, version)
    return record if record is not None and Path(record.trained.weights).is_file() else None


def take_up_again(
    run_folder: Path, version: int, earlier: int, expected: Mapping[str, bytes] | None = None
) -> Trained:
    """Make checkpoint ``version`` the same as ``earlier``, by hard links; one that is there is reported.

    Where the earlier one has no optimiser state any more, the next step begins with an empty one.
    ``expected``: what its tensor files were published as (``published_as``).

    Raises:
        RunFolderError: ``earlier`` is not there, or damaged.
        StorageError: the disk refused; nothing is left of the attempt.
    """
    made = checkpoints.read_record(run_folder, version)
    if made is None:
        known = _whole(run_folder, earlier)
        if known is None:
            raise RunFolderError(
                f"cannot go back to version {earlier}: {can_return(run_folder, earlier)}; order another one "
                "(`barnraise coordinator rollback`)"
            )
        if (damaged := _damaged(known, expected or {})) is not None:
            raise RunFolderError(
                f"cannot go back to version {earlier}: {damaged} is not what it was published as; order "
                "another one (`barnraise coordinator rollback`), or copy that file from a backup"
            )
        source = checkpoint_folder(run_folder, earlier)
        tensors = [path for path in sorted(source.iterdir()) if path.suffix == ".safetensors"]
        shards = source / checkpoints.SHARDS_FOLDER
        whole = (source / checkpoints.OPTIMIZER_FILE).is_file() or shards.is_dir()
        name = Path(known.trained.weights).name
        trained = msgspec.structs.replace(known.trained, version=version, weights=name, stats=None)
        record = msgspec.structs.replace(
            known, version=version, trained=trained, fresh_optimizer=known.fresh_optimizer or not whole
        )

        def write(folder: Path) -> None:
            for path in tensors:
                link_or_copy(path, folder / path.name)
            if shards.is_dir():
                (folder / shards.name).mkdir()
                for path in sorted(shards.iterdir()):
                    link_or_copy(path, folder / shards.name / path.name)

        checkpoints.save_checkpoint(run_folder, record, write)
        made = checkpoints.read_record(run_folder, version)
        assert made is not None
    return made.trained
