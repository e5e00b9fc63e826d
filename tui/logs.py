"""``barnraise logs``: what a node has said, also while it does not run."""

from __future__ import annotations

from pathlib import Path

import typer

from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.console import examples
from barnraise.tui.log_file import (
    LEVELS,
    NODE_LOG,
    Record,
    any_line,
    at_least,
    follow,
    is_for_people,
    log_files,
    spoken,
    spoken_of_many,
    tail,
)
from barnraise.tui.log_units import find_unit
from barnraise.tui.receipts import data_folder

EXAMPLES = examples(
    "logs",
    "logs -f",
    "logs node-1 --level warning -n 100",
    "logs --unit 17",
    "logs --unit 3fa9c1d2 --json",
)
ALL_LOGS = (*NODE_LOG, "engine.log")
LINES, UNIT_LINES = 20, 10_000  # shown at first, if nobody says how many


def logs(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A node's data folder (default: ~/.local/share/barnraise)."
    ),
    following: bool = typer.Option(False, "--follow", "-f", help="Go on with new lines until Ctrl-C."),
    unit: str = typer.Option(
        "",
        "--unit",
        metavar="ID",
        help="Only what is about this unit, from daemon and engine: its number, or the beginning of its "
        "lease's or submission's id.",
    ),
    level: str = typer.Option(
        "",
        "--level",
        metavar="LEVEL",
        help="This level and graver: debug, info, warning, error. [default: info; of a unit everything]",
    ),
    count: int | None = typer.Option(
        None,
        "--lines",
        "-n",
        metavar="N",
        min=0,
        max=1_000_000,
        help="How many of the last to begin with. [default: 20; of a unit 10,000]",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object a line."),
) -> None:
    """Print the end of a node's log, and what is added to it.

    ``--level debug`` also shows what libraries and inner parts noted. A node notes details, less than
    INFO, only where BARNRAISE_LOG_LEVEL=debug is in its environment.
    """
    level = known_level(level, unit)
    place = data_folder(folder)
    if not log_files(place):
        raise BarnraiseError(f"there is no log in {place}: no node has run there yet")
    grave, may = at_least(level), any_line
    everything = level.upper() == "DEBUG"
    names, say = (ALL_LOGS, spoken_of_many) if unit else (NODE_LOG, spoken)
    if unit:
        meant = find_unit(place, names, unit, "'barnraise receipts' has the verdicts")
        may = meant.may

    def keep(record: Record) -> bool:
        return grave(record) and (meant.keep(record) if unit else everything or is_for_people(record))

    first = count if count is not None else UNIT_LINES if unit else LINES
    if not following:
        for record in tail(place, first, keep, names, may):
            typer.echo(say(record, as_json))
        return
    for record in follow(place, first, lambda: False, keep, names, may):
        typer.echo(say(record, as_json))


def known_level(level: str, unit: str) -> str:
    """``level``, or what holds by default.

    Raises:
        typer.BadParameter: it is none.
    """
    level = level or ("debug" if unit else "info")
    if level.upper() not in LEVELS:
        raise typer.BadParameter(f"{level!r} is no level: debug, info, warning, error", param_hint="--level")
    return level
