"""The terminal application: a viewer of one node. ``run(folder)`` is all that others call."""

from barnraise.tui.app.app import run

__all__ = ["run"]
