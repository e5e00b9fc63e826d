"""Terminals that show ASCII only: the last thing before the screen puts every other character in ASCII.

Textual draws borders, scroll bars and icons of its own, so replacing only our own
characters would not be enough.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

LIMITED = ("linux", "vt100", "vt102", "vt220", "ansi", "sun", "dumb", "unknown")

_SAME = {
    "─╌╍┄┅┈┉╴╶╸╺": "-",
    "━═": "=",
    "│┃┆┇┊┋║╎╏╵╷╹╻▏▎▍▌▐▕": "|",
    "┌┐└┘├┤┬┴┼╭╮╰╯┏┓┗┛┣┫┳┻╋╔╗╚╝╠╣╦╩╬┡┢┩┪╇╈┠┨┯┷┿": "+",
    "█▉▊▋▓▒": "#",
    "░": ".",
    "▁": "_",
    "▂": ".",
    "▃": "-",
    "▄": "=",
    "▅": "+",
    "▆": "*",
    "▇": "%",
    "▀▔": '"',
    "●◉◆■": "*",
    "○◌◇□": "o",
    "·•∙": ".",
    "…": ".",
    "–—−‐‑": "-",
    "→▶►▸⏵›": ">",
    "←◀◄◂‹": "<",
    "↑▲⏶": "^",
    "↓▼⏷": "v",
    "‘’": "'",
    "“”„": '"',
    "×": "x",
    "✓✔": "+",
    "✗✘✕⭘": "x",
    "°": " ",
    "µμ": "u",
    "\N{REPLACEMENT CHARACTER}": "?",
    "\N{NO-BREAK SPACE}": " ",
}
_TABLE = {char: to for chars, to in _SAME.items() for char in chars}


@lru_cache(8192)
def to_ascii(text: str) -> str:
    """``text`` in ASCII, taking as many cells: what has no likeness becomes ``?``."""
    if text.isascii():
        return text
    return "".join(c if c.isascii() else _TABLE.get(c, "?" * cell_len(c)).ljust(cell_len(c)) for c in text)


class AsciiFilter(LineFilter):
    """Lets nothing but ASCII through."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Replace characters; styles stay."""
        return [
            segment if segment.control else Segment(to_ascii(segment.text), segment.style)
            for segment in segments
        ]


def needs_ascii(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the locale has no UTF-8, or the terminal's font no block characters.

    Python sets ``LC_CTYPE=C.UTF-8`` in a process that began without a locale; that says nothing
    about the terminal.
    """
    env = os.environ if environment is None else environment
    if env.get("TERM", "") in LIMITED:
        return True
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = env.get(name, "").lower().replace("-", "")
        if name == "LC_CTYPE" and value == "c.utf8" and env.get("LANG", "") in ("", "C", "POSIX"):
            return True
        if value:
            return "utf8" not in value
    return True
