"""The command palette: everything that the app can do, by name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from textual.app import SystemCommand

from barnraise.tui.app.screen import TABS
from barnraise.tui.console import duration

if TYPE_CHECKING:
    from barnraise.tui.app.app import NodeApp


def commands(app: NodeApp) -> Iterable[SystemCommand]:
    """Each with its name, what it does, and the call."""
    for name in TABS:
        go = partial(app.switch_mode, name)
        yield SystemCommand(f"Go to {name.capitalize()}", "Show this screen", go)
    yield SystemCommand("Pause", "Stop the work until you resume", app.action_pause)
    for seconds in (1800, 3600, 7200, 28_800):
        rest = partial(app.order, "pause", seconds=seconds)
        yield SystemCommand(f"Pause for {duration(seconds)}", "Stop the work, then go on", rest)
    yield SystemCommand("Pause for ...", "Stop the work for a time of your choice", app.action_pause_for)
    yield SystemCommand("Resume", "Go on working; takes a finish back, too", app.action_resume)
    yield SystemCommand("Finish", "Complete the unit at work, take no more, then end", app.action_finish)
    yield SystemCommand("Leave", "Give the unit back and end the node now", app.action_leave)
    yield SystemCommand("Dark or light", "Change the theme", app.action_shade)
    yield SystemCommand("Help", "All keys, and what the words mean", app.action_help)
    yield SystemCommand("Quit", "Close this; the node goes on", app.action_detach)
