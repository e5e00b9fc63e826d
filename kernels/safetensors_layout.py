"""Where the tensors of a safetensors file lie, and its bytes block by block, as patches take them.

A file is believed as little as a patch: a header that does not fit the file is a ``PatchError``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from barnraise.kernels.patch_format import PatchError

_MAX_LAYOUT = 16 * 1024 * 1024  # bytes of a safetensors header
_WIDTHS = {
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}


class Tensor(NamedTuple):
    """One tensor of a file, by its place."""

    name: str
    width: int  # bytes of an element, 1 for dtypes that are not whole bytes
    start: int  # in the file
    size: int  # bytes


class Layout(NamedTuple):
    """A file's header as it is, and what it says."""

    head: bytes  # length field and JSON, as they are
    tensors: tuple[Tensor, ...]  # in file order, without gaps
    size: int  # of the whole file


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file at ``path``, to be read.

    Raises:
        PatchError: missing, or the system does not let us.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error.strerror or error}") from None
    with file:
        yield file


def read_layout(file: BinaryIO, path: Path) -> Layout:
    """The header of an open safetensors file, and its tensors in file order.

    Raises:
        PatchError: not safetensors, or with holes between tensors.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(_MAX_LAYOUT, size - 8):
        raise PatchError(f"{path} is not a safetensors file: its header is cut short or too long")
    text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = sorted((_tensor(n, e, 8 + length) for n, e in entries.items()), key=lambda t: t[2:])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise PatchError(f"{path} is not a safetensors file: {error}") from None
    end = 8 + length
    for tensor in tensors:
        if tensor.start != end:
            raise PatchError(f"{path}: tensor {tensor.name[:64]!r} does not begin where the one before ends")
        end += tensor.size
    if end != size:
        raise PatchError(f"{path} has {size} bytes where its header describes {end}")
    return Layout(prefix + text, tuple(tensors), size)


def blocks_of(tensor: Tensor, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield where in the file each block of ``tensor`` begins, and its bytes; the last may be shorter."""
    for offset in range(0, tensor.size, block_bytes):
        yield tensor.start + offset, min(block_bytes, tensor.size - offset)


def read_block(file: BinaryIO, start: int, size: int, path: Path) -> bytes:
    """``size`` bytes from ``start`` on.

    Raises:
        PatchError: the file ends before; ``path`` is for the text.
    """
    file.seek(start)
    data = file.read(size)
    if len(data) != size:
        raise PatchError(f"{path} was cut short while it was read")
    return data


def _tensor(name: str, entry: Any, origin: int) -> Tensor:
    begin, end = entry["data_offsets"]
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
        raise ValueError(f"tensor {name[:64]!r} has offsets that cannot be")
    width = _WIDTHS.get(entry["dtype"], 1)
    if width > 1:
        expected = width
        for dimension in entry["shape"]:
            expected *= int(dimension)
        if expected != end - begin:
            raise ValueError(f"tensor {name[:64]!r} has {end - begin} bytes, its shape needs {expected}")
    return Tensor(name, width, origin + begin, end - begin)
