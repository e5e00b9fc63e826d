import contextlib
from functools import lru_cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tlog_support import entries_of, log_of, tile_bytes

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.merkle import MerkleLog, leaf_hash, verify_consistency, verify_inclusion
from barnraise.protocol.tlog_tiles import (
    ENTRIES,
    FULL,
    MAX_ENTRY,
    Tile,
    TileTree,
    bundle,
    parse_path,
    tile_of,
    tiles_for,
    tiles_to_compare,
    unbundle,
)

MOST = 700
ALL = entries_of(MOST)
LOG = log_of(ALL)


@lru_cache(maxsize=4)
def big_log() -> MerkleLog:
    """70,000 entries, as in the specification's example: three levels of tiles."""
    return log_of([number.to_bytes(4, "big") for number in range(70_000)])


def tree_of(size: int) -> TileTree:
    """Only the tiles that a log of exactly that size serves."""
    served = {tile: tile_bytes(LOG, ALL, tile) for tile in tiles_for(size)}
    return TileTree(size, served.__getitem__)


def test_roots_and_proofs_from_tiles_are_those_of_the_log_at_every_size() -> None:
    for size in range(MOST + 1):
        tree = tree_of(size)
        assert tree.root() == LOG.root(size)
        for index in {0, size // 3, size - 1} - {-1, size}:
            proof = tree.inclusion_proof(index)
            assert proof == LOG.inclusion_proof(index, size)
            assert verify_inclusion(ALL[index], index, size, proof, LOG.root(size))
            assert tree.entry(index) == ALL[index]
            assert tree.leaf(index) == leaf_hash(ALL[index])
        for first in {0, 1, size // 2, max(0, size - 1), size}:
            first = min(first, size)
            proof = tree.consistency_proof(first)
            assert proof == LOG.consistency_proof(first, size)
            assert tree.root(first) == LOG.root(first)
            assert verify_consistency(first, size, LOG.root(first), LOG.root(size), proof)


def test_every_pair_of_sizes_is_compared_from_the_tiles_named_for_it() -> None:
    for second in (1, 2, 255, 256, 257, 511, 512, 513, MOST):
        served = {tile: tile_bytes(LOG, ALL, tile) for tile in tiles_for(second)}
        for first in range(0, second + 1, 7):
            tiles = {tile: served[tile] for tile in tiles_to_compare(first, second)}
            tree = TileTree(second, tiles.__getitem__)
            assert tree.root(first) == LOG.root(first)
            assert tree.root() == LOG.root(second)
            assert tree.consistency_proof(first) == LOG.consistency_proof(first, second)


def test_the_tiles_of_70_000_entries_are_those_of_the_specification() -> None:
    tiles = [tile for tile in tiles_for(70_000) if tile.level >= 0]
    full = [tile for tile in tiles if tile.width == FULL]
    partial_tiles = [tile for tile in tiles if tile.width < FULL]
    assert [sum(tile.level == level for tile in full) for level in range(3)] == [273, 1, 0]
    assert partial_tiles == [Tile(0, 273, 112), Tile(1, 1, 17), Tile(2, 0, 1)]
    assert list(tiles_for(256))[-1] == Tile(1, 0, 1)
    log = big_log()
    tree = TileTree(70_000, partial(tile_bytes, log, []))
    for index in (0, 255, 256, 65_535, 65_536, 69_999):
        assert tree.inclusion_proof(index) == log.inclusion_proof(index)
    for first in (1, 256, 65_536, 65_537, 69_888):
        assert tree.consistency_proof(first) == log.consistency_proof(first)
    assert max(len(tiles_to_compare(first, 70_000)) for first in range(1, 70_000, 997)) <= 8


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_a_grown_log_adds_exactly_the_tiles_it_did_not_have(one: int, other: int) -> None:
    before, size = sorted((one, other))
    assert set(tiles_for(size, before)) >= set(tiles_for(size)) - set(tiles_for(before))
    assert set(tiles_for(size, before)) <= set(tiles_for(size))
    assert list(tiles_for(size, size)) == []
    for tile in tiles_for(size):
        assert tile_of(tile.level, tile.index, size) == tile


@settings(max_examples=300)
@given(st.integers(ENTRIES, 7), st.integers(0, 2**40), st.integers(1, FULL))
def test_a_tiles_path_names_it_and_nothing_else(level: int, index: int, width: int) -> None:
    tile = Tile(level, index, width)
    assert parse_path(tile.path) == tile


def test_paths_are_those_of_the_specification() -> None:
    assert Tile(3, 1_234_067).path == "tile/3/x001/x234/067"
    assert Tile(ENTRIES, 0, 5).path == "tile/entries/000.p/5"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "checkpoint",
        "tile/0",
        "tile/0/0",
        "tile/0/x000",
        "tile/00/000",
        "tile/8/000",
        "tile/-1/000",
        "tile/0/x000/000",
        "tile/0/000/001",
        "tile/0/000.p/0",
        "tile/0/000.p/256",
        "tile/0/000.p/05",
        "tile/0/000.p",
        "tile/0/../000",
        "tile/0/x001/../../../secret",
        "tile/0/٠٠٠",
        "/tile/0/000",
        "tile/0/000/",
        "tile/0/" + "x999/" * 20 + "999",
    ],
)
def test_what_is_no_tiles_path_is_refused(path: str) -> None:
    with pytest.raises(MalformedError):
        parse_path(path)


@given(st.lists(st.binary(max_size=40), max_size=FULL))
def test_bundles_give_back_their_entries(entries: list[bytes]) -> None:
    data = bundle(entries)
    assert unbundle(data) == entries
    if data:
        with pytest.raises(MalformedError):
            unbundle(data[:-1])


@given(st.binary(max_size=200))
def test_a_hostile_bundle_only_ever_raises_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedError):
        assert bundle(unbundle(data)) == data


def test_entries_that_no_bundle_holds_are_refused() -> None:
    assert unbundle(bundle([bytes(MAX_ENTRY)])) == [bytes(MAX_ENTRY)]
    with pytest.raises(MalformedError):
        bundle([bytes(MAX_ENTRY + 1)])
    with pytest.raises(MalformedError, match="more than 256"):
        unbundle(bytes(2 * 257))


def test_a_full_tile_may_stand_for_a_partial_one() -> None:
    tree = TileTree(
        300, lambda tile: tile_bytes(LOG, ALL, tile.whole if tile.level == tile.index == 0 else tile)
    )
    assert tree.root() == LOG.root(300)
    short = TileTree(300, lambda tile: bytes(32))
    with pytest.raises(MalformedError, match="instead of"):
        short.root()


def test_a_bundle_that_is_not_of_the_tiles_is_refused() -> None:
    lie = TileTree(10, lambda tile: tile_bytes(LOG, ALL[::-1], tile))
    with pytest.raises(MalformedError, match="does not hold"):
        lie.entry(3)
