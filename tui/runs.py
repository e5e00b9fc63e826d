"""``barnraise run``: make a run folder."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from barnraise.protocol.errors import RunFolderError
from barnraise.tui.console import Progress, emit_json, examples, size

if TYPE_CHECKING:
    from barnraise.coordinator.folder import Settings

app = typer.Typer(help="Make runs.", epilog=examples("run init ./my-run"), no_args_is_help=True)
PRESET = "(default: the model's preset)"


@app.callback()
def group() -> None:
    """Make runs."""


@app.command(
    short_help="Make a run folder: model, task and settings.",
    epilog=examples(
        "run init ./my-run",
        "run init ./my-run --model ./Qwen3-0.6B --environment chain_sum",
        "coordinator run ./my-run      (to serve it)",
    ),
)
def init(
    folder: Path = typer.Argument(
        ..., metavar="DIR", help="The run folder to make; must not exist, or be empty."
    ),
    model: str = typer.Option(
        "demo",
        "--model",
        metavar="NAME|DIR",
        help="'demo', 'smollm2', a folder with safetensors, or a Hugging Face id.",
    ),
    environment: str | None = typer.Option(
        None,
        "--environment",
        metavar="NAME",
        help=f"'reverse' or a reasoning-gym generator such as chain_sum {PRESET}.",
    ),
    environment_settings: str | None = typer.Option(
        None, "--environment-settings", metavar="JSON", help="Its settings, such as '{\"max_terms\": 3}'."
    ),
    chat: bool | None = typer.Option(
        None, "--chat/--plain-prompts", help=f"Use the tokenizer's chat template or not {PRESET}."
    ),
    system_prompt: str | None = typer.Option(
        None, "--system-prompt", metavar="TEXT", help=f"Put before every task, chat only {PRESET}."
    ),
    name: str | None = typer.Option(
        None, "--name", metavar="TEXT", help="What volunteers see (default: the folder's name)."
    ),
    description: str = typer.Option(
        "", "--description", metavar="TEXT", help="One sentence for volunteers (default: none)."
    ),
    seed: int = typer.Option(
        0, "--seed", metavar="N", min=0, max=2**31, help="Seed of demo model, held-out tasks and learner."
    ),
    versions: int | None = typer.Option(
        None, "--versions", metavar="N", min=1, help=f"Policy versions until the run is complete {PRESET}."
    ),
    prompts: int | None = typer.Option(
        None, "--prompts-per-unit", metavar="N", min=1, help=f"Prompts in one rollout unit {PRESET}."
    ),
    group_size: int | None = typer.Option(
        None, "--group-size", metavar="N", min=2, help=f"Samples per prompt {PRESET}."
    ),
    groups: int | None = typer.Option(
        None, "--groups-per-version", metavar="N", min=1, help=f"Usable groups per policy version {PRESET}."
    ),
    max_new_tokens: int | None = typer.Option(
        None, "--max-new-tokens", metavar="N", min=1, help=f"Longest completion, in tokens {PRESET}."
    ),
    temperature: float | None = typer.Option(
        None, "--temperature", metavar="X", min=0.01, max=10.0, help=f"Sampling temperature {PRESET}."
    ),
    learning_rate: float | None = typer.Option(
        None, "--learning-rate", metavar="X", min=1e-9, max=1.0, help=f"AdamW's peak rate {PRESET}."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object as the last line."),
) -> None:
    """Make a run: choose the model and the task, sign the run spec, write policy version 0."""
    from msgspec.structs import replace as with_fields

    from barnraise.coordinator import folder as run_folder
    from barnraise.coordinator.checks import default_verify_spec
    from barnraise.coordinator.model_source import ModelSourceError, prepare_model, resolve_model
    from barnraise.coordinator.presets import fits_a_message, largest_submission
    from barnraise.protocol.environments import build_environment

    _check_folder(folder)
    if environment_settings is not None:
        _check_json(environment_settings)
    settings = _preset(model)
    changed = {
        "name": environment,
        "settings": environment_settings or ("{}" if environment else None),
        "prompt_format": None if chat is None else ("chat" if chat else "plain"),
        "system_prompt": system_prompt,
    }
    rollout = {
        "versions": versions,
        "prompts_per_unit": prompts,
        "group_size": group_size,
        "groups_per_version": groups,
        "max_groups_per_version": max(groups, settings.rollout.max_groups_per_version) if groups else None,
    }
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    settings = replace(
        settings,
        environment=with_fields(settings.environment, **_given(changed)),
        rollout=with_fields(settings.rollout, **_given(rollout)),
        sampling=with_fields(settings.sampling, **_given(sampling)),
        grpo=with_fields(settings.grpo, **_given({"learning_rate": learning_rate})),
    )
    if not fits_a_message(settings):
        raise typer.BadParameter(
            f"one unit's submission could reach {size(largest_submission(settings))}, more than a message "
            "may hold: lower --prompts-per-unit, --group-size or --max-new-tokens"
        )
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise typer.BadParameter(f"{model} holds no config.json, so no model", param_hint="--model")
    progress = Progress()
    progress(f"looking at the environment '{settings.environment.name}'", 0.0)
    build_environment(settings.environment)  # before the model, which may take minutes
    progress("loading torch and transformers", 0.0)
    with tempfile.TemporaryDirectory(prefix="barnraise-init-") as scratch:
        try:
            source = resolve_model(model, Path(scratch), seed, progress)
            progress("checking the model and its tokenizer", 0.0)
            prepared = Path(scratch) / "prepared"
            prepare_model(source, prepared, settings.weights_dtype, settings.environment)
        except ModelSourceError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from error
        except _model_error() as error:
            raise typer.BadParameter(str(error), param_hint="--model") from error
        run_id = run_folder.create_run(
            folder,
            prepared,
            settings,
            default_verify_spec(settings.compute_dtype),
            name=(name or folder.absolute().name)[:64],
            description=description,
            model_name=Path(model).name[:64],
            seed=seed,
            now_ms=time.time_ns() // 1_000_000,
        )
    typer.echo(_described(settings))
    typer.echo(f"run {run_id.hex()[:16]} made in {folder}; serve it with: barnraise coordinator run {folder}")
    if as_json:
        emit_json({"folder": str(folder), "run_id": run_id.hex()})


def _preset(model: str) -> Settings:
    from barnraise.coordinator import presets

    return {"demo": presets.demo, "smollm2": presets.smollm2}.get(model, presets.generic)()


def _described(settings: Settings) -> str:
    rollout, task = settings.rollout, settings.environment
    return (
        f"environment '{task.name}' {task.settings}: {rollout.versions} versions "
        f"of {rollout.groups_per_version} groups of {rollout.group_size} completions, "
        f"learning rate {settings.grpo.learning_rate:g}"
    )


def _model_error() -> type[Exception]:
    from barnraise.kernels.models import ModelError  # needs torch: not before it is about to be used

    return ModelError


def _check_folder(folder: Path) -> None:
    """Refuse a place where no run folder can be made, before minutes go into a model for it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} exists and is not an empty folder: choose another, or remove it")
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise RunFolderError(f"{folder} cannot be made: {nearest} cannot be written to")


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _check_json(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--environment-settings") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--environment-settings")
