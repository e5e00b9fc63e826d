"""Numbers and moments as a person reads them on the page."""

from __future__ import annotations

from datetime import UTC, datetime

_FLOPS = ((10**12, "EFLOP"), (10**9, "PFLOP"), (10**6, "TFLOP"), (10**3, "GFLOP"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_LONG = ((86_400, "d"), (3600, "h"), (60, "min"))


def flops(mflop: float) -> str:
    """Credit in a unit that keeps it short: ``3.21 GFLOP`` for 3210."""
    for size, name in _FLOPS:
        if abs(mflop) >= size:
            return f"{_three(mflop / size)} {name}"
    return f"{_three(mflop)} MFLOP"


def size(count: float) -> str:
    """Bytes, in powers of 1024."""
    for unit, name in _BYTES:
        if count >= unit:
            return f"{_three(count / unit)} {name}"
    return f"{count:.0f} B"


def number(value: float | None, digits: int = 3) -> str:
    """With thousands separated; a dash for what is not there."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if float(value).is_integer() and digits != 0 else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """A value between 0 and 1 with three digits, so that 1 is not mistaken for a count."""
    return "–" if value is None else f"{value:.3f}"


def rate(value: float) -> str:
    """How many a minute or a second."""
    return _three(value)


def length(seconds: float) -> str:
    """``4.2 s``, ``3 min``, ``5 h``, ``12 d``."""
    for unit, name in _LONG:
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def iso(at_ms: int) -> str:
    """For ``<time datetime>``: what no calendar has is the epoch there."""
    return _moment(at_ms).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(at_ms: int) -> str:
    """``2026-01-02 03:04:05``, in UTC."""
    return _moment(at_ms).strftime("%Y-%m-%d %H:%M:%S")


def _moment(at_ms: int) -> datetime:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime(1970, 1, 1, tzinfo=UTC)


def _three(value: float) -> str:
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
