"""Whom to ask about the person on this system (``barnraise.node.presence``)."""

from __future__ import annotations

import os

from barnraise.node.presence import Source
from barnraise.node.presence_tty import Terminals


def open_sources() -> list[Source]:
    """Every source that this system may have; one that cannot answer says so each time it is asked."""
    if os.name != "posix":
        return []
    return [Terminals()]
