"""``barnraise run init`` without pretraining: a run that begins with a model and its version 0."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from barnraise.tui.console import Progress

if TYPE_CHECKING:
    from barnraise.coordinator.folder import Settings
    from barnraise.coordinator.model_source import AdapterChoice
    from barnraise.protocol.identity import Identity


def make(
    folder: Path,
    model: str,
    settings: Settings,
    adapter: AdapterChoice | None,
    *,
    name: str,
    description: str,
    seed: int,
    now_ms: int,
    identity: Identity | None,
) -> tuple[bytes, list[str]]:
    """Check model and tasks, then make the run folder. Returns the run id and what to say of the run.

    ``identity``: the operator's key, None for a new one.

    Raises:
        typer.BadParameter: the model cannot be used.
        TaskError: an environment is unknown.
    """
    from barnraise.coordinator.calibration import measured_verify_spec
    from barnraise.coordinator.folder import create_run
    from barnraise.coordinator.model_source import BUILT_IN, ModelSourceError, prepare_model, resolve_model
    from barnraise.protocol.environments import build_environment

    # a built-in's name wins over a folder that is called so ('./demo' names the folder)
    if model not in BUILT_IN and Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise typer.BadParameter(f"{model} holds no config.json, so no model", param_hint="--model")
    progress = Progress()
    progress(f"looking at the environment '{settings.environment.name}'", 0.0)
    build_environment(settings.environment)  # before the model, which may take minutes
    if settings.evaluation.environment is not None:
        build_environment(settings.evaluation.environment)
    progress("loading torch and transformers", 0.0)
    from barnraise.kernels.models import ModelError  # needs torch: not before it is about to be used

    with tempfile.TemporaryDirectory(prefix="barnraise-init-") as scratch:
        try:
            source = resolve_model(model, Path(scratch), seed, progress)
            progress("checking the model and its tokenizer", 0.0)
            prepared = Path(scratch) / "prepared"
            prepare_model(source, prepared, settings.weights_dtype, settings.environment, adapter, seed)
        except (ModelSourceError, ModelError) as error:
            raise typer.BadParameter(str(error), param_hint="--model") from error
        verify, whence = measured_verify_spec(
            prepared, settings.environment, settings.sampling, settings.compute_dtype, progress
        )
        run_id = create_run(
            folder,
            prepared,
            settings,
            verify,
            name=name,
            description=description,
            model_name=Path(model).name[:64],
            seed=seed,
            now_ms=now_ms,
            identity=identity,
        )
    return run_id, [_described(settings), whence]


def _described(settings: Settings) -> str:
    rollout, task = settings.rollout, settings.environment
    return (
        f"environment '{task.name}' {task.settings}: {rollout.versions} versions "
        f"of {rollout.groups_per_version} groups of {rollout.group_size} completions, "
        f"learning rate {settings.grpo.learning_rate:g}"
    )
