"""Moments in words, and back: milliseconds since the Unix epoch, shown in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_AGO = re.compile(r"(\d{1,9})\s*([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def shown_moment(at_ms: int, precision: str = "milliseconds") -> str:
    """ISO 8601 in UTC; whoever signs a ledger may write any number, so also what no calendar has."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec=precision)
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"


def minute(at_ms: int) -> str:
    """``2026-01-02 03:04`` in UTC."""
    return shown_moment(at_ms, "minutes").removesuffix("+00:00").replace("T", " ")


def read_moment(text: str, now_ms: int) -> int:
    """A moment in ms since the epoch: ISO 8601 (UTC unless it says otherwise), or how long ago: 90m, 2d, 1w.

    Raises:
        ValueError: neither; the message says what is.
    """
    plain = text.strip()
    if match := _AGO.fullmatch(plain):
        return now_ms - int(match[1]) * _UNIT_S[match[2]] * 1000
    try:
        moment = datetime.fromisoformat(plain)
        aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        raise ValueError("a moment is 2026-01-31, 2026-01-31T18:00, or how long ago: 90m, 2d, 1w") from None
