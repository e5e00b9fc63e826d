"""A run whose tokenizer begins prompts with a token of its own serves no node that leaves it out."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from learner_support import make_model
from tokenizers import Tokenizer, processors
from typer.testing import CliRunner

from barnraise.coordinator.prompt_floor import floor_trouble, least_minor, with_floor
from barnraise.coordinator.run_file import Serve
from barnraise.protocol.spec import EnvironmentSpec
from barnraise.tui.main import app

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
OPTIONS = (
    *("--environment", "reverse", "--environment-settings", '{"letters": 3, "alphabet": 3}'),
    *("--max-new-tokens", "4", "--prompts-per-unit", "2", "--group-size", "2", "--groups-per-version", "2"),
)


def environment(prompt_format: str) -> EnvironmentSpec:
    return EnvironmentSpec(name="reverse", settings="{}", prompt_format=prompt_format, system_prompt="")  # type: ignore[arg-type]


def model(folder: Path, start: str, named: object) -> Path:
    """A model whose tokenizer puts ``start`` before a text, and names ``named`` as that token."""
    make_model(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(f"{start} $A", special_tokens=[(start, 2)])
    tokenizer.save(path)
    settings = {"eos_token": "<eos>", "bos_token": named, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("start", "named", "prompt_format", "minor"),
    [
        ("=", "=", "plain", 1),
        ("=", {"content": "="}, "plain", 1),
        ("=", "=", "chat", -1),
        ("", "=", "plain", -1),
        ("=", None, "plain", -1),
        ("=", "r", "plain", -1),
    ],
)
def test_a_floor_is_needed_where_plain_prompts_begin_with_a_token(
    tmp_path: Path, start: str, named: object, prompt_format: str, minor: int
) -> None:
    folder, tasks = model(tmp_path / "model", start, named), environment(prompt_format)
    assert least_minor(folder, tasks) == minor
    assert with_floor(Serve(), folder, tasks).floor_minor == minor
    assert bool(floor_trouble(Serve(), folder, tasks, 0)) is (minor > 0)


def test_a_floor_that_is_there_is_left_as_it_is_and_one_that_is_too_low_or_late_is_named(
    tmp_path: Path,
) -> None:
    folder, plain = model(tmp_path / "model", "=", "="), environment("plain")
    late, now = Serve(floor_minor=1, floor_from="2027-01-01"), 1_798_761_600_000
    assert with_floor(late, folder, plain) == late
    assert "until 2027-01-01" in floor_trouble(late, folder, plain, now - 1)
    assert floor_trouble(late, folder, plain, now) == ""
    low = Serve(floor_minor=0, floor_from="2027-01-01")
    assert "floor_minor is 0" in floor_trouble(low, folder, plain, now)
    assert with_floor(low, folder, plain) == Serve(floor_minor=1)


@pytest.mark.parametrize("damage", ["absent", "no-json", "no-tokenizer", "list"])
def test_a_tokenizer_that_cannot_be_read_needs_nothing(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    if damage != "absent":
        model(folder, "=", "=")
    if damage == "no-json":
        (folder / "tokenizer_config.json").write_text("{")
    elif damage == "list":
        (folder / "tokenizer_config.json").write_text("[1]")
    elif damage == "no-tokenizer":
        (folder / "tokenizer.json").unlink()
    assert least_minor(folder, environment("plain")) == -1


@pytest.mark.parametrize("prompts", ["--plain-prompts", "--chat"])
def test_run_init_sets_the_floor_and_run_check_says_where_it_is_missing(tmp_path: Path, prompts: str) -> None:
    source, run = model(tmp_path / "model", "=", "="), tmp_path / "run"
    made = CliRunner().invoke(app, ["run", "init", str(run), "--model", str(source), *OPTIONS, prompts])
    assert made.exit_code == 0, made.output
    plain = prompts == "--plain-prompts"
    assert ("[serve] floor_minor = 1:" in made.output) is plain
    text = (run / "run.toml").read_text()
    assert tomllib.loads(text)["serve"].get("floor_minor", -1) == (1 if plain else -1)

    def check(place: Path) -> str:
        return CliRunner().invoke(app, ["run", "check", str(place)]).output

    assert "floor_minor" not in check(run)
    (run / "run.toml").write_text(text.replace("\nfloor_minor = 1\n", "\n"))
    assert ("write floor_minor = 1" in check(run)) is plain
    mine = tmp_path / "mine.toml"
    template = CliRunner().invoke(app, ["run", "template", "--model", str(source)]).output
    assert 'prompt_format = "chat"' in template
    assert "\n# floor_minor = -1" in template
    mine.write_text(template if not plain else template.replace('format = "chat"', 'format = "plain"'))
    assert ("write floor_minor = 1" in check(mine)) is plain


def test_a_template_has_the_floor_that_its_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from barnraise.coordinator import presets

    source = model(tmp_path / "model", "=", "=")
    monkeypatch.setattr(presets, "generic", presets.demo)  # one whose prompts are plain
    template = CliRunner().invoke(app, ["run", "template", "--model", str(source)]).output
    assert "\nfloor_minor = 1\n" in template
