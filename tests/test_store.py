from __future__ import annotations

import errno
import os
import threading
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from barnraise.protocol import store as store_module
from barnraise.protocol.errors import StorageError
from barnraise.protocol.store import DiskStore

GB = 10**9


def shard(number: int, size: int = 1000) -> tuple[bytes, bytes]:
    data = number.to_bytes(4, "big") * (size // 4)
    return sha256(data).digest(), data


def file_of(store: DiskStore, digest: bytes) -> Path:
    return store.folder / digest.hex()[:2] / digest.hex()


def test_a_shard_survives_reopening(tmp_path: Path) -> None:
    digest, data = shard(1)
    DiskStore(tmp_path).put(digest, data)
    again = DiskStore(tmp_path)
    assert again.has(digest)
    assert again.size(digest) == 1000
    assert again.get(digest) == data
    assert again.used_bytes == 1000
    assert again.get(b"x" * 32) is None


def test_data_under_a_wrong_name_is_never_stored(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with pytest.raises(ValueError, match="is not shard"):
        store.put(b"x" * 32, b"data")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("damage", [b"", b"short", b"z" * 1000, b"z" * 2000])
def test_a_shard_damaged_on_disk_is_deleted_and_missing(tmp_path: Path, damage: bytes) -> None:
    digest, data = shard(1)
    DiskStore(tmp_path).put(digest, data)
    path = tmp_path / digest.hex()[:2] / digest.hex()
    path.write_bytes(damage)
    store = DiskStore(tmp_path)
    assert not store.verify(digest)
    assert not store.has(digest)
    assert not path.exists()
    assert store.used_bytes == 0
    store.put(digest, data)
    assert store.get(digest) == data


def test_damage_while_open_is_found_when_the_file_changed(tmp_path: Path) -> None:
    digest, data = shard(1)
    store = DiskStore(tmp_path)
    store.put(digest, data)
    assert store.verify(digest)
    file_of(store, digest).write_bytes(b"z" * 1000)
    os.utime(file_of(store, digest), ns=(1, 1))
    assert store.get(digest) is None


def test_leftovers_of_a_crash_and_foreign_files_are_no_shards(tmp_path: Path) -> None:
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / ".tmp-half").write_bytes(b"half")
    (tmp_path / "aa" / ("b" * 64)).write_bytes(b"in the wrong folder")
    (tmp_path / "notes.txt").write_bytes(b"hello")
    store = DiskStore(tmp_path)
    assert store.used_bytes == 0
    assert not (tmp_path / "aa" / ".tmp-half").exists()


def test_over_the_quota_the_oldest_unpinned_goes(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, quota_bytes=3000)
    shards = [shard(number) for number in range(4)]
    for digest, data in shards[:3]:
        store.put(digest, data)
    store.pin("v1", [shards[0][0]])
    store.put(*shards[3])
    assert [store.has(digest) for digest, _ in shards] == [True, False, True, True]
    assert store.used_bytes == 3000


def test_r25_a_quota_that_is_lowered_holds_at_once_but_for_what_is_pinned(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, quota_bytes=4000)
    shards = [shard(number) for number in range(4)]
    for digest, data in shards:
        store.put(digest, data)
    store.pin("v1", [shards[0][0], shards[1][0]])
    store.set_quota(3000)
    assert [store.has(digest) for digest, _ in shards] == [True, True, False, True]
    store.set_quota(1000)
    assert [store.has(digest) for digest, _ in shards] == [True, True, False, False]
    store.set_quota(None)
    store.put(*shards[2])
    assert store.used_bytes == 3000


def test_a_quota_full_of_pinned_shards_refuses_with_the_numbers(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, quota_bytes=2000)
    first, second, third = shard(1), shard(2), shard(3)
    store.put(*first)
    store.put(*second)
    store.pin("v1", [first[0], second[0]])
    with pytest.raises(StorageError, match="limit"):
        store.put(*third)
    with pytest.raises(StorageError, match="raise the limit"):
        store.ensure_room(1000)
    store.unpin("v1")
    store.ensure_room(1000)
    store.put(*third)
    assert not store.has(first[0])


@pytest.mark.parametrize(
    ("code", "text"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota")],
)
def test_a_disk_that_refuses_says_how_much_is_needed_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    store = DiskStore(tmp_path)

    def refuse(path: Path, data: bytes, sync: bool) -> tuple[int, int]:
        raise OSError(code, os.strerror(code))

    digest, data = shard(1, 2_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_write", refuse)
        with pytest.raises(StorageError, match=rf"2\.0 MB are needed there.*{text}") as caught:
            store.put(digest, data)
    assert str(tmp_path) in str(caught.value)
    assert store.used_bytes == 0
    store.put(digest, data)  # space was made: goes on
    assert store.get(digest) == data


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, sync=True)
    digest, data = shard(1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="the disk is full"):
        store.put(digest, data)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_too_little_free_disk_is_said_before_a_download(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, free_bytes=lambda folder: GB)
    store.ensure_room(GB // 2)
    with pytest.raises(StorageError, match=r"1067\.1 MB are needed there and 1000\.0 MB are free"):
        store.ensure_room(GB // 2, scratch=GB // 2)


def test_unpinned_shards_make_way_for_a_download(tmp_path: Path) -> None:
    digest, data = shard(1, 1_000_000)
    store = DiskStore(
        tmp_path, free_bytes=lambda folder: 64 * 1024 * 1024 + (0 if store.has(digest) else 1_000_000)
    )
    store.put(digest, data)
    store.ensure_room(900_000)
    assert not store.has(digest)


def test_adopted_shards_are_served_from_the_version_file_and_take_no_room(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store", quota_bytes=2000)
    first, second = shard(1), shard(2)
    store.put(*first)
    store.put(*second)
    folder = tmp_path / "v000001"
    folder.mkdir()
    (folder / "f").write_bytes(first[1] + second[1])
    store.adopt(folder / "f", [(first[0], 0, 1000), (second[0], 1000, 1000)])
    assert store.used_bytes == 0
    assert not file_of(store, first[0]).exists()
    assert store.get(first[0]) == first[1]
    assert store.get(second[0]) == second[1]
    (folder / "f").write_bytes(first[1] + b"z" * 1000)
    os.utime(folder / "f", ns=(1, 1))
    assert store.get(first[0]) == first[1]
    assert store.get(second[0]) is None
    store.disown(folder)
    assert not store.has(first[0])


def test_sweeping_spares_only_pins_and_adopted_shards(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store")
    loose, pinned, adopted = shard(1), shard(2), shard(3)
    for item in (loose, pinned, adopted):
        store.put(*item)
    (tmp_path / "f").write_bytes(adopted[1])
    store.adopt(tmp_path / "f", [(adopted[0], 0, 1000)])
    store.pin("x", [pinned[0]])
    store.sweep()
    assert [store.has(item[0]) for item in (loose, pinned, adopted)] == [False, True, True]


def test_several_threads_may_put_the_same_shards(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    shards = [shard(number) for number in range(20)]

    def work() -> None:
        for digest, data in shards:
            store.put(digest, data)
            assert store.get(digest) == data

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.used_bytes == 20_000
    assert DiskStore(tmp_path).used_bytes == 20_000


class StoreMachine(RuleBasedStateMachine):
    """Against a model: nothing pinned is ever lost, the quota holds, what is read is right."""

    @initialize()
    def open(self) -> None:
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.store = DiskStore(self.folder, quota_bytes=5000)
        self.pinned: dict[str, set[int]] = {}

    @rule(number=st.integers(0, 9))
    def put(self, number: int) -> None:
        pinned = set().union(*self.pinned.values())
        kept = {n for n in pinned if self.store.has(shard(n)[0])} | {number}
        if len(kept) > 5:
            with pytest.raises(StorageError):
                self.store.put(*shard(number))
        else:
            self.store.put(*shard(number))
            assert self.store.has(shard(number)[0])

    @rule(owner=st.sampled_from("ab"), numbers=st.sets(st.integers(0, 9), max_size=4))
    def pin(self, owner: str, numbers: set[int]) -> None:
        held = {n for n in numbers if self.store.has(shard(n)[0])}
        self.pinned[owner] = held
        self.store.pin(owner, [shard(n)[0] for n in held])

    @rule(number=st.integers(0, 9))
    def get(self, number: int) -> None:
        digest, data = shard(number)
        assert self.store.get(digest) in (data, None)

    @rule()
    def reopen(self) -> None:
        self.store = DiskStore(self.folder, quota_bytes=5000)
        for owner, numbers in self.pinned.items():
            self.store.pin(owner, [shard(n)[0] for n in numbers])

    def teardown(self) -> None:
        self.temporary.cleanup()

    @invariant()
    def holds(self) -> None:
        assert self.store.used_bytes <= 5000
        assert self.store.used_bytes == sum(p.stat().st_size for p in self.folder.glob("*/*"))
        for numbers in self.pinned.values():
            assert all(self.store.has(shard(n)[0]) for n in numbers)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
