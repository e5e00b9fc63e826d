"""Two themes, and the few tones that texts are shown in.

Colour says only how things stand: good, warn, bad; everything else is text, dim text or strong text.
"""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="barn-dark",
    primary="#d98e48",
    secondary="#8fa8bf",
    accent="#e0a15f",
    warning="#e0b341",
    error="#e06c5f",
    success="#86b36b",
    foreground="#d8d5cf",
    background="#16181a",
    surface="#1d2023",
    panel="#26292d",
    dark=True,
    variables={
        "border": "#4a4e54",
        "scrollbar": "#3a3f45",
        "scrollbar-hover": "#555b63",
        "scrollbar-active": "#6b727b",
        "scrollbar-background": "#16181a",
        "scrollbar-background-hover": "#16181a",
        "scrollbar-background-active": "#16181a",
        "border-blurred": "#33373c",
        "block-cursor-background": "#33424f",
        "block-cursor-foreground": "#f0ede7",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#262d33",
        "input-selection-background": "#d98e48 35%",
    },
)
LIGHT = Theme(
    name="barn-light",
    primary="#9a5518",
    secondary="#44607a",
    accent="#9a5518",
    warning="#8a6400",
    error="#b3261e",
    success="#3d6b25",
    foreground="#22252a",
    background="#faf8f4",
    surface="#f1eee8",
    panel="#e6e2da",
    dark=False,
    variables={
        "border": "#b9b3a8",
        "scrollbar": "#cfc9be",
        "scrollbar-hover": "#b4ada0",
        "scrollbar-active": "#9a9385",
        "scrollbar-background": "#faf8f4",
        "scrollbar-background-hover": "#faf8f4",
        "scrollbar-background-active": "#faf8f4",
        "border-blurred": "#d6d1c7",
        "block-cursor-background": "#d5dfe8",
        "block-cursor-foreground": "#16181a",
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": "#e3e7ea",
        "input-selection-background": "#9a5518 30%",
    },
)

TONES = {
    "": "",
    "dim": "$foreground 60%",
    "note": "not bold $foreground 60%",
    "strong": "bold",
    "good": "$success",
    "warn": "$warning",
    "bad": "bold $error",
    "accent": "$accent",
    "key": "bold $accent",
    "bar": "$primary",
    "track": "$border",
    "spark": "$secondary",
    "found": "bold reverse",
}
