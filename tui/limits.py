"""``barnraise limits``: how much of the machine and of the line a node may use, shown and changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from barnraise.protocol.control_client import send_command
from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.amounts import parse_rate, parse_size
from barnraise.tui.console import emit_json, examples, print_rows
from barnraise.tui.limit_notes import note_disk, note_threads
from barnraise.tui.limit_words import (
    NOTHING,
    parse_degrees,
    parse_hours,
    parse_moment,
    parse_program,
    parse_share,
    parse_threads,
    parse_when,
    parse_yes,
    rows,
)
from barnraise.tui.limits_at_rest import limits_at_rest, resting
from barnraise.tui.status import folder_or_default, read_folder
from barnraise.tui.steer import parse_span

app = typer.Typer(
    help="What a node may use, and when it may work.",
    epilog=examples(
        "limits get",
        "limits set --down 20MB/s --up 5MB/s --month 500GB",
        "limits set --when idle --idle-after 5m",
    ),
    no_args_is_help=True,
)

FOLDER = typer.Argument(None, metavar="DIR", help="A node's data folder (default: ~/.local/share/barnraise).")


@app.callback()
def group() -> None:
    """What a node may use, and when it may work."""


@app.command(
    "get",
    short_help="Show limits and rules, and what they make of this moment.",
    epilog=examples("limits get node-1 --json", "limits get     (this user's node)"),
)
def get(
    folder: Path | None = FOLDER,
    as_json: bool = typer.Option(
        False,
        "--json",
        help="One JSON object: bytes, bytes/s, fractions, seconds, degrees C; null where there is no limit.",
    ),
) -> None:
    """Show caps, quota, rules and limits, what is used, and what suspends work now."""
    if (place := resting(folder, make=False)) is not None:
        _show_at_rest(limits_at_rest(place), as_json, place)
        return
    state = read_folder(folder)
    _show(_limits(state), as_json, state)


@app.command(
    "set",
    short_help="Change limits and rules, at once and for good or for a while.",
    epilog=examples(
        "limits set --down 20MB/s --up 5MB/s --month 500GB",
        "limits set --when idle --hours 22:00-07:00 --not-while steam",
        "limits set --threads 8 --memory 80% --for 2h",
        "limits set --until none     (ends what was set for a while)",
    ),
)
def change(
    folder: Path | None = FOLDER,
    down: str | None = typer.Option(
        None, "--down", metavar="RATE", help="Most to receive, such as 20MB/s or 160Mbit/s; none: no cap."
    ),
    up: str | None = typer.Option(
        None, "--up", metavar="RATE", help="Most to send, serving others included; none: no cap."
    ),
    month: str | None = typer.Option(
        None, "--month", metavar="SIZE", help="Most a calendar month, up and down, such as 500GB; none: any."
    ),
    disk: str | None = typer.Option(
        None, "--disk", metavar="SIZE", help="Most disk for weights, such as 50GB; none: 20 GB."
    ),
    when: str | None = typer.Option(
        None, "--when", metavar="always|idle", help="Work always, or only while nobody uses the machine."
    ),
    idle_after: str | None = typer.Option(
        None, "--idle-after", metavar="SPAN", help="Nobody does after so long without input, such as 3m."
    ),
    hours: str | None = typer.Option(
        None, "--hours", metavar="SPANS", help="Work within these only: 22:00-07:00,12:00-13:00; any: always."
    ),
    on_battery: str | None = typer.Option(
        None, "--on-battery", metavar="yes|no", help="Whether to work on battery, too."
    ),
    not_while: list[str] | None = typer.Option(
        None, "--not-while", metavar="PROGRAM", help="Suspend while this runs (as ps names it); repeatable."
    ),
    allow_program: list[str] | None = typer.Option(
        None, "--allow-program", metavar="PROGRAM", help="Do not suspend for it any more; all: for none."
    ),
    threads: str | None = typer.Option(
        None, "--threads", metavar="N", help="The engine's threads; auto: half of the cores."
    ),
    threads_in_use: str | None = typer.Option(
        None, "--threads-in-use", metavar="N", help="While you use the machine; auto: half of the others."
    ),
    memory: str | None = typer.Option(
        None, "--memory", metavar="SHARE", help="Most of the RAM for the engine, such as 90%."
    ),
    memory_in_use: str | None = typer.Option(
        None, "--memory-in-use", metavar="SHARE", help="While you use the machine, such as 50%."
    ),
    gpu_memory: str | None = typer.Option(
        None, "--gpu-memory", metavar="SHARE", help="Most of the GPU's memory, such as 90%."
    ),
    gpu_temperature: str | None = typer.Option(
        None, "--gpu-temperature", metavar="C", help="The GPU rests from here on, such as 80; none: no limit."
    ),
    gpu_in_use: str | None = typer.Option(
        None, "--gpu-in-use", metavar="yes|no", help="Whether the GPU works while you use the machine."
    ),
    span: str | None = typer.Option(
        None, "--for", metavar="SPAN", help="All this holds for 45s, 90m, 2h or 1d12h only."
    ),
    until: str | None = typer.Option(
        None, "--until", metavar="TIME", help="All this holds until 07:30 only; none: what did so ends now."
    ),
    as_json: bool = typer.Option(False, "--json", help="What holds now, as one JSON object."),
) -> None:
    """Change limits and rules: at once, during transfers and work, and after a restart.

    Where no node runs they hold from its next start on.
    """
    asked: tuple[tuple[str, str, str | None, Callable[[str], Any]], ...] = (
        ("down", "--down", down, parse_rate),
        ("up", "--up", up, parse_rate),
        ("monthly", "--month", month, parse_size),
        ("disk", "--disk", disk, parse_size),
        ("when", "--when", when, parse_when),
        ("idle_s", "--idle-after", idle_after, parse_span),
        ("hours", "--hours", hours, parse_hours),
        ("on_battery", "--on-battery", on_battery, parse_yes),
        ("threads_idle", "--threads", threads, parse_threads),
        ("threads_in_use", "--threads-in-use", threads_in_use, parse_threads),
        ("memory_idle", "--memory", memory, parse_share),
        ("memory_in_use", "--memory-in-use", memory_in_use, parse_share),
        ("gpu_memory", "--gpu-memory", gpu_memory, parse_share),
        ("gpu_temperature", "--gpu-temperature", gpu_temperature, parse_degrees),
        ("gpu_in_use", "--gpu-in-use", gpu_in_use, parse_yes),
    )
    arguments = {
        name: _parsed(option, text, parse) for name, option, text, parse in asked if text is not None
    }
    arguments |= _moment(span, until, time.time())
    if not arguments and not not_while and not allow_program:
        raise typer.BadParameter("nothing to change: see 'barnraise limits set --help' for what there is")
    added = [_parsed("--not-while", name, parse_program) for name in not_while or []]
    place = resting(folder, make=True)
    note_disk("--disk", place or folder_or_default(folder), arguments.get("disk"))
    note_threads("--threads", arguments.get("threads_idle"))
    note_threads("--threads-in-use", arguments.get("threads_in_use"))
    limits = limits_at_rest(place) if place is not None else _limits(read_folder(folder))
    if not_while or allow_program:
        arguments["programs"] = _programs(limits.get("programs") or [], added, allow_program or [])
    if place is not None:
        _show_at_rest(limits_at_rest(place, arguments), as_json, place)
        return
    reply = send_command(_socket(folder), "limits", **arguments)
    after = read_folder(folder)
    _show(reply.get("limits") or _limits(after), as_json, after)


def _moment(span: str | None, until: str | None, now: float) -> dict[str, Any]:
    if span is not None and until is not None:
        raise typer.BadParameter("give --for or --until, not both")
    if span is not None:
        return {"until_ms": round((now + _parsed("--for", span, parse_span)) * 1000)}
    if until is None:
        return {}
    if until.strip().lower() in NOTHING:
        return {"until_ms": None}
    return {"until_ms": round(_parsed("--until", until, lambda text: parse_moment(text, now)) * 1000)}


def _programs(before: list[str], added: list[str], removed: list[str]) -> list[str]:
    gone = {name.casefold() for name in removed}
    kept = [name for name in before if "all" not in gone and name.casefold() not in gone]
    return kept + [name for name in dict.fromkeys(added) if name not in kept]


def _parsed(option: str, text: str, parse: Callable[[str], Any]) -> Any:
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


def _show_at_rest(limits: dict[str, Any], as_json: bool, place: Path) -> None:
    if not as_json:
        typer.echo(f"no node runs in {place}: this holds at its next start, but for what 'join' then says")
    _show(limits, as_json, {})


def _show(limits: dict[str, Any], as_json: bool, state: dict[str, Any]) -> None:
    if as_json:
        emit_json(limits)
    else:
        print_rows(list(rows(limits, time.time(), state)))
