"""``barnraise run``: make a run folder."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from barnraise.protocol.errors import RunFolderError
from barnraise.tui.console import emit_json, size

if TYPE_CHECKING:
    from barnraise.coordinator.folder import Settings

app = typer.Typer(help="Make and describe runs.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Make and describe runs."""


@app.command(
    epilog=(
        "Example: barnraise run init ./my-run --model ./Qwen3-0.6B --environment chain_sum   "
        "(then: barnraise coordinator run ./my-run)"
    )
)
def init(
    folder: Path = typer.Argument(
        ..., metavar="DIR", help="The run folder to make; must not exist, or be empty."
    ),
    model: str = typer.Option(
        "demo", "--model", help="'demo', 'smollm2', a folder with safetensors, or a Hugging Face id."
    ),
    environment: str | None = typer.Option(
        None, "--environment", help="'reverse' or a reasoning-gym generator such as chain_sum."
    ),
    environment_settings: str | None = typer.Option(
        None, "--environment-settings", metavar="JSON", help="Its settings, such as '{\"max_terms\": 3}'."
    ),
    chat: bool | None = typer.Option(
        None, "--chat/--plain-prompts", help="Use the tokenizer's chat template."
    ),
    system_prompt: str | None = typer.Option(
        None, "--system-prompt", help="Put before every task (chat only)."
    ),
    name: str | None = typer.Option(None, "--name", help="What volunteers see (default: the folder's name)."),
    description: str = typer.Option("", "--description", help="One sentence for volunteers."),
    seed: int = typer.Option(0, "--seed", min=0, max=2**31, help="Seed of held-out tasks and the learner."),
    versions: int | None = typer.Option(
        None, "--versions", min=1, help="Policy versions until the run is complete."
    ),
    prompts: int | None = typer.Option(
        None, "--prompts-per-unit", min=1, help="Prompts in one rollout unit."
    ),
    group_size: int | None = typer.Option(None, "--group-size", min=2, help="Samples per prompt."),
    groups: int | None = typer.Option(
        None, "--groups-per-version", min=1, help="Usable groups per policy version."
    ),
    max_new_tokens: int | None = typer.Option(None, "--max-new-tokens", min=1, help="Longest completion."),
    temperature: float | None = typer.Option(
        None, "--temperature", min=0.01, max=10.0, help="Sampling temperature."
    ),
    learning_rate: float | None = typer.Option(
        None, "--learning-rate", min=1e-9, max=1.0, help="AdamW's peak rate."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object as the last line."),
) -> None:
    """Make a run: choose the model and the task, sign the run spec, write policy version 0."""
    from msgspec.structs import replace as with_fields

    from barnraise.coordinator import folder as run_folder
    from barnraise.coordinator.checks import default_verify_spec
    from barnraise.coordinator.model_source import prepare_model, resolve_model
    from barnraise.coordinator.presets import fits_a_message, largest_submission

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} exists and is not an empty folder: choose another, or remove it")
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
    if environment_settings is not None:
        _check_json(environment_settings)
    progress = _Progress()
    with tempfile.TemporaryDirectory(prefix="barnraise-init-") as scratch:
        source = resolve_model(model, Path(scratch), seed, progress)
        progress("checking the model and its tokenizer", 0.0)
        prepared = Path(scratch) / "prepared"
        prepare_model(source, prepared, settings.weights_dtype, settings.environment)
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
    typer.echo(f"run {run_id.hex()[:16]} made in {folder}; serve it with: barnraise coordinator run {folder}")
    if as_json:
        emit_json({"folder": str(folder), "run_id": run_id.hex()})


def _preset(model: str) -> Settings:
    from barnraise.coordinator import presets

    return {"demo": presets.demo, "smollm2": presets.smollm2}.get(model, presets.generic)()


def _given(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _check_json(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--environment-settings") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--environment-settings")


class _Progress:
    """A line when the subject changes, and one every few seconds while it goes on."""

    def __init__(self) -> None:
        self._subject = ""
        self._shown = 0.0

    def __call__(self, subject: str, fraction: float) -> None:
        now = time.monotonic()
        if subject == self._subject and now - self._shown < 5.0:
            return
        self._subject, self._shown = subject, now
        typer.echo(f"{subject}{f' ({fraction:.0%})' if 0 < fraction < 1 else ''}")
