"""``barnraise tui``: the terminal application, attached to a node that runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.console import examples

EXAMPLES = examples("tui", "tui node-1 --light", "tui --ascii")

UNFIT = ("", "dumb", "unknown")


def tui(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A node's data folder (default: ~/.local/share/barnraise)."
    ),
    light: bool | None = typer.Option(
        None, "--light/--dark", help="Begin with this theme (default: the last one); t changes it."
    ),
    ascii: bool | None = typer.Option(
        None, "--ascii/--no-ascii", help="Draw with ASCII only (default: as the locale and TERM say)."
    ),
) -> None:
    """Watch and steer this machine's node.

    Closing the window stops nothing. Keys stand at the bottom, ? shows them all. NO_COLOR is honoured.
    """
    place = watched_folder(folder)
    require_terminal(place if folder is not None else None)
    from barnraise.tui.app import run

    raise typer.Exit(run(place, light=light, ascii=ascii))


def watched_folder(folder: Path | None) -> Path:
    """The data folder to watch; None is this user's, which need not exist yet.

    Raises:
        typer.BadParameter: it is no node's data folder.
    """
    if folder is None:
        from barnraise.node.config import default_data_path

        return default_data_path()
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder; name a node's data folder")
    if (folder / "spec.bin").is_file():
        raise typer.BadParameter(
            f"{folder} is a run's folder; 'barnraise status {folder}' shows its coordinator"
        )
    return folder


def require_terminal(folder: Path | None) -> None:
    """Refuse to draw where nobody could see it or press a key (R24).

    Raises:
        BarnraiseError: stdin or stdout is no terminal, or one that cannot move its cursor.
    """
    shows = f"'barnraise status{f' {folder}' if folder else ''}' prints the same as plain lines"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BarnraiseError(f"this is not a terminal, so there is nowhere to draw; {shows}")
    if os.environ.get("TERM", "") in UNFIT:
        term = os.environ.get("TERM", "") or "not set"
        raise BarnraiseError(f"this terminal cannot be drawn on (TERM is {term}); {shows}")
