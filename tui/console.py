"""What every command shares on its way to a terminal: plain or rich, numbers for people."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import typer
from rich.console import Console


def is_plain(plain: bool) -> bool:
    """Plain lines when asked, when stdout is no terminal, or when the terminal is dumb (R24)."""
    return plain or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"


def console() -> Console:
    """A console on stdout that honours NO_COLOR and a narrow or absent terminal."""
    return Console(highlight=False)


def emit_json(value: Any) -> None:
    """One JSON object on one line of stdout."""
    typer.echo(json.dumps(value, sort_keys=True, separators=(",", ":")))


def size(count: float) -> str:
    """Bytes for people, decimal units: ``4.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for people: ``47s``, ``3m 05s``, ``2h 10m``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
