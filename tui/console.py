"""What every command shares on its way to a terminal: plain or rich, numbers for people, help's examples."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from barnraise.protocol.ledger_lines import short_id as short_id
from barnraise.protocol.wire import printable

MOST_ROW = 100_000  # characters of one line


def is_plain(plain: bool) -> bool:
    """Plain lines when asked, when stdout is no terminal, or when the terminal is dumb (R24)."""
    return plain or not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown")


def examples(*commands: str) -> str:
    """A help text's end: each command on a line of its own, unbroken, so that it can be copied."""
    head = "Example:" if len(commands) == 1 else "Examples:"
    return "\n".join(("\b", head, *(f"  barnraise {command}" for command in commands)))


def rounds(every_s: float | None) -> Iterator[None]:
    """Once, or again and again with so many seconds between, until Ctrl-C while it waits."""
    while True:
        yield
        if every_s is None:
            return
        try:
            time.sleep(every_s)
        except KeyboardInterrupt:
            return


def console() -> Console:
    """A console on stdout that honours NO_COLOR and a narrow or absent terminal."""
    return Console(highlight=False)


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Labels and texts in two columns: folded to a terminal's width, one line per row in a pipe.

    Some texts are strangers': no control character reaches the terminal.
    """
    rows = [(_harmless(label), _harmless(text)) for label, text in rows]
    if is_plain(False):
        width = max((len(label) for label, _ in rows), default=0)
        for label, text in rows:
            typer.echo(f"{label:{width}}  {text}".rstrip())
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    console().print(table)


def _harmless(text: str) -> str:
    return "\n".join(printable(line, MOST_ROW) for line in text.split("\n"))


def emit_json(value: Any) -> None:
    """One JSON object on one line of stdout; numbers that JSON has not (NaN, infinities) are null."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError:
        emit_json(json.loads(json.dumps(value), parse_constant=lambda name: None))
    else:
        typer.echo(text)


class Progress:
    """Lines about long work: one when the subject changes, and one every few seconds while it goes on."""

    def __init__(self) -> None:
        self._subject = ""
        self._shown = 0.0

    def __call__(self, subject: str, fraction: float) -> None:
        """``fraction`` of ``subject`` is done, 0 to 1."""
        now = time.monotonic()
        if subject == self._subject and now - self._shown < 5.0:
            return
        self._subject, self._shown = subject, now
        typer.echo(f"{subject}{f' ({fraction:.0%})' if 0 < fraction < 1 else ''}")


def size(count: float) -> str:
    """Bytes for people, decimal units: ``4.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < (1000 if unit == "B" else 999.95):  # what rounds to 1000.0 is one of the next unit
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
