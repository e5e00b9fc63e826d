"""``RUN -> TARGET/shards/aa/<hex>``: what a static file host needs to serve a run's shards.

Works beside a running coordinator or without one. Only what is missing is written,
each shard whole or not at all, so that TARGET may be served while it is written and
may be a folder that is synchronised to a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from barnraise.coordinator.events import VersionPublished
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.journal_place import journal_path
from barnraise.coordinator.patching import patch_places
from barnraise.coordinator.publisher import version_files
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.manifest import cut
from barnraise.protocol.messages import FileEntry, Manifest, PatchEntry
from barnraise.protocol.mirrors import FOLDER, shard_path
from barnraise.protocol.spec import RunSpec

_TEMPORARY = ".tmp-"


class Exported(NamedTuple):
    """What a mirror holds now. ``size`` and ``written_bytes`` in bytes."""

    version: int
    shards: int
    size: int
    written: int
    written_bytes: int
    removed: int


def export_store(folder: Path, target: Path, *, versions: int = 1, prune: bool = False) -> Exported:
    """Write the shards of the newest ``versions`` versions, patches included, below ``target``. Blocking.

    ``prune`` deletes every other shard there, once all is written.

    Raises:
        RunFolderError: no run folder, no version published yet, or one of its files is damaged.
        StorageError: the disk refused.
    """
    kept: dict[bytes, int] = {}
    written = written_bytes = 0
    try:
        newest, places = _places(folder, versions)
        for entry, path, shard_size in places:
            for digest, piece in zip(entry.shards, cut(path, shard_size), strict=False):
                if digest in kept:
                    continue
                if sha256(piece).digest() != digest:
                    raise RunFolderError(
                        f"{path} is not the file that was published: it changed or is damaged; "
                        "restart the coordinator, which makes or names what is missing"
                    )
                kept[digest] = len(piece)
                if _put(target / shard_path(digest), piece):
                    written += 1
                    written_bytes += len(piece)
            if missing := [digest for digest in entry.shards if digest not in kept]:
                raise RunFolderError(f"{path} is too short: {len(missing)} of its shards are missing")
        removed = _prune(target / FOLDER, kept) if prune else 0
    except OSError as error:
        raise StorageError(f"cannot write the mirror {target}: {error}") from error
    return Exported(newest, len(kept), sum(kept.values()), written, written_bytes, removed)


def _places(folder: Path, versions: int) -> tuple[int, list[tuple[FileEntry | PatchEntry, Path, int]]]:
    """The newest version, and of the newest few each file or patch, where it lies, its shards' size."""
    spec, _, _ = read_spec(folder)
    path = journal_path(folder)
    nothing = f"{folder} has published nothing yet: run `barnraise coordinator run {folder}` first"
    if not path.is_file():
        raise RunFolderError(nothing)
    journal = Journal(path, reading=True)
    try:
        published = [event for event in journal.events() if isinstance(event, VersionPublished)]
        if not published:
            raise RunFolderError(nothing)
        places: list[tuple[FileEntry | PatchEntry, Path, int]] = []
        for event in published[-versions:]:
            signed = journal.manifest(event.version)
            if signed is None:
                continue
            manifest = open_signed(signed, Manifest, spec.operator)
            found = list(_files(folder, spec, manifest, event.weights))
            lost = [file for _, file, _ in found if not file.is_file()]
            if lost and event is published[-1]:
                raise RunFolderError(
                    f"{lost[0]}, published with version {event.version}, is missing; restart the "
                    "coordinator, which makes or names what is missing"
                )
            if not lost:  # older checkpoints are deleted in time
                places += found
        return published[-1].version, places
    finally:
        journal.close()


def _files(
    folder: Path, spec: RunSpec, manifest: Manifest, weights: str
) -> Iterator[tuple[FileEntry | PatchEntry, Path, int]]:
    files = version_files(folder, spec, manifest.version, weights)
    for entry in manifest.files:
        yield entry, files[entry.path], manifest.shard_size
    for patch, path in patch_places(folder, manifest):
        if path.is_file():  # else nodes fetch whole files
            yield patch, path, manifest.shard_size


def _put(path: Path, piece: bytes) -> bool:
    """Write a shard unless it is there; whether it was written."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == len(piece):
            return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(prefix=_TEMPORARY, dir=path.parent, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(piece)
            file.flush()
            temporary.chmod(0o644)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return True


def _prune(root: Path, kept: dict[bytes, int]) -> int:
    """Delete shards that are not in ``kept``, and what a crash left; nothing else."""
    names = {digest.hex() for digest in kept}
    removed = 0
    for path in root.glob("[0-9a-f][0-9a-f]/*"):
        ours = len(path.name) == 64 and path.name.startswith(path.parent.name)
        if path.name.startswith(_TEMPORARY) or (ours and path.name not in names):
            path.unlink(missing_ok=True)
            removed += ours
    return removed
