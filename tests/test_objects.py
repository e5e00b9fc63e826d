"""Versions in object storage: only whole ones count, and what comes back is what went out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from barnraise.coordinator.checkpoints import Record, save_checkpoint
from barnraise.coordinator.objects import WHOLE, ObjectStore, keep_versions
from barnraise.coordinator.workers import Trained, checkpoint_folder
from barnraise.protocol.errors import RunFolderError, StorageError

pytest.importorskip("fsspec", reason="needs barnraise[objects]")


def save(run_folder: Path, version: int) -> None:
    (run_folder / "checkpoints/v000000").mkdir(parents=True, exist_ok=True)
    (run_folder / "checkpoints/v000000/config.json").write_text("{}")
    trained = Trained(version=version, weights="model.safetensors", stats=None, accuracy=0.0)

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(version.to_bytes(4, "big") * 5000)
        (folder / "shards").mkdir()
        (folder / "shards/0.bin").write_bytes(b"momentum")

    save_checkpoint(run_folder, Record(version=version, step=version, trained=trained), write)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run" if request.param == "file" else f"memory://{tmp_path.name}/run"


def test_versions_go_out_are_kept_for_a_while_and_come_back(url: str, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    store = ObjectStore(url)
    assert store.versions() == []
    for version in range(1, 4):
        save(run, version)
    assert keep_versions(store, run, 2, keep=()).copied == [2, 3]
    save(run, 4)
    done = keep_versions(store, run, 2, keep=(2,))
    assert (done.copied, done.removed, done.there) == ([4], [], [2, 3, 4])
    assert keep_versions(store, run, 2, keep=()) == ([], [2], [3, 4])
    assert store.fetch(4, other) == checkpoint_folder(other, 4)
    assert contents(checkpoint_folder(other, 4)) == contents(checkpoint_folder(run, 4))
    with pytest.raises(RunFolderError, match=r"no whole version 2: it has \[3, 4\]"):
        store.fetch(2, other)


def test_a_store_that_fails_now_and_then_is_asked_again_and_a_torn_copy_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pauses = tmp_path / "run", list[float]()
    save(run, 1)
    store = ObjectStore(f"file://{tmp_path}/bucket", sleep=pauses.append)
    opened, failing = store._files.open, [True, True]

    def flaky(path: str, mode: str) -> Any:
        if failing and path.endswith("model.safetensors"):
            failing.pop()
            raise OSError("503 slow down")
        return opened(path, mode)

    monkeypatch.setattr(store._files, "open", flaky)
    assert keep_versions(store, run, 1).copied == [1]
    assert pauses == [1.0, 2.0]
    save(run, 2)
    failing.extend([True] * 5)
    with pytest.raises(StorageError, match=r"after 5 tries \(503 slow down\): check keys and network"):
        store.put(run, 2)
    assert store.versions() == [1]  # what is there of version 2 is no copy
    assert keep_versions(store, run, 1, keep=()).there == [2]


def test_what_changed_over_there_is_not_taken(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    save(run, 1)
    store = ObjectStore(f"file://{tmp_path}/bucket")
    store.put(run, 1)
    weights = tmp_path / "bucket/v000001/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(RunFolderError, match=r"model.safetensors of version 1 is damaged"):
        store.fetch(1, other)
    assert list((other / "checkpoints").iterdir()) == []
    whole = tmp_path / "bucket/v000001" / WHOLE
    whole.write_bytes(whole.read_bytes().replace(b"config.json", b"../../../x1"))
    with pytest.raises(RunFolderError, match="which is outside"):
        store.fetch(1, other)


def test_no_key_is_shown_and_an_unknown_kind_of_store_is_named(tmp_path: Path) -> None:
    assert ObjectStore("memory://me:secret@host/run?key=secret").shown == "memory://host/run"
    with pytest.raises(RunFolderError, match="no URL that fsspec knows"):
        ObjectStore("nosuchstore://bucket")
