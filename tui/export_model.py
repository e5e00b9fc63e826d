"""``barnraise run export-model`` and ``run card``: a version of a run as a model folder, and its card."""

from __future__ import annotations

from pathlib import Path

import typer

from barnraise.protocol.errors import StorageError
from barnraise.tui.console import emit_json, examples

EXAMPLES = examples(
    "run export-model ./my-run ./my-model",
    "run export-model ./my-run ./my-model --version 40",
)
CARD_EXAMPLES = examples("run card ./my-run", "run card ./my-run --version 40 --to ./my-model")


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
    if not as_json:
        typer.echo(f"version {done} is there; writing the run's card", err=True)
    put_card(folder, target, done)
    if as_json:
        emit_json({"version": done, "folder": str(target)})
    else:
        typer.echo(f"version {done} written to {target}, with the run's card beside it")


def run_card(
    folder: Path = typer.Argument(..., metavar="DIR", help="The run folder; it may be served meanwhile."),
    to: Path | None = typer.Option(
        None, "--to", metavar="DIR", help="Where to write README.md and its curves (default: DIR/card)."
    ),
    version: int | None = typer.Option(
        None, "--version", metavar="N", min=0, help="Which policy version (default: the newest on this disk)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Write the run's card: data, settings and their changes, curves, credits to volunteers, how to check."""
    from barnraise.coordinator.checkpoints import complete_versions

    chosen = max(complete_versions(folder), default=0) if version is None else version
    path = put_card(folder, folder / "card" if to is None else to, chosen)
    if as_json:
        emit_json({"version": chosen, "card": str(path)})
    else:
        typer.echo(f"written: {path}")


def put_card(folder: Path, target: Path, version: int) -> Path:
    """Write the card of ``version`` into ``target``.

    Raises:
        StorageError: the disk refused.
    """
    from barnraise.coordinator.run_card import write_card

    try:
        return write_card(folder, target, version)
    except OSError as error:
        raise StorageError(f"cannot write the run's card to {target}: {error}; see --to") from error
