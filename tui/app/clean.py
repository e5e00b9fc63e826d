"""What comes from a node came in part from strangers: names, reasons, messages.

Once here, a string holds no control character, no direction mark and no invisible one, and
has a bounded length; the app shows strings as they are and never reads markup in them.
"""

from __future__ import annotations

import math
from typing import Any

MOST_TEXT = 2000
MOST_ITEMS = 4096
MOST_DEPTH = 12
MOST_NUMBER = 2**63
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def clean_text(text: str) -> str:
    """``text`` with every character that is not printable replaced, cut to ``MOST_TEXT``."""
    if text.isascii() and text.isprintable() and len(text) <= MOST_TEXT:
        return text
    shown = "".join(c if c.isprintable() else (" " if c in "\n\t" else REPLACEMENT) for c in text[:MOST_TEXT])
    return shown if len(text) <= MOST_TEXT else shown[:-1] + "…"


def cleaned(value: Any, depth: int = 0) -> Any:
    """``value`` with clean strings, keys included, numbers within 2**63 (else None) and bounded lists.

    Other than plain values become their text.
    """
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if abs(value) <= MOST_NUMBER and math.isfinite(value) else None
    if depth >= MOST_DEPTH:
        return "…"
    if isinstance(value, dict):
        pairs = list(value.items())[:MOST_ITEMS]
        return {clean_text(str(key)): cleaned(item, depth + 1) for key, item in pairs}
    if isinstance(value, list | tuple):
        return [cleaned(item, depth + 1) for item in value[:MOST_ITEMS]]
    return clean_text(str(value))
