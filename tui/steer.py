"""``barnraise pause | resume | finish | leave``: a person's wishes, obeyed within two seconds (R13).

Each may be repeated: it says what holds, and changes nothing twice. ``finish`` and ``leave``
succeed where nothing runs any more; ``pause`` and ``resume`` have nothing to act on then.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from barnraise.node.supervise import read_supervisor
from barnraise.protocol.control_client import send_command
from barnraise.protocol.errors import BarnraiseError, PeerError
from barnraise.tui.background import state_in, waiting_in
from barnraise.tui.console import duration, emit_json, examples
from barnraise.tui.status import folder_or_default, read_folder

PAUSE_EXAMPLES = examples("pause", "pause --for 2h", "pause node-1 --for 1d12h --json")
RESUME_EXAMPLES = examples("resume", "resume node-1 --json")
FINISH_EXAMPLES = examples("finish", "finish node-1 --wait")
LEAVE_EXAMPLES = examples("leave", "leave node-1 --json")

EFFECT_S = 5.0  # longer than the two seconds, so that a breach is seen and not cut off
END_S = 15.0
LOOK_EVERY_S = 0.05
_SPAN = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m(?:in)?)?(?:(\d{1,8})s?)?")

FOLDER = typer.Argument(None, metavar="DIR", help="A node's data folder (default: ~/.local/share/barnraise).")
JSON = typer.Option(False, "--json", help="One JSON object.")

State = dict[str, Any]


def parse_span(text: str) -> float:
    """Seconds from ``2h``, ``90m``, ``1d12h``, ``45s``, ``600``.

    Raises:
        ValueError: anything else, or nothing at all.
    """
    match = _SPAN.fullmatch(text.strip().lower().replace(" ", ""))
    if match is None or not any(match.groups()):
        raise ValueError(f"{text!r} is no span of time: write it like 45s, 90m, 2h or 1d12h")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    total = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if total <= 0:
        raise ValueError(f"{text!r} is no time at all: write a span like 45s, 90m, 2h or 1d12h")
    return total


def pause(
    folder: Path | None = FOLDER,
    span: str | None = typer.Option(
        None, "--for", metavar="SPAN", help="Resume by itself after 45s, 90m, 2h or 1d12h (default: never)."
    ),
    as_json: bool = JSON,
) -> None:
    """Stop work and downloads now.

    The engine is idle within two seconds. A rollout unit goes back to the coordinator, a block unit is
    kept and goes on later. The pause outlives restarts of the node and of the machine.
    """
    arguments: dict[str, Any] = {}
    if span is not None:
        try:
            arguments["seconds"] = parse_span(span)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--for") from error
    _steer(folder, "pause", arguments, _is_paused, as_json)


def resume(folder: Path | None = FOLDER, as_json: bool = JSON) -> None:
    """Take up work again; also takes back 'finish'."""
    _steer(folder, "resume", {}, lambda state: state.get("mode") == "run", as_json)


def finish(
    folder: Path | None = FOLDER,
    wait: bool = typer.Option(False, "--wait", help="Return when the node has ended."),
    as_json: bool = JSON,
) -> None:
    """Complete the unit at work, take no more, then end the node."""
    place = folder_or_default(folder)
    if not _runs(place):
        _nothing_runs(place, as_json)
        return
    _steer(folder, "finish", {}, lambda state: state.get("mode") == "finish", as_json, ends=True)
    while wait and _runs(place):
        time.sleep(LOOK_EVERY_S * 4)


def leave(folder: Path | None = FOLDER, as_json: bool = JSON) -> None:
    """End the node now; its unit goes back to the coordinator."""
    place = folder_or_default(folder)
    if not _runs(place):
        _nothing_runs(place, as_json)
        return
    began = time.monotonic()
    pid = (state_in(place) or {}).get("pid")
    told = read_supervisor(place)
    try:
        send_command(place / "control.sock", "leave")
    except (PeerError, OSError):
        if told is not None:  # it crashed, and waits for its next start
            _signal(told["pid"])
    while _runs(place) or (isinstance(pid, int) and _lives(pid)):
        if time.monotonic() - began > END_S:
            raise BarnraiseError(
                f"the node in {place} has not ended within {END_S:.0f} s; see {place / 'node.log'}"
            )
        time.sleep(LOOK_EVERY_S)
    seconds = time.monotonic() - began
    if as_json:
        emit_json({"ok": True, "running": False, "text": "left", "seconds": round(seconds, 3)})
    else:
        typer.echo(f"left: the node has ended ({seconds:.1f} s)")


def _steer(
    folder: Path | None,
    name: str,
    arguments: dict[str, Any],
    reached: Callable[[State], bool],
    as_json: bool,
    ends: bool = False,
) -> None:
    """Send a command and wait until it has taken effect."""
    place = folder_or_default(folder)
    state = _node(place)
    began = time.monotonic()
    reply = send_command(place / "control.sock", name, **arguments)
    if not reply.get("ok", True):
        raise BarnraiseError(str(reply.get("text") or f"the node refused to {name}"))
    state = state_in(place) or ({} if ends else state)  # as it is after the command
    while state and not reached(state):
        if time.monotonic() - began > EFFECT_S:
            raise BarnraiseError(
                f"the node took the command, but after {EFFECT_S:.0f} s it is still "
                f"{state.get('state', '?')}; see {place / 'node.log'}"
            )
        time.sleep(LOOK_EVERY_S)
        state = state_in(place) or ({} if ends else state)
    seconds = time.monotonic() - began
    if as_json:
        shown = {key: state.get(key) for key in ("state", "reason", "mode", "until_ms")}
        text = reply.get("text", "")
        emit_json({"ok": True, "running": bool(state), "text": text, "seconds": round(seconds, 3), **shown})
        return
    until = state.get("until_ms") if name == "pause" else None
    left = f"; resumes in {duration(max(0.0, until / 1000 - time.time()))}" if until else ""
    typer.echo(f"{reply.get('text') or name}{left} ({seconds:.1f} s)")


def _is_paused(state: State) -> bool:
    return state.get("mode") == "pause" and state.get("state") == "paused"


def _node(place: Path) -> State:
    """The state of the node that runs in a folder.

    Raises:
        BarnraiseError: none does, or it is a coordinator.
    """
    if state_in(place) is None and (waits := waiting_in(place)):
        raise BarnraiseError(f"{waits}; 'barnraise leave' ends it")
    state = read_folder(place)
    if state.get("kind") != "node":
        raise BarnraiseError(f"{place} is a run folder; its coordinator is ended with Ctrl-C")
    return state


def _runs(place: Path) -> bool:
    state = state_in(place)
    if state is not None and state.get("kind") != "node":
        raise BarnraiseError(f"{place} is a run folder; its coordinator is ended with Ctrl-C")
    return state is not None or read_supervisor(place) is not None


def _nothing_runs(place: Path, as_json: bool) -> None:
    if as_json:
        emit_json({"ok": True, "running": False, "text": "no node runs here"})
    else:
        typer.echo(f"no node runs in {place}")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
