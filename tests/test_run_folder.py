"""The run folder: made whole, opened by one, and every defect named with its cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from coordinator_support import VERIFY, make_run, settings, write_model
from tokenizers import Tokenizer, models

from barnraise.coordinator.folder import create_run, open_run, read_spec
from barnraise.coordinator.model_folder import count_parameters, describe_model
from barnraise.coordinator.presets import demo, fits_a_message, generic, smollm2
from barnraise.protocol.errors import KeyFileError, RunFolderError
from barnraise.protocol.identity import Identity, save_identity


def test_a_new_run_is_signed_by_its_own_key_and_opens(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with open_run(folder) as run:
        assert run.identity.public_key == run.spec.operator
        assert run.spec.model.parameters == 500_000
        assert set(run.spec.model.assets) == {"config.json", "tokenizer.json"}
        assert run.spec.model.eos_token == 1
    assert (folder / "run.key").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in (folder / "checkpoints" / "v000000").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(RunFolderError, match="not an empty folder"):
        make_run(tmp_path)


def test_a_run_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(RunFolderError, match=r"config\.json cannot be read"):
        create_run(
            tmp_path / "run",
            tmp_path / "model",
            settings(),
            VERIFY,
            name="x",
            description="",
            model_name="m",
            seed=0,
            now_ms=0,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_second_coordinator_is_kept_out_and_the_lock_dies_with_its_owner(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom barnraise.coordinator.folder import open_run\n"
        "with open_run(Path(sys.argv[1])):\n    print('open', flush=True)\n    time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, cwd=tmp_path)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(RunFolderError, match=rf"process {other.pid}\) is using"), open_run(folder):
            pass
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    with open_run(folder):
        pass


def test_another_format_version_is_refused_with_the_cure(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "format").write_text("2\n")
    with pytest.raises(RunFolderError, match="layout version 2, this barnraise reads version 1"):
        read_spec(folder)


@pytest.mark.parametrize("missing", ["format", "spec.bin"])
def test_an_incomplete_folder_is_named(tmp_path: Path, missing: str) -> None:
    folder = make_run(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(RunFolderError, match=f"{missing} is missing.*run init"):
        read_spec(folder)


def test_a_damaged_spec_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    data = bytearray((folder / "spec.bin").read_bytes())
    data[200] ^= 1
    (folder / "spec.bin").write_bytes(data)
    with pytest.raises(RunFolderError, match=r"spec\.bin is damaged"):
        read_spec(folder)


def test_a_missing_or_readable_or_foreign_key_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    key = folder / "run.key"
    os.chmod(key, 0o644)
    with pytest.raises(KeyFileError, match="chmod 600"), open_run(folder):
        pass
    key.unlink()
    with pytest.raises(KeyFileError, match="no key file"), open_run(folder):
        pass
    save_identity(Identity.generate(), key)
    with pytest.raises(RunFolderError, match="not the key that signed"), open_run(folder):
        pass


def test_code_and_pickles_never_become_assets(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    for name in ("modeling.py", "pytorch_model.bin", "state.json", "model.safetensors.index.json"):
        (model / name).write_text("x")
    spec = describe_model(model, "m", "float32", "float32")
    assert set(spec.assets) == {"config.json", "tokenizer.json"}


def test_every_token_of_a_models_lists_ends_a_completion(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 1, 4]}))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|turn|>"}}))
    Tokenizer(models.WordLevel({"<|turn|>": 7}, "<|turn|>")).save(str(model / "tokenizer.json"))
    spec = describe_model(model, "m", "float32", "float32")
    assert (spec.eos_token, spec.other_ends, spec.ends) == (4, (1, 7), {1, 4, 7})


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(RunFolderError, match="no readable safetensors"):
        count_parameters(path)


def test_presets_fit_into_messages() -> None:
    assert all(fits_a_message(preset) for preset in (demo(), smollm2(), generic()))


@pytest.mark.parametrize("left", [None, b""])
def test_a_run_that_lost_its_journal_does_not_quietly_begin_again(tmp_path: Path, left: bytes | None) -> None:
    folder = make_run(tmp_path)
    with open_run(folder):
        pass  # a run that never began needs none
    (folder / "checkpoints" / "v000007").mkdir()
    if left is not None:
        (folder / "state.sqlite").write_bytes(left)
    with (
        pytest.raises(RunFolderError, match=r"state\.sqlite is missing or empty.*v000007.*backup"),
        open_run(folder),
    ):
        pass
    (folder / "state.sqlite").write_bytes(b"x")
    with open_run(folder):
        pass
