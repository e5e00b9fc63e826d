"""Bit-exact patches between two safetensors files of the same layout: make, apply, chain.

Consecutive policies of RL differ in about 1 % of their bfloat16 values (arXiv 2602.03839), so
a patch is a hundredth of the weights. Applying gives the very bytes of the other file, header
included, and so the shards cut from it are the shards of the published version.

Files are read and written block by block: memory is bounded by a few blocks, whatever the
model's size. The output appears under its name only when its SHA-256 is the one that the patch
promises; until then it is a temporary file beside it. Works on files alone, without torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from barnraise.kernels.patch_format import (
    BLOCK_BYTES,
    LEVEL,
    MAGIC,
    MAX_HEADER,
    RECORD,
    Array,
    PatchError,
    PatchHeader,
    RecordHead,
    decode_record,
    encode_block,
    parse_record_head,
    plane_limit,
)
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import StorageError

MAX_CHAIN = 64
_MAX_LAYOUT = 16 * 1024 * 1024  # bytes of a safetensors header
_READ = 4 * 1024 * 1024
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
_HEADER = msgspec.msgpack.Decoder(PatchHeader)


class PatchStats(NamedTuple):
    """What a finished patch is. ``changed`` of ``elements`` differ; sizes in bytes."""

    elements: int
    changed: int
    full_bytes: int
    patch_bytes: int
    header: PatchHeader


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


class _Tensor(NamedTuple):
    name: str
    width: int  # bytes of an element, 1 for dtypes that are not whole bytes
    start: int  # in the file
    size: int  # bytes


class _Layout(NamedTuple):
    head: bytes  # length field and JSON, as they are
    tensors: tuple[_Tensor, ...]  # in file order, without gaps
    size: int  # of the whole file


def make_patch(
    base: Path,
    target: Path,
    patch: Path,
    *,
    base_sha256: bytes | None = None,
    max_bytes: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    level: int = LEVEL,
) -> PatchStats | None:
    """Write to ``patch`` what leads from the safetensors file ``base`` to ``target``. Blocking.

    ``patch`` appears whole or not at all. Deterministic: the same files give the same bytes
    (with the same zstd library).

    Args:
        base_sha256: of ``base``, if it is known; it is hashed if not.
        max_bytes: give up as soon as the patch would be longer.

    Returns:
        None if it was given up.

    Raises:
        PatchError: a file is missing or no safetensors, or the two are not laid out alike.
        StorageError: the disk refused.
    """
    with ExitStack() as stack:
        old_file, new_file = (stack.enter_context(_opened(path)) for path in (base, target))
        layout = read_layout(old_file, base)
        if read_layout(new_file, target).head != layout.head:
            raise PatchError(f"{base} and {target} have other tensors, or the same ones in another order")
        stack.enter_context(_storing(patch, layout.size))
        # The body comes first, since the header has numbers that are known at its end.
        body = stack.enter_context(tempfile.TemporaryFile(dir=patch.parent, prefix=f".{patch.name}."))
        old_hash, new_hash = sha256(), sha256(layout.head)
        if base_sha256 is None:
            old_hash.update(layout.head)
        names: list[str] = []
        elements = changed = 0
        for tensor in layout.tensors:
            elements += tensor.size // tensor.width
            for block, (start, size) in enumerate(_blocks(tensor, block_bytes)):
                old = _read_block(old_file, start, size, base)
                new = _read_block(new_file, start, size, target)
                new_hash.update(new)
                if base_sha256 is None:
                    old_hash.update(old)
                known = bool(names) and names[-1] == tensor.name
                number = len(names) - known
                dtype = f"<u{tensor.width}"
                count, record = encode_block(
                    np.frombuffer(old, dtype), np.frombuffer(new, dtype), number, block, level
                )
                if count:
                    changed += count
                    if not known:
                        names.append(tensor.name)
                    body.write(record)
                    if max_bytes is not None and body.tell() > max_bytes:
                        return None
        header = PatchHeader(
            format=1,
            block_bytes=block_bytes,
            size=layout.size,
            layout=sha256(layout.head).digest(),
            base_sha256=base_sha256 or old_hash.digest(),
            target_sha256=new_hash.digest(),
            changed=changed,
            tensors=tuple(names),
        )
        data = msgspec.msgpack.encode(header)
        total = len(MAGIC) + 4 + len(data) + body.tell()
        if len(data) > MAX_HEADER or (max_bytes is not None and total > max_bytes):
            return None
        with _replacing(patch) as file:
            file.write(MAGIC + len(data).to_bytes(4, "little") + data)
            body.seek(0)
            while piece := body.read(_READ):
                file.write(piece)
        return PatchStats(elements, changed, layout.size, total, header)


def read_header(patch: Path) -> PatchHeader:
    """The header of a patch file, schema checked.

    Raises:
        PatchError: missing, or not a patch.
    """
    with _opened(patch) as file:
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
        layout = read_layout(stack.enter_context(_opened(like)), like)
        cursor = _Cursor(stack.enter_context(_opened(patch)), patch)
        _check_chain([cursor], layout, like)
        block_bytes = cursor.header.block_bytes
        for tensor in layout.tensors:
            for block, (start, size) in enumerate(_blocks(tensor, block_bytes)):
                found = cursor.decode(tensor, block, size)
                if found is not None:
                    first = (start - tensor.start) // tensor.width
                    yield Change(tensor.name, first, size // tensor.width, *found)
        cursor.finish()


def apply_patch(
    base: Path, patch: Path, target: Path, *, observe: Callable[[bytes], None] = lambda piece: None
) -> None:
    """Write to ``target`` what ``patch`` makes of ``base``; see ``apply_chain``."""
    apply_chain(base, (patch,), target, observe=observe)


def apply_chain(
    base: Path,
    patches: Sequence[Path],
    target: Path,
    *,
    observe: Callable[[bytes], None] = lambda piece: None,
) -> None:
    """Write to ``target`` what ``patches``, each leading to the next one's base, make of ``base``.

    One pass, however long the chain: each block is read, changed by every patch, hashed and
    written. ``target`` is synced and renamed into place after its SHA-256 was found to be the
    last patch's; a crash or an error leaves at most a hidden temporary file. Blocking.

    Args:
        observe: called with every piece of the output in order, before the whole is known to be right.

    Raises:
        PatchError: a patch is damaged or hostile, does not fit the one before it or ``base``, or
            the result is not what it promises. Whatever ``observe`` raises goes through.
        StorageError: the disk refused.
    """
    if not 1 <= len(patches) <= MAX_CHAIN:
        raise PatchError(f"a chain of {len(patches)} patches: 1 to {MAX_CHAIN} can be applied at once")
    with ExitStack() as stack:
        base_file = stack.enter_context(_opened(base))
        layout = read_layout(base_file, base)
        cursors = [_Cursor(stack.enter_context(_opened(path)), path) for path in patches]
        _check_chain(cursors, layout, base)
        block_bytes = cursors[0].header.block_bytes
        whole = sha256()
        with _storing(target, layout.size), _replacing(target) as file:

            def put(piece: bytes) -> None:
                whole.update(piece)
                observe(piece)
                file.write(piece)

            put(layout.head)
            for tensor in layout.tensors:
                for block, (start, size) in enumerate(_blocks(tensor, block_bytes)):
                    data = _read_block(base_file, start, size, base)
                    for cursor in cursors:
                        data = cursor.change(tensor, block, data)
                    put(data)
            for cursor in cursors:
                cursor.finish()
            if whole.digest() != cursors[-1].header.target_sha256:
                raise PatchError(_blame(base, base_file, cursors[0]))


def read_layout(file: BinaryIO, path: Path) -> _Layout:
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
    return _Layout(prefix + text, tuple(tensors), size)


def _tensor(name: str, entry: Any, origin: int) -> _Tensor:
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
    return _Tensor(name, width, origin + begin, end - begin)


class _Cursor:
    """Reads a patch's records in order; each is asked for by the block that it belongs to."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.header = _read_header(file, path)
        self._file = file
        self._path = path
        self._next: RecordHead | None = None
        self._changed = 0
        self._advance(None)

    def change(self, tensor: _Tensor, block: int, data: bytes) -> bytes:
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

    def decode(self, tensor: _Tensor, block: int, size: int) -> tuple[Array | None, Array] | None:
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


def _check_chain(cursors: Sequence[_Cursor], layout: _Layout, base: Path) -> None:
    first = cursors[0].header
    if first.size != layout.size or first.layout != sha256(layout.head).digest():
        raise PatchError(f"the patch is not for {base}: that has other tensors or another size")
    for before, after in pairwise(cursors):
        one, two = before.header, after.header
        if one.target_sha256 != two.base_sha256:
            raise PatchError("the patches are not a chain: one does not begin where the one before ends")
        if (one.size, one.layout, one.block_bytes) != (two.size, two.layout, two.block_bytes):
            raise PatchError("the patches of the chain have different layouts: apply them one by one")


def _blame(base: Path, base_file: BinaryIO, first: _Cursor) -> str:
    """Whose fault a wrong result is. The base is hashed only now: the result's digest covers it."""
    whole = sha256()
    base_file.seek(0)
    while piece := base_file.read(_READ):
        whole.update(piece)
    if whole.digest() != first.header.base_sha256:
        return f"{base} is not the file that the patch begins with: its SHA-256 differs"
    return "the patch does not make the file that it promises: the result's SHA-256 differs"


def _blocks(tensor: _Tensor, block_bytes: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, tensor.size, block_bytes):
        yield tensor.start + offset, min(block_bytes, tensor.size - offset)


def _read_block(file: BinaryIO, start: int, size: int, path: Path) -> bytes:
    file.seek(start)
    data = file.read(size)
    if len(data) != size:
        raise PatchError(f"{path} was cut short while it was read")
    return data


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error.strerror or error}") from None
    with file:
        yield file


@contextmanager
def _storing(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path} (up to {size / 1e6:.1f} MB): {error}") from error


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that is synced and takes ``path``'s place at the end, or is deleted on an error."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
