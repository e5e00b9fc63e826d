"""An append-only Merkle log: RFC 6962 hashes (SHA-256), proofs as in RFC 9162, sans-I/O.

``MerkleLog`` keeps the hash of every complete subtree, one flat array per level: 64
bytes a leaf in all, an append touches O(log n) of them, and root and proofs of *any*
earlier size come out in O(log^2 n). Whoever has the log's tiles elsewhere can have it
``forget`` what they hold; then it keeps a few KiB, however long it grows. ``tree_root``
and the ``*_path`` functions make roots and proofs from wherever such hashes come; the
``verify_*`` functions need no log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()
_TILE_LEVELS = 8  # as in barnraise.protocol.tlog_tiles, whose tiles hold what is forgotten here

Nodes = Callable[[int, int], bytes]
"""Gives, for level k and index i, the hash of the complete subtree over leaves [i * 2^k, (i + 1) * 2^k)."""


def leaf_hash(leaf: bytes) -> bytes:
    """Hash of one entry (RFC 6962, section 2.1: the prefix keeps leaves and nodes apart)."""
    return hashlib.sha256(b"\0" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node from those of its children."""
    return hashlib.sha256(b"\1" + left + right).digest()


def _unavailable(level: int, index: int) -> bytes:
    raise IndexError(f"subtree {index} at level {level} was forgotten, and nothing else has it")


class MerkleLog:
    """The log's hashes; the entries themselves are kept by the caller."""

    def __init__(self) -> None:
        self._levels: list[bytearray] = [bytearray()]  # level k, hash i: leaves [i * 2^k, (i + 1) * 2^k)
        self._first: list[int] = [0]  # the number of each level's first hash that is kept
        self._earlier: Nodes = _unavailable

    @classmethod
    def resumed(cls, size: int, rows: Sequence[bytes], earlier: Nodes = _unavailable) -> MerkleLog:
        """The log of ``size`` entries of which ``tail`` gave ``rows``; ``earlier`` has the other hashes.

        Raises:
            ValueError: such a log has other rows.
        """
        log = cls()
        log._levels = [bytearray(row) for row in rows]
        log._first = [_first_kept(level, size) for level in range(len(rows))]
        log._earlier = earlier
        for level, row in enumerate(rows):
            if len(row) != HASH_BYTES * ((size >> level) - log._first[level]):
                raise ValueError(f"a log of {size} entries has not {len(row)} bytes of level {level} to keep")
        if not rows or size >> len(rows):
            raise ValueError(f"{len(rows)} levels are not those of a log of {size} entries")
        return log

    def __len__(self) -> int:
        return self._first[0] + len(self._levels[0]) // HASH_BYTES

    def append(self, leaf: bytes) -> int:
        """Add an entry's bytes and return its index."""
        index = count = len(self)
        digest = leaf_hash(leaf)
        self._levels[0] += digest
        level = 0
        while count & 1:  # the new node is a right child: its parent is complete
            digest = node_hash(self._node(level, count - 1), digest)
            level += 1
            count >>= 1
            if level == len(self._levels):
                self._levels.append(bytearray())
                self._first.append(0)
            self._levels[level] += digest
        return index

    def tail(self) -> tuple[bytes, ...]:
        """For each level, the hashes from which the log can go on: of its last tile and the subtrees in it.

        At most 16 KiB for every eight levels. See ``resumed``.
        """
        size = len(self)
        starts = (_first_kept(level, size) for level in range(len(self._levels)))
        return tuple(self.hashes(level, first, (size >> level) - first) for level, first in enumerate(starts))

    def forget(self, size: int, earlier: Nodes) -> None:
        """Give up what the full tiles of the first ``size`` entries hold; from now on ``earlier`` is asked.

        Not while another thread reads.

        Raises:
            IndexError: the log has fewer entries.
        """
        self._check(size)
        self._earlier = earlier
        for level, row in enumerate(self._levels):
            first = max(self._first[level], _first_kept(level, size))
            del row[: (first - self._first[level]) * HASH_BYTES]
            self._first[level] = first

    def root(self, size: int | None = None) -> bytes:
        """Root of the first ``size`` entries (all of them by default).

        Raises:
            IndexError: the log has fewer entries.
        """
        size = len(self) if size is None else size
        self._check(size)
        return tree_root(self._node, size)

    def inclusion_proof(self, index: int, size: int | None = None) -> tuple[bytes, ...]:
        """Proof that entry ``index`` is in the log of ``size`` entries: sibling hashes, leaf to root.

        Raises:
            IndexError: no such entry or size.
        """
        size = len(self) if size is None else size
        self._check(size)
        return inclusion_path(self._node, index, size)

    def consistency_proof(self, first: int, second: int | None = None) -> tuple[bytes, ...]:
        """Proof that the log of ``second`` entries extends that of ``first``; empty if either is trivial.

        Raises:
            IndexError: not 0 <= first <= second <= size of the log.
        """
        second = len(self) if second is None else second
        self._check(second)
        return consistency_path(self._node, first, second)

    def hashes(self, level: int, start: int, count: int) -> bytes:
        """The hashes of ``count`` neighbouring complete subtrees of 2^level leaves, from number ``start`` on.

        Raises:
            IndexError: the log has no such subtrees.
        """
        row, first = (self._levels[level], self._first[level]) if 0 <= level < len(self._levels) else (b"", 0)
        if 0 <= start < first and count >= 0:
            forgotten = min(count, first - start)
            rest = self.hashes(level, first, count - forgotten)
            return b"".join(self._earlier(level, start + at) for at in range(forgotten)) + rest
        at = (start - first) * HASH_BYTES
        found = bytes(row[at : at + count * HASH_BYTES]) if start >= 0 <= count else b""
        if len(found) != count * HASH_BYTES:
            raise IndexError(f"the log has no {count} subtrees from number {start} on at level {level}")
        return found

    def _check(self, size: int) -> None:
        if not 0 <= size <= len(self):
            raise IndexError(f"the log has {len(self)} entries, not {size}")

    def _node(self, level: int, index: int) -> bytes:
        at = (index - self._first[level]) * HASH_BYTES
        if at < 0:
            return self._earlier(level, index)
        return bytes(self._levels[level][at : at + HASH_BYTES])


def tree_root(nodes: Nodes, size: int) -> bytes:
    """Root of the first ``size`` entries, from the hashes of complete subtrees."""
    return _range(nodes, 0, size) if size else EMPTY_ROOT


def inclusion_path(nodes: Nodes, index: int, size: int) -> tuple[bytes, ...]:
    """Proof that entry ``index`` is in the log of ``size`` entries: sibling hashes, leaf to root.

    Raises:
        IndexError: not 0 <= index < size.
    """
    if not 0 <= index < size:
        raise IndexError(f"entry {index} is not in a log of {size} entries")
    path = []
    start, end = 0, size
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            path.append(_range(nodes, middle, end))
            end = middle
        else:
            path.append(_range(nodes, start, middle))
            start = middle
    return tuple(reversed(path))


def consistency_path(nodes: Nodes, first: int, second: int) -> tuple[bytes, ...]:
    """Proof that the log of ``second`` entries extends that of ``first``; empty if either is trivial.

    Raises:
        IndexError: not 0 <= first <= second.
    """
    if not 0 <= first <= second:
        raise IndexError(f"no consistency proof from {first} to {second} entries")
    if first in (0, second):
        return ()
    path = []
    start, end = 0, second
    while end != first:
        middle = start + _split(end - start)
        if first <= middle:
            path.append(_range(nodes, middle, end))
            end = middle
        else:
            path.append(_range(nodes, start, middle))
            start = middle
    if start:  # otherwise the subtree is the old log itself, whose root the verifier has
        path.append(_range(nodes, start, end))
    return tuple(reversed(path))


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether ``proof`` shows that the entry ``leaf`` (its bytes) has ``index`` in a log of ``size`` entries.

    ``root`` is that log's root. RFC 9162, section 2.1.3.2. Never raises on hostile proofs.
    """
    if not 0 <= index < size or not _well_formed(proof):
        return False
    node, last = index, size - 1
    digest = leaf_hash(leaf)
    for sibling in proof:
        if last == 0:
            return False
        if node & 1 or node == last:
            digest = node_hash(sibling, digest)
            while node and not node & 1:
                node >>= 1
                last >>= 1
        else:
            digest = node_hash(digest, sibling)
        node >>= 1
        last >>= 1
    return last == 0 and digest == root


def verify_consistency(
    first: int, second: int, first_root: bytes, second_root: bytes, proof: Sequence[bytes]
) -> bool:
    """Whether ``proof`` shows that the log of ``second`` entries only appended to that of ``first``.

    RFC 9162, section 2.1.4.2; any log extends the empty one. Never raises on hostile proofs.
    """
    if not 0 <= first <= second or not _well_formed(proof):
        return False
    if first == second:
        return not proof and first_root == second_root
    if first == 0:
        return not proof and first_root == EMPTY_ROOT
    return proven_roots(first, second, first_root, proof) == (first_root, second_root)


def proven_roots(
    first: int, second: int, first_root: bytes, proof: Sequence[bytes]
) -> tuple[bytes, bytes] | None:
    """The roots of the ``first`` and the ``second`` entries of the one log that a consistency proof is from.

    Whoever believes one of the two must believe the other. ``first_root`` is used where
    the proof leaves it out (a power of two). None: the proof has not the form of one.

    Raises:
        ValueError: not 0 < first < second.
    """
    if not 0 < first < second:
        raise ValueError("a consistency proof is from a smaller log to a larger one")
    if not _well_formed(proof):
        return None
    path = list(proof)
    if first & (first - 1) == 0:
        path.insert(0, first_root)
    if not path:
        return None
    node, last = first - 1, second - 1
    while node & 1:
        node >>= 1
        last >>= 1
    old = new = path[0]
    for sibling in path[1:]:
        if last == 0:
            return None
        if node & 1 or node == last:
            old = node_hash(sibling, old)
            new = node_hash(sibling, new)
            while node and not node & 1:
                node >>= 1
                last >>= 1
        else:
            new = node_hash(new, sibling)
        node >>= 1
        last >>= 1
    return (old, new) if last == 0 else None


def _first_kept(level: int, size: int) -> int:
    """The first subtree at ``level`` that is in no full tile of the log (256 hashes, every eighth level)."""
    below = level % _TILE_LEVELS
    return (size >> (level - below) >> _TILE_LEVELS << _TILE_LEVELS) >> below


def _range(nodes: Nodes, start: int, end: int) -> bytes:
    """Hash of leaves [start, end); start is a multiple of the power of two at or above the width."""
    width = end - start
    if width & (width - 1) == 0:
        level = width.bit_length() - 1
        return nodes(level, start >> level)
    middle = start + _split(width)
    return node_hash(_range(nodes, start, middle), _range(nodes, middle, end))


def _split(width: int) -> int:
    """Largest power of two smaller than ``width`` (>= 2)."""
    return 1 << ((width - 1).bit_length() - 1)


def _well_formed(proof: Sequence[bytes]) -> bool:
    return len(proof) <= 64 and all(len(item) == HASH_BYTES for item in proof)
