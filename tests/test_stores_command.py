"""What an operator types to move a run, to keep it safe, and to get it back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio.testing
from coordinator_support import make_run

from tests.test_ledger_inspect import call
from tests.test_migrate import database, some_versions

__all__ = ["database"]


async def test_moved_backed_up_and_restored_from_the_command_line(
    tmp_path: Path,
    database: str,
    autojump_clock: trio.testing.MockClock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, backup, new = make_run(tmp_path, versions=4), tmp_path / "backup", tmp_path / "new"
    assert call("coordinator", "migrate", folder, "--to", database) == 0  # before it begins
    await some_versions(folder, 1)
    capsys.readouterr()
    assert call("coordinator", "migrate", folder, "--to", "sqlite", "--json") == 0
    moved = json.loads(capsys.readouterr().out)
    assert moved["moved"]
    assert moved["events"] > 0
    assert "schema barnraise_" in moved["left"]
    assert call("coordinator", "backup", folder, backup, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["events"] == moved["events"]
    await some_versions(folder, 2)
    seen = ("--checkpoint", folder)
    assert call("coordinator", "restore", backup, new, "--same-run", *seen) == 2
    assert "were published after this backup" in capsys.readouterr().err
    assert call("coordinator", "restore", backup, new, *seen) == 0
    said = capsys.readouterr().out
    assert f"continues {made['run_id'][:16]} from version {made['version']}" in said
    assert "that came after the backup" in said


def test_versions_go_to_object_storage_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fsspec", reason="needs barnraise[objects]")
    from tests.test_objects import save

    folder = make_run(tmp_path)
    save(folder, 1)
    url = f"file://{tmp_path}/bucket"
    assert call("coordinator", "export-versions", folder, url, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"copied": [1], "removed": [], "there": [1]}
    before = (folder / "checkpoints/v000001/model.safetensors").read_bytes()
    (folder / "checkpoints/v000001/model.safetensors").write_bytes(b"lost")
    assert call("coordinator", "fetch-version", folder, url, "1") == 0
    assert (folder / "checkpoints/v000001/model.safetensors").read_bytes() == before
    assert call("coordinator", "fetch-version", folder, url, "7") == 2
