import hashlib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.protocol.merkle import EMPTY_ROOT, MerkleLog, leaf_hash, verify_consistency, verify_inclusion

# The eight leaves and roots of the Certificate Transparency reference implementation.
LEAVES = [
    bytes.fromhex(leaf)
    for leaf in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def log_of(leaves: list[bytes]) -> MerkleLog:
    log = MerkleLog()
    for index, leaf in enumerate(leaves):
        assert log.append(leaf) == index
    return log


def naive_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, word for word."""
    n = len(leaves)
    if n == 0:
        return hashlib.sha256().digest()
    if n == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    k = naive_split(n)
    return hashlib.sha256(b"\1" + naive_root(leaves[:k]) + naive_root(leaves[k:])).digest()


def naive_split(n: int) -> int:
    k = 1
    while 2 * k < n:
        k *= 2
    return k


def naive_path(m: int, leaves: list[bytes]) -> list[bytes]:
    n = len(leaves)
    if n == 1:
        return []
    k = naive_split(n)
    if m < k:
        return [*naive_path(m, leaves[:k]), naive_root(leaves[k:])]
    return [*naive_path(m - k, leaves[k:]), naive_root(leaves[:k])]


def naive_consistency(m: int, leaves: list[bytes], whole: bool = True) -> list[bytes]:
    n = len(leaves)
    if m == n:
        return [] if whole else [naive_root(leaves)]
    k = naive_split(n)
    if m <= k:
        return [*naive_consistency(m, leaves[:k], whole), naive_root(leaves[k:])]
    return [*naive_consistency(m - k, leaves[k:], False), naive_root(leaves[:k])]


def test_the_reference_roots_of_certificate_transparency() -> None:
    log = MerkleLog()
    assert log.root().hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    for leaf, root in zip(LEAVES, ROOTS, strict=True):
        log.append(leaf)
        assert log.root().hex() == root
    assert [log.root(size).hex() for size in range(1, 9)] == ROOTS


def test_the_reference_proofs_of_certificate_transparency() -> None:
    log = log_of(LEAVES)
    assert [item.hex() for item in log.inclusion_proof(5, 8)] == [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]
    assert [item.hex() for item in log.consistency_proof(6, 8)] == [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]


def test_every_root_and_proof_up_to_forty_leaves_is_the_naive_one_and_verifies() -> None:
    leaves = [bytes([n]) for n in range(40)]
    log = log_of(leaves)
    for size in range(41):
        root = naive_root(leaves[:size])
        assert log.root(size) == root
        for index in range(size):
            proof = log.inclusion_proof(index, size)
            assert list(proof) == naive_path(index, leaves[:size])
            assert verify_inclusion(leaves[index], index, size, proof, root)
        for first in range(size + 1):
            proof = log.consistency_proof(first, size)
            if first:
                assert list(proof) == naive_consistency(first, leaves[:size])
            assert verify_consistency(first, size, log.root(first), root, proof)


sizes = st.integers(1, 300)


@given(sizes, st.data())
def test_a_tampered_inclusion_proof_is_refuted(size: int, data: st.DataObject) -> None:
    leaves = [n.to_bytes(2, "big") for n in range(size)]
    log = log_of(leaves)
    index = data.draw(st.integers(0, size - 1))
    proof, root = log.inclusion_proof(index), log.root()
    assert verify_inclusion(leaves[index], index, size, proof, root)
    assert not verify_inclusion(b"other", index, size, proof, root)
    assert not verify_inclusion(leaves[index], index, size, proof, flipped(root))
    assert not verify_inclusion(leaves[index], index, size, (*proof, bytes(32)), root)
    for at in range(len(proof)):
        assert not verify_inclusion(leaves[index], index, size, (*proof[:at], *proof[at + 1 :]), root)
        altered = (*proof[:at], flipped(proof[at]), *proof[at + 1 :])
        assert not verify_inclusion(leaves[index], index, size, altered, root)
    other = data.draw(st.integers(-2, size + 2).filter(lambda n: n != index))
    assert not verify_inclusion(leaves[index], other, size, proof, root)


@given(sizes, st.data())
def test_a_tampered_consistency_proof_is_refuted(size: int, data: st.DataObject) -> None:
    leaves = [n.to_bytes(2, "big") for n in range(size)]
    log = log_of(leaves)
    first = data.draw(st.integers(0, size))
    proof, old, new = log.consistency_proof(first), log.root(first), log.root()
    assert verify_consistency(first, size, old, new, proof)
    assert not verify_consistency(first, size, flipped(old), new, proof)
    if first:  # every log extends the empty one, so nothing about the new root is claimed there
        assert not verify_consistency(first, size, old, flipped(new), proof)
    assert not verify_consistency(first, size, old, new, (*proof, bytes(32)))
    for at in range(len(proof)):
        assert not verify_consistency(first, size, old, new, (*proof[:at], *proof[at + 1 :]))
        assert not verify_consistency(
            first, size, old, new, (*proof[:at], flipped(proof[at]), *proof[at + 1 :])
        )
    assert not verify_consistency(size, first, new, old, proof) or first == size


@given(sizes, st.data())
def test_a_rewritten_history_has_no_consistency_proof(size: int, data: st.DataObject) -> None:
    leaves = [n.to_bytes(2, "big") for n in range(size + 5)]
    first = data.draw(st.integers(1, size))
    changed = data.draw(st.integers(0, first - 1))
    honest = log_of(leaves[:first])
    rewritten = log_of([*leaves[:changed], b"rewritten", *leaves[changed + 1 :]])
    proof = rewritten.consistency_proof(first)
    assert not verify_consistency(first, len(rewritten), honest.root(), rewritten.root(), proof)


@given(
    st.integers(-5, 2**70), st.integers(-5, 2**70), st.lists(st.binary(max_size=40), max_size=70), st.binary()
)
def test_hostile_proofs_are_false_and_never_raise(a: int, b: int, proof: list[bytes], root: bytes) -> None:
    assert not verify_inclusion(b"leaf", a, b, proof, root)
    if a != b:
        assert not verify_consistency(a, b, root, b"other", proof)


def test_sizes_and_indices_outside_the_log_are_errors() -> None:
    log = log_of(LEAVES[:3])
    for call in (
        lambda: log.root(4),
        lambda: log.root(-1),
        lambda: log.inclusion_proof(3),
        lambda: log.inclusion_proof(2, 2),
        lambda: log.inclusion_proof(-1),
        lambda: log.consistency_proof(3, 2),
        lambda: log.consistency_proof(-1),
        lambda: log.consistency_proof(0, 4),
    ):
        with pytest.raises(IndexError):
            call()
    assert MerkleLog().root() == EMPTY_ROOT


def test_a_log_keeps_two_hashes_a_leaf_and_answers_for_any_size() -> None:
    tracemalloc.start()
    log = MerkleLog()
    count = 60_000
    for n in range(count):
        log.append(n.to_bytes(4, "big"))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < count * 64 * 1.2
    size = 54_321
    leaf = (12_345).to_bytes(4, "big")
    assert verify_inclusion(leaf, 12_345, size, log.inclusion_proof(12_345, size), log.root(size))
    assert verify_consistency(size, count, log.root(size), log.root(), log.consistency_proof(size))
    assert leaf_hash(leaf) not in log.inclusion_proof(12_345, size)


def flipped(digest: bytes) -> bytes:
    return bytes([digest[0] ^ 1]) + digest[1:]


def tile_levels(size: int) -> int:
    return max(1, -(-max(1, size.bit_length()) // 8))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=4), st.data())
def test_a_log_that_forgets_what_tiles_hold_goes_on_as_if_it_had_not(
    steps: list[int], data: st.DataObject
) -> None:
    whole, thin = MerkleLog(), MerkleLog()
    for step in steps:
        for _ in range(step):
            leaf = len(whole).to_bytes(4, "big")
            assert whole.append(leaf) == thin.append(leaf)
        size = data.draw(st.integers(0, len(whole)))
        if data.draw(st.booleans()):
            thin.forget(size, whole._node)
        else:
            thin = MerkleLog.resumed(len(thin), thin.tail(), whole._node)
        assert (len(thin), thin.root(), thin.tail()) == (len(whole), whole.root(), whole.tail())
        assert thin.root(size) == whole.root(size)
        assert thin.consistency_proof(size) == whole.consistency_proof(size)
        if size:
            assert thin.inclusion_proof(size - 1) == whole.inclusion_proof(size - 1)
        start = data.draw(st.integers(0, len(whole)))
        count = data.draw(st.integers(0, len(whole) - start))
        assert thin.hashes(0, start, count) == whole.hashes(0, start, count)
        assert sum(map(len, thin.tail())) <= 16_384 * tile_levels(len(thin))


def test_what_was_forgotten_is_asked_for_and_never_made_up() -> None:
    log = log_of([bytes([number & 255]) for number in range(1000)])
    asked: list[tuple[int, int]] = []
    whole = log_of([bytes([number & 255]) for number in range(1000)])

    def earlier(level: int, index: int) -> bytes:
        asked.append((level, index))
        return whole._node(level, index)

    log.forget(900, earlier)
    for size in range(900, 1001):  # a coordinator signs and publishes these
        assert log.root(size) == whole.root(size)
    assert log.hashes(0, 768, 232) == whole.hashes(0, 768, 232)
    assert asked == []
    assert log.inclusion_proof(3) == whole.inclusion_proof(3)
    assert asked
    with pytest.raises(IndexError):
        MerkleLog.resumed(1000, whole.tail()).inclusion_proof(3)


@pytest.mark.parametrize("size", [999, 1001, 2000, 0])
def test_a_tail_is_of_one_size_only(size: int) -> None:
    with pytest.raises(ValueError, match=r"entries has not|are not those"):
        MerkleLog.resumed(size, log_of([b"x"] * 1000).tail())
