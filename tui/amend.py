"""``barnraise run amend``: change settings of a run that is under way."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from barnraise.protocol.amendments import AMENDABLE, json_value
from barnraise.tui.console import emit_json, examples
from barnraise.tui.coordinate import command

EXAMPLES = (
    examples(
        "run amend ./my-run grpo.learning_rate=5e-7 --reason 'KL grew too fast'",
        "run amend ./my-run rollout.versions=800 --reason 'it still learns'",
        "run amend --keys",
    )
    + "\n\nAn amendment is signed by the run's key and stands in the public ledger. It holds from the next "
    "batch and the next lease on."
)


def amend(
    folder: Path | None = typer.Argument(
        None, metavar="[DIR]", help="The folder of a run that is being served.", show_default=False
    ),
    changes: list[str] | None = typer.Argument(
        None, metavar="KEY=VALUE...", help="What to change, and to what."
    ),
    reason: str = typer.Option("", "--reason", metavar="TEXT", help="Why; nodes and the ledger show it."),
    keys: bool = typer.Option(False, "--keys", help="Print what may be changed, and end."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Change settings of a run that is under way; what nodes at work depend on cannot change."""
    if keys:
        for key in sorted(AMENDABLE):
            typer.echo(key)
        return
    if folder is None or not changes:
        raise typer.BadParameter("name the run's folder and at least one KEY=VALUE", param_hint="KEY=VALUE")
    if not reason.strip():
        raise typer.BadParameter("say why: volunteers read it", param_hint="--reason")
    reply = command(folder, "amend", changes=dict(_change(text) for text in changes), reason=reason)
    if as_json:
        emit_json(reply)
    elif reply["changed"]:
        for key, value in reply["changed"].items():
            typer.echo(f"{key} = {value}")
        typer.echo(f"amendment {reply['number']} is in force and in the ledger")
    else:
        typer.echo("that is in force already: nothing to change")


def _change(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="KEY=VALUE")
    try:
        return key.strip(), json_value(json.loads(value))
    except (ValueError, RecursionError):
        return key.strip(), json_value(value.strip())  # a word without quotes
