"""A version by patch: its patches are fetched, kept beside it and applied.

``barnraise.node.patching`` says which patches those are and what applying one means. Whatever goes
wrong here is no error: the version's own shards are fetched instead.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from barnraise.node.patching import (
    Route,
    apply_route,
    patch_path,
    patches_folder,
    plan,
    route_patches,
    write_patch,
)
from barnraise.node.weights import Fetcher
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.manifest import entry_shards, patch_shards
from barnraise.protocol.messages import Manifest
from barnraise.protocol.shards import off_loop
from barnraise.protocol.store import DiskStore
from barnraise.protocol.version_folder import version_name

log = logging.getLogger(__name__)


async def make_by_patch(
    manifest: Manifest,
    held: Mapping[int, Manifest],
    missing: Mapping[bytes, int],
    store: DiskStore,
    versions: Path,
    fetcher: Fetcher,
    scratch: Path,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, Path], int]:
    """Fetch the patches that save bytes, and apply them.

    Args:
        held: manifests of the versions on disk, which lie under ``versions``.
        missing: shards of the files that are not on disk, digest -> size in bytes.
        scratch: where the files are made.
        progress: called with bytes done and in all, of the patches.

    Returns:
        Files made, by name, and the patches' size in bytes; no files if there is no patch, or it
        was of no use.
    """
    routes = plan(manifest, held, missing)
    if not routes:
        return {}, 0
    folder = versions / version_name(manifest.version)
    try:
        total = await _fetch(manifest, routes, store, folder, fetcher, progress)
        return await _apply(manifest, routes, versions, scratch, lambda: progress(total, total)), total
    except BarnraiseError as error:
        log.warning("version %d is fetched whole, its patch was of no use: %s", manifest.version, error)
        drop_patches(store, folder)
        return {}, 0


def drop_patches(store: DiskStore, version_folder: Path) -> None:
    """Delete the patches that led to the version in ``version_folder``. Blocking."""
    folder = patches_folder(version_folder)
    store.disown(folder)
    shutil.rmtree(folder, ignore_errors=True)


async def _fetch(
    manifest: Manifest,
    routes: tuple[Route, ...],
    store: DiskStore,
    folder: Path,
    fetcher: Fetcher,
    progress: Callable[[int, int], None],
) -> int:
    """Bring the patch files to disk, whole and checked; return their size in bytes."""
    patches = route_patches(routes)
    shards = dict(patch_shards(patches, manifest.shard_size))
    total = done = sum(shards.values())
    owner = f"fetch patches of {version_name(manifest.version)}"
    store.pin(owner, shards)
    try:
        missing = await off_loop(total, lambda: {d: n for d, n in shards.items() if not store.verify(d)})
        room = total + sum(route.entry.size for route in routes)
        store.ensure_room(sum(missing.values()), scratch=room)
        done -= sum(missing.values())
        progress(done, total)

        def received(more: int) -> None:
            nonlocal done
            done += more
            progress(done, total)

        await fetcher.fetch(manifest, missing, received)

        def keep() -> None:
            for patch in patches:
                path = patch_path(folder, patch)
                write_patch(patch, manifest.shard_size, store.get, path)
                store.adopt(path, entry_shards(patch, manifest.shard_size))

        await off_loop(total, keep)
    finally:
        store.unpin(owner)
    return total


async def _apply(
    manifest: Manifest,
    routes: tuple[Route, ...],
    versions: Path,
    scratch: Path,
    alive: Callable[[], None],
) -> dict[str, Path]:
    """Make the routes' files in ``scratch``; cancelled, it ends at the next block."""
    total = sum(route.entry.size for route in routes)
    done = 0
    stopped = False

    def observe(more: int) -> None:  # in the worker thread
        nonlocal done
        if stopped:
            raise StorageError("stopped while a patch was applied")
        done += more

    def apply() -> dict[str, Path]:
        folder = versions / version_name(manifest.version)
        for route in routes:
            target = scratch / route.entry.path
            apply_route(route, versions, folder, target, manifest.shard_size, observe)
        return {route.entry.path: scratch / route.entry.path for route in routes}

    async def tell() -> None:
        nonlocal stopped
        told = 0
        try:
            while True:
                await trio.sleep(1.0)
                if done > told:  # silence is for the caller to judge
                    told = done
                    alive()
        finally:
            stopped = True

    made: dict[str, Path] = {}
    failure: BarnraiseError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        try:
            made = await off_loop(total, apply)
        except BarnraiseError as error:  # raised outside, where no group wraps it
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return made
