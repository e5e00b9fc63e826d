"""Policy versions on a node's disk: fetched, assembled whole, kept while used, the oldest deleted.

``<folder>/v000012/`` holds the files, ``<folder>/v000012.manifest`` the signed
manifest. Shards come from the store, then live in the assembled files alone: the
store adopts them there, so that nothing lies on the disk twice once a version is
complete; a file that an earlier version has just so is linked to it. What a crash
leaves is resumed from: shards in the store and in damaged version folders are
re-hashed, and only the rest is fetched (R23). Where the manifest
offers a patch from a version on disk, the patch is fetched instead
(``barnraise.node.by_patch``); it stays in ``v000012.patches`` and is served on.

Of a version of the block stage a node needs the scaffold and one block: a folder may hold
some of the manifest's files, and more of them later.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import trio

from barnraise.node.by_patch import drop_patches, make_by_patch
from barnraise.node.patching import PATCHES, patch_path
from barnraise.node.weights import Fetcher
from barnraise.protocol.envelope import content_id
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.manifest import (
    check_manifest,
    entry_shards,
    manifest_bytes,
    manifest_shards,
)
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.shards import off_loop
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.store import DiskStore
from barnraise.protocol.version_folder import assemble, folder_matches, remove_parts, version_name
from barnraise.protocol.wire import decode, encode

KEEP = 3
FRESH_S = 2.0  # how long a check is believed when an engine is to load what was checked
_VERSION = re.compile(r"v([0-9]{6,10})")
_TRASH = ".trash-"
_MAX_MANIFEST = 16 * 1024 * 1024


class Versions:
    """The versions of one run under ``folder``, the newest ``keep`` of them.

    Opening adopts what is there into ``store`` (blocking, but nothing is hashed yet).

    Raises:
        StorageError: the folder cannot be made or read.
    """

    def __init__(
        self, folder: Path, store: DiskStore, spec: RunSpec, run_id: bytes, *, keep: int = KEEP
    ) -> None:
        self.folder = folder
        self._store = store
        self._spec = spec
        self._run_id = run_id
        self._keep = keep
        self._whole: dict[int, bytes] = {}  # checked since opening -> content id of its manifest
        self._files: dict[int, frozenset[str]] = {}  # of those, what is there
        self._checked_at: dict[int, float] = {}  # seconds of trio's clock
        self._held: Counter[int] = Counter()
        self._busy = trio.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_parts(folder)
            for path in folder.glob(f"{_TRASH}*"):
                shutil.rmtree(path, ignore_errors=True)
            for path in folder.glob(f"v*{PATCHES}"):  # of a version that was never finished
                if not path.with_name(path.name.removesuffix(PATCHES)).is_dir():
                    shutil.rmtree(path, ignore_errors=True)
            for version in self.on_disk():
                manifest = self._saved_manifest(version)
                if manifest is not None:
                    self._adopt(manifest)
        except OSError as error:
            raise StorageError(f"cannot use the version folder {folder}: {error}") from error

    def on_disk(self) -> list[int]:
        """The versions that have a folder, oldest first."""
        found = (_VERSION.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    @property
    def busy(self) -> bool:
        """Whether a version is being fetched or assembled."""
        return self._busy.locked()

    def path(self, version: int) -> Path:
        """Where a version's files lie, or would lie."""
        return self.folder / version_name(version)

    def is_ready(self, version: int, without: Collection[str] = ()) -> bool:
        """Whether the version is whole, but for files in ``without``, and was checked since opening."""
        manifest = self._saved_manifest(version) if version in self._whole else None
        if manifest is None:
            return False
        wanted = {entry.path for entry in manifest.files}.difference(without)
        return self._files[version] >= wanted

    def saved(self, version: int) -> Signed | None:
        """The manifest of a version on disk, as it was signed; None where it is not to be believed."""
        return None if self._saved_manifest(version) is None else self._saved(version)

    async def recheck(self, version: int, without: Collection[str] = ()) -> bool:
        """Whether the version is whole, but for files in ``without``.

        What an earlier process left is compared with its manifest now.
        """
        if version not in self._whole:
            async with self._busy:
                signed, manifest, folder = (
                    self._saved(version),
                    self._saved_manifest(version),
                    self.path(version),
                )
                if signed is None or manifest is None:
                    return False
                part = _part(manifest, _names(folder))
                if await off_loop(manifest_bytes(part), lambda: folder_matches(part, folder)):
                    self._note(signed, part)
        return self.is_ready(version, without)

    async def intact(self, version: int) -> bool:
        """Whether a version still is as it was when it was checked, for an engine that is to load it.

        Unless that was a moment ago it is hashed again: a disk may have spoiled it meanwhile, and
        work with wrong weights is rejected. A damaged one is forgotten, to be fetched again.
        """
        manifest = self._saved_manifest(version)
        if version not in self._whole or manifest is None:
            return True
        if trio.current_time() - self._checked_at[version] < FRESH_S:
            return True
        part, folder = _part(manifest, self._files[version]), self.path(version)
        if await off_loop(manifest_bytes(part), lambda: folder_matches(part, folder)):
            self._checked_at[version] = trio.current_time()
            return True
        for other in [*self._whole]:  # files that versions share are damaged in all of them
            self._forget(other)
        self._adopt(manifest)  # its shards are hashed before they are believed again
        return False

    def _forget(self, version: int) -> None:
        self._whole.pop(version, None)
        self._files.pop(version, None)
        self._checked_at.pop(version, None)

    def _note(self, signed: Signed, part: Manifest) -> None:
        self._whole[part.version] = content_id(signed)
        self._checked_at[part.version] = trio.current_time()
        self._files[part.version] = frozenset(entry.path for entry in part.files)

    async def ensure(
        self,
        signed: Signed,
        fetcher: Fetcher,
        progress: Callable[[int, int], None] = lambda done, total: None,
        without: Collection[str] = (),
    ) -> Path:
        """Return the folder with the version that the signed manifest describes, fetching what is missing.

        ``without``: files that are not wanted, unless they are there already.
        ``progress(done, total)`` counts bytes that are verified and on disk: of the
        files, or of patches while those are fetched instead. One call at a time runs,
        others wait. Cancelled, it loses nothing: shards stay in the store. Other versions
        beyond the newest ``keep`` are deleted at the end unless held.

        Raises:
            SignatureError, MalformedError: the manifest is not to be believed.
            StorageError: too little disk, or it refused.
            PeerError: no source is left.
        """
        manifest = check_manifest(signed, self._spec, self._run_id)
        async with self._busy:
            there = self._files.get(manifest.version, frozenset())
            wanted = {entry.path for entry in manifest.files}.difference(without)
            part = _part(manifest, wanted.union(_names(self.path(manifest.version))))
            if self._whole.get(manifest.version) != content_id(signed) or not there >= wanted:
                owner = f"fetch {version_name(manifest.version)}"
                self._store.pin(owner, (digest for digest, _ in manifest_shards(part)))
                try:
                    await self._complete(signed, manifest, part, fetcher, progress)
                finally:
                    self._store.unpin(owner)
                self._note(signed, part)
                await off_loop(manifest_bytes(part), lambda: self._prune(manifest.version))
        return self.path(manifest.version)

    @contextmanager
    def hold(self, version: int) -> Iterator[Path]:
        """While inside, the version's folder is not deleted."""
        self._held[version] += 1
        try:
            yield self.path(version)
        finally:
            self._held[version] -= 1

    async def _complete(
        self,
        signed: Signed,
        manifest: Manifest,
        part: Manifest,
        fetcher: Fetcher,
        progress: Callable[[int, int], None],
    ) -> None:
        size = manifest_bytes(part)
        folder = self.path(part.version)
        shards = dict(manifest_shards(part))
        total = sum(shards.values())
        if not await off_loop(size, lambda: folder_matches(part, folder)):
            with self._scratch(part) as scratch:
                linked = await off_loop(size, lambda: self._linked(part, scratch))
                sought = {d for entry in part.files if entry.path not in linked for d in entry.shards}
                missing = await off_loop(
                    size,
                    lambda: {d: n for d, n in shards.items() if d in sought and not self._store.verify(d)},
                )
                ready, fetched = await make_by_patch(
                    part, self._bases(part), missing, self._store, self.folder, fetcher, scratch, progress
                )
                ready = linked | ready
                rest = [entry for entry in part.files if entry.path not in ready]
                needed = {digest for entry in rest for digest in entry.shards}
                missing = {d: n for d, n in missing.items() if d in needed}
                if fetched and not missing:
                    total = fetched
                self._store.ensure_room(sum(missing.values()), scratch=sum(e.size for e in rest))
                done = total - sum(missing.values())
                progress(done, total)

                def received(more: int) -> None:
                    nonlocal done
                    done += more
                    progress(done, total)

                await fetcher.fetch(manifest, missing, received)  # whose lists are of all files
                await off_loop(size, lambda: assemble(part, self._store.get, folder, ready))
        await off_loop(size, lambda: self._settle(signed, part))
        progress(total, total)

    def _linked(self, manifest: Manifest, scratch: Path) -> dict[str, Path]:
        """Files that a version checked since opening has just so, as hard links in ``scratch``, by name.

        The base of a run with adapters is many gigabytes that are neither copied nor hashed again.
        """
        found: dict[str, Path] = {}
        for version in sorted(self._whole, reverse=True):
            saved = self._saved_manifest(version)
            if saved is None or version == manifest.version:
                continue
            have = {entry.path: entry for entry in saved.files if entry.path in self._files[version]}
            for entry in manifest.files:
                old = have.get(entry.path)
                if entry.path not in found and old is not None and old.sha256 == entry.sha256:
                    with suppress(OSError):  # no hard links on this file system
                        os.link(self.path(version) / entry.path, scratch / entry.path)
                        found[entry.path] = scratch / entry.path
        return found

    def _bases(self, manifest: Manifest) -> dict[int, Manifest]:
        """Of the versions that its patches begin with, those on disk."""
        found = {}
        for base in {patch.base_version for patch in manifest.patches} & set(self.on_disk()):
            saved = self._saved_manifest(base)
            if saved is not None:
                found[base] = saved
        return found

    @contextmanager
    def _scratch(self, manifest: Manifest) -> Iterator[Path]:
        """A folder for files in the making; what a crash leaves of it goes at the next opening."""
        try:
            name = tempfile.mkdtemp(prefix=f".{version_name(manifest.version)}.part-", dir=self.folder)
        except OSError as error:
            raise StorageError(f"cannot write to {self.folder}: {error}") from error
        try:
            yield Path(name)
        finally:
            shutil.rmtree(name, ignore_errors=True)

    def _settle(self, signed: Signed, manifest: Manifest) -> None:
        path = self._manifest_path(manifest.version)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(encode(signed))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error}") from error
        self._adopt(manifest)

    def _adopt(self, manifest: Manifest) -> None:
        folder = self.path(manifest.version)
        for entry in manifest.files:
            if (folder / entry.path).is_file():
                self._store.adopt(folder / entry.path, entry_shards(entry, manifest.shard_size))
        for patch in manifest.patches:
            path = patch_path(folder, patch)
            if path.is_file():
                self._store.adopt(path, entry_shards(patch, manifest.shard_size))

    def _prune(self, current: int) -> None:
        """Delete old versions, and what abandoned downloads left in the store."""
        versions = self.on_disk()
        for version in versions[: -self._keep]:
            if version == current or self._held[version] > 0:
                continue
            folder = self.path(version)
            self._forget(version)
            self._store.disown(folder)
            drop_patches(self._store, folder)
            self._manifest_path(version).unlink(missing_ok=True)
            trash = self.folder / f"{_TRASH}{folder.name}"
            try:
                folder.rename(trash)  # so that no reader ever sees half a version
            except OSError:
                trash = folder
            shutil.rmtree(trash, ignore_errors=True)
        if current == versions[-1]:
            self._store.sweep()

    def _manifest_path(self, version: int) -> Path:
        return self.folder / f"{version_name(version)}.manifest"

    def _saved_manifest(self, version: int) -> Manifest | None:
        signed = self._saved(version)
        try:
            manifest = None if signed is None else check_manifest(signed, self._spec, self._run_id)
        except BarnraiseError:
            return None  # the version is checked against a fresh manifest when it is next wanted
        return manifest if manifest is not None and manifest.version == version else None

    def _saved(self, version: int) -> Signed | None:
        path = self._manifest_path(version)
        try:
            return None if path.stat().st_size > _MAX_MANIFEST else decode(path.read_bytes(), Signed)
        except (OSError, BarnraiseError):
            return None


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _part(manifest: Manifest, names: Collection[str]) -> Manifest:
    """The manifest as if those were all of its files."""
    return msgspec.structs.replace(
        manifest, files=tuple(entry for entry in manifest.files if entry.path in names)
    )
