"""From a node in the background to the person: the one question, then the app or plain lines.

Whatever is shown here is a viewer: closing it stops no work (R24).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from barnraise.node.consent import forget_typed_ahead
from barnraise.protocol.control_client import send_command
from barnraise.tui.background import Background, state_in
from barnraise.tui.console import print_rows
from barnraise.tui.log_file import follow, is_for_people, last_error, spoken

DECLINED = 5  # the node's exit code
CONNECT_S = 15.0
LEAVE_S = 10.0
LOOK_EVERY_S = 0.2

State = dict[str, Any]


def ask_once(data: Path, yes: bool, say: Callable[[str], None], started: Background | None) -> int | None:
    """Show the run's description and ask, if the node waits for consent; an exit code if it is over then.

    While the coordinator does not answer, the person is told why; after 15 s the question
    is left to the app, which asks it when it comes up.
    """
    patience, told = time.monotonic() + CONNECT_S, ""
    while True:
        state = state_in(data)
        if state is None:
            if started is None or (code := started.wait(LOOK_EVERY_S)) is None:
                if time.monotonic() > patience:
                    return None  # it crashed and starts again
                continue
            complain(last_error(data) or "the node has ended; see its log")
            return code
        if state.get("run"):
            return None
        consent = state.get("consent")
        if consent:
            return None if answer(data, consent, yes) else _declined(data, started)
        reason = str(state.get("reason") or "")
        if reason and reason != told and time.monotonic() > patience - CONNECT_S + 2.0:
            told = reason
            say(reason)
        if time.monotonic() > patience:
            say(f"the node goes on trying in the background; 'barnraise leave{_folder(data)}' ends it")
            return None
        time.sleep(LOOK_EVERY_S)


def answer(data: Path, consent: dict[str, Any], yes: bool) -> bool:
    """Put the question at this terminal and send the answer; whether it was yes."""
    print_rows([(str(label), str(text)) for label, text in consent["fields"]])
    if not yes:
        forget_typed_ahead()
    agreed = yes or typer.confirm("Join this run?", default=True)
    send_command(data / "control.sock", "agree" if agreed else "decline", run_id=consent["run_id"])
    return agreed


def _declined(data: Path, started: Background | None) -> int:
    if started is not None:
        started.wait(LEAVE_S)
    complain("you chose not to join; nothing was fetched")
    return DECLINED


def complain(text: str) -> None:
    """One line on stderr, as every error of the command line."""
    typer.echo(f"barnraise: {' '.join(text.split())}", err=True)


def show(data: Path, started: Background | None) -> int:
    """The app on this node until it is closed; the node's exit code if it has ended by then, else the app's.

    Where the app is not installed the node's plain lines take its place.
    """
    code = _app(data)
    ended = None if started is None else started.ended()
    return code if ended is None else ended


def _app(data: Path) -> int:
    try:
        from barnraise.tui.app import run
    except ImportError as error:
        if not (error.name or "").startswith(("textual", "barnraise.tui.app")):
            raise
        complain(
            "the terminal app needs the package textual; plain lines instead (Ctrl-C stops showing them)"
        )
        return lines(data)
    return run(data)


def lines(data: Path, as_json: bool = False) -> int:
    """Print what the node says until it ends or Ctrl-C is pressed; work goes on then."""
    try:
        for record in follow(data, 10, lambda: state_in(data) is None):
            if is_for_people(record):
                typer.echo(spoken(record, as_json))
    except KeyboardInterrupt:
        where = _folder(data)
        typer.echo(
            f"the node works on: 'barnraise status{where}' shows it, 'barnraise leave{where}' ends it",
            err=True,
        )
    sys.stdout.flush()
    return 0


def _folder(data: Path) -> str:
    from barnraise.node.config import default_data_path

    return "" if data == default_data_path() else f" {data}"
