"""Openings: a version's shards, named in order while the rest of its files is still being hashed.

An ``Opening`` is signed by the run's key and says which files a version will have,
with their sizes, and the digests of the first shards of all of them in order. It
grows: each opening of one publication begins with the shards of the one before.
Shards that it names may be fetched and passed on, checked by their digests as ever;
nothing is assembled or used before the manifest, which wins wherever it differs.

``Openings`` holds the one that is open. A state machine without I/O: signatures are
checked before it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated

from msgspec import Meta

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.manifest import MAX_SHARDS, check_file_names, largest_version
from barnraise.protocol.messages import (
    MAX_SHARD,
    Digest,
    Manifest,
    Message,
    Millis,
    Signed,
    Size,
    Version,
)
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.tree_index import MAX_VERSION, OPENING_LISTS, Shards
from barnraise.protocol.wire import encode

FIRST_SHARDS = 4
MOST_OPENINGS = 18  # of one publication: 4 shards, 8, 16, ... 2^17, and all of them


class OpenedFile(Message, frozen=True):
    """A file of the version to come; its SHA-256 is not known yet."""

    path: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
    size: Size


class Opening(Message, frozen=True):
    """*Signed* by the run's key: the first part of a version that is being published.

    ``created_at`` is when its publication began, and tells two attempts apart. ``bases``:
    versions from which the manifest is expected to offer a patch; whoever holds one of
    them does better to wait. ``shards``: of the files' shards, one file after the
    other, as many as are known.
    """

    run_id: Digest
    version: Version
    created_at: Millis
    shard_size: Annotated[int, Meta(ge=1024, le=MAX_SHARD)]
    files: Annotated[tuple[OpenedFile, ...], Meta(min_length=1, max_length=256)]
    bases: Annotated[tuple[Version, ...], Meta(max_length=64)]
    shards: Annotated[tuple[Digest, ...], Meta(max_length=MAX_SHARDS)]


def check_opening(signed: Signed, spec: RunSpec, run_id: bytes) -> Opening:
    """Open a signed opening and prove that its shards may be fetched ahead for this run. Pure.

    Raises:
        SignatureError: signed by another key than ``spec.operator``, or damaged.
        MalformedError: of another run, inconsistent, larger than a version of the run's
            model can be, or with files that do not belong.
    """
    opening = open_signed(signed, Opening, spec.operator)
    what = f"opening v{opening.version}"
    if opening.run_id != run_id:
        raise MalformedError(f"{what} is of run {opening.run_id.hex()[:16]}, not of {run_id.hex()[:16]}")
    if opening.version > MAX_VERSION:
        raise MalformedError(f"{what}: no version above {MAX_VERSION} can be opened")
    names = [file.path for file in opening.files]
    if names != sorted(names):
        raise MalformedError(f"{what}: its files are not in order of name")
    check_file_names(what, names, spec, opening.version)
    total, most = opened_bytes(opening), largest_version(spec, opening.version)
    if total > most:
        raise MalformedError(f"{what}: {total} bytes in all, a version of this run has at most {most}")
    count = sum(-(-file.size // opening.shard_size) for file in opening.files)
    if count > MAX_SHARDS or len(opening.shards) > count:
        raise MalformedError(f"{what}: {len(opening.shards)} shards are named of {count}")
    known: dict[bytes, int] = {}
    for digest, size in zip(opening.shards, _sizes(opening), strict=False):
        if known.setdefault(digest, size) != size:
            raise MalformedError(f"{what}: shard {digest.hex()[:16]} is given two different sizes")
    return opening


def opened_bytes(opening: Opening) -> int:
    """The size of the version to come, in bytes."""
    return sum(file.size for file in opening.files)


def opened_shards(opening: Opening) -> Shards:
    """Each distinct shard that a checked opening names, ``(digest, size in bytes)``, in order of use."""
    sizes: dict[bytes, int] = {}
    for digest, size in zip(opening.shards, _sizes(opening), strict=False):
        sizes.setdefault(digest, size)
    return tuple(sizes.items())


def opening_list(opening: Opening) -> int:
    """The number of an opening's list of shards, 2^30 or more: the same however far it has grown.

    It hashes everything but ``shards``, so that a second attempt at a version, whose
    shards may differ, is never mistaken for the first (30 bits of SHA-256).
    """
    fixed = Opening(
        run_id=opening.run_id,
        version=opening.version,
        created_at=opening.created_at,
        shard_size=opening.shard_size,
        files=opening.files,
        bases=opening.bases,
        shards=(),
    )
    return OPENING_LISTS + int.from_bytes(sha256(encode(fixed)).digest()[:4], "big") % OPENING_LISTS


def contradiction(opening: Opening, manifest: Manifest) -> str:
    """How the manifest of the version differs from what was opened; empty if it does not. Pure."""
    if manifest.version != opening.version:
        return ""
    if [(file.path, file.size) for file in opening.files] != [(e.path, e.size) for e in manifest.files]:
        return f"version {manifest.version} has other files than were opened"
    if opening.shard_size != manifest.shard_size:
        return f"version {manifest.version} is cut otherwise than was opened"
    final = [digest for entry in manifest.files for digest in entry.shards]
    for place, (opened, named) in enumerate(zip(opening.shards, final, strict=False)):
        if opened != named:
            return f"version {manifest.version}: shard {place} is not the one that was opened"
    return ""


def _sizes(opening: Opening) -> Iterable[int]:
    for file in opening.files:
        for offset in range(0, file.size, opening.shard_size):
            yield min(opening.shard_size, file.size - offset)


class Openings:
    """The one version that is open, if any, and which neighbours were told of it.

    Attributes:
        signed, opening: the newest opening; None while nothing is open.
    """

    def __init__(self) -> None:
        self.signed: Signed | None = None
        self.opening: Opening | None = None
        self._told: set[str] = set()
        self._published = -1

    def take(self, signed: Signed, opening: Opening, sender: str = "") -> tuple[bool, str]:
        """A checked opening came: whether it is news, and what is wrong with it though it is signed.

        News is a later version than any manifest seen and than the one open, a newer
        attempt at that one, or a longer part of the same attempt.
        """
        if opening.version <= self._published:
            return False, ""
        now = self.opening
        if now is not None:
            if (opening.version, opening.created_at) < (now.version, now.created_at):
                return False, ""
            if (opening.version, opening.created_at) == (now.version, now.created_at):
                shorter = min(len(opening.shards), len(now.shards))
                same = opening_list(opening) == opening_list(now)
                if not same or opening.shards[:shorter] != now.shards[:shorter]:
                    return False, f"two openings of version {opening.version} contradict each other"
                if len(opening.shards) <= len(now.shards):
                    return False, ""
        self.signed, self.opening = signed, opening
        self._told = {sender}
        return True, ""

    def due(self, neighbours: Iterable[str]) -> list[str]:
        """Those of ``neighbours`` that were not told yet; they count as told from now on."""
        if self.signed is None:
            return []
        fresh = [peer for peer in neighbours if peer not in self._told]
        self._told.update(fresh)
        return fresh

    def published(self, manifest: Manifest) -> tuple[Opening | None, str]:
        """A checked manifest came: the opening that it closes, if any, and how the two differ."""
        self._published = max(self._published, manifest.version)
        opening = self.opening
        if opening is None or opening.version > manifest.version:
            return None, ""
        self.signed = self.opening = None
        self._told.clear()
        return opening, contradiction(opening, manifest)
