"""Whom to ask about the person on this system (``barnraise.node.presence``)."""

from __future__ import annotations

import sys

from barnraise.node.presence import Source
from barnraise.node.presence_tty import Terminals, logged_in


def open_sources(platform: str = sys.platform) -> list[Source]:
    """Every source that this system may have; one that cannot answer says so each time it is asked."""
    if platform == "win32":
        from barnraise.node.presence_other import Windows

        return [Windows()]
    if platform == "darwin":
        from barnraise.node.presence_other import Mac

        return [Mac(), Terminals()]
    if platform == "linux":
        from barnraise.node.presence_linux import Desktop

        desktop = Desktop()
        return [desktop, Terminals(users=lambda: {*logged_in(), *desktop.terminals()})]
    return [Terminals()]
