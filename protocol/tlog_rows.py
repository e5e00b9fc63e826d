"""A log by one hash for each 256 entries: enough to check any whole bundle by itself, and the root.

A million entries are 125 kB. Where a size ends in the middle of a bundle, that bundle's
leaf hashes are wanted as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.merkle import HASH_BYTES, consistency_path, leaf_hash, node_hash, tree_root
from barnraise.protocol.tlog_tiles import FULL, HEIGHT


@dataclass
class BundleRow:
    """The hashes of a log of ``size`` entries.

    Attributes:
        row: of each full bundle the 32 bytes of its subtree, one after the other.
        leaves: by a bundle's index, the leaf hashes of those of its entries that are known, joined.
    """

    size: int
    row: bytes
    leaves: dict[int, bytes] = field(default_factory=dict)

    def root(self, size: int | None = None) -> bytes:
        """Root of the first ``size`` entries (all by default).

        Raises:
            KeyError: it ends in a bundle whose leaves are not known.
        """
        return tree_root(self.node, self.size if size is None else size)

    def consistency_proof(self, first: int) -> tuple[bytes, ...]:
        """As ``MerkleLog.consistency_proof``, from ``first`` to all. Raises KeyError as ``root`` does."""
        return consistency_path(self.node, first, self.size)

    def node(self, level: int, index: int) -> bytes:
        """The hash of a complete subtree (``merkle.Nodes``)."""
        if level >= HEIGHT:
            span = HASH_BYTES << (level - HEIGHT)
            return subtree(self.row[index * span : (index + 1) * span])
        number, place = divmod(index << level, FULL)
        start = place * HASH_BYTES
        return subtree(self.leaves[number][start : start + (HASH_BYTES << level)])

    def check(self, index: int, entries: Iterable[bytes]) -> None:
        """Make sure that bundle ``index`` has these entries: all 256 of a full one.

        Raises:
            MalformedError: it has not.
        """
        hashes = leaf_hashes(entries)
        if index < self.size // FULL:
            wanted = self.row[index * HASH_BYTES : (index + 1) * HASH_BYTES]
            good = len(hashes) == FULL * HASH_BYTES and subtree(hashes) == wanted
        else:
            good = hashes == self.leaves.get(index)
        if not good:
            raise MalformedError(f"the entries from {index * FULL} on are not those that were signed")


def leaf_hashes(entries: Iterable[bytes]) -> bytes:
    """The entries' leaf hashes, joined."""
    return b"".join(map(leaf_hash, entries))


def subtree(hashes: bytes) -> bytes:
    """The hash over neighbouring hashes, a power of two of them."""
    row = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    while len(row) > 1:
        row = [node_hash(row[at], row[at + 1]) for at in range(0, len(row), 2)]
    return row[0]


def row_of(entries: Iterable[bytes], keep: Iterable[int] = ()) -> BundleRow:
    """Read a whole log once. The leaves of its last bundle, if not full, and of bundles ``keep`` are kept."""
    wanted, size, row = frozenset(keep), 0, bytearray()
    leaves: dict[int, bytes] = {}
    waiting = bytearray()
    for entry in entries:
        waiting += leaf_hash(entry)
        size += 1
        if size % FULL == 0:
            number = size // FULL - 1
            row += subtree(bytes(waiting))
            if number in wanted:
                leaves[number] = bytes(waiting)
            waiting.clear()
    if waiting:
        leaves[size // FULL] = bytes(waiting)
    return BundleRow(size, bytes(row), leaves)
