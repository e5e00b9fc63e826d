"""``barnraise coordinator pause|resume|rollback|drain|stop|token|status``: steer a run that is served.

Each may be repeated: it says what holds, and changes nothing twice.
"""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from barnraise.protocol.control_client import read_state
from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.console import emit_json, examples
from barnraise.tui.coordinate import answering, command, seconds_of
from barnraise.tui.status import status

FOLDER = typer.Argument(..., metavar="DIR", help="The folder of a run that is being served.")
JSON = typer.Option(False, "--json", help="One JSON object.")
REASON = typer.Option(..., "--reason", metavar="TEXT", help="Why; volunteers see it.")
LOOK_EVERY_S = 0.25
TELL_EVERY_S = 2.0
STOP_WITHIN_S = 30.0

State = dict[str, Any]


def pause(folder: Path = FOLDER, reason: str = REASON, as_json: bool = JSON) -> None:
    """Lend no work and train on none until 'resume'; what is at hand is taken in and judged.

    The pause outlives restarts. Weights are served and receipts are given all the same.
    """
    _say(command(folder, "pause", reason=reason), as_json)


def resume(folder: Path = FOLDER, as_json: bool = JSON) -> None:
    """Go on after a pause, yours or a guard's. An alarm that is in force pauses the run no second time."""
    _say(command(folder, "resume"), as_json)


def rollback(
    folder: Path = FOLDER,
    version: int = typer.Argument(..., metavar="VERSION", min=0, help="The version to take up again."),
    reason: str = typer.Option(..., "--reason", metavar="TEXT", help="Why; the ledger shows it."),
    as_json: bool = JSON,
) -> None:
    """Publish an earlier version again, as the next one; what came between is given up.

    Weights and optimiser are those of VERSION. Version numbers go on, the ledger only grows, and
    credit stays; accepted work of the versions given up is not trained on. A pause stays in force.
    """
    reply = command(folder, "rollback", version=version, reason=reason)
    if as_json:
        emit_json(reply)
    else:
        typer.echo(f"version {reply['version']} will be version {reply['to']} again")


def drain(
    folder: Path = FOLDER,
    within: str = typer.Option("30m", "--within", metavar="TIME", help="Wait at most so long: 90m, 12h."),
    as_json: bool = JSON,
) -> None:
    """Lend no more, wait until all work at hand is in and judged, then stop the coordinator.

    Ctrl-C ends the waiting, and work is lent again.
    """
    seconds = seconds_of(within)
    if not _locked(folder):
        if as_json:
            emit_json({"stopped": True, "ran": False})
        else:
            typer.echo(f"no coordinator serves {folder}: nothing to drain")
        return
    try:  # Ctrl-C may come before the reply does
        command(folder, "drain", seconds=seconds)
        left = _wait_drained(folder, as_json)
    except BaseException:
        with suppress(BarnraiseError):
            command(folder, "drain", seconds=0)
        raise
    if left is not None:
        raise BarnraiseError(
            f"{left} units are still at work: the coordinator goes on; wait longer with --within (it was "
            f"{within}), or 'coordinator stop' (what is handed in later finds it when it is back)"
        )
    if as_json:
        emit_json({"stopped": True, "ran": True})
    else:
        typer.echo("stopped; 'barnraise coordinator run' goes on where it was")


def stop(folder: Path = FOLDER, as_json: bool = JSON) -> None:
    """End the coordinator cleanly, as Ctrl-C does. Nodes go on with their unit and come back."""
    ran = _stop(folder)
    if as_json:
        emit_json({"stopped": True, "ran": ran})
    else:
        typer.echo("stopped" if ran else f"no coordinator serves {folder}: nothing to stop")


def show_status(folder: Path = FOLDER, as_json: bool = JSON) -> None:
    """Show the state of the coordinator that serves a run."""
    status(folder, as_json)


def token(
    folder: Path = typer.Argument(..., metavar="DIR", help="A run folder; its coordinator may be running."),
    anew: bool = typer.Option(False, "--new", help="Make another; the one before counts no more."),
    as_json: bool = JSON,
) -> None:
    """Make the token with which programs steer the run over HTTP, and print the file that holds it.

    The token itself is never printed. Whoever can read the file can do what you can.
    """
    from barnraise.coordinator.folder import read_spec
    from barnraise.coordinator.web.tokens import make_token

    read_spec(folder)
    path, made = make_token(folder, anew=anew)
    if as_json:
        emit_json({"path": str(path), "made": made})
    else:
        typer.echo(path)
        typer.echo("a new token; the coordinator takes it from now on" if made else "as before", err=True)


def register(app: typer.Typer) -> None:
    """Add these commands to ``barnraise coordinator``."""
    app.command(
        short_help="Lend no work for now.",
        epilog=examples("coordinator pause ./my-run --reason 'moving the machine'"),
    )(pause)
    app.command(short_help="Go on after a pause.", epilog=examples("coordinator resume ./my-run"))(resume)
    app.command(
        short_help="Take an earlier version up again.",
        epilog=examples("coordinator rollback ./my-run 120 --reason 'the reward collapsed'"),
    )(rollback)
    app.command(
        short_help="Let the work at hand come in, then stop.",
        epilog=examples("coordinator drain ./my-run", "coordinator drain ./my-run --within 2h"),
    )(drain)
    app.command(short_help="End the coordinator.", epilog=examples("coordinator stop ./my-run"))(stop)
    app.command(
        short_help="Make the admin API's token.",
        epilog=examples("coordinator token ./my-run", "coordinator token ./my-run --new"),
    )(token)
    app.command(
        "status", short_help="Show its state.", epilog=examples("coordinator status ./my-run --json")
    )(show_status)


def _say(reply: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(reply)
    elif reply["paused"] is None:
        typer.echo("the run goes on")
    else:
        typer.echo(f"paused: {reply['paused']['reason']}")


def _state(folder: Path) -> State:
    with answering(folder) as socket:
        return read_state(socket)


def _wait_drained(folder: Path, as_json: bool) -> int | None:
    """None once the coordinator has ended; how many units are left if the draining is over and it has not."""
    told = 0.0
    while True:
        try:
            state = _state(folder)
        except BarnraiseError:
            _wait_ended(folder)
            return None
        if state["draining_until_ms"] is None:
            return int(state["leases_open"]) + int(state["queue"])
        if not as_json and time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            typer.echo(f"{state['leases_open']} units lent, {state['queue']} waiting for a verdict")
        time.sleep(LOOK_EVERY_S)


def _stop(folder: Path) -> bool:
    """Stop whoever serves ``folder``; whether somebody did."""
    try:
        command(folder, "stop")
    except BarnraiseError:
        if not _locked(folder):
            return False
    _wait_ended(folder)
    return True


def _wait_ended(folder: Path) -> None:
    until = time.monotonic() + STOP_WITHIN_S
    while _locked(folder):
        if time.monotonic() > until:
            raise BarnraiseError(
                f"the coordinator of {folder} does not end: see {folder / 'coordinator.log'}; kill -9 loses "
                "nothing that was acknowledged"
            )
        time.sleep(LOOK_EVERY_S)


def _locked(folder: Path) -> bool:
    """Whether a coordinator holds the run folder."""
    if not (folder / "spec.bin").is_file():
        raise BarnraiseError(f"{folder} is no run folder")
    try:
        with (folder / "lock").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except PermissionError as error:
        raise BarnraiseError(f"{folder} is somebody else's: use the account that serves it") from error
    except OSError:
        return True
    return False
