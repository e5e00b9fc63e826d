"""A tokenizer's end token: what a run spec says of it and what generation goes by are one reading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from coordinator_support import write_model
from tokenizers import Tokenizer, models

from barnraise.coordinator.model_folder import describe_model
from barnraise.kernels.model_json import ModelError
from barnraise.kernels.tokens import Codec
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.spec import EnvironmentSpec

PLAIN = EnvironmentSpec(name="x", settings="", prompt_format="plain", system_prompt="")
FIRST = 2  # what the model itself says


def folder_with(tmp_path: Path, settings: str | None) -> Path:
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": FIRST}))
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "</s>": 1, "stop": FIRST, "word": 3}, "one"))
    tokenizer.add_special_tokens(["</s>", "<|turn|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(settings)
    return folder


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ('{"eos_token": "</s>"}', 1),
        ('{"eos_token": "<|turn|>"}', 4),
        ('{"eos_token": {"content": "<|turn|>", "special": true}}', 4),
        ('{"eos_token": "word"}', 3),  # of the vocabulary, not added to it
        ('{"eos_token": "unheard of"}', None),
        ('{"eos_token": 4}', None),
        ('{"eos_token": null}', None),
        ("{}", None),
        (None, None),
    ],
)
def test_the_run_spec_and_the_codec_name_the_same_end(
    tmp_path: Path, settings: str | None, end: int | None
) -> None:
    folder = folder_with(tmp_path, settings)
    spec = describe_model(folder, "m", "float32", "float32")
    assert spec.ends == {FIRST} | ({end} if end is not None else set())
    assert Codec(folder, PLAIN).eos_token == (FIRST if end is None else end)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer_config.json", "["), ("tokenizer_config.json", "[]"), ("tokenizer.json", '{"model": 1}')],
)
def test_files_that_neither_can_read_are_refused_by_both(tmp_path: Path, name: str, text: str) -> None:
    folder = folder_with(tmp_path, '{"eos_token": "</s>"}')
    (folder / name).write_text(text)
    with pytest.raises(RunFolderError, match=name):
        describe_model(folder, "m", "float32", "float32")
    with pytest.raises(ModelError, match=name):
        Codec(folder, PLAIN)


@pytest.mark.parametrize("module", ["coordinator.model_folder", "kernels.special_tokens", "kernels.tokens"])
def test_it_is_read_without_torch(module: str) -> None:
    code = f"import sys; import barnraise.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
