"""Bit-exact patches between two safetensors files of the same layout: make, apply, chain.

Consecutive policies of RL differ in about 1 % of their bfloat16 values (arXiv 2602.03839), so
a patch is a hundredth of the weights. Applying gives the very bytes of the other file, header
included, and so the shards cut from it are the shards of the published version.

Files are read and written block by block: memory is bounded by a few blocks, whatever the
model's size. The output appears under its name only when its SHA-256 is the one that the patch
promises; until then it is a temporary file beside it. Works on files alone, without torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from barnraise.kernels.patch_format import (
    BLOCK_BYTES,
    LEVEL,
    MAGIC,
    MAX_HEADER,
    PatchError,
    PatchHeader,
    encode_block,
)
from barnraise.kernels.patch_reader import PatchCursor, check_chain
from barnraise.kernels.safetensors_layout import blocks_of, opened, read_block, read_layout
from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import StorageError

MAX_CHAIN = 64
_READ = 4 * 1024 * 1024


class PatchStats(NamedTuple):
    """What a finished patch is. ``changed`` of ``elements`` differ; sizes in bytes."""

    elements: int
    changed: int
    full_bytes: int
    patch_bytes: int
    header: PatchHeader


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
        old_file, new_file = (stack.enter_context(opened(path)) for path in (base, target))
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
            for block, (start, size) in enumerate(blocks_of(tensor, block_bytes)):
                old = read_block(old_file, start, size, base)
                new = read_block(new_file, start, size, target)
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
        base_file = stack.enter_context(opened(base))
        layout = read_layout(base_file, base)
        cursors = [PatchCursor(stack.enter_context(opened(path)), path) for path in patches]
        check_chain(cursors, layout, base)
        block_bytes = cursors[0].header.block_bytes
        whole = sha256()
        with _storing(target, layout.size), _replacing(target) as file:

            def put(piece: bytes) -> None:
                whole.update(piece)
                observe(piece)
                file.write(piece)

            put(layout.head)
            for tensor in layout.tensors:
                for block, (start, size) in enumerate(blocks_of(tensor, block_bytes)):
                    data = read_block(base_file, start, size, base)
                    for cursor in cursors:
                        data = cursor.change(tensor, block, data)
                    put(data)
            for cursor in cursors:
                cursor.finish()
            if whole.digest() != cursors[-1].header.target_sha256:
                raise PatchError(_blame(base, base_file, cursors[0]))


def _blame(base: Path, base_file: BinaryIO, first: PatchCursor) -> str:
    """Whose fault a wrong result is. The base is hashed only now: the result's digest covers it."""
    whole = sha256()
    base_file.seek(0)
    while piece := base_file.read(_READ):
        whole.update(piece)
    if whole.digest() != first.header.base_sha256:
        return f"{base} is not the file that the patch begins with: its SHA-256 differs"
    return "the patch does not make the file that it promises: the result's SHA-256 differs"


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
