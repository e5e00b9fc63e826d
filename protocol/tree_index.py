"""What treecast's transfers are about: every version is up to two numbered lists of shards.

The ``version`` of ``Bitmap``, ``Have``, ``Want``, ``Cancel``, ``Unavailable`` and
``Piece`` is the number of such a list: ``2 * v`` for the files of version v, whole,
and ``2 * v + 1`` for the patches that lead to v from the version before. Whoever has
that one takes part in the second list alone, a newcomer in the first; whoever has
finished serves both. A shard's index is its place among the distinct shards of the
list, in the manifest's order.
"""

from __future__ import annotations

from barnraise.protocol.manifest import manifest_shards, patch_shards
from barnraise.protocol.messages import Manifest, PatchEntry

OPENING_LISTS = 2**30  # from here on, lists of openings (barnraise.protocol.opening)
MAX_VERSION = OPENING_LISTS // 2 - 1  # above it, versions have no lists

Shards = tuple[tuple[bytes, int], ...]


def files_list(version: int) -> int:
    """The number of the list with the files of ``version``."""
    return 2 * version


def patches_list(version: int) -> int:
    """The number of the list with the last patches to ``version``."""
    return 2 * version + 1


def version_of(number: int) -> int:
    """The version that a list belongs to."""
    return number // 2


def lists_of(manifest: Manifest) -> dict[int, Shards]:
    """The lists of a checked manifest: number -> ``(digest, size in bytes)`` of each shard. Pure."""
    if manifest.version > MAX_VERSION:
        return {}
    lists = {files_list(manifest.version): manifest_shards(manifest)}
    last: dict[str, PatchEntry] = {patch.path: patch for patch in manifest.patches}  # in order of base
    if last:
        lists[patches_list(manifest.version)] = patch_shards(last.values(), manifest.shard_size)
    return {number: shards for number, shards in lists.items() if shards}
