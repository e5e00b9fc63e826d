from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import spec_support
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_support import pretrain_spec

from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import DamagedVersionError, MalformedError, SignatureError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import (
    build_manifest,
    check_manifest,
    check_shard,
    fitting_shard_size,
    largest_version,
    manifest_bytes,
    manifest_shards,
)
from barnraise.protocol.messages import FileEntry, Manifest
from barnraise.protocol.spec import (
    RunSpec,
)
from barnraise.protocol.version_folder import assemble, folder_matches, remove_parts

OPERATOR = Identity.generate()
RUN = b"r" * 32
CONFIG = b'{"hidden_size": 64}'


def run_spec(assets: dict[str, bytes] | None = None, parameters: int = 1_000_000) -> RunSpec:
    return spec_support.run_spec(
        operator=OPERATOR.public_key,
        model__parameters=parameters,
        model__assets=assets or {"config.json": sha256(CONFIG).digest()},
    )


def publish(
    folder: Path, files: dict[str, bytes], shard_size: int = 1024
) -> tuple[Manifest, dict[bytes, bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, data in files.items():
        paths[name] = folder / name
        paths[name].write_bytes(data)
    shards: dict[bytes, bytes] = {}
    manifest = build_manifest(RUN, 3, paths, shard_size, 1234, shards.__setitem__)
    return manifest, shards


def version(folder: Path, **more: bytes) -> tuple[Manifest, dict[bytes, bytes]]:
    files = {"config.json": CONFIG, "model.safetensors": bytes(range(256)) * 20}
    files |= {name.replace("__", "."): data for name, data in more.items()}
    return publish(folder, files)


def refused(manifest: Manifest, match: str, spec: RunSpec | None = None) -> None:
    with pytest.raises(MalformedError, match=match):
        check_manifest(sign(manifest, OPERATOR), spec or run_spec(), RUN)


def with_file(manifest: Manifest, name: str, change: Callable[[FileEntry], FileEntry]) -> Manifest:
    files = tuple(change(entry) if entry.path == name else entry for entry in manifest.files)
    return msgspec.structs.replace(manifest, files=files)


def test_what_was_published_comes_out_byte_for_byte(tmp_path: Path) -> None:
    manifest, shards = version(tmp_path / "in")
    assert check_manifest(sign(manifest, OPERATOR), run_spec(), RUN) == manifest
    assemble(manifest, shards.get, tmp_path / "out" / "v000003")
    for path in (tmp_path / "in").iterdir():
        assert (tmp_path / "out" / "v000003" / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v000003"]


@settings(max_examples=50, deadline=None)
@given(
    weights=st.binary(max_size=5000),
    config=st.binary(max_size=3000),
    shard_size=st.integers(1024, 4096),
)
def test_any_files_are_cut_checked_and_assembled(weights: bytes, config: bytes, shard_size: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        manifest, shards = publish(
            folder / "in", {"config.json": config, "model.safetensors": weights}, shard_size
        )
        spec = run_spec({"config.json": sha256(config).digest()})
        check_manifest(sign(manifest, OPERATOR), spec, RUN)
        listed = dict(manifest_shards(manifest))
        assert listed.keys() == shards.keys()
        assert all(len(shards[digest]) == size for digest, size in listed.items())
        assert all(check_shard(data, digest) for digest, data in shards.items())
        assert manifest_bytes(manifest) == len(weights) + len(config)
        assert len(shards) <= math.ceil(len(weights) / shard_size) + math.ceil(len(config) / shard_size)
        assemble(manifest, shards.get, folder / "out")
        assert folder_matches(manifest, folder / "out")


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(0, 2**53),
    shards=st.lists(st.binary(min_size=32, max_size=32), max_size=6),
    shard_size=st.integers(1024, 4096),
)
def test_a_manifest_that_is_believed_has_sizes_that_add_up(
    size: int, shards: list[bytes], shard_size: int
) -> None:
    config = FileEntry(
        path="config.json",
        size=len(CONFIG),
        sha256=sha256(CONFIG).digest(),
        shards=(sha256(CONFIG).digest(),),
    )
    weights = FileEntry(path="model.safetensors", size=size, sha256=b"s" * 32, shards=tuple(shards))
    manifest = Manifest(run_id=RUN, version=1, created_at=0, shard_size=shard_size, files=(config, weights))
    try:
        check_manifest(sign(manifest, OPERATOR), run_spec(), RUN)
    except MalformedError:
        return
    assert len(shards) == math.ceil(size / shard_size)
    assert all(0 < n <= shard_size for _, n in manifest_shards(manifest))


def test_a_manifest_by_another_key_is_refused(tmp_path: Path) -> None:
    manifest, _ = version(tmp_path)
    with pytest.raises(SignatureError):
        check_manifest(sign(manifest, Identity.generate()), run_spec(), RUN)
    forged = msgspec.structs.replace(sign(manifest, Identity.generate()), signer=OPERATOR.public_key)
    with pytest.raises(SignatureError):
        check_manifest(forged, run_spec(), RUN)


def test_a_manifest_of_another_run_is_refused(tmp_path: Path) -> None:
    manifest, _ = version(tmp_path)
    refused(msgspec.structs.replace(manifest, run_id=b"x" * 32), "of run")


def test_a_size_that_its_shards_do_not_explain_is_refused(tmp_path: Path) -> None:
    manifest, _ = version(tmp_path)
    grow = with_file(manifest, "model.safetensors", lambda e: msgspec.structs.replace(e, size=e.size + 1024))
    refused(grow, "must have 6 shards")
    empty = with_file(manifest, "model.safetensors", lambda e: msgspec.structs.replace(e, size=0))
    refused(empty, "must have 0 shards")


def test_one_shard_cannot_have_two_sizes(tmp_path: Path) -> None:
    manifest, _ = version(tmp_path)
    first = manifest.files[1].shards[0]
    refused(
        with_file(manifest, "config.json", lambda e: msgspec.structs.replace(e, shards=(first,))),
        "two different",
    )


def test_a_version_far_larger_than_its_model_is_refused(tmp_path: Path) -> None:
    manifest, _ = version(tmp_path)
    spec = run_spec()
    size = largest_version(spec, 1) + 1
    count = math.ceil(size / 1024 / 4096)
    shards = tuple(number.to_bytes(32, "big") for number in range(count))
    huge = FileEntry(path="model.safetensors", size=size, sha256=b"s" * 32, shards=shards)
    bigger = msgspec.structs.replace(manifest, shard_size=4 * 1024 * 1024, files=(manifest.files[0], huge))
    refused(bigger, "at most")


@pytest.mark.parametrize("name", ["model.safetensors\n", "Config.json", "config.json.", "config.json"])
def test_names_that_could_collide_or_mislead_are_refused(tmp_path: Path, name: str) -> None:
    manifest, _ = version(tmp_path)
    entry = msgspec.structs.replace(manifest.files[0], path=name)
    refused(msgspec.structs.replace(manifest, files=(*manifest.files, entry)), "not allowed|appears twice")


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", ".hidden", "a/b", "", "a" * 65])
def test_names_that_leave_the_folder_are_no_manifest(tmp_path: Path, name: str) -> None:
    manifest, _ = version(tmp_path)
    entry = msgspec.structs.replace(manifest.files[0], path=name)
    refused(msgspec.structs.replace(manifest, files=(*manifest.files, entry)), "Manifest|not allowed")
    with pytest.raises(MalformedError, match="cannot be published"):
        build_manifest(RUN, 1, {name: tmp_path / "config.json"}, 1024, 0, lambda digest, data: None)


@pytest.mark.parametrize("name", ["modeling.py", "pytorch_model.bin", "model.safetensors.index.json"])
def test_files_that_are_neither_pinned_nor_weights_are_refused(tmp_path: Path, name: str) -> None:
    manifest, _ = version(tmp_path, **{name: b"import os"})
    refused(manifest, "neither weights nor pinned")


def test_a_changed_or_missing_asset_is_refused(tmp_path: Path) -> None:
    manifest, _ = version(tmp_path)
    refused(manifest, "differs from", run_spec({"config.json": b"z" * 32}))
    pinned = {"config.json": sha256(CONFIG).digest(), "tokenizer.json": b"t" * 32}
    refused(manifest, r"tokenizer\.json, pinned", run_spec(pinned))


def test_weights_come_whole_or_in_a_full_set_of_parts(tmp_path: Path) -> None:
    base = {"config.json": CONFIG}
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = {"model.safetensors.index.json": b"{}"}
    full, _ = publish(tmp_path / "a", base | {one: b"1", two: b"2"} | index)
    assert check_manifest(sign(full, OPERATOR), run_spec(), RUN) == full
    half, _ = publish(tmp_path / "b", base | {two: b"2"} | index)
    refused(half, "incomplete")
    both, _ = publish(tmp_path / "c", base | {one: b"1", two: b"2", "model.safetensors": b"3"})
    refused(both, "must be one model.safetensors")
    none, _ = publish(tmp_path / "d", base)
    refused(none, "must be one model.safetensors")


def test_a_missing_or_wrong_shard_leaves_no_folder(tmp_path: Path) -> None:
    manifest, shards = version(tmp_path / "in")
    gone = manifest.files[1].shards[2]
    without = {digest: data for digest, data in shards.items() if digest != gone}
    with pytest.raises(StorageError, match=r"shard .* of model\.safetensors is missing"):
        assemble(manifest, without.get, tmp_path / "out" / "v")
    damaged = shards | {gone: b"\0" * len(shards[gone])}
    with pytest.raises(StorageError, match="changed on the disk"):
        assemble(manifest, damaged.get, tmp_path / "out" / "v")
    assert not list((tmp_path / "out").iterdir())


def test_a_file_that_is_wrong_though_its_shards_are_right_is_the_publishers_fault(tmp_path: Path) -> None:
    manifest, shards = version(tmp_path / "in")
    entry = msgspec.structs.replace(manifest.files[1], sha256=b"\1" * 32)
    wrong = msgspec.structs.replace(manifest, files=(manifest.files[0], entry, *manifest.files[2:]))
    with pytest.raises(DamagedVersionError, match=r"coordinator is at fault, and no peer"):
        assemble(wrong, shards.get, tmp_path / "out" / "v")
    assert not list((tmp_path / "out").iterdir())


def test_assembling_again_keeps_a_good_folder_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    manifest, shards = version(tmp_path / "in")
    out = tmp_path / "out" / "v"
    assemble(manifest, shards.get, out)
    assemble(manifest, {}.get, out)  # needs no shard
    (out / "config.json").write_bytes(b"damaged")
    (out / "stray").write_bytes(b"")
    assert not folder_matches(manifest, out)
    assemble(manifest, shards.get, out)
    assert folder_matches(manifest, out)


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".v000003.part-abc").mkdir()
    (tmp_path / ".v000003.part-abc" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "v000002").mkdir()
    remove_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["v000002"]


def test_a_full_disk_while_assembling_says_how_much_is_needed_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, shards = version(tmp_path / "in")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"MB are needed there.*No space left"):
        assemble(manifest, shards.get, tmp_path / "out" / "v")
    assert not list((tmp_path / "out").iterdir())


def test_unchanged_files_share_their_shards_across_versions(tmp_path: Path) -> None:
    first, _ = publish(tmp_path / "a", {"tokenizer.json": b"t" * 3000, "model.safetensors": b"1" * 3000})
    second, _ = publish(tmp_path / "b", {"tokenizer.json": b"t" * 3000, "model.safetensors": b"2" * 3000})
    assert first.files[1].shards == second.files[1].shards
    assert first.files[0].shards != second.files[0].shards


def test_small_versions_are_cut_finer_so_that_a_tree_has_something_to_share() -> None:
    mib = 1024 * 1024
    sizes = {total: fitting_shard_size(total) for total in (0, 3 * mib, 64 * mib, 270 * 10**6, 2**30, 2**34)}
    assert list(sizes.values()) == [mib // 4, mib // 4, mib // 4, 2 * mib, 4 * mib, 4 * mib]
    for total in range(64 * mib + 1, 2**30, 37 * mib):
        assert 128 <= total / fitting_shard_size(total) <= 256


def block_stage(rounds: int = 3, **model: Any) -> RunSpec:
    """A run whose version 3, which ``publish`` makes, is the last of the block stage, or the one after it."""
    plain = run_spec()
    return msgspec.structs.replace(
        plain,
        phase="pretrain",
        pretrain=pretrain_spec(blocks=2, rounds=rounds),
        model=msgspec.structs.replace(plain.model, **model),
    )


def parts(count: int) -> dict[str, bytes]:
    return {f"model-{part + 1:05d}-of-{count:05d}.safetensors": bytes([part]) * 50 for part in range(count)}


def test_a_version_of_blocks_has_one_file_for_the_scaffold_and_one_for_each_block(tmp_path: Path) -> None:
    manifest, _ = publish(tmp_path / "good", {"config.json": CONFIG, **parts(3)})
    assert check_manifest(sign(manifest, OPERATOR), block_stage(), RUN) == manifest
    refused(manifest, "put together by then", block_stage(rounds=2))  # version 3 is the model there
    for count in (1, 2, 4):
        other, _ = publish(tmp_path / str(count), {"config.json": CONFIG, **parts(count)})
        refused(other, "weight files", block_stage())
    whole, _ = version(tmp_path / "whole")
    refused(whole, "weight files", block_stage())
    assert check_manifest(sign(whole, OPERATOR), block_stage(rounds=2), RUN) == whole


def test_blocks_are_float32_whatever_the_model_is_published_in() -> None:
    spec = block_stage(weights_dtype="bfloat16")
    assert largest_version(spec, 3) - largest_version(spec, 4) == 2 * 2 * spec.model.parameters
