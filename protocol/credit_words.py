"""Credit as a person reads it: in millions of useful operations, Mflop, and units above that."""

from __future__ import annotations

_UNITS = ("Mflop", "Gflop", "Tflop", "Pflop", "Eflop")


def credit_words(mflop: float) -> str:
    """``12 Mflop``, ``48.2 Gflop``; whole below a thousand, one digit after the point above."""
    amount = mflop
    for unit in _UNITS:
        if abs(amount) < (1000 if unit == "Mflop" else 999.95) or unit == "Eflop":
            return f"{amount:,.0f} {unit}" if unit == "Mflop" else f"{amount:,.1f} {unit}"
        amount /= 1000
    raise AssertionError
