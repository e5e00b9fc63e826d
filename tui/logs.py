"""``barnraise logs``: what a node has said, also while it does not run."""

from __future__ import annotations

from pathlib import Path

import typer

from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.console import examples
from barnraise.tui.log_file import LEVELS, Record, at_least, follow, is_for_people, log_files, spoken, tail
from barnraise.tui.receipts import data_folder

EXAMPLES = examples("logs", "logs -f", "logs node-1 --level warning -n 100", "logs -f --json")


def logs(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A node's data folder (default: ~/.local/share/barnraise)."
    ),
    following: bool = typer.Option(False, "--follow", "-f", help="Go on with new lines until Ctrl-C."),
    level: str = typer.Option(
        "info", "--level", metavar="LEVEL", help="This level and graver: debug, info, warning, error."
    ),
    count: int = typer.Option(
        20, "--lines", "-n", metavar="N", min=0, max=1_000_000, help="How many of the last to begin with."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
) -> None:
    """Print the end of a node's log, and what is added to it.

    ``--level debug`` also shows what libraries and inner parts noted.
    """
    if level.upper() not in LEVELS:
        raise typer.BadParameter(f"{level!r} is no level: debug, info, warning, error", param_hint="--level")
    place = data_folder(folder)
    if not log_files(place):
        raise BarnraiseError(f"there is no log in {place}: no node has run there yet")
    grave = at_least(level)
    everything = level.upper() == "DEBUG"

    def keep(record: Record) -> bool:
        return everything or (grave(record) and is_for_people(record))

    if not following:
        for record in tail(place, count, keep):
            typer.echo(spoken(record, as_json))
        return
    for record in follow(place, count, lambda: False, keep):
        typer.echo(spoken(record, as_json))
