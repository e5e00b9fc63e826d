"""A block unit's files, from the node that made them into ``RUN/units/HEX``, and out of the way again.

The node dialled us; its shards come over a stream on that connection. Sizes were judged
before (``barnraise.coordinator.block_shapes``), every shard is checked by its SHA-256 as
it comes and every file by its own when it is whole. What is there of a file is kept
between attempts, and checked again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

import trio

from barnraise.coordinator.block_workers import DELTA_FILE, corpus_folder, unit_folder
from barnraise.coordinator.core import Offload
from barnraise.protocol.corpus import Corpus, read_corpus
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import MalformedError, PeerError, RunFolderError, StorageError
from barnraise.protocol.manifest import check_shard, entry_shards
from barnraise.protocol.messages import MAX_SHARD, FileEntry
from barnraise.protocol.pretrain import BlockSubmission
from barnraise.protocol.shards import ShardClient
from barnraise.protocol.store import DiskStore

_PART = ".part"
_KEEP_FREE = 64 * 1024 * 1024
DESCRIPTION, SHARDS = "corpus.bin", "shards"  # as barnraise.coordinator.corpus_files names them


class DamagedUnitError(PeerError):
    """A file is not what its entry says though all its shards are: the fault of whoever signed it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} does not have the SHA-256 that the submission names")
        self.name = name


def unit_files(submission: BlockSubmission, segments: Collection[int]) -> dict[str, FileEntry]:
    """The files that judging a unit by ``segments`` needs, under the names that they get here.

    Those that any unit needs come first: until they are here, nobody can tell what was drawn.
    """
    last = len(submission.states) - 1
    ends = {end for segment in segments for end in (segment - 1, segment) if end >= 0}
    return {
        DELTA_FILE: submission.delta,
        **{state_name(end): submission.states[end] for end in (last, *sorted(ends - {last}))},
    }


def is_revealed(folder: Path, submission: BlockSubmission) -> bool:
    """Whether the node was asked for a file that tells what was drawn, or is about to be. Blocking."""
    last = state_name(len(submission.states) - 1)
    return (folder / DELTA_FILE).is_file() and (folder / last).is_file()


def state_name(segment: int) -> str:
    """File name of the state after a segment."""
    return f"state-{segment:04d}.safetensors"


async def fetch_unit(
    client: ShardClient, files: Mapping[str, FileEntry], folder: Path, offload: Offload, until: float
) -> None:
    """Fetch what is missing of ``files`` into ``folder``; stops between two shards at trio time ``until``.

    Raises:
        TimeoutError: ``until`` came first; what there is stays.
        DamagedUnitError: a file is whole and not what was signed.
        BadShardError, PeerError: the node sent something else, does not have a shard, or is gone.
        StorageError: the disk refused, or is too full.
    """
    try:
        await offload(lambda: _make(folder, sum(entry.size for entry in files.values())))
        for name, entry in files.items():
            await _fetch(client, name, entry, folder / name, offload, until)
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        raise StorageError(f"cannot write {folder}: {error}; free some space there") from error


async def _fetch(
    client: ShardClient, name: str, entry: FileEntry, path: Path, offload: Offload, until: float
) -> None:
    if path.is_file():
        return  # it was checked before it got that name
    part = path.with_name(path.name + _PART)
    have = await offload(lambda: _intact(part, entry))
    for digest, offset, size in islice(entry_shards(entry, MAX_SHARD), have, None):
        if trio.current_time() >= until:
            raise TimeoutError
        data = await client.fetch(digest, size)
        if data is None:
            raise PeerError(f"{client.peer_id} does not have a shard of {name}")
        await offload(lambda data=data, offset=offset: _write(part, offset, data))  # type: ignore[misc]
    if not await offload(lambda: _finish(part, path, entry.sha256)):
        raise DamagedUnitError(name)


def _make(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size + _KEEP_FREE:
        raise StorageError(
            f"{folder} needs {size / 1e6:.0f} MB for a block unit, {free / 1e6:.0f} MB are free: free some"
        )


def _intact(part: Path, entry: FileEntry) -> int:
    """How many leading shards of a half-fetched file are there and right; the rest is cut off."""
    count = end = 0
    with suppress(FileNotFoundError), part.open("r+b") as file:
        for digest, offset, size in entry_shards(entry, MAX_SHARD):
            data = file.read(size)
            if len(data) != size or not check_shard(data, digest):
                break
            count, end = count + 1, offset + size
        file.truncate(end)
    return count


def _write(part: Path, offset: int, data: bytes) -> None:
    with part.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)


def _finish(part: Path, path: Path, digest: bytes) -> bool:
    with part.open("rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != digest:
            return False
        os.fsync(file.fileno())
    part.rename(path)
    sync_folder(path.parent)  # a difference has to outlive the verdict that accepts it
    return True


def keep_delta(run_folder: Path, submission_id: bytes) -> None:
    """Delete the states of an accepted unit; its difference is kept for the round. Blocking."""
    folder = unit_folder(run_folder, submission_id)
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != DELTA_FILE:
                path.unlink(missing_ok=True)


def drop_unit(run_folder: Path, submission_id: bytes) -> None:
    """Delete a unit's files. Blocking."""
    shutil.rmtree(unit_folder(run_folder, submission_id), ignore_errors=True)


def sweep_units(run_folder: Path, keep: Container[bytes]) -> None:
    """Delete the files of all units but ``keep``. Blocking."""
    root = run_folder / "units"
    for folder in list(root.iterdir()) if root.is_dir() else []:
        try:
            wanted = bytes.fromhex(folder.name) in keep
        except ValueError:
            continue  # not ours
        if not wanted:
            shutil.rmtree(folder, ignore_errors=True)


def serve_corpus(run_folder: Path, digest: bytes, store: DiskStore) -> Corpus:
    """Offer the run's corpus, description and shards, out of the folder that it lies in. Blocking.

    Raises:
        RunFolderError: the description is missing, or not the one that the run spec names.
    """
    folder = corpus_folder(run_folder)
    path = folder / DESCRIPTION
    try:
        data = path.read_bytes()
        corpus = read_corpus(data)
    except (OSError, MalformedError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}; restore it from a backup") from error
    if hashlib.sha256(data).digest() != digest:
        raise RunFolderError(f"{folder} is not the corpus that the run spec names: restore it")
    store.adopt(path, [(digest, 0, len(data))])
    size = corpus.width * corpus.shard_tokens
    for shard in (*corpus.train, *corpus.held_out):
        store.adopt(folder / SHARDS / shard.hex(), [(shard, 0, size)])
    return corpus
