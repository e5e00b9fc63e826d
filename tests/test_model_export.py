"""A version as a model folder: what anybody loads is what the run published, adapters merged."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from barnraise.coordinator.model_export import export_model
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.kernels.models import load_policy
from barnraise.protocol.errors import RunFolderError
from barnraise.tui.main import app


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters, which are no longer nothing in version 0."""
    folder = _made(tmp_path_factory.mktemp("adapted") / "run", "--lora-rank", "4")
    place = next(checkpoint_folder(folder, 0).glob("adapter*.safetensors"))
    torch.manual_seed(3)
    save_file({name: torch.randn_like(value) * 0.1 for name, value in load_file(place).items()}, place)
    return folder


def _made(folder: Path, *options: str) -> Path:
    result = CliRunner().invoke(app, ["run", "init", str(folder), *options])
    assert result.exit_code == 0, result.output
    return folder


def test_a_plain_version_is_copied_as_it_was_published(plain: Path, tmp_path: Path) -> None:
    assert export_model(plain, tmp_path / "model") == 0
    source = checkpoint_folder(plain, 0) / "model.safetensors"
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == source.read_bytes()
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_adapters_are_merged_and_the_logits_are_the_adapted_policys(adapted: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "export-model", str(adapted), str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    assert not any("adapter" in path.name for path in (tmp_path / "model").iterdir())
    policy = load_policy(checkpoint_folder(adapted, 0), "float32")
    tokens = torch.arange(1, 7)[None]
    with torch.no_grad():
        wanted = policy.logits(policy.hidden(tokens))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        found = merged(input_ids=tokens).logits
        unmerged = AutoModelForCausalLM.from_pretrained(checkpoint_folder(adapted, 0), dtype=torch.float32)
        base = unmerged(input_ids=tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert float((base - wanted).abs().max()) > 0.05


def test_a_version_that_is_not_there_or_a_folder_in_use_is_named(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there are: "):
        export_model(plain, tmp_path / "model", 7)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("")
    with pytest.raises(RunFolderError, match="not an empty folder"):
        export_model(plain, tmp_path / "used")
