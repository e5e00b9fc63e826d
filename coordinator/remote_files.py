"""What a worker on another machine holds of the run folder: the requests about files, and the worker's side.

The coordinator says which files have to be there and sends what is lacking; what a learner made is read
back in the same way. The worker's copy is a cache: whatever is in it was checked against a SHA-256 of the
coordinator's file, and it may be deleted while no worker runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from msgspec import Struct, structs

from barnraise.coordinator.block_workers import REPORT_FILE
from barnraise.coordinator.workers import WorkerSetup
from barnraise.protocol.durable import link_or_copy
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.log_lines import ask_level

PART_BYTES = 4 * 1024 * 1024
"""The most that one request or reply carries of a file."""
MAX_PATH = 400
CACHES = ("verifier", "learner")
"""Kinds of workers; each has a cache of its own, since they delete at different times."""
_ROOTS = ("checkpoints", "corpus", "units", "scaffold.safetensors", REPORT_FILE)


class FileFact(Struct, frozen=True, kw_only=True):
    """One file: its path relative to the run folder, ``/`` between names; bytes; SHA-256."""

    path: str
    size: int
    sha256: bytes


class Meet(Struct, frozen=True, kw_only=True, tag=True):
    """First request to a worker elsewhere. ``release``: the coordinator's.

    ``level``: what the coordinator's environment asks of logs, which no ssh carries; "": nothing.
    """

    release: str
    run_id: bytes
    level: str = ""


class Met(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``Meet``."""

    release: str


class Mirror(Struct, frozen=True, kw_only=True, tag=True):
    """Request: have these files, and nothing else in ``folders``; of checkpoints keep ``versions`` alone."""

    files: tuple[FileFact, ...]
    folders: tuple[str, ...]
    versions: tuple[int, ...]


class Lacking(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``Mirror``: the paths of those that have to be sent."""

    paths: tuple[str, ...]


class PutPart(Struct, frozen=True, kw_only=True, tag=True):
    """Request: bytes of ``fact``'s file, in order from 0; the last part puts it in its place."""

    fact: FileFact
    offset: int
    data: bytes


class Taken(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``PutPart``: the bytes that are there now."""

    size: int


class ListFolder(Struct, frozen=True, kw_only=True, tag=True):
    """Request: which files are in this folder and below."""

    folder: str


class Listed(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``ListFolder``."""

    files: tuple[FileFact, ...]


class GetPart(Struct, frozen=True, kw_only=True, tag=True):
    """Request: at most ``PART_BYTES`` bytes of a file from ``offset`` on."""

    path: str
    offset: int


class Part(Struct, frozen=True, kw_only=True, tag=True):
    """Reply to ``GetPart``; empty at the file's end."""

    data: bytes


FileRequest = Meet | Mirror | PutPart | ListFolder | GetPart
FileReply = Met | Lacking | Taken | Listed | Part


def check_path(path: str) -> str:
    """``path`` itself, if it is one that may be sent.

    Raises:
        BarnraiseError: it is absolute, leads upwards, or is none of a run folder's.
    """
    parts = path.split("/")
    odd = any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts)
    if odd or len(path) > MAX_PATH or parts[0] not in _ROOTS:
        raise BarnraiseError(f"{path[:100]!r} is no path that is sent between coordinator and worker")
    return path


class Digests:
    """SHA-256 of files, computed once for as long as size, time and inode stay."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], bytes]] = {}

    def of(self, path: Path) -> tuple[int, bytes]:
        """Size and digest.

        Raises:
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = status.st_size, status.st_mtime_ns, status.st_ino
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                known = self._known[path] = stamp, hashlib.file_digest(file, "sha256").digest()
        return status.st_size, known[1]

    def fact(self, root: Path, path: str) -> FileFact:
        """What ``root / path`` is.

        Raises:
            OSError: it cannot be read.
        """
        size, digest = self.of(root / path)
        return FileFact(path=path, size=size, sha256=digest)


class NoFiles:
    """A worker on the coordinator's own machine: it reads the run folder itself."""

    def handle(self, request: FileRequest) -> FileReply:
        """Nobody asks it.

        Raises:
            BarnraiseError: always.
        """
        raise BarnraiseError(
            "this worker reads the run folder itself: start one elsewhere by 'barnraise worker'"
        )

    def here(self, setup: WorkerSetup, threads: int) -> WorkerSetup:
        """``setup``, as it is."""
        return setup


class FileHost:
    """The worker's side. Synchronous; one request at a time, several processes may share the cache.

    Attributes:
        folder: what stands for the run folder here, once ``Meet`` has come.
    """

    def __init__(self, cache: Path, kind: str, release: str) -> None:
        """``cache``: a folder of this machine, for any number of runs; made when needed."""
        self._cache = cache
        self._kind = kind
        self._release = release
        self._digests = Digests()
        self._incoming: tuple[FileFact, Path] | None = None
        self.folder = Path()

    def here(self, setup: WorkerSetup, threads: int) -> WorkerSetup:
        """``setup`` with this machine's folder, and this many threads; 0 leaves them.

        Raises:
            BarnraiseError: ``Meet`` has not come, or spoke of another run.
        """
        if self.folder.parent.name != setup.run_id.hex():
            raise BarnraiseError("the worker was set up for another run than it met")
        threads = threads or setup.threads
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read when torch is loaded
            os.environ[variable] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return structs.replace(setup, folder=str(self.folder), threads=threads)

    def handle(self, request: FileRequest) -> FileReply:
        """Answer one request.

        Raises:
            BarnraiseError: the releases differ, or a path is not one that is sent.
            StorageError: this machine's disk refuses.
        """
        if isinstance(request, Meet):
            return self._meet(request)
        if self.folder == Path():
            raise BarnraiseError("the worker was asked about files before it was told of which run")
        try:
            match request:
                case Mirror():
                    return self._mirror(request)
                case PutPart():
                    return self._put(request)
                case ListFolder():
                    return Listed(files=tuple(self._facts(request.folder)))
                case GetPart():
                    return self._get(request)
        except OSError as error:
            where = error.filename or self.folder
            raise StorageError(
                f"the worker's disk refuses ({where}: {error.strerror or error}): free some space there, "
                "or choose another place with 'barnraise worker --cache'"
            ) from error

    def _meet(self, request: Meet) -> Met:
        if request.release != self._release:
            raise BarnraiseError(
                f"the coordinator is barnraise {request.release}, the worker is {self._release}: "
                "install the same release on both machines"
            )
        ask_level(request.level)
        self.folder = self._cache / request.run_id.hex() / self._kind
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "checkpoints").mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"the worker cannot use {self.folder} ({error.strerror}): choose another place with "
                "'barnraise worker --cache'"
            ) from error
        return Met(release=self._release)

    def _mirror(self, request: Mirror) -> Lacking:
        self._drop_versions(set(request.versions))
        wanted = {check_path(fact.path): fact for fact in request.files}
        for folder in request.folders:
            place = self.folder / check_path(folder)
            for path in _files(place):
                if path.relative_to(self.folder).as_posix() not in wanted:
                    path.unlink(missing_ok=True)
        lacking = [path for path, fact in wanted.items() if not self._has(fact) and not self._adopt(fact)]
        return Lacking(paths=tuple(lacking))

    def _drop_versions(self, keep: set[int]) -> None:
        for folder in (self.folder / "checkpoints").glob("v*"):
            digits = folder.name[1:]
            if digits.isascii() and digits.isdecimal() and int(digits) not in keep:
                shutil.rmtree(folder)

    def _has(self, fact: FileFact, path: Path | None = None) -> bool:
        path = path or self.folder / fact.path
        try:
            return path.stat().st_size == fact.size and self._digests.of(path)[1] == fact.sha256
        except FileNotFoundError:
            return False

    def _adopt(self, fact: FileFact) -> bool:
        """Take the file from another kind's cache: what a learner made here is not sent here again."""
        for kind in CACHES:
            other = self.folder.parent / kind / fact.path
            if kind != self._kind and self._has(fact, other):
                place = self.folder / fact.path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.unlink(missing_ok=True)
                link_or_copy(other, place)
                return True
        return False

    def _put(self, request: PutPart) -> Taken:
        fact = request.fact
        place = self.folder / check_path(fact.path)
        if request.offset == 0:
            self._discard()
            place.parent.mkdir(parents=True, exist_ok=True)
            self._incoming = fact, place.with_name(f".sent-{os.getpid()}-{place.name}")
        if self._incoming is None or self._incoming[0] != fact:
            raise BarnraiseError(f"a part of {fact.path} came out of turn")
        part = self._incoming[1]
        with part.open("wb" if request.offset == 0 else "ab") as file:
            if file.tell() != request.offset or request.offset + len(request.data) > fact.size:
                raise BarnraiseError(f"a part of {fact.path} came out of turn")
            file.write(request.data)
            size = file.tell()
        if size == fact.size:
            if self._digests.of(part)[1] != fact.sha256:
                self._discard()
                raise BarnraiseError(f"{fact.path} changed while it was sent")
            part.replace(place)
            self._incoming = None
        return Taken(size=size)

    def _discard(self) -> None:
        if self._incoming is not None:
            with contextlib.suppress(OSError):
                self._incoming[1].unlink(missing_ok=True)
            self._incoming = None

    def _facts(self, folder: str) -> Iterable[FileFact]:
        for path in _files(self.folder / check_path(folder)):
            yield self._digests.fact(self.folder, path.relative_to(self.folder).as_posix())

    def _get(self, request: GetPart) -> Part:
        with (self.folder / check_path(request.path)).open("rb") as file:
            file.seek(request.offset)
            return Part(data=file.read(PART_BYTES))


def _files(folder: Path) -> list[Path]:
    """Regular files, but for those that are being written."""
    found = (path for path in folder.rglob("*") if not path.name.startswith("."))
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def names_of(run_folder: Path, folder: str, without: frozenset[str] = frozenset()) -> list[str]:
    """Paths of the files in a folder of ``run_folder`` and below; ``without``: names to skip."""
    found = []
    for path in _files(run_folder / folder):
        name = PurePosixPath(path.relative_to(run_folder).as_posix())
        if not without & set(name.parts):
            found.append(str(name))
    return found
