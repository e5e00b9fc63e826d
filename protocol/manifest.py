"""Manifests: one policy version as a list of files, each cut into shards named by their SHA-256.

Every file is cut into its own shards, so that a tokenizer or a config that does
not change from one version to the next has the same shards in both, and nobody
fetches it twice. A manifest is believed only after ``check_manifest``: signed by
the run's key, for this run, with sizes that add up and nothing in it but the
run's pinned assets and safetensors weights (no code, nothing pickled).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.messages import MAX_SHARD, FileEntry, Manifest, PatchEntry, Signed
from barnraise.protocol.mirrors import check_mirror
from barnraise.protocol.pretrain import last_block_version, part_name
from barnraise.protocol.spec import RunSpec

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
LEAST_SHARD = 256 * 1024  # what is chosen; a manifest may have smaller ones
_SHARDS_WANTED = 256
MAX_SHARDS = 100_000  # 34 encoded bytes each: what fits, with room to spare, in a 4 MiB frame
ASSET_ALLOWANCE = 256 * 1024 * 1024  # bytes for tokenizer, configs and file headers together

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_WEIGHTS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")


def cut(path: Path, shard_size: int) -> Iterator[bytes]:
    """Yield ``path``'s bytes in pieces of ``shard_size``; the last may be shorter, an empty file has none."""
    with path.open("rb") as file:
        while piece := file.read(shard_size):
            yield piece


def fitting_shard_size(total: int) -> int:
    """Bytes of a shard for a version of ``total`` bytes: 128 to 256 of them, each 256 KiB to 4 MiB.

    A tree needs many shards to have all nodes upload at once; a patch is some hundredth
    of its version and is to consist of several, too. Below 256 KiB a shard is over
    within a round trip of a home link.
    """
    size = MAX_SHARD
    while size > LEAST_SHARD and total <= size // 2 * _SHARDS_WANTED:
        size //= 2
    return size


def build_manifest(
    run_id: bytes,
    version: int,
    files: Mapping[str, Path],
    shard_size: int,
    created_at: int,
    put: Callable[[bytes, bytes], None],
    known: Mapping[str, FileEntry] | None = None,
) -> Manifest:
    """Cut ``files`` (name in the version -> where it lies) and hand each shard to ``put(digest, data)``.

    Blocking, and as long as reading, hashing and storing all bytes takes: off the
    event loop. ``created_at`` is in ms. The result is not yet signed; its files
    are in order of name, so that equal input gives an equal manifest. Files in ``known``
    were cut before, with this ``shard_size``: they are not read again.

    Raises:
        MalformedError: a file's name is not allowed, or the pieces are too many for one manifest.
        OSError: a file cannot be read. Whatever ``put`` raises goes through.
    """
    if not 1024 <= shard_size <= MAX_SHARD:
        raise MalformedError(f"shard size {shard_size} is not between 1024 and {MAX_SHARD} bytes")
    entries = []
    total = 0
    for name, path in sorted(files.items()):
        if not _NAME.fullmatch(name):
            raise MalformedError(
                f"file name {name!r} cannot be published: use letters, digits, '_', '-', '.'"
            )
        if known and name in known:
            entries.append(known[name])
            total += len(known[name].shards)
            continue
        whole = sha256()
        size = 0
        digests = []
        for piece in cut(path, shard_size):
            whole.update(piece)
            size += len(piece)
            digest = sha256(piece).digest()
            total += 1
            if total > MAX_SHARDS:
                raise MalformedError(
                    f"more than {MAX_SHARDS} shards of {shard_size} bytes: publish with a larger shard size"
                )
            put(digest, piece)
            digests.append(digest)
        entries.append(FileEntry(path=name, size=size, sha256=whole.digest(), shards=tuple(digests)))
    return Manifest(
        run_id=run_id,
        version=version,
        created_at=created_at,
        shard_size=shard_size,
        files=tuple(entries),
    )


def check_shard(data: bytes, digest: bytes) -> bool:
    """Whether ``data`` is the shard named ``digest`` (its SHA-256)."""
    return sha256(data).digest() == digest


def entry_shards(entry: FileEntry | PatchEntry, shard_size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield ``(digest, offset in the file, size)`` of each shard of a file, in order, in bytes."""
    for position, digest in enumerate(entry.shards):
        offset = position * shard_size
        yield digest, offset, min(shard_size, entry.size - offset)


def manifest_shards(manifest: Manifest) -> tuple[tuple[bytes, int], ...]:
    """Each distinct shard of the files (not of patches) as ``(digest, size in bytes)``, in order of use."""
    return _distinct(manifest.files, manifest.shard_size)


def patch_shards(patches: Iterable[PatchEntry], shard_size: int) -> tuple[tuple[bytes, int], ...]:
    """Each distinct shard of some patches as ``(digest, size in bytes)``, in order of first use."""
    return _distinct(patches, shard_size)


def _distinct(entries: Iterable[FileEntry | PatchEntry], shard_size: int) -> tuple[tuple[bytes, int], ...]:
    sizes: dict[bytes, int] = {}
    for entry in entries:
        for digest, _, size in entry_shards(entry, shard_size):
            sizes.setdefault(digest, size)
    return tuple(sizes.items())


def manifest_bytes(manifest: Manifest) -> int:
    """The size of the assembled files together, in bytes."""
    return sum(entry.size for entry in manifest.files)


def check_manifest(signed: Signed, spec: RunSpec, run_id: bytes) -> Manifest:
    """Open a signed manifest and prove that it may be fetched and used for this run.

    Pure; costs one signature and a walk over the entries. After it, sizes are
    bounded by the model's size, names are safe to create in one folder on any
    system, and every file is either an asset pinned by the spec or weights.

    Raises:
        SignatureError: signed by another key than ``spec.operator``, or damaged.
        MalformedError: of another run, inconsistent, too large, or with files that do not belong.
    """
    manifest = open_signed(signed, Manifest, spec.operator)
    if manifest.run_id != run_id:
        raise MalformedError(
            f"the manifest is of run {manifest.run_id.hex()[:16]}, not of this run {run_id.hex()[:16]}"
        )
    names = [entry.path for entry in manifest.files]
    check_file_names(f"manifest v{manifest.version}", names, spec, manifest.version)
    _check_sizes(manifest, spec)
    _check_assets(manifest, spec)
    _check_patches(manifest)
    for url in manifest.mirrors:
        check_mirror(url)
    return manifest


def check_file_names(what: str, names: Sequence[str], spec: RunSpec, version: int) -> None:
    """Whether a version may consist of these files: the run's pinned assets and a set of weights.

    A version of the block stage has one weight file for the scaffold and each block; one of
    adapters has the base, the same in all, and the adapters.

    Raises:
        MalformedError: they cannot; ``what`` begins the text.
    """
    seen: set[str] = set()
    for name in names:
        # fullmatch: the schema's "$" lets a trailing newline through
        if not _NAME.fullmatch(name) or name.endswith("."):
            raise MalformedError(f"{what}: file name {name!r} is not allowed")
        if name.lower() in seen:  # some file systems fold case
            raise MalformedError(f"{what}: file {name!r} appears twice")
        seen.add(name.lower())
    for name in spec.model.assets:
        if name not in names:
            raise MalformedError(f"{what}: {name}, pinned by the run spec, is missing")
    rest = set(names) - spec.model.assets.keys()
    if spec.model.adapter is not None:
        if rest != {WEIGHTS_FILE, ADAPTER_FILE}:
            raise MalformedError(
                f"{what}: a version with adapters is the base, {WEIGHTS_FILE}, and {ADAPTER_FILE}"
            )
        return
    weights = {name for name in rest if _WEIGHTS.fullmatch(name)}
    if not weights or (WEIGHTS_FILE in weights and len(weights) > 1):
        raise MalformedError(
            f"{what}: there must be one {WEIGHTS_FILE} or a set of model-00001-of-0000N.safetensors"
        )
    if WEIGHTS_FILE not in weights:
        _check_parts(what, weights)
    pretrain = spec.pretrain
    if pretrain is not None and version <= last_block_version(pretrain):
        if weights != {part_name(pretrain, part) for part in range(pretrain.blocks + 1)}:
            raise MalformedError(
                f"{what}: a version of {pretrain.blocks} blocks and a scaffold has "
                f"{pretrain.blocks + 1} weight files, not {len(weights)}"
            )
    elif pretrain is not None and WEIGHTS_FILE not in weights:
        raise MalformedError(f"{what}: the blocks are put together by then, in one {WEIGHTS_FILE}")
    strangers = rest - weights - (set() if WEIGHTS_FILE in weights else {WEIGHTS_INDEX})
    if strangers:
        raise MalformedError(f"{what}: {min(strangers)} is neither weights nor pinned by the run spec")


def _check_sizes(manifest: Manifest, spec: RunSpec) -> None:
    known: dict[bytes, int] = {}
    entries: tuple[FileEntry | PatchEntry, ...] = (*manifest.files, *manifest.patches)
    for entry in entries:
        expected = -(-entry.size // manifest.shard_size)
        if len(entry.shards) != expected:
            raise MalformedError(
                f"manifest v{manifest.version}: {entry.path} of {entry.size} bytes must have "
                f"{expected} shards of {manifest.shard_size} bytes, not {len(entry.shards)}"
            )
        for digest, _, size in entry_shards(entry, manifest.shard_size):
            if known.setdefault(digest, size) != size:
                raise MalformedError(
                    f"manifest v{manifest.version}: shard {digest.hex()[:16]} is given two different sizes"
                )
    total = manifest_bytes(manifest)
    most = largest_version(spec, manifest.version)
    if total > most:
        raise MalformedError(
            f"manifest v{manifest.version}: {total} bytes in all, but a version of this run's model "
            f"({spec.model.parameters} parameters in {spec.model.weights_dtype}) has at most {most}"
        )


def largest_version(spec: RunSpec, version: int) -> int:
    """Upper bound in bytes of a version: twice the weights (untied copies), plus the assets' allowance.

    A version of the block stage is float32: all blocks, and a scaffold no larger than the model.
    """
    blocks = spec.pretrain is not None and version <= last_block_version(spec.pretrain)
    width = 4 if blocks or spec.model.weights_dtype == "float32" else 2
    adapter = spec.model.adapter
    added = 0 if adapter is None else 2 * (4 if adapter.dtype == "float32" else 2) * adapter.parameters
    return 2 * width * spec.model.parameters + added + ASSET_ALLOWANCE


def _check_assets(manifest: Manifest, spec: RunSpec) -> None:
    by_name = {entry.path: entry for entry in manifest.files}
    pinned = dict(spec.model.assets)
    if spec.model.adapter is not None:
        pinned[WEIGHTS_FILE] = spec.model.adapter.base
    for name, digest in pinned.items():
        if by_name[name].sha256 != digest:
            raise MalformedError(
                f"manifest v{manifest.version}: {name} differs from the one that the run spec pins"
            )


def _check_parts(what: str, weights: set[str]) -> None:
    count = len(weights)
    expected = {f"model-{part:05d}-of-{count:05d}.safetensors" for part in range(1, count + 1)}
    if weights != expected:
        raise MalformedError(f"{what}: the weight files are incomplete: {min(expected - weights)} is missing")


def _check_patches(manifest: Manifest) -> None:
    """Patches lead from earlier versions of weight files, in order, and are shorter than the file."""
    sizes = {entry.path: entry.size for entry in manifest.files if _WEIGHTS.fullmatch(entry.path)}
    previous: tuple[str, int] | None = None
    for patch in manifest.patches:
        if patch.path not in sizes:
            raise MalformedError(
                f"manifest v{manifest.version}: a patch for {patch.path!r}, which is none of its weight files"
            )
        if patch.base_version >= manifest.version:
            raise MalformedError(
                f"manifest v{manifest.version}: a patch for {patch.path} begins with version "
                f"{patch.base_version}, which is not an earlier one"
            )
        if not 0 < patch.size <= sizes[patch.path]:
            raise MalformedError(
                f"manifest v{manifest.version}: a patch for {patch.path} has {patch.size} bytes, "
                f"the whole file {sizes[patch.path]}"
            )
        if previous is not None and (patch.path, patch.base_version) <= previous:
            raise MalformedError(
                f"manifest v{manifest.version}: its patches are not in order of file and base version"
            )
        previous = patch.path, patch.base_version
