"""What ``doctor`` says about one thing that it looked at."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal["ok", "note", "warning", "problem"]


class Finding(Struct, frozen=True):
    """One thing looked at. ``note`` is neutral; ``problem`` keeps a node from working."""

    subject: str
    status: Status
    text: str
    cure: str = ""


def gigabytes(size: float) -> str:
    """Bytes for a person: ``12.3 GB``."""
    return f"{size / 1e9:.1f} GB"
