"""Shards as sets of bits: counting, picking, bytes."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol.bitmaps import Counts, from_bytes, members, pick, to_bytes


@given(st.lists(st.integers(0, 2**70), max_size=12), st.data())
def test_bit_sliced_counts_equal_plain_counting(masks: list[int], data: st.DataObject) -> None:
    counts, plain = Counts(), Counter[int]()
    for mask in masks:
        counts.add(mask)
        plain.update(members(mask))
    for mask in data.draw(st.lists(st.sampled_from(masks), unique=True)) if masks else []:
        counts.subtract(mask)
        plain.subtract(members(mask))
    asked = data.draw(st.integers(1, 2**70))
    least = min(plain[index] for index in members(asked))
    assert set(members(counts.rarest(asked))) == {i for i in members(asked) if plain[i] == least}
    assert set(members(counts.zero(asked))) == {i for i in members(asked) if plain[i] == 0}
    assert all(counts.count(index) == plain[index] for index in range(71))


@given(st.integers(1, 2**200), st.integers())
def test_picking_and_bytes(mask: int, seed: int) -> None:
    assert mask >> pick(mask, random.Random(seed)) & 1
    assert from_bytes(to_bytes(mask)) == mask
    assert from_bytes(to_bytes(mask) + bytes(3)) == mask
