"""How much of a block unit is done again, and which of its segments: decided after the node has committed.

A node with a record has one segment drawn. A new one has two, and each failure that is
not forgiven adds another: whoever cheats in one segment of eight is banned after some
twelve units on average, instead of forty, and honest nodes cost no more for it.
"""

from __future__ import annotations

from barnraise.protocol.corpus import permuted

PROVEN_AFTER = 8  # units verified in a row


def depth_for(streak: int, offences: int) -> int:
    """How many segments of a unit are drawn, of a node with ``streak`` verified units in a row."""
    return (1 if streak >= PROVEN_AFTER else 2) + offences


def drawn(draw: bytes, segments: int, depth: int) -> tuple[int, ...]:
    """The segments that a secret ``draw`` picks, at most all, in ascending order."""
    return tuple(sorted(permuted(place, segments, draw) for place in range(min(depth, segments))))
