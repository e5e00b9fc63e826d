"""Reading a weight patch: its header, and its records against the file that they are for.

Nothing is believed that a patch says of itself: every record has to have a place in the file's
layout, in order, and all of them have to be used. ``barnraise.kernels.patches`` applies what
is read here; whoever holds the tensors in memory takes ``changes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from barnraise.kernels.patch_format import (
    MAGIC,
    MAX_HEADER,
    RECORD,
    Array,
    PatchError,
    PatchHeader,
    RecordHead,
    decode_record,
    parse_record_head,
    plane_limit,
)
from barnraise.kernels.safetensors_layout import Layout, Tensor, blocks_of, opened, read_layout

_HEADER = msgspec.msgpack.Decoder(PatchHeader)


class Change(NamedTuple):
    """What a patch does to one block of a tensor, in elements of the flattened tensor.

    ``places`` [N] int64 count from ``start``, None for all ``size`` of the block; ``values`` [N]
    unsigned integers are added to the elements' bits, modulo 2^bits.
    """

    tensor: str
    start: int
    size: int
    places: Array | None
    values: Array


def read_header(patch: Path) -> PatchHeader:
    """The header of a patch file, schema checked.

    Raises:
        PatchError: missing, or not a patch.
    """
    with opened(patch) as file:
        return _read_header(file, patch)


def changed_tensors(patch: Path) -> tuple[str, ...]:
    """The names of the tensors that the patch changes, in file order: what an engine must reload.

    Raises:
        PatchError: missing, or not a patch.
    """
    return read_header(patch).tensors


def changes(patch: Path, like: Path) -> Iterator[Change]:
    """What ``patch`` does, block by block, for whoever holds the tensors in memory.

    ``like``: either of the two files, for its layout. Nothing is compared with a digest here:
    for a patch that was applied to a file before.

    Raises:
        PatchError: damaged, hostile, or for files of another layout.
    """
    with ExitStack() as stack:
        layout = read_layout(stack.enter_context(opened(like)), like)
        cursor = PatchCursor(stack.enter_context(opened(patch)), patch)
        check_chain([cursor], layout, like)
        block_bytes = cursor.header.block_bytes
        for tensor in layout.tensors:
            for block, (start, size) in enumerate(blocks_of(tensor, block_bytes)):
                found = cursor.decode(tensor, block, size)
                if found is not None:
                    first = (start - tensor.start) // tensor.width
                    yield Change(tensor.name, first, size // tensor.width, *found)
        cursor.finish()


class PatchCursor:
    """Reads a patch's records in order; each is asked for by the block that it belongs to."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.header = _read_header(file, path)
        self._file = file
        self._path = path
        self._next: RecordHead | None = None
        self._changed = 0
        self._advance(None)

    def change(self, tensor: Tensor, block: int, data: bytes) -> bytes:
        """``data`` of the block after this patch."""
        values = np.frombuffer(data, f"<u{tensor.width}")
        found = self.decode(tensor, block, len(data))
        if found is None:
            return data
        places, delta = found
        if places is None:
            return (values + delta).tobytes()
        changed = values.copy()
        changed[places] += delta
        return changed.tobytes()

    def decode(self, tensor: Tensor, block: int, size: int) -> tuple[Array | None, Array] | None:
        """Places and values by which this patch changes the block of ``size`` bytes; None if it does not."""
        head = self._next
        if head is None or head.block != block or self.header.tensors[head.tensor] != tensor.name:
            return None
        lengths = self._lengths(head, size // tensor.width)
        body = memoryview(self._read(sum(lengths)))
        try:
            found = decode_record(head, lengths, body, tensor.width, size // tensor.width)
        except PatchError as error:
            raise PatchError(f"{self._path}: tensor {tensor.name[:64]!r}: {error}") from None
        self._changed += int(np.count_nonzero(found[1]))
        self._advance(head)
        return found

    def finish(self) -> None:
        """Make sure that all of the patch was used.

        Raises:
            PatchError: records are left, out of order or for a tensor that is not there.
        """
        if self._next is not None:
            raise PatchError(
                f"{self._path}: a record for block {self._next.block} of tensor "
                f"{self.header.tensors[self._next.tensor][:64]!r} has no place in this file"
            )
        if self._changed != self.header.changed:
            raise PatchError(f"{self._path} changes {self._changed} elements, not {self.header.changed}")

    def _lengths(self, head: RecordHead, elements: int) -> list[int]:
        if head.elements > elements:
            raise PatchError(f"{self._path}: {head.elements} elements in a block that has {elements}")
        data = self._read(head.lengths_bytes)
        lengths = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
        if any(length > plane_limit(head.elements) for length in lengths):
            raise PatchError(
                f"{self._path}: a plane of {head.elements} bytes is given as {max(lengths)} bytes"
            )
        return lengths

    def _advance(self, last: RecordHead | None) -> None:
        data = self._file.read(RECORD)
        if not data:
            self._next = None
            if (0 if last is None else last.tensor + 1) != len(self.header.tensors):
                raise PatchError(f"{self._path} ends before its last tensor: it is cut short")
            return
        if len(data) < RECORD:
            raise PatchError(f"{self._path} ends inside a record: it is cut short")
        head = parse_record_head(data)
        same = last is not None and head.tensor == last.tensor
        follows = head.tensor == (0 if last is None else last.tensor + 1)
        if not (follows or (same and last is not None and head.block > last.block)):
            raise PatchError(f"{self._path}: its records are out of order")
        if head.tensor >= len(self.header.tensors):
            raise PatchError(f"{self._path}: a record names tensor {head.tensor}, which it does not list")
        self._next = head

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise PatchError(f"{self._path} ends inside a record: it is cut short")
        return data


def check_chain(cursors: Sequence[PatchCursor], layout: Layout, base: Path) -> None:
    """Make sure that the patches are for ``base``, laid out so, and each for what the one before it makes.

    Raises:
        PatchError: they are not.
    """
    first = cursors[0].header
    if first.size != layout.size or first.layout != sha256(layout.head).digest():
        raise PatchError(f"the patch is not for {base}: that has other tensors or another size")
    for before, after in pairwise(cursors):
        one, two = before.header, after.header
        if one.target_sha256 != two.base_sha256:
            raise PatchError("the patches are not a chain: one does not begin where the one before ends")
        if (one.size, one.layout, one.block_bytes) != (two.size, two.layout, two.block_bytes):
            raise PatchError("the patches of the chain have different layouts: apply them one by one")


def _read_header(file: BinaryIO, path: Path) -> PatchHeader:
    prefix = file.read(len(MAGIC) + 4)
    if len(prefix) < len(MAGIC) + 4 or not prefix.startswith(MAGIC):
        raise PatchError(f"{path} is not a patch")
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    if length > MAX_HEADER:
        raise PatchError(f"{path}: a header of {length} bytes; at most {MAX_HEADER} are accepted")
    data = file.read(length)
    try:
        header = _HEADER.decode(data)
        if len(data) != length or msgspec.msgpack.encode(header) != data:
            raise PatchError(f"{path}: its header is cut short or not in canonical form")
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        raise PatchError(f"{path}: its header is not one of a patch: {str(error)[:200]!r}") from None
    return header
