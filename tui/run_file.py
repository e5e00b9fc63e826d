"""``barnraise run init --file``, ``run template`` and ``run check``: runs from one TOML file."""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.console import duration, emit_json, examples, size

if TYPE_CHECKING:
    from barnraise.coordinator.folder import Settings
    from barnraise.coordinator.run_estimate import Estimate, Swarm
    from barnraise.coordinator.run_file import RunFile, RunSection

CHECK_EXAMPLES = examples(
    "run check my-run.toml",
    "run check ./my-run --nodes 50 --tokens-per-second 400",
)
TEMPLATE_EXAMPLES = examples("run template > my-run.toml", "run template --model smollm2")

BUILT_IN = ("demo", "smollm2", "tiny", "small")
NOWHERE = Path(os.devnull, "none")


def given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line: then it comes before the file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def template(
    model: str = typer.Option("demo", "--model", metavar="NAME|DIR", help="As for 'run init'."),
    phase: str = typer.Option("posttrain", "--phase", metavar="PHASE", help="'posttrain' or 'pretrain'."),
) -> None:
    """Print a run file with every key, its meaning, range and value for a model."""
    from barnraise.coordinator.prompt_floor import with_floor
    from barnraise.coordinator.run_file import RunFile, RunSection, Serve
    from barnraise.coordinator.run_keys import write_run_file

    if phase not in ("posttrain", "pretrain"):
        raise typer.BadParameter("posttrain or pretrain", param_hint="--phase")
    run, settings = RunSection(model=model, phase=phase), preset(model)  # type: ignore[arg-type]
    serve = with_floor(Serve(), _folder(model), settings.environment)
    typer.echo(write_run_file(RunFile(run=run, serve=serve), settings), nl=False)


def keep_file(folder: Path, loaded: RunFile, run: RunSection, pretrain: dict[str, Any]) -> None:
    """Write ``RUN/run.toml``: how the run was made, and how this machine serves it.

    With the floor that the model's tokenizer needs; a person is told.
    """
    from msgspec.structs import replace

    from barnraise.coordinator.folder import read_spec
    from barnraise.coordinator.prompt_floor import with_floor
    from barnraise.coordinator.run_file import RUN_FILE
    from barnraise.coordinator.run_keys import write_run_file
    from barnraise.coordinator.workers import checkpoint_folder

    spec = read_spec(folder)[0]
    serve = with_floor(loaded.serve, checkpoint_folder(folder, 0), spec.environment)
    if serve != loaded.serve:
        typer.echo(
            f"[serve] floor_minor = {serve.floor_minor}: the tokenizer begins a plain prompt with a token of "
            "its own, which older nodes leave out"
        )
    file = replace(loaded, run=run, serve=serve, signed={**loaded.signed, "pretrain": pretrain})
    (folder / RUN_FILE).write_text(write_run_file(file, spec), encoding="utf-8")


def preset(model: str) -> Settings:
    """The settings to start from for a model."""
    from barnraise.coordinator import presets

    return {"demo": presets.demo, "smollm2": presets.smollm2}.get(model, presets.generic)()


def check(
    place: Path = typer.Argument(..., metavar="FILE|DIR", help="A run file, or a run's folder."),
    nodes: int = typer.Option(10, "--nodes", metavar="N", min=1, help="Nodes to reckon with."),
    speed: float = typer.Option(
        0.0,
        "--tokens-per-second",
        metavar="X",
        min=0.0,
        help="What one of them generates (default: by a processor's 50 Gflop/s).",
    ),
    uplink: float = typer.Option(20.0, "--up-mbit", metavar="MBIT", min=0.1, help="One node's upload."),
    own: float = typer.Option(100.0, "--own-mbit", metavar="MBIT", min=0.1, help="The coordinator's upload."),
    parameters: float = typer.Option(
        0.0, "--parameters", metavar="N", min=0.0, help="Of the model, where it is not at hand: 7e9."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Say what is wrong with a run file, and what the run will need: disk, memory, bandwidth, time."""
    from barnraise.coordinator.prompt_floor import floor_trouble
    from barnraise.coordinator.run_estimate import Swarm
    from barnraise.coordinator.task_check import task_troubles

    if not all(map(math.isfinite, (speed, uplink, own, parameters))) or 0 < parameters < 1:
        raise BarnraiseError("what run check reckons with must be numbers, and a model has parameters")
    file, facts = _look(place, parameters)
    swarm = Swarm(nodes=nodes, tokens_per_s=speed, up_mbit=uplink, own_mbit=own)
    found = _estimate(file, facts, swarm)
    tasks, held_out = facts["tasks"]
    found.troubles.extend(task_troubles(tasks, held_out, facts["sampling"].max_new_tokens))
    if trouble := floor_trouble(file.serve, facts["tokenizer"], tasks, time.time_ns() // 1_000_000):
        found.troubles.append(trouble)
    if as_json:
        emit_json({"fits": not found.troubles, **asdict(found)})
    else:
        _say(found, swarm)
    if found.troubles:
        raise typer.Exit(1)


def _look(place: Path, parameters: float) -> tuple[RunFile, dict[str, Any]]:
    """The file, and what is known of the model: parameters, bytes a weight, tokens of a completion."""
    from barnraise.coordinator.amending import settings_in_force
    from barnraise.coordinator.folder import read_spec
    from barnraise.coordinator.run_file import operating, read_run_file, settings_of

    if place.is_dir():
        spec = settings_in_force(place, read_spec(place)[0])
        facts = {
            "parameters": spec.model.parameters,
            "weights_dtype": spec.model.weights_dtype,
            "compute_dtype": spec.model.compute_dtype,
            "rollout": spec.rollout,
            "sampling": spec.sampling,
            "adapter": spec.model.adapter,
            "tasks": (spec.environment, spec.evaluation.environment),
            "tokenizer": max(place.glob("checkpoints/v*/tokenizer.json"), default=NOWHERE).parent,
        }
        return operating(place), facts
    file = read_run_file(place)
    settings = settings_of(file, preset(file.run.model))
    known = {"demo": 0.8e6, "smollm2": 134.5e6, "tiny": 2e6, "small": 10e6}
    count = parameters or known.get(file.run.model) or _weights(Path(file.run.model), settings.weights_dtype)
    if not count:
        raise BarnraiseError(
            f"{file.run.model} is not on this machine: say how large it is with --parameters, such as 7e9"
        )
    return file, {
        "parameters": int(count),
        "weights_dtype": settings.weights_dtype,
        "compute_dtype": settings.compute_dtype,
        "rollout": settings.rollout,
        "sampling": settings.sampling,
        "adapter": None,
        "tasks": (settings.environment, settings.evaluation.environment),
        "tokenizer": _folder(file.run.model),
    }


def _folder(model: str) -> Path:
    """The folder that a model is named by; built-in names and Hugging Face ids name none."""
    return NOWHERE if model in BUILT_IN else Path(model)


def _weights(folder: Path, dtype: str) -> float:
    """About how many parameters a folder's safetensors have, by their size."""
    try:
        total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except OSError:  # too long for a path, say
        return 0.0
    return total / (4 if dtype == "float32" else 2)


def _estimate(file: RunFile, facts: dict[str, Any], swarm: Swarm) -> Estimate:
    from barnraise.coordinator.run_estimate import estimate

    return estimate(
        parameters=facts["parameters"],
        published_bytes=4 if facts["weights_dtype"] == "float32" else 2,
        compute_bytes=4 if facts["compute_dtype"] == "float32" else 2,
        rollout=facts["rollout"],
        max_new_tokens=facts["sampling"].max_new_tokens,
        keep=file.keep,
        swarm=swarm,
        trained=None if facts["adapter"] is None else facts["adapter"].parameters,
    )


def _say(found: Estimate, swarm: Swarm) -> None:
    rows = [
        ("a version", f"{size(found.version_bytes)} whole, about {size(found.patch_bytes)} as a patch"),
        ("coordinator's disk", size(found.disk_bytes)),
        ("learner's memory", size(found.learner_bytes) + " and activations"),
        ("a verifier's memory", size(found.verifier_bytes)),
        ("a node's memory", size(found.node_bytes) + " and cache"),
        ("a node's download", f"{size(found.version_bytes)} once, then {size(found.patch_bytes)} a version"),
        ("spreading a patch", duration(found.patch_s)),
        ("spreading a version", duration(found.version_s)),
        ("rollouts for a version", duration(found.rollouts_s)),
        ("the run", f"{found.versions} versions in about {duration(found.run_s)}"),
    ]
    typer.echo(f"with {swarm.nodes} nodes that generate {found.tokens_per_s:,.0f} tokens a second each:")
    for name, text in rows:
        typer.echo(f"  {name:24}{text}")
    for trouble in found.troubles:
        typer.echo(f"  ! {trouble}")
