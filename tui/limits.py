"""``barnraise limits``: how much of the line a running node may use, shown and changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from barnraise.protocol.control import send_command
from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.amounts import parse_rate, parse_size
from barnraise.tui.console import duration, emit_json, examples, print_rows, size
from barnraise.tui.status import read_folder

app = typer.Typer(
    help="Bandwidth caps and the monthly quota of a running node.",
    epilog=examples("limits set --down 20MB/s --up 5MB/s --month 500GB", "limits get"),
    no_args_is_help=True,
)

Row = tuple[str, str]


@app.callback()
def group() -> None:
    """Bandwidth caps and the monthly quota of a running node."""


@app.command(
    "get",
    short_help="Show caps, quota and what is used of it.",
    epilog=examples("limits get node-1 --json", "limits get     (this user's node)"),
)
def get(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A node's data folder (default: ~/.local/share/barnraise)."
    ),
    as_json: bool = typer.Option(
        False, "--json", help="One JSON object: bytes, bytes/s, null where there is no limit."
    ),
) -> None:
    """Show caps, the monthly quota and what is used of it."""
    _show(_limits(read_folder(folder)), as_json)


@app.command(
    "set",
    short_help="Change caps or quota, at once and for good.",
    epilog=examples(
        "limits set --down 20MB/s --up 5MB/s --month 500GB",
        "limits set node-1 --up 4Mbit/s",
        "limits set --down none --month none",
    ),
)
def change(
    folder: Path | None = typer.Argument(
        None, metavar="DIR", help="A node's data folder (default: ~/.local/share/barnraise)."
    ),
    down: str | None = typer.Option(
        None, "--down", metavar="RATE", help="Most to receive, such as 20MB/s or 160Mbit/s; none: no cap."
    ),
    up: str | None = typer.Option(
        None, "--up", metavar="RATE", help="Most to send, serving others included; none: no cap."
    ),
    month: str | None = typer.Option(
        None, "--month", metavar="SIZE", help="Most a calendar month, up and down, such as 500GB; none: any."
    ),
    as_json: bool = typer.Option(False, "--json", help="What holds now, as one JSON object."),
) -> None:
    """Change caps or the monthly quota of a running node: at once, during transfers, and after a restart."""
    arguments: dict[str, Any] = {}
    wishes = (("down", "--down", down, parse_rate), ("up", "--up", up, parse_rate))
    for name, option, text, parse in (*wishes, ("monthly", "--month", month, parse_size)):
        if text is not None:
            arguments[name] = _parsed(option, text, parse)
    if not arguments:
        raise typer.BadParameter("nothing to change: give --down, --up or --month")
    state = read_folder(folder)
    _limits(state)
    reply = send_command(_socket(folder), "limits", **arguments)
    _show(reply.get("limits") or _limits(read_folder(folder)), as_json)


def _parsed(option: str, text: str, parse: Callable[[str], int | None]) -> int | None:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _socket(folder: Path | None) -> Path:
    from barnraise.node.config import default_data_path

    return (folder or default_data_path()) / "control.sock"


def _limits(state: dict[str, Any]) -> dict[str, Any]:
    limits = state.get("limits")
    if state.get("kind") != "node" or not isinstance(limits, dict):
        raise BarnraiseError(
            "that is a coordinator, which has no caps: its upload is limited by "
            "'barnraise coordinator run --upload-copies'"
        )
    return limits


def _show(limits: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(limits)
    else:
        print_rows(list(rows(limits, time.time())))


def rows(limits: dict[str, Any], now: float) -> Iterator[Row]:
    """The limits of a node's state tree as rows of label and text; ``now``: seconds (UTC)."""
    yield "down", _rate(limits.get("down"))
    yield "up", _rate(limits.get("up"))
    used, most = limits.get("monthly_used", 0), limits.get("monthly")
    if most is None:
        yield "month", f"{size(used)} used, no quota"
        return
    yield "month", f"{size(used)} of {size(most)} used ({100 * used / max(most, 1):.0f} %)"
    until = limits.get("spent_until_ms")
    if until is not None:
        yield "paused", f"the quota is spent; it is renewed in {duration(max(0.0, until / 1000 - now))}"


def _rate(rate: float | None) -> str:
    return "no cap" if rate is None else f"{size(rate)}/s ({rate * 8 / 1e6:.2f} Mbit/s)"
