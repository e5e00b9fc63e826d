"""The bytes of a weight patch: a typed header, then one record per block of a tensor that changed.

    file    = "BRNPATCH" + u32 length + header (MessagePack of ``PatchHeader``) + records
    record  = u32 tensor + u32 block + u32 count + u8 mode + u8 gap planes + u8 value planes
              + u32 length of each plane present + the planes, each one zstd frame

All integers are little-endian. ``tensor`` counts in ``PatchHeader.tensors``; tensors are cut
into blocks of ``block_bytes`` (the last may be shorter), and records come in file order, at most
one per block. Elements are taken as unsigned integers of the dtype's width, so that every bit
counts and a NaN is like any other value.

- mode 0, sparse: ``count`` elements changed. Their places are given as gaps (elements skipped
  since the change before), so that no place can come twice or out of order.
- mode 1, dense: ``count`` is the block's number of elements; there are no gaps.

A value is new minus old modulo 2^bits, zigzag (0, -1, 1, -2, ... -> 0, 1, 2, 3, ...): training in
small steps moves a bfloat16 by one or two units in the last place, which makes nearly one bit.
Gaps (u32) and values are split into byte planes, lowest byte first, and a bit of the mask tells
which planes are present; absent ones are all zero.

Nothing here opens a file. Whatever is wrong with a record is a ``PatchError``, and no number in
it makes more than one block be allocated.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import zstandard
from msgspec import Meta, Struct
from numpy.typing import NDArray

from barnraise.protocol.errors import BarnraiseError

MAGIC = b"BRNPATCH"
BLOCK_BYTES = 8 * 1024 * 1024
MAX_BLOCK = 16 * 1024 * 1024
MAX_HEADER = 8 * 1024 * 1024
SPARSE, DENSE = 0, 1
RECORD = np.dtype("<u4").itemsize * 3 + 3
LEVEL = 3
_DENSER = 8  # one changed element in so many: gaps cost more than the zeros that they save
_GAP_BYTES = 4

Array = NDArray[Any]
Sha256 = Annotated[bytes, Meta(min_length=32, max_length=32)]
TensorName = Annotated[str, Meta(min_length=1, max_length=512)]


class PatchError(BarnraiseError):
    """A patch is damaged, hostile, or not for this file; the text says what. Nothing was changed."""


class PatchHeader(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a patch leads from and to. Both files have the same ``size`` in bytes and the same layout.

    ``layout`` is the SHA-256 of the safetensors header with its length field, which is equal
    in both; ``changed`` counts elements; ``tensors`` are those with at least one record, in
    file order.
    """

    format: Literal[1]
    block_bytes: Annotated[int, Meta(ge=64, le=MAX_BLOCK, multiple_of=8)]
    size: Annotated[int, Meta(ge=8, le=2**53)]
    layout: Sha256
    base_sha256: Sha256
    target_sha256: Sha256
    changed: Annotated[int, Meta(ge=0, le=2**53)]
    tensors: Annotated[tuple[TensorName, ...], Meta(max_length=65_536)]


class RecordHead(NamedTuple):
    """The fixed part of a record."""

    tensor: int
    block: int
    elements: int
    mode: int
    gap_planes: int
    value_planes: int

    def pack(self) -> bytes:
        """The head's 15 bytes."""
        numbers = b"".join(n.to_bytes(4, "little") for n in (self.tensor, self.block, self.elements))
        return numbers + bytes((self.mode, self.gap_planes, self.value_planes))

    @property
    def lengths_bytes(self) -> int:
        """How many bytes of plane lengths follow the head."""
        return 4 * (self.gap_planes.bit_count() + self.value_planes.bit_count())


def parse_record_head(data: bytes) -> RecordHead:
    """Read the 15 bytes of a record's head; only what needs no tensor is judged.

    Raises:
        PatchError: unknown mode, planes that cannot be, or nothing changed.
    """
    tensor, block, count = (int.from_bytes(data[i : i + 4], "little") for i in (0, 4, 8))
    head = RecordHead(tensor, block, count, *data[12:15])
    if head.mode not in (SPARSE, DENSE):
        raise PatchError(f"patch record with unknown mode {head.mode}")
    if head.gap_planes >> _GAP_BYTES or (head.mode == DENSE and head.gap_planes):
        raise PatchError("patch record with gap planes that it cannot have")
    if head.elements == 0 or head.value_planes == 0:
        raise PatchError("patch record that changes nothing")
    return head


def plane_limit(count: int) -> int:
    """The most bytes that a zstd frame of ``count`` bytes needs; longer ones are refused unread."""
    return count + count // 64 + 128


def encode_block(old: Array, new: Array, tensor: int, block: int, level: int = LEVEL) -> tuple[int, bytes]:
    """The number of elements in which two blocks differ, and the record that leads from one to the other.

    Args:
        old, new: [N] unsigned integers of the same width, N at least 1.

    Returns:
        ``(0, b"")`` if the blocks are equal.
    """
    places = np.flatnonzero(old != new)
    count = int(places.size)
    if not count:
        return 0, b""
    width = old.dtype.itemsize
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
    if count * _DENSER < old.size:
        gaps = (np.diff(places, prepend=-1) - 1).astype("<u4")
        gap_mask, frames = _planes(gaps, compressor)
        values = new[places] - old[places]
        mode, total = SPARSE, count
    else:
        gap_mask, frames = 0, []
        values = new - old
        mode, total = DENSE, int(old.size)
    value_mask, value_frames = _planes(_zigzag(values), compressor)
    frames += value_frames
    assert value_mask < 1 << width
    head = RecordHead(tensor, block, total, mode, gap_mask, value_mask)
    lengths = b"".join(len(frame).to_bytes(4, "little") for frame in frames)
    return count, b"".join((head.pack(), lengths, *frames))


def decode_record(
    head: RecordHead, lengths: list[int], body: memoryview, width: int, elements: int
) -> tuple[Array | None, Array]:
    """Where a record changes a block of ``elements`` elements of ``width`` bytes, and by how much.

    Args:
        lengths: of the planes in ``body``, as the record gives them; they add up to ``len(body)``.

    Returns:
        Places [N] int64, strictly increasing, or None for all; and [N] unsigned integers to add
        modulo 2^bits.

    Raises:
        PatchError: the record is damaged, or does not fit such a block.
    """
    if head.value_planes >> width:
        raise PatchError(f"patch record with more value planes than the {width} bytes of an element")
    if head.elements > elements or (head.mode == DENSE and head.elements != elements):
        raise PatchError(f"patch record for {head.elements} elements of a block that has {elements}")
    frames = _split(lengths, body)
    decompressor = zstandard.ZstdDecompressor(max_window_size=2 * MAX_BLOCK)
    gaps = _join(head.gap_planes, _GAP_BYTES, head.elements, frames, decompressor)
    values = _unzigzag(_join(head.value_planes, width, head.elements, frames, decompressor))
    if head.mode == DENSE:
        return None, values
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1  # at most 2^24 gaps below 2^32: no overflow
    if int(places[-1]) >= elements:
        raise PatchError(f"patch record changes element {int(places[-1])} of a block that has {elements}")
    if not values.all():
        raise PatchError("patch record lists an element that does not change")
    return places, values


def _split(lengths: list[int], body: memoryview) -> list[memoryview]:
    frames = []
    start = 0
    for length in lengths:
        frames.append(body[start : start + length])
        start += length
    return frames


def _zigzag(delta: Array) -> Array:
    signed = delta.view(f"<i{delta.dtype.itemsize}")
    folded: Array = ((signed << 1) ^ (signed >> (8 * delta.dtype.itemsize - 1))).view(delta.dtype)
    return folded


def _unzigzag(folded: Array) -> Array:
    one = folded.dtype.type(1)
    delta: Array = (folded >> one) ^ (~(folded & one) + one)
    return delta


def _planes(values: Array, compressor: zstandard.ZstdCompressor) -> tuple[int, list[bytes]]:
    """Mask and compressed planes of [N] unsigned integers."""
    width = values.dtype.itemsize
    columns = values.view(np.uint8).reshape(-1, width)
    mask, frames = 0, []
    for place in range(width):
        plane = np.ascontiguousarray(columns[:, place])
        if plane.any():
            mask |= 1 << place
            frames.append(compressor.compress(plane.tobytes()))
    return mask, frames


def _join(
    mask: int, width: int, count: int, frames: list[memoryview], decompressor: zstandard.ZstdDecompressor
) -> Array:
    """[count] unsigned integers of ``width`` bytes from the planes at the front of ``frames``, removed."""
    columns = np.zeros((count, width), dtype=np.uint8)
    for place in range(width):
        if mask >> place & 1:
            columns[:, place] = np.frombuffer(_inflate(frames.pop(0), count, decompressor), dtype=np.uint8)
    return columns.view(f"<u{width}").reshape(-1)


def _inflate(frame: memoryview, size: int, decompressor: zstandard.ZstdDecompressor) -> bytes:
    try:
        # The size is judged first: given one in the frame, the decompressor allocates it unasked.
        if zstandard.frame_content_size(frame) != size:
            raise PatchError("patch record whose planes are not as long as it says")
        data: bytes = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PatchError(f"patch record that cannot be decompressed: {error}") from None
    if len(data) != size:
        raise PatchError("patch record whose planes are not as long as it says")
    return data
