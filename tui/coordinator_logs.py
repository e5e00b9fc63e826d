"""``barnraise coordinator logs RUN``: what a run's processes have said, also while it is not served."""

from __future__ import annotations

from pathlib import Path

import typer

from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.unit_context import UNITS
from barnraise.tui.console import examples
from barnraise.tui.log_file import (
    Record,
    any_line,
    at_least,
    follow,
    log_files,
    spoken_of_many,
    tail,
)
from barnraise.tui.log_units import find_unit
from barnraise.tui.logs import LINES, UNIT_LINES, known_level

NAMES = ("coordinator.log", "units.log", "verifier.log", "learner.log")


def logs(
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder, of a run that is served or not."),
    following: bool = typer.Option(False, "--follow", "-f", help="Go on with new lines until Ctrl-C."),
    unit: str = typer.Option(
        "",
        "--unit",
        metavar="ID",
        help="Only what is about this unit, from all processes: its number, or the beginning of its "
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
    """Print what coordinator, verifiers and learner have logged, by time, and what is added to it.

    What became of single units is only shown with ``--unit`` or ``--level debug``. The processes note
    details, less than INFO, only where BARNRAISE_LOG_LEVEL=debug is in their environment.
    """
    level = known_level(level, unit)
    if not (folder / "spec.bin").is_file():
        raise BarnraiseError(f"{folder} is no run folder")
    if not log_files(folder, NAMES):
        raise BarnraiseError(f"there is no log in {folder}: the run has not been served yet")
    grave, may = at_least(level), any_line
    if unit:
        meant = find_unit(
            folder, NAMES, unit, f"'barnraise ledger unit {folder} ID' has the ledger's entries"
        )
        may = meant.may

    def keep(record: Record) -> bool:
        if not grave(record):
            return False
        return meant.keep(record) if unit else level.upper() == "DEBUG" or is_for_everybody(record)

    first = count if count is not None else UNIT_LINES if unit else LINES
    if not following:
        for record in tail(folder, first, keep, NAMES, may):
            typer.echo(spoken_of_many(record, as_json))
        return
    for record in follow(folder, first, lambda: False, keep, NAMES, may):
        typer.echo(spoken_of_many(record, as_json))


def is_for_everybody(record: Record) -> bool:
    """Whether a record is of the run, or grave, and not just of one unit."""
    return record.level not in ("DEBUG", "INFO") or not record.source.startswith(UNITS)


def register(app: typer.Typer) -> None:
    """Add the command to ``barnraise coordinator``."""
    app.command(
        "logs",
        short_help="Show what its processes have logged, of one unit too.",
        epilog=examples(
            "coordinator logs ./my-run -f",
            "coordinator logs ./my-run --level warning -n 100",
            "coordinator logs ./my-run --unit 17",
            "coordinator logs ./my-run --unit 3fa9c1d2 --json",
        ),
    )(logs)
