"""The shards on disk: content-addressed, checked, within a quota.

A shard lives in ``<folder>/aa/<hex digest>``, or at a known place inside an
assembled version file (``adopt``), so that a version need not lie on the disk
twice. Nothing on disk is believed: each shard is re-hashed the first time it is
read after opening and whenever its file has changed since; a damaged one is
deleted and reported as missing, which is also how a download resumes.

All methods are synchronous and safe to call from several threads; callers on an
event loop use a worker thread for anything of megabytes.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import StorageError
from barnraise.protocol.manifest import check_shard

_TEMPORARY = ".tmp-"
_HEX = frozenset("0123456789abcdef")
_KEEP_FREE = 64 * 1024 * 1024  # bytes that a download leaves free on the disk
_REFUSALS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_REFUSALS[errno.EROFS] = "the file system is read-only"
_REFUSALS[errno.EACCES] = _REFUSALS[errno.EPERM] = "permission denied"


class Place(NamedTuple):
    """Where a shard's bytes lie."""

    path: Path
    offset: int
    size: int
    adopted: bool


class DiskStore:
    """Shards under ``folder``, at most ``quota_bytes`` of them (``None``: no limit but the disk).

    Adopted shards count for nothing: their version folder holds the bytes.
    ``sync`` forces each put to the platter before it returns; without it a power
    cut may cost shards, which the re-hash then finds.

    Raises:
        StorageError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        quota_bytes: int | None = None,
        *,
        sync: bool = False,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self.folder = folder
        self.quota_bytes = quota_bytes
        self._sync = sync
        self._free_bytes = free_bytes or _free_bytes
        self._lock = threading.RLock()
        self._places: dict[bytes, Place] = {}  # own ones oldest first
        self._checked: dict[
            bytes, tuple[int, int]
        ] = {}  # digest -> (mtime in ns, file size) when last hashed
        self._pins: dict[str, frozenset[bytes]] = {}
        self._lasting: set[bytes] = set()
        self._used = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise _storage_error("open the shard store", folder, 0, error) from error

    def _scan(self) -> None:
        found: list[tuple[int, bytes, Place]] = []
        for group in self.folder.iterdir():
            if len(group.name) != 2 or not group.is_dir():
                continue
            for path in group.iterdir():
                if path.name.startswith(_TEMPORARY):
                    path.unlink(missing_ok=True)
                elif len(path.name) == 64 and set(path.name) <= _HEX and path.name[:2] == group.name:
                    status = path.lstat()
                    place = Place(path, 0, status.st_size, adopted=False)
                    found.append((status.st_mtime_ns, bytes.fromhex(path.name), place))
        for _, digest, place in sorted(found, key=lambda item: item[:2]):
            self._places[digest] = place
            self._used += place.size

    def set_quota(self, quota_bytes: int | None) -> None:
        """Change the limit; the oldest unpinned shards beyond it go at once, pinned ones stay."""
        with self._lock:
            self.quota_bytes = quota_bytes
            self._evict(lambda: self._fits(0))

    @property
    def used_bytes(self) -> int:
        """Bytes in the store's own files."""
        return self._used

    def has(self, digest: bytes) -> bool:
        """Whether the shard is believed to be here; ``verify`` makes sure of it."""
        with self._lock:
            return digest in self._places

    def size(self, digest: bytes) -> int | None:
        """The shard's size in bytes without reading it, or ``None`` if it is not here."""
        with self._lock:
            place = self._places.get(digest)
        return None if place is None else place.size

    def get(self, digest: bytes) -> bytes | None:
        """The shard's bytes, or ``None`` if it is not here or was found damaged (then it is deleted)."""
        while True:
            with self._lock:
                place = self._places.get(digest)
                known = self._checked.get(digest)
            if place is None:
                return None
            read = _read(place)
            if read is not None:
                data, stamp = read
                if stamp == known:
                    return data
                if check_shard(data, digest):
                    with self._lock:
                        if self._places.get(digest) == place:
                            self._checked[digest] = stamp
                    return data
            with self._lock:
                if self._places.get(digest) == place:
                    self._drop(digest)
                    return None
            # it moved while it was read (a version was adopted or deleted): look again

    def verify(self, digest: bytes) -> bool:
        """Whether the shard is here and whole: re-hashed now unless it was since opening."""
        with self._lock:
            place = self._places.get(digest)
            known = self._checked.get(digest)
        if place is None:
            return False
        if known is not None:
            with suppress(OSError):
                status = place.path.stat()
                if (status.st_mtime_ns, status.st_size) == known:
                    return True
        return self.get(digest) is not None

    def put(self, digest: bytes, data: bytes, *, checked: bool = False) -> None:
        """Keep a shard; a second time does nothing. Appears whole or not at all.

        ``checked``: the caller has just hashed ``data`` itself, as ``ShardClient`` does.

        Raises:
            ValueError: ``data`` is not the shard named ``digest``: a mistake of the caller.
            StorageError: the disk refused, or everything within the quota is pinned.
        """
        if not checked and not check_shard(data, digest):
            raise ValueError(f"data of {len(data)} bytes is not shard {digest.hex()[:16]}")
        if self.verify(digest):
            return
        with self._lock:
            self._make_room(len(data))
            self._used += len(data)  # before the write: several threads may be here
        path = self._path(digest)
        try:
            stamp = _write(path, data, self._sync)
        except OSError as error:
            with self._lock:
                self._used -= len(data)
            raise _storage_error("store a shard", self.folder, len(data), error) from error
        with self._lock:
            previous = self._places.get(digest)
            if previous is not None:
                self._used -= len(data)
                if previous.adopted:  # adopted meanwhile: one copy is enough
                    path.unlink(missing_ok=True)
                return
            self._places[digest] = Place(path, 0, len(data), adopted=False)
            self._checked[digest] = stamp

    def delete(self, digest: bytes) -> None:
        """Forget a shard and delete its file (an adopted one's version file stays)."""
        with self._lock:
            self._drop(digest)

    def pin(self, owner: str, digests: Iterable[bytes]) -> None:
        """Keep ``digests`` from being evicted until ``unpin(owner)``; replaces the owner's earlier pins.

        Pins live in memory: owners pin again after a restart.
        """
        with self._lock:
            self._pins[owner] = frozenset(digests)

    def unpin(self, owner: str) -> None:
        """Lift the owner's pins; unknown owners are fine."""
        with self._lock:
            self._pins.pop(owner, None)

    def discard(self, digests: Iterable[bytes]) -> None:
        """Delete those of ``digests`` that are files of the store's own and that nobody has pinned."""
        with self._lock:
            pinned = self._pinned()
            for digest in digests:
                place = self._places.get(digest)
                if place is not None and not place.adopted and digest not in pinned:
                    self._drop(digest)

    def spare(self, digests: Iterable[bytes]) -> None:
        """Keep ``digests`` from ``sweep``: they were used just now, and are evicted after all older ones.

        For what will be wanted again and may be fetched again. Lives in memory, as pins do.
        """
        with self._lock:
            for digest in digests:
                place = self._places.get(digest)
                if place is not None and not place.adopted:
                    self._lasting.add(digest)
                    self._places[digest] = self._places.pop(digest)

    def sweep(self) -> None:
        """Delete every shard of the store's own that nobody has pinned, or had spared."""
        with self._lock:
            self._evict(lambda: False, self._lasting)

    def adopt(self, path: Path, shards: Iterable[tuple[bytes, int, int]]) -> None:
        """Serve shards from inside ``path`` and delete their own files.

        ``shards`` are ``(digest, offset, size)`` in bytes. The file must not change
        while it is adopted; if it does, the re-hash drops the shard.
        """
        for digest, offset, size in shards:
            with self._lock:
                old = self._places.get(digest)
                self._places[digest] = Place(path, offset, size, adopted=True)
                self._checked.pop(digest, None)
                if old is not None and not old.adopted:
                    self._used -= old.size
                    with suppress(OSError):
                        old.path.unlink()

    def disown(self, folder: Path) -> None:
        """Forget every shard adopted from a file in ``folder``, which is about to go."""
        with self._lock:
            gone = [d for d, place in self._places.items() if place.adopted and place.path.parent == folder]
            for digest in gone:
                self._drop(digest)

    def ensure_room(self, needed: int, *, scratch: int = 0) -> None:
        """Check before a download that ``needed`` bytes of shards and ``scratch`` others will fit (R25).

        Raises:
            StorageError: they will not; the text says how much is needed where.
        """
        with self._lock:
            pinned = self._pinned()
            fixed = sum(p.size for d, p in self._places.items() if d in pinned and not p.adopted)
            reclaimable = self._used - fixed
        if self.quota_bytes is not None and fixed + needed > self.quota_bytes:
            raise StorageError(
                f"{_mb(needed)} of shards do not fit into {self.folder}: its limit is "
                f"{_mb(self.quota_bytes)}, of which {_mb(fixed)} are in use; raise the limit"
            )
        try:
            free = self._free_bytes(self.folder)
        except OSError as error:
            raise _storage_error("see how much disk is free", self.folder, needed, error) from error
        total = needed + scratch + _KEEP_FREE
        if free + reclaimable < total:
            raise StorageError(
                f"not enough disk for {self.folder}: {_mb(total)} are needed there and {_mb(free)} are free; "
                f"free another {_mb(total - free - reclaimable)}"
            )
        if self.quota_bytes is not None or free < total:
            with self._lock:
                self._evict(lambda: self._fits(needed) and self._free_bytes(self.folder) >= total)

    def _pinned(self) -> set[bytes]:
        return set().union(*self._pins.values())

    def _fits(self, size: int) -> bool:
        return self.quota_bytes is None or self._used + size <= self.quota_bytes

    def _make_room(self, size: int) -> None:
        if not self._evict(lambda: self._fits(size)):
            raise StorageError(
                f"the shard store {self.folder} is full: {_mb(self._used)} of its limit of "
                f"{_mb(self.quota_bytes or 0)} are in use and {_mb(size)} more are needed; raise the limit"
            )

    def _evict(self, enough: Callable[[], bool], besides: Iterable[bytes] = ()) -> bool:
        """Delete the oldest unpinned shards, but ``besides``, until ``enough()``; return whether it is."""
        if enough():
            return True
        pinned = self._pinned().union(besides)
        for digest in [d for d, p in self._places.items() if not p.adopted and d not in pinned]:
            self._drop(digest)
            if enough():
                return True
        return False

    def _drop(self, digest: bytes) -> None:
        place = self._places.pop(digest, None)
        self._checked.pop(digest, None)
        self._lasting.discard(digest)
        if place is not None and not place.adopted:
            self._used -= place.size
            with suppress(OSError):
                place.path.unlink()

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / name


def _read(place: Place) -> tuple[bytes, tuple[int, int]] | None:
    try:
        with place.path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(place.offset)
            data = file.read(place.size)
    except OSError:
        return None
    if len(data) != place.size or (not place.adopted and status.st_size != place.size):
        return None
    return data, (status.st_mtime_ns, status.st_size)


def _write(path: Path, data: bytes, sync: bool) -> tuple[int, int]:
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{threading.get_ident()}")
    path.parent.mkdir(exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        sync_folder(path.parent)
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _storage_error(doing: str, folder: Path, needed: int, error: OSError) -> StorageError:
    why = _REFUSALS.get(error.errno or 0, error.strerror or str(error))
    need = f" ({_mb(needed)} are needed there)" if needed else ""
    return StorageError(f"cannot {doing} in {folder}{need}: {why}")
