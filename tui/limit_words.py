"""A node's limits as people write and read them (``barnraise limits``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from barnraise.tui.console import duration, size

Row = tuple[str, str]

_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%?")
_DEGREES = re.compile(r"([0-9]{2,3}) ?(?:°? ?C)?", re.IGNORECASE)
_TIME = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")
_HOURS = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])-([01]?[0-9]|2[0-4]):([0-5][0-9])")
NOTHING = frozenset({"none", "off", "any"})


def parse_share(text: str) -> float:
    """A fraction from ``50%``, above 0 and at most 100.

    Raises:
        ValueError: anything else.
    """
    match = _SHARE.fullmatch(text.strip())
    value = float(match[1]) / 100 if match else 0.0
    if not 0 < value <= 1:
        raise ValueError(f"{text!r} is no share: write it like 50%, above 0 and at most 100")
    return value


def parse_degrees(text: str) -> float | None:
    """Degrees C from ``80`` or ``80C``; None from ``none``.

    Raises:
        ValueError: anything else, or not 30 to 120.
    """
    if text.strip().lower() in NOTHING:
        return None
    match = _DEGREES.fullmatch(text.strip())
    if match is None or not 30 <= int(match[1]) <= 120:
        raise ValueError(f"{text!r} is no temperature: 30 to 120 degrees Celsius, or none")
    return float(match[1])


def parse_threads(text: str) -> int | None:
    """A number of threads; None, which is half of the cores, from ``auto``.

    Raises:
        ValueError: anything else.
    """
    text = text.strip().lower()
    if text in ("auto", "none"):
        return None
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= 1024:
        raise ValueError(f"{text!r} is no number of threads: 1 to 1024, or auto")
    return int(text)


def parse_hours(text: str) -> list[str]:
    """Spans from ``22:00-07:00,12:00-13:00``; none from ``any``.

    Raises:
        ValueError: anything else.
    """
    if text.strip().lower() in NOTHING:
        return []
    spans: list[str] = []
    for part in text.split(","):
        match = _HOURS.fullmatch(part.strip())
        if match is None or (match[3] == "24" and match[4] != "00"):
            raise ValueError(f"{part.strip()!r} are no hours: write them like 22:00-07:00, or any")
        if (int(match[1]), match[2]) == (int(match[3]) % 24, match[4]) and match[3] != "24":
            raise ValueError(f"{part.strip()!r} begins when it ends: write hours like 22:00-07:00, or any")
        spans.append(f"{int(match[1]):02d}:{match[2]}-{int(match[3]):02d}:{match[4]}")
    return spans


def parse_when(text: str) -> str:
    """``always`` or ``idle``.

    Raises:
        ValueError: neither.
    """
    when = text.strip().lower()
    if when not in ("always", "idle"):
        raise ValueError(f"{text!r} is no rule: always, or idle (only while nobody uses the machine)")
    return when


def parse_program(text: str) -> str:
    """A program's name as ``ps`` writes it.

    Raises:
        ValueError: empty, or over 64 characters.
    """
    name = text.strip()
    if not 1 <= len(name) <= 64:
        raise ValueError(f"{text!r} is no program's name: write it as ps does, in 1 to 64 characters")
    return name


def parse_yes(text: str) -> bool:
    """Yes or no.

    Raises:
        ValueError: neither.
    """
    known = {"yes": True, "no": False, "on": True, "off": False, "true": True, "false": False}
    try:
        return known[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{text!r} is neither yes nor no") from None


def parse_moment(text: str, now: float) -> float:
    """Seconds since the epoch from ``07:30`` (the next one) or ``2026-03-01 07:30``, local time.

    Raises:
        ValueError: anything else, or a moment that has passed.
    """
    match = _TIME.fullmatch(text.strip())
    if match is not None:
        today = datetime.fromtimestamp(now)
        moment = today.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
        if moment.timestamp() <= now:
            moment += timedelta(days=1)
        return moment.timestamp()
    try:
        found = datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text!r} is no time: write it like 07:30 or '2026-03-01 07:30'") from None
    if found <= now:
        raise ValueError(f"{text!r} has passed")
    return found


def rows(limits: dict[str, Any], now: float, state: dict[str, Any] | None = None) -> Iterator[Row]:
    """The limits of a node's state tree as rows of label and text; ``now``: seconds (UTC).

    ``state``: the whole tree, for what the rules make of it at this moment.
    """
    yield "down", _rate(limits.get("down"))
    yield "up", _rate(limits.get("up"))
    yield from _month(limits, now)
    if "when" not in limits:
        return  # a node of an earlier version
    yield "disk", f"at most {size(limits['disk'])} for weights"
    idle = f"{duration(limits.get('idle_s', 0))} without input"
    yield (
        "works",
        f"while nobody uses the machine (after {idle})" if limits["when"] == "idle" else "at any time",
    )
    yield "hours", ", ".join(limits.get("hours") or []) or "any"
    yield "on battery", _yes(limits.get("on_battery"))
    yield "not while", ", ".join(limits.get("programs") or []) or "-"
    threads = f"{limits.get('threads_idle')}, {limits.get('threads_in_use')} while you use the machine"
    yield "threads", threads
    memory = f"{_share(limits.get('memory_idle'))}, {_share(limits.get('memory_in_use'))}"
    yield "memory", f"{memory} while you use the machine"
    yield "GPU", f"{_share(limits.get('gpu_memory'))} of its memory, {_heat(limits.get('gpu_temperature'))}"
    yield "GPU in use", "yes" if limits.get("gpu_in_use") else "no: it rests while you use the machine"
    until = limits.get("until_ms")
    if until is not None:
        what = ", ".join(limits.get("for_now") or []) or "part of this"
        yield "for now", f"{what}: ends in {duration(max(0.0, until / 1000 - now))}"
    yield from _at_present(state or {}, now)


def _month(limits: dict[str, Any], now: float) -> Iterator[Row]:
    used, most = limits.get("monthly_used", 0), limits.get("monthly")
    if most is None:
        yield "month", f"{size(used)} used, no quota"
        return
    yield "month", f"{size(used)} of {size(most)} used ({100 * used / max(most, 1):.0f} %)"
    until = limits.get("spent_until_ms")
    if until is not None:
        yield "paused", f"the quota is spent; it is renewed in {duration(max(0.0, until / 1000 - now))}"


def _at_present(state: dict[str, Any], now: float) -> Iterator[Row]:
    presence = state.get("presence")
    if presence:
        there = "in use" if presence.get("in_use") else "idle"
        if presence.get("source") in (None, "none"):
            there = "not known"
        yield "you", f"{there}; {presence.get('text', '')}"
    for cause in state.get("suspended") or ():
        until = cause.get("until_ms")
        ends = "" if until is None else f", {duration(max(0.0, until / 1000 - now))} more"
        yield "suspended", f"{cause.get('reason', '')}{ends}; {cause.get('cure', '')}"


def _rate(rate: float | None) -> str:
    return "no cap" if rate is None else f"{size(rate)}/s ({rate * 8 / 1e6:.2f} Mbit/s)"


def _share(fraction: Any) -> str:
    return f"{100 * fraction:.0f} %" if isinstance(fraction, int | float) else "-"


def _heat(limit: Any) -> str:
    return "at any temperature" if limit is None else f"below {limit:.0f} C"


def _yes(value: Any) -> str:
    return "yes" if value else "no"
