"""A log's hashes and entries as static files: the tiles of c2sp.org/tlog-tiles, height 8.

A tile holds up to 256 neighbouring hashes of complete subtrees over 256^level entries; a
bundle holds the entries of a level-0 tile, each after two bytes of big-endian length.
A tile is only ever extended: what ends in the middle of one has a name of its own.

Tiles from a stranger prove nothing by themselves. A proof made from them does, once
it is checked against a root that somebody answers for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.merkle import (
    HASH_BYTES,
    MerkleLog,
    consistency_path,
    inclusion_path,
    leaf_hash,
    node_hash,
    tree_root,
)
from barnraise.protocol.notes import parse_decimal
from barnraise.protocol.wire import printable

HEIGHT = 8
FULL = 256  # hashes or entries
ENTRIES = -1  # the "level" of entry bundles
MAX_LEVEL = 7  # 256^7 x 256 entries are 2^64
MAX_ENTRY = 65_535  # bytes
MAX_TILE = FULL * HASH_BYTES  # bytes
MAX_BUNDLE = FULL * (2 + MAX_ENTRY)  # bytes, by the format
MAX_PATH = 64  # characters


@dataclass(frozen=True, order=True)
class Tile:
    """A tile (or, with ``level`` ``ENTRIES``, a bundle) and how many of its 256 places are filled."""

    level: int
    index: int
    width: int = FULL

    @property
    def path(self) -> str:
        """Where it is served, below the log's prefix."""
        level = "entries" if self.level == ENTRIES else str(self.level)
        groups = [f"{self.index % 1000:03d}"]
        rest = self.index // 1000
        while rest:
            groups.append(f"x{rest % 1000:03d}")
            rest //= 1000
        partial = "" if self.width == FULL else f".p/{self.width}"
        return f"tile/{level}/{'/'.join(reversed(groups))}{partial}"

    @property
    def whole(self) -> Tile:
        """The same tile, full: it may stand where a partial one is wanted that is there no more."""
        return Tile(self.level, self.index)

    @property
    def limit(self) -> int:
        """The most bytes that it can have; a hash tile has exactly as many."""
        return self.width * (2 + MAX_ENTRY if self.level == ENTRIES else HASH_BYTES)


ReadTile = Callable[[Tile], bytes]
"""Gives a tile's bytes. A longer tile of the same place may be given: only its beginning is used."""


def parse_path(path: str) -> Tile:
    """Read a tile's path, in the one form that it can have.

    Raises:
        MalformedError: it is none.
    """
    parts = path.split("/")
    if len(path) > MAX_PATH or len(parts) < 3 or parts[0] != "tile":
        raise MalformedError(f"{printable(path)} is no tile's path")
    level = ENTRIES if parts[1] == "entries" else parse_decimal(parts[1], "the tile's level", MAX_LEVEL)
    groups, width = parts[2:], FULL
    if groups[-2:-1] and groups[-2].endswith(".p"):
        width = parse_decimal(groups.pop(), "the tile's width", FULL - 1)
        groups[-1] = groups[-1].removesuffix(".p")
    digits = "".join(group.removeprefix("x") for group in groups)
    if not digits.isascii() or not digits.isdigit():
        raise MalformedError(f"{printable(path)} is no tile's path")
    tile = Tile(level, int(digits), width)
    if not width or tile.path != path:
        raise MalformedError(f"{printable(path)} is no tile's path")
    return tile


def tiles_for(size: int, before: int = 0) -> Iterator[Tile]:
    """The tiles and bundles of a log of ``size`` entries that one of ``before`` entries did not have.

    Bundles first, then level by level upwards.
    """
    for level in range(ENTRIES, MAX_LEVEL + 1):
        unit = max(level, 0) * HEIGHT
        now, then = size >> unit, before >> unit
        if now == then:
            if not now:
                return
            continue
        for index in range(then // FULL, now // FULL):
            yield Tile(level, index)
        if now % FULL:
            yield Tile(level, now // FULL, now % FULL)


def tile_of(level: int, index: int, size: int) -> Tile:
    """The tile with that level and index as it is in a log of ``size`` entries.

    Raises:
        IndexError: that log has none.
    """
    width = min(FULL, (size >> max(level, 0) * HEIGHT) - index * FULL)
    if index < 0 or width < 1:
        raise IndexError(f"a log of {size} entries has no tile {index} at level {level}")
    return Tile(level, index, width)


def hash_tile(log: MerkleLog, tile: Tile) -> bytes:
    """Return the bytes of a tile of hashes.

    Raises:
        IndexError: the log has no such tile yet.
    """
    return log.hashes(tile.level * HEIGHT, tile.index * FULL, tile.width)


def bundle(entries: Sequence[bytes]) -> bytes:
    """Return the bundle of 1 to 256 entries.

    Raises:
        MalformedError: an entry is longer than a bundle can hold.
    """
    if any(len(entry) > MAX_ENTRY for entry in entries):
        raise MalformedError(f"an entry has more than {MAX_ENTRY} bytes")
    return b"".join(len(entry).to_bytes(2, "big") + entry for entry in entries)


def unbundle(data: bytes, most: int = FULL) -> list[bytes]:
    """Return the entries of a bundle.

    Raises:
        MalformedError: it is cut short, or has more than ``most`` entries.
    """
    entries: list[bytes] = []
    place = 0
    while place < len(data):
        end = place + 2 + int.from_bytes(data[place : place + 2], "big")
        if end > len(data) or place + 2 > len(data):
            raise MalformedError("the entry bundle is cut short")
        if len(entries) == most:
            raise MalformedError(f"the entry bundle has more than {most} entries")
        entries.append(data[place + 2 : end])
        place = end
    return entries


class TileTree:
    """A log of ``size`` entries, read from its tiles; each is asked for once.

    What comes out is as true as the tiles are: check it against a root.

    Raises (all of its functions):
        MalformedError: a tile is too short, or is none.
        IndexError: no such entry or size.
    """

    def __init__(self, size: int, read: ReadTile) -> None:
        self.size = size
        self._read = read
        self._known: dict[tuple[int, int], bytes] = {}

    def root(self, size: int | None = None) -> bytes:
        """Root of the first ``size`` entries (all by default)."""
        return tree_root(self.node, self._within(size))

    def inclusion_proof(self, index: int, size: int | None = None) -> tuple[bytes, ...]:
        """As ``MerkleLog.inclusion_proof``."""
        return inclusion_path(self.node, index, self._within(size))

    def consistency_proof(self, first: int, second: int | None = None) -> tuple[bytes, ...]:
        """As ``MerkleLog.consistency_proof``."""
        return consistency_path(self.node, first, self._within(second))

    def leaf(self, index: int) -> bytes:
        """Hash of entry ``index``."""
        return self.node(0, index)

    def entry(self, index: int) -> bytes:
        """Entry ``index``, whose hash is the one in the tiles."""
        if not 0 <= index < self.size:
            raise IndexError(f"entry {index} is not in a log of {self.size} entries")
        tile = tile_of(ENTRIES, index // FULL, self.size)
        entries = unbundle(self._read(tile))
        place = index % FULL
        if place >= len(entries) or leaf_hash(entries[place]) != self.leaf(index):
            raise MalformedError(f"{tile.path} does not hold the entries that the log's hashes are of")
        return entries[place]

    def _within(self, size: int | None) -> int:
        size = self.size if size is None else size
        if not 0 <= size <= self.size:
            raise IndexError(f"the log has {self.size} entries, not {size}")
        return size

    def node(self, level: int, index: int) -> bytes:
        """Hash of the complete subtree over entries [index * 2^level, (index + 1) * 2^level)."""
        row, above = divmod(level, HEIGHT)
        first, count = index << above, 1 << above
        data = self._tile(row, first // FULL)
        start = first % FULL * HASH_BYTES
        hashes = data[start : start + count * HASH_BYTES]
        if len(hashes) != count * HASH_BYTES:
            raise IndexError(f"a log of {self.size} entries has no subtree {index} at level {level}")
        return hashes if count == 1 else _subtree(hashes)

    def _tile(self, level: int, index: int) -> bytes:
        data = self._known.get((level, index))
        if data is None:
            tile = tile_of(level, index, self.size)
            data = self._read(tile)
            if len(data) < tile.width * HASH_BYTES or len(data) > MAX_TILE or len(data) % HASH_BYTES:
                raise MalformedError(f"{tile.path} has {len(data)} bytes instead of {tile.limit}")
            data = self._known[level, index] = data[: tile.limit]
        return data


@lru_cache(maxsize=64)
def _subtree(row: bytes) -> bytes:
    """Hash over a whole row of hashes: a power of two. Remembered, as full tiles never change."""
    hashes = [row[at : at + HASH_BYTES] for at in range(0, len(row), HASH_BYTES)]
    while len(hashes) > 1:
        hashes = [node_hash(*hashes[at : at + 2]) for at in range(0, len(hashes), 2)]
    return hashes[0]


def tiles_to_compare(first: int, second: int) -> list[Tile]:
    """The hash tiles of a log of ``second`` entries from which its consistency with ``first`` can be judged.

    They give the root of the first ``first`` entries, that of all, and the proof between
    them. At most four a level. Needs 0 <= first <= second.
    """
    asked: list[Tile] = []

    def note(tile: Tile) -> bytes:
        asked.append(tile)
        return bytes(tile.limit)

    tree = _Noting(second, note)
    tree.root(first)
    tree.root()
    tree.consistency_proof(first)
    return asked


class _Noting(TileTree):
    """Reads as a ``TileTree`` does, and hashes nothing of it."""

    def node(self, level: int, index: int) -> bytes:
        row, above = divmod(level, HEIGHT)
        self._tile(row, (index << above) // FULL)
        return bytes(HASH_BYTES)
