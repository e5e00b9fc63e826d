"""Copies of versions in object storage, through fsspec: ``s3://``, ``gs://``, ``file://``, ``memory://``, ...

::

    URL/v000012/<file>        as in RUN/checkpoints/v000012
    URL/v000012/whole.json    written last: every file's size and SHA-256; without it, it is no copy

A version goes out after it is durable here, and only then; nothing waits for it. What an
object store gives back is compared with the hashes before it takes a version's place.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from barnraise.coordinator.checkpoints import TEMPORARY, complete_versions
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import RunFolderError, StorageError

log = logging.getLogger(__name__)

WHOLE = "whole.json"
TRIES = 5
PAUSES_S = (1.0, 2.0, 4.0, 8.0)
_CHUNK = 8 * 1024 * 1024
_MAX_WHOLE = 16 * 1024 * 1024

Sleep = Callable[[float], None]
T = TypeVar("T")


class Whole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``whole.json``. ``files``: path below the version's folder to size in bytes and SHA-256 in hex."""

    format: Literal[1] = 1
    version: int
    files: dict[str, tuple[int, str]]


class Kept(NamedTuple):
    """What ``keep_versions`` did: version numbers."""

    copied: list[int]
    removed: list[int]
    there: list[int]


class ObjectStore:
    """Versions of one run below ``url``. Blocking.

    Attributes:
        shown: the URL without user, password or query.
    """

    def __init__(self, url: str, *, tries: int = TRIES, sleep: Sleep = time.sleep, **options: Any) -> None:
        """``options``: for fsspec's file system, such as ``endpoint_url``; keys come from its environment.

        Raises:
            RunFolderError: fsspec, or what it needs for this kind of URL, is not installed.
        """
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise RunFolderError(
                f"{error.name} is not installed: run `pip install barnraise[objects]`"
            ) from error
        scheme, _, rest = url.partition("://")
        self.shown = f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}".rstrip("/")
        if scheme in ("file", "local"):
            options.setdefault("auto_mkdir", True)  # elsewhere there are no folders to make
        try:
            self._files, self._root = fsspec.core.url_to_fs(url.rstrip("/"), **options)
        except ImportError as error:
            raise RunFolderError(f"{self.shown} needs another package: {error}") from error
        except ValueError as error:
            raise RunFolderError(f"{self.shown} is no URL that fsspec knows ({error})") from error
        self._tries, self._sleep = tries, sleep

    def versions(self) -> list[int]:
        """Versions that are there whole, ascending. Raises StorageError."""

        def look() -> list[int]:
            self._files.invalidate_cache()
            if not self._files.exists(self._root):
                return []
            names = [
                str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)
            ]
            numbers = [int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdecimal()]
            return sorted(number for number in numbers if self._files.exists(self._path(number, WHOLE)))

        return self._again("list", look)

    def put(self, run_folder: Path, version: int) -> None:
        """Copy a complete version out; one that is there whole stays.

        Raises:
            StorageError: the object store refused, so many times.
        """
        folder = checkpoint_folder(run_folder, version)
        files: dict[str, tuple[int, str]] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            files[name] = self._again(
                f"write {name} of version {version} to", partial(self._send, path, version, name)
            )
        whole = msgspec.json.encode(Whole(version=version, files=files))
        self._again(
            f"finish version {version} in", lambda: self._files.pipe_file(self._path(version, WHOLE), whole)
        )

    def remove(self, version: int) -> None:
        """Remove a version, what makes it whole first. Raises StorageError."""

        def gone() -> None:
            for path in (self._path(version, WHOLE), self._path(version)):
                if self._files.exists(path):
                    self._files.rm(path, recursive=True)

        self._again(f"remove version {version} from", gone)

    def fetch(self, version: int, run_folder: Path) -> Path:
        """Bring a version back to ``RUN/checkpoints``, whole or not at all; one that is there is replaced.

        Raises:
            RunFolderError: it is not there, or not what was put there.
            StorageError: object store or disk refused.
        """
        try:
            data = self._again(f"read version {version} of", lambda: self._read_whole(version))
            whole = msgspec.json.decode(data, type=Whole)
        except msgspec.MsgspecError as error:
            raise RunFolderError(
                f"{self.shown}: {WHOLE} of version {version} is damaged ({error})"
            ) from error
        if whole.version != version:
            raise RunFolderError(f"{self.shown}: what is called version {version} is {whole.version}")
        final = checkpoint_folder(run_folder, version)
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            part = Path(mkdtemp(prefix=f"{TEMPORARY}{final.name}-", dir=final.parent))
            try:
                for name, told in whole.files.items():
                    target = part / name
                    if not target.resolve().is_relative_to(part.resolve()):
                        raise RunFolderError(
                            f"{self.shown}: version {version} names {name!r}, which is outside"
                        )
                    target.parent.mkdir(parents=True, exist_ok=True)
                    found = self._again(f"read {name} of", partial(self._receive, version, name, target))
                    if found != tuple(told):
                        raise RunFolderError(
                            f"{self.shown}: {name} of version {version} is damaged (its SHA-256 differs): "
                            "fetch another version"
                        )
                part.chmod(0o755)
                sync_folder(part)
                if final.exists():
                    shutil.rmtree(final)
                part.rename(final)
                sync_folder(final.parent)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
        except OSError as error:
            raise StorageError(f"cannot write {final}: {error}") from error
        return final

    def _send(self, path: Path, version: int, name: str) -> tuple[int, str]:
        digest, size = sha256(), 0
        with path.open("rb") as source, self._files.open(self._path(version, name), "wb") as target:
            while piece := source.read(_CHUNK):
                target.write(piece)
                digest.update(piece)
                size += len(piece)
        return size, digest.hexdigest()

    def _receive(self, version: int, name: str, target: Path) -> tuple[int, str]:
        digest, size = sha256(), 0
        with self._files.open(self._path(version, name), "rb") as source, target.open("wb") as file:
            while piece := source.read(_CHUNK):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
        return size, digest.hexdigest()

    def _read_whole(self, version: int) -> bytes:
        path = self._path(version, WHOLE)
        if not self._files.exists(path):
            raise RunFolderError(f"{self.shown} has no whole version {version}: it has {self.versions()}")
        data: bytes = self._files.cat_file(path, start=0, end=_MAX_WHOLE)
        return data

    def _path(self, version: int, name: str = "") -> str:
        return f"{self._root}/v{version:06}" + (f"/{name}" if name else "")

    def _again(self, what: str, work: Callable[[], T]) -> T:
        """Do it, and again after a pause where the store fails: it is other people's network."""
        for attempt in range(1, self._tries + 1):
            try:
                return work()
            except (RunFolderError, StorageError):
                raise
            except Exception as error:  # every file system has errors of its own
                text = " ".join(str(error).split())[:300] or type(error).__name__
                if attempt == self._tries:
                    raise StorageError(
                        f"cannot {what} {self.shown} after {attempt} tries ({text}): check keys and network"
                    ) from error
                log.warning("cannot %s %s (%s); trying again", what, self.shown, text)
                self._sleep(PAUSES_S[min(attempt, len(PAUSES_S)) - 1])
        raise AssertionError


def keep_versions(store: ObjectStore, run_folder: Path, newest: int, keep: Sequence[int] = (0,)) -> Kept:
    """Put the newest ``newest`` complete versions and those of ``keep`` there; remove the others.

    A version that is there whole is not written again: under one number there is one version.

    Raises:
        StorageError: the object store refused; done again, it goes on.
    """
    here, there = complete_versions(run_folder), store.versions()
    ours = sorted({*here, *there})
    wanted = {*ours[-newest:], *(version for version in ours if version in keep)}
    copied = [version for version in here if version in wanted and version not in there]
    for version in list(copied):
        try:
            store.put(run_folder, version)
        except StorageError:
            if checkpoint_folder(run_folder, version).is_dir():
                raise
            copied.remove(version)  # the coordinator has no more use for it
    removed = [version for version in there if version not in wanted]
    for version in removed:
        store.remove(version)
    return Kept(copied, removed, sorted({*there, *copied} - {*removed}))
