"""Sets of shards as whole numbers (bit i = shard i), and how many peers hold each shard.

``Counts`` keeps the counts of all shards in bit slices: plane k holds bit k of every
count. Adding a peer's whole bitmap or finding the rarest of a set is then a handful
of operations on whole numbers, for 64 shards or 65,536.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator


class Counts:
    """For each shard, how many bitmaps that were added hold it."""

    __slots__ = ("_planes",)

    def __init__(self) -> None:
        self._planes: list[int] = []

    def add(self, mask: int) -> None:
        """Count every shard of ``mask`` once more."""
        for index, plane in enumerate(self._planes):
            self._planes[index] = plane ^ mask
            mask &= plane
            if not mask:
                return
        if mask:
            self._planes.append(mask)

    def subtract(self, mask: int) -> None:
        """Count every shard of ``mask``, which was added before, once less."""
        for index, plane in enumerate(self._planes):
            self._planes[index] = plane ^ mask
            mask &= ~plane
            if not mask:
                break
        while self._planes and not self._planes[-1]:
            self._planes.pop()

    def rarest(self, mask: int) -> int:
        """The shards of ``mask`` with the lowest count among them."""
        for plane in reversed(self._planes):
            if low := mask & ~plane:
                mask = low
        return mask

    def zero(self, mask: int) -> int:
        """The shards of ``mask`` that nobody holds."""
        for plane in self._planes:
            mask &= ~plane
        return mask

    def count(self, index: int) -> int:
        """How often shard ``index`` is held."""
        return sum((plane >> index & 1) << bit for bit, plane in enumerate(self._planes))


def pick(mask: int, rng: random.Random) -> int:
    """A random member of a set that is not empty (members after a gap are likelier)."""
    start = int(rng.random() * mask.bit_length())
    rest = mask >> start
    return start + (rest & -rest).bit_length() - 1


def to_mask(indices: Iterable[int]) -> int:
    """The set of these shards."""
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask


def members(mask: int) -> Iterator[int]:
    """The shards of a set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def to_bytes(mask: int) -> bytes:
    """Bit i of byte i // 8, least significant first, without trailing zero bytes."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def from_bytes(bits: bytes) -> int:
    """The inverse of ``to_bytes``; trailing zero bytes are allowed."""
    return int.from_bytes(bits, "little")
