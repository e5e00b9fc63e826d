"""Amounts as people write them: ``20MB/s``, ``5 Mbit/s``, ``500GB``, ``none``."""

from __future__ import annotations

import re

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kmgt]i?|)(bits?|bytes?|b)", re.IGNORECASE)
_NOTHING = frozenset({"none", "off", "unlimited"})


def parse_size(text: str) -> int | None:
    """Bytes from ``500GB``, ``1.5 TiB``, ``40 Gbit``; None from ``none``.

    Raises:
        ValueError: anything else; the text says what would be understood.
    """
    text = text.strip()
    if text.lower() in _NOTHING:
        return None
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no amount: write it like 500GB, 1.5TiB or none")
    number, prefix, unit = match[1], match[2], match[3]
    if unit == "b" and prefix:
        raise ValueError(
            f"{text!r} may mean bits or bytes: write {prefix}B for bytes or {prefix}bit for bits"
        )
    factor = _BINARY.get(prefix.lower()) or _PREFIXES[prefix.lower()]
    return round(float(number) * factor / (8 if unit.lower().startswith("bi") else 1))


def parse_rate(text: str) -> int | None:
    """Bytes per second from ``20MB/s``, ``5 Mbit/s``, ``300 KiB/s``; None from ``none``.

    Raises:
        ValueError: anything else; the text says what would be understood.
    """
    text = text.strip()
    if text.lower() in _NOTHING:
        return None
    amount, slash, per = text.rpartition("/")
    in_seconds = slash and per.strip().lower() in ("s", "sec", "second")
    if not in_seconds or _AMOUNT.fullmatch(amount.strip()) is None:
        raise ValueError(f"{text!r} is no rate: write it like 20MB/s, 5Mbit/s or none")
    return parse_size(amount)
