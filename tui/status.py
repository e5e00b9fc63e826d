"""``barnraise status``: what a node or a coordinator on this machine is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from barnraise.protocol.control import read_state
from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.console import console, emit_json, size

EXAMPLES = "Example: barnraise status ./my-run --json"


def status(
    folder: Path | None = typer.Argument(
        None, metavar="[DIR]", help="A run folder or a node's data folder (default: this user's node)."
    ),
    as_json: bool = typer.Option(False, "--json", help="The whole state as one JSON object."),
) -> None:
    """Show the state of a running node or coordinator."""
    if folder is None:
        from barnraise.node.config import default_data_path

        folder = default_data_path()
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder; name a run folder or a node's data folder")
    try:
        state = read_state(folder / "control.sock")
    except (BarnraiseError, OSError) as error:
        raise BarnraiseError(
            f"nothing is running in {folder} ({error}); start it with "
            f"'barnraise coordinator run {folder}' or 'barnraise join MULTIADDR'"
        ) from error
    if as_json:
        emit_json(state)
        return
    console().print(overview(state))


def overview(state: dict[str, Any]) -> Table:
    """A two-column table of the plain values of a state tree, sizes made readable."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in state.items():
        label = name.replace("_", " ")
        if name in ("rewards", "accuracy"):
            table.add_row(label, f"{value[-1][1]:.3f} at version {value[-1][0]}" if value else "none yet")
        elif name in ("bytes_in", "bytes_out"):
            table.add_row(label, size(value))
        elif name == "nodes":
            for node in value:
                parts = ", ".join(f"{key} {item}" for key, item in node.items() if key != "name")
                table.add_row(f"node {node.get('name', '?')}", parts)
        elif isinstance(value, dict):
            table.add_row(label, ", ".join(f"{key} {item}" for key, item in value.items()) or "none")
        elif isinstance(value, float):
            table.add_row(label, f"{value:.3g}")
        else:
            table.add_row(label, "none" if value is None or value == [] else str(value))
    return table
