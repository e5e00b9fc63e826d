"""``barnraise run export-model``: a version of a run as a model folder."""

from __future__ import annotations

from pathlib import Path

import typer

from barnraise.tui.console import emit_json, examples

EXAMPLES = examples(
    "run export-model ./my-run ./my-model",
    "run export-model ./my-run ./my-model --version 40",
)


def export_model(
    folder: Path = typer.Argument(..., metavar="DIR", help="The run folder; it may be served meanwhile."),
    target: Path = typer.Argument(..., metavar="TO", help="The folder to make; must not exist, or be empty."),
    version: int | None = typer.Option(
        None, "--version", metavar="N", min=0, help="Which policy version (default: the newest on this disk)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Write a version as a Hugging Face model folder, with adapters merged into the weights."""
    from barnraise.coordinator.model_export import export_model as export

    done = export(folder, target, version)
    if as_json:
        emit_json({"version": done, "folder": str(target)})
    else:
        typer.echo(f"version {done} written to {target}")
