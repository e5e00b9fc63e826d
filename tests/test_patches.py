"""Patches between safetensors files: exact, bounded, hard to fool, safe to kill."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from barnraise.kernels.patch_format import (
    DENSE,
    MAGIC,
    SPARSE,
    PatchError,
    PatchHeader,
    RecordHead,
    decode_record,
    encode_block,
    parse_record_head,
)
from barnraise.kernels.patch_reader import changed_tensors, read_header
from barnraise.kernels.patches import apply_chain, apply_patch, make_patch

DTYPES = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.int8: torch.int8,
}
relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def random_bits(shape: list[int], dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """Any bit pattern: NaNs, infinities, denormals, both zeros."""
    count = int(np.prod(shape)) if shape else 1
    width = torch.tensor([], dtype=dtype).element_size()
    data = np.frombuffer(rng.randbytes(count * width), dtype=f"<i{width}").copy()
    return torch.from_numpy(data).view(dtype).reshape(shape)


def altered(tensor: torch.Tensor, fraction: float, rng: random.Random) -> torch.Tensor:
    bits = tensor.clone().view(DTYPES[tensor.dtype]).reshape(-1)
    for place in range(len(bits)):
        if rng.random() < fraction:
            bits[place] ^= rng.choice((1, 3, 0x7F))
    return bits.view(tensor.dtype).reshape(tensor.shape)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    old, new = {}, {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(list(DTYPES)))
        shape = draw(st.lists(st.integers(0, 12), max_size=3))
        name = draw(st.sampled_from("zyxw")) + str(number)
        old[name] = random_bits(shape, dtype, rng)
        new[name] = altered(old[name], draw(st.sampled_from((0.0, 0.02, 0.2, 1.0))), rng)
    return old, new


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """A model of 60,000 bfloat16 in three tensors, one of them unchanged, and its successor."""
    rng = torch.Generator().manual_seed(0)
    old = {name: torch.randn(100, 200, generator=rng) * 0.05 for name in ("a", "b", "c")}
    new = {
        n: t if n == "b" else t + 3e-6 * torch.randn(t.shape, generator=rng).sign() for n, t in old.items()
    }
    return (
        write(tmp_path / "old.safetensors", {n: t.bfloat16() for n, t in old.items()}),
        write(tmp_path / "new.safetensors", {n: t.bfloat16() for n, t in new.items()}),
    )


@relaxed
@given(pair=pairs(), block_bytes=st.sampled_from((64, 256, 8 * 1024 * 1024)))
def test_a_patch_gives_the_very_bytes(
    tmp_path: Path, pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], block_bytes: int
) -> None:
    old, new = (write(tmp_path / name, tensors) for name, tensors in zip("on", pair, strict=True))
    stats = make_patch(old, new, tmp_path / "p", block_bytes=block_bytes)
    assert stats is not None
    apply_patch(old, tmp_path / "p", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == new.read_bytes()
    differ = {
        n
        for n, t in pair[0].items()
        if not torch.equal(t.view(DTYPES[t.dtype]), pair[1][n].view(DTYPES[t.dtype]))
    }
    assert set(changed_tensors(tmp_path / "p")) == differ
    assert stats.header.target_sha256 == hashlib.sha256(new.read_bytes()).digest()
    assert stats.header.base_sha256 == hashlib.sha256(old.read_bytes()).digest()
    assert stats.patch_bytes == (tmp_path / "p").stat().st_size


@settings(max_examples=200, deadline=None)
@given(
    width=st.sampled_from((1, 2, 4, 8)),
    data=st.binary(min_size=8, max_size=800),
    places=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 2**64 - 1)), max_size=30),
)
def test_a_block_is_coded_exactly(width: int, data: bytes, places: list[tuple[int, int]]) -> None:
    old = np.frombuffer(data[: len(data) // width * width], dtype=f"<u{width}")
    new = old.copy()
    for place, value in places:
        new[place % len(new)] ^= np.array(value % 2 ** (8 * width)).astype(new.dtype)
    count, record = encode_block(old, new, 3, 7)
    assert count == int((old != new).sum())
    if not count:
        assert record == b""
        return
    head = parse_record_head(record[:15])
    assert (head.tensor, head.block) == (3, 7)
    body = 15 + head.lengths_bytes
    lengths = [int.from_bytes(record[i : i + 4], "little") for i in range(15, body, 4)]
    result = old.copy()
    where, delta = decode_record(head, lengths, memoryview(record)[body:], width, len(old))
    assert int((delta != 0).sum()) == count
    result[slice(None) if where is None else where] += delta
    assert result.tobytes() == new.tobytes()


def test_small_steps_make_small_patches_and_untouched_tensors_cost_nothing(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    stats = make_patch(*two, tmp_path / "p")
    assert stats is not None
    assert changed_tensors(tmp_path / "p") == ("a", "c")
    assert stats.elements == 60_000
    assert 0 < stats.changed < 6_000
    assert stats.full_bytes / stats.patch_bytes > 10
    assert stats.patch_bytes * 8 / stats.changed < 11  # bits per change
    again = make_patch(*two, tmp_path / "q")
    assert again is not None
    assert (tmp_path / "p").read_bytes() == (tmp_path / "q").read_bytes()


def test_a_patch_that_would_be_too_long_is_given_up(two: tuple[Path, Path], tmp_path: Path) -> None:
    assert make_patch(*two, tmp_path / "p", max_bytes=500) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.safetensors", "old.safetensors"]


def test_everything_changed_is_stored_without_places(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    old = torch.randn(300, 300, generator=rng) * 0.02
    new = old + 1e-6 * torch.randn(300, 300, generator=rng)
    one, two_ = write(tmp_path / "o", {"w": old}), write(tmp_path / "n", {"w": new})
    stats = make_patch(one, two_, tmp_path / "p")
    assert stats is not None
    assert stats.changed > 0.9 * stats.elements
    assert stats.full_bytes / stats.patch_bytes > 1.8  # float32: the high bytes stay
    apply_patch(one, tmp_path / "p", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == two_.read_bytes()


def test_a_chain_is_applied_in_one_pass(tmp_path: Path) -> None:
    rng = random.Random(5)
    tensors = {"a": random_bits([50, 40], torch.bfloat16, rng), "b": random_bits([700], torch.float32, rng)}
    files = [write(tmp_path / "v0", tensors)]
    patches = []
    for version in range(1, 5):
        name = "ab"[version % 2]
        tensors = tensors | {name: altered(tensors[name], 0.03, rng)}
        files.append(write(tmp_path / f"v{version}", tensors))
        patches.append(tmp_path / f"p{version}")
        assert make_patch(files[-2], files[-1], patches[-1], block_bytes=512)
    for start in range(4):
        apply_chain(files[start], patches[start:], tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == files[-1].read_bytes()
    for wrong in (patches[::-1], [patches[0], patches[2]], [], patches * 20):
        with pytest.raises(PatchError, match="chain"):
            apply_chain(files[0], wrong, tmp_path / "no")
    with pytest.raises(PatchError, match="not the file that the patch begins with"):
        apply_chain(files[1], patches, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_files_of_other_tensors_have_no_patch(two: tuple[Path, Path], tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"a": torch.zeros(100, 200, dtype=torch.bfloat16)})
    with pytest.raises(PatchError, match="other tensors"):
        make_patch(two[0], other, tmp_path / "p")
    assert make_patch(*two, tmp_path / "p")
    with pytest.raises(PatchError, match="not for"):
        apply_patch(other, tmp_path / "p", tmp_path / "out")


def described(shape: str, offsets: str, size: int) -> bytes:
    """A file of one tensor with this header and so many bytes."""
    header = f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (10**15).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}trailing",
        (6).to_bytes(8, "little") + b'{"a":1',
        described("[9]", "[0,4]", 4),
        described("[1]", "[4,8]", 8),
        described("[1]", "[4,0]", 4),
        (40).to_bytes(8, "little") + b"[" * 40,
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, two: tuple[Path, Path], data: bytes) -> None:
    assert make_patch(*two, tmp_path / "p")
    bad = tmp_path / "bad"
    bad.write_bytes(data)
    for call in (
        lambda: make_patch(bad, bad, tmp_path / "q"),
        lambda: apply_patch(bad, tmp_path / "p", tmp_path / "out"),
        lambda: apply_patch(two[0], bad, tmp_path / "out"),
        lambda: read_header(tmp_path / "missing"),
    ):
        with pytest.raises(PatchError):
            call()


# --- hostile patches


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_patch_is_an_error_and_never_another_result(
    two: tuple[Path, Path], tmp_path: Path, data: st.DataObject
) -> None:
    good = tmp_path / "p"
    if not good.exists():
        make_patch(*two, good, block_bytes=4096)
    patch = bytearray(good.read_bytes())
    match data.draw(st.sampled_from(("flip", "cut", "add", "splice"))):
        case "flip":
            for _ in range(data.draw(st.integers(1, 3))):
                place = data.draw(st.integers(0, len(patch) - 1))
                patch[place] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del patch[data.draw(st.integers(0, len(patch) - 1)) :]
        case "add":
            patch += data.draw(st.binary(min_size=1, max_size=40))
        case "splice":
            start = data.draw(st.integers(0, len(patch) - 1))
            patch[start : start + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=30))
    bad, out = tmp_path / "bad", tmp_path / "out"
    bad.write_bytes(patch)
    try:
        apply_patch(two[0], bad, out)
    except PatchError:
        assert not out.exists()
    else:  # another way to say the same
        assert out.read_bytes() == two[1].read_bytes()
        out.unlink()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def spoiled(
    tmp_path: Path, two: tuple[Path, Path], records: list[bytes], names: tuple[str, ...] = ("a",)
) -> Path:
    """A patch with a proper header and these records."""
    assert make_patch(*two, tmp_path / "p")
    header = msgspec.structs.replace(read_header(tmp_path / "p"), tensors=names)
    data = msgspec.msgpack.encode(header)
    path = tmp_path / "spoiled"
    path.write_bytes(MAGIC + len(data).to_bytes(4, "little") + data + b"".join(records))
    return path


def record(head: RecordHead, *planes: bytes, lengths: list[int] | None = None) -> bytes:
    sizes = lengths or [len(plane) for plane in planes]
    return b"".join((head.pack(), *(size.to_bytes(4, "little") for size in sizes), *planes))


def packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def spoilt(count: int, mode: int, gaps: int, values: int, *planes: bytes, tensor: int = 0) -> list[bytes]:
    return [record(RecordHead(tensor, 0, count, mode, gaps, values), *planes)]


ONE = packed(b"\x01")
ONES = packed(bytes(20_001))
BOMB = packed(bytes(64 << 20))  # a few kilobytes
SIZELESS = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x01")

HOSTILE = {
    "out of range": (spoilt(1, SPARSE, 15, 1, *[packed(b"\xff")] * 4, ONE), "changes element"),
    "nothing changes": (spoilt(2, SPARSE, 1, 1, packed(b"ab"), packed(b"\x01\x00")), "does not change"),
    "more elements than there are": (spoilt(20_001, SPARSE, 1, 1, ONES, ONES), "has 20000"),
    "four thousand million elements": (spoilt(2**32 - 1, SPARSE, 1, 1, b"", b""), "has 20000"),
    "dense but short": (spoilt(5, DENSE, 0, 1, packed(b"12345")), "has 20000"),
    "wide values": (spoilt(1, SPARSE, 0, 128, ONE), "value planes"),
    "unknown mode": (spoilt(1, 2, 0, 1, ONE), "unknown mode"),
    "gaps in a dense record": (spoilt(1, DENSE, 1, 1, ONE, ONE), "gap planes"),
    "a fifth gap plane": (spoilt(1, SPARSE, 16, 1, ONE, ONE), "gap planes"),
    "no values": (spoilt(1, SPARSE, 1, 0, ONE), "changes nothing"),
    "no elements": (spoilt(0, SPARSE, 0, 1, ONE), "changes nothing"),
    "a bomb": (spoilt(9_000, SPARSE, 0, 1, BOMB), "as long as it says"),
    "a plane of gigabytes": (
        [record(RecordHead(0, 0, 1, SPARSE, 0, 1), b"", lengths=[2**32 - 1])],
        "given as",
    ),
    "no content size": (spoilt(1, SPARSE, 0, 1, SIZELESS), "as long as it says"),
    "two frames": (spoilt(1, SPARSE, 0, 1, ONE * 2), "decompressed"),
    "no zstd": (spoilt(1, SPARSE, 0, 1, b"\x01"), "decompressed"),
    "a block twice": (spoilt(1, SPARSE, 0, 1, ONE) * 2, "out of order"),
    "a tensor skipped": (spoilt(1, SPARSE, 0, 1, ONE, tensor=1), "out of order"),
    "a block beyond the tensor": (
        [record(RecordHead(0, 9, 1, SPARSE, 0, 1), ONE)],
        "no place",
    ),
    "no record": ([], "cut short"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_record_is_refused_before_it_costs_anything(
    tmp_path: Path, two: tuple[Path, Path], what: str
) -> None:
    records, match = HOSTILE[what]
    path = spoiled(tmp_path, two, records)
    tracemalloc.start()
    try:
        with pytest.raises(PatchError, match=match):
            apply_patch(two[0], path, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "out").exists()


def test_unknown_tensors_and_wrong_order_of_tensors_are_refused(
    tmp_path: Path, two: tuple[Path, Path]
) -> None:
    one = record(RecordHead(0, 0, 1, SPARSE, 0, 1), packed(b"\x01"))
    two_ = record(RecordHead(1, 0, 1, SPARSE, 0, 1), packed(b"\x01"))
    for names in (("zz", "a"), ("c", "a")):
        with pytest.raises(PatchError, match="no place"):
            apply_patch(two[0], spoiled(tmp_path, two, [one, two_], names), tmp_path / "out")


def test_a_header_is_judged_by_its_schema(tmp_path: Path, two: tuple[Path, Path]) -> None:
    assert make_patch(*two, tmp_path / "p")
    plain = msgspec.to_builtins(read_header(tmp_path / "p"), builtin_types=(bytes,))
    path = tmp_path / "bad"
    for change in (
        {"block_bytes": 2**40},
        {"block_bytes": 100},
        {"format": 2},
        {"size": -1},
        {"layout": b"short"},
        {"changed": 1.0},
        {"tensors": [""]},
        {"more": 1},
    ):
        data = msgspec.msgpack.encode(plain | change)
        path.write_bytes(MAGIC + len(data).to_bytes(4, "little") + data)
        with pytest.raises(PatchError):
            read_header(path)
    path.write_bytes(MAGIC + (2**32 - 1).to_bytes(4, "little") + b"x")
    with pytest.raises(PatchError, match="at most"):
        read_header(path)
    assert isinstance(read_header(tmp_path / "p"), PatchHeader)


# --- bounded and safe to kill


def test_memory_is_bounded_by_blocks_not_by_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    old = torch.from_numpy(rng.integers(0, 2**15, 12_000_000, dtype=np.int16)).view(torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[::97] += 1
    one, two_ = write(tmp_path / "o", {"w": old}), write(tmp_path / "n", {"w": new})
    tracemalloc.start()
    try:
        assert make_patch(one, two_, tmp_path / "p", block_bytes=1 << 20)
        apply_patch(one, tmp_path / "p", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 12_000_000  # the file has 24 MB
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out").read_bytes() == two_.read_bytes()


KILLED = """
import sys, time
from pathlib import Path
from barnraise.kernels.patches import apply_patch
seen = 0
def slow(piece):
    global seen
    seen += 1
    if seen == 20:
        print("half way", flush=True)
        time.sleep(60)
apply_patch(*(Path(p) for p in sys.argv[1:4]), observe=slow)
"""


def test_kill_9_in_the_middle_leaves_no_half_file(two: tuple[Path, Path], tmp_path: Path) -> None:
    assert make_patch(*two, tmp_path / "p", block_bytes=1024)
    out = tmp_path / "made" / "model.safetensors"
    out.parent.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, two[0], tmp_path / "p", out], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "half way\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not out.exists()
    assert all(path.name.startswith(".") for path in out.parent.iterdir())
    apply_patch(two[0], tmp_path / "p", out)  # and what it left is in nobody's way
    assert out.read_bytes() == two[1].read_bytes()


def test_a_result_is_kept_over_an_older_file_only_when_right(two: tuple[Path, Path], tmp_path: Path) -> None:
    assert make_patch(*two, tmp_path / "p")
    out = tmp_path / "out"
    out.write_bytes(b"older")
    with pytest.raises(PatchError):
        apply_patch(two[1], tmp_path / "p", out)
    assert out.read_bytes() == b"older"
    apply_patch(two[0], tmp_path / "p", out)
    assert load_file(out).keys() == {"a", "b", "c"}
