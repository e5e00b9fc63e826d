"""The limits that a person may set: how each is shown, and how what they write is read.

What is read is what the daemon's command ``limits`` takes; the daemon judges again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from barnraise.tui.amounts import parse_rate, parse_size
from barnraise.tui.app.view import clock, is_moment, number
from barnraise.tui.console import duration, size
from barnraise.tui.limit_words import parse_moment, parse_threads

_SPAN = re.compile(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m(?:in)?)?(?:([0-9]{1,8})s)?")
_SECONDS = (86_400, 3600, 60, 1)
_HOURS = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])-([01]?[0-9]|2[0-4]):([0-5][0-9])")
_WHILE = re.compile(r"(.*)\b(for|until)\s+(\S.*)", re.IGNORECASE)
MOST_PAUSE_S = 366 * 86_400


def parse_duration(text: str) -> int:
    """Seconds from ``90s``, ``30m``, ``2h``, ``1h 30m``, ``1d``; a bare number is seconds.

    Raises:
        ValueError: anything else, nothing at all, or more than a year.
    """
    pieces = text.lower().replace(" ", "")
    pieces += "s" if pieces.isdecimal() else ""
    match = _SPAN.fullmatch(pieces)
    if match is None or not pieces:
        raise ValueError(f"{text!r} is no time: write it like 30m, 2h or 1h30m")
    total = sum(int(count or 0) * seconds for count, seconds in zip(match.groups(), _SECONDS, strict=True))
    if not 0 < total <= MOST_PAUSE_S:
        raise ValueError("write a time like 30m, 2h or 1h30m, at most a year")
    return total


@dataclass(frozen=True)
class Field:
    """One limit: its key in the state tree, what it is called, what may be written, and how it is shown.

    ``choices``: Enter goes to the next one instead of asking.
    """

    key: str
    name: str
    hint: str
    read: Callable[[str], Any]
    show: Callable[[Any], str]
    about: str
    choices: tuple[Any, ...] = ()

    def next(self, value: Any) -> Any:
        """The choice after ``value``."""
        where = self.choices.index(value) if value in self.choices else -1
        return self.choices[(where + 1) % len(self.choices)]


def _share(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%?", text.strip())
    value = float(match[1]) if match else 0.0
    if not 0 < value <= 100:
        raise ValueError(f"{text!r} is no share: write it like 50 %, above 0 and at most 100")
    return value / 100


def _degrees(text: str) -> float | None:
    text = text.strip().lower()
    if text in ("none", "off"):
        return None
    match = re.fullmatch(r"([0-9]{2,3}) ?(?:°? ?c)?", text)
    if match is None or not 30 <= int(match[1]) <= 120:
        raise ValueError(f"{text!r} is no temperature: 30 to 120 (degrees Celsius), or none")
    return float(match[1])


def _hours(text: str) -> list[str]:
    if text.strip().lower() in ("", "any", "always", "none"):
        return []
    spans = []
    for part in text.replace(";", ",").split(","):
        match = _HOURS.fullmatch(part.replace(" ", "").replace("–", "-"))
        if match is None or (match[3] == "24" and match[4] != "00"):
            raise ValueError(f"{part.strip()!r} are no hours: write them like 22:00-07:00, or any")
        spans.append(f"{int(match[1]):02d}:{match[2]}-{int(match[3]):02d}:{match[4]}")
    return spans


def _programs(text: str) -> list[str]:
    if text.strip().lower() in ("", "none"):
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if any(len(name) > 64 for name in names):
        raise ValueError("a program's name has at most 64 characters; separate names by commas")
    return names


def _rate(value: Any) -> str:
    return "no cap" if value is None else f"{size(number(value))}/s"


def _yes(value: Any) -> str:
    return "yes" if value else "no"


def _percent(value: Any) -> str:
    return f"{number(value) * 100:.0f} %"


def _listed(none: str) -> Callable[[Any], str]:
    return lambda value: ", ".join(map(str, value)) if isinstance(value, list) and value else none


def _or(none: str, form: str) -> Callable[[Any], str]:
    return lambda value: none if value is None else form.format(number(value))


def _no_text(text: str) -> Any:
    raise ValueError("Enter goes to the next choice")


def for_a_while(field: Field, now: float, value: Any) -> Callable[[str], tuple[Any, int]]:
    """Reads ``20MB/s for 2h`` or ``none until 07:30``: a value, and when (ms since the epoch) it ends.

    ``now``: s since the epoch. Of a limit with choices the value may be left out: the one after ``value``.
    """

    def read(text: str) -> tuple[Any, int]:
        match = _WHILE.fullmatch(text.strip())
        if match is None:
            raise ValueError("say for how long, too: ... for 2h, or ... until 07:30")
        wanted, word, time = match[1].strip(), match[2].lower(), match[3]
        end = now + parse_duration(time) if word == "for" else parse_moment(time, now)
        if not field.choices:
            return field.read(wanted), round(end * 1000)
        named = {field.show(choice).removeprefix("when "): choice for choice in field.choices}
        if wanted and wanted.lower() not in named:
            raise ValueError(f"{wanted!r} is none of {', '.join(named)}")
        return named[wanted.lower()] if wanted else field.next(value), round(end * 1000)

    return read


FIELDS = (
    Field("down", "download", "20MB/s, 160Mbit/s or none", parse_rate, _rate, "most that is received"),
    Field(
        "up", "upload", "5MB/s, 40Mbit/s or none", parse_rate, _rate, "most that is sent, to peers as well"
    ),
    Field(
        "monthly",
        "month",
        "500GB or none",
        parse_size,
        lambda value: "any amount" if value is None else size(number(value)),
        "traffic in a calendar month, up and down; then the node pauses",
    ),
    Field(
        "disk",
        "disk",
        "20GB",
        parse_size,
        lambda value: "-" if value is None else size(number(value)),
        "most disk for weights",
    ),
    Field(
        "when",
        "run",
        "always or idle",
        _no_text,
        lambda value: "when idle" if value == "idle" else "always",
        "idle: only while nobody uses this machine",
        ("always", "idle"),
    ),
    Field(
        "idle_s",
        "idle after",
        "3m",
        parse_duration,
        lambda value: duration(number(value)),
        "without key or mouse, nobody uses this machine",
    ),
    Field(
        "hours",
        "hours",
        "22:00-07:00, 12:00-13:00 or any",
        _hours,
        _listed("any"),
        "local time in which work is done",
    ),
    Field("on_battery", "on battery", "", _no_text, _yes, "work on battery, too", (False, True)),
    Field(
        "gpu_in_use", "GPU in use", "", _no_text, _yes, "use the GPU while you use the machine", (False, True)
    ),
    Field(
        "programs",
        "not beside",
        "steam, blender or none",
        _programs,
        _listed("none"),
        "no work while one of these programs runs",
    ),
    Field(
        "threads_idle",
        "threads, idle",
        "8 or auto",
        parse_threads,
        _or("auto", "{:.0f}"),
        "of the engine, while nobody uses the machine",
    ),
    Field(
        "threads_in_use",
        "threads, in use",
        "4 or auto",
        parse_threads,
        _or("auto", "{:.0f}"),
        "of the engine, while you use the machine",
    ),
    Field(
        "memory_idle", "RAM, idle", "90 %", _share, _percent, "most of the RAM, while nobody uses the machine"
    ),
    Field(
        "memory_in_use", "RAM, in use", "50 %", _share, _percent, "most of the RAM, while you use the machine"
    ),
    Field("gpu_memory", "GPU memory", "90 %", _share, _percent, "most of a GPU's memory"),
    Field(
        "gpu_temperature",
        "GPU rests at",
        "85 or none",
        _degrees,
        _or("any heat", "{:.0f} °C"),
        "hotter, the GPU rests until it is cool",
    ),
)


def shown_fields(limits: Mapping[str, Any]) -> tuple[Field, ...]:
    """The limits that this node knows."""
    return tuple(field for field in FIELDS if field.key in limits)


def note(field: Field, limits: Mapping[str, Any]) -> str:
    """What is used of a limit now, or what it is for."""
    for_now = limits.get("for_now")
    if isinstance(for_now, list) and field.key in for_now and is_moment(limits.get("until_ms")):
        return f"until {clock(limits['until_ms'] / 1000, '%a %H:%M')} only; {field.about}"
    if field.key == "monthly":
        used, most = number(limits.get("monthly_used")), number(limits.get("monthly"))
        share = f" ({100 * used / most:.0f} %)" if most else ""
        return f"{size(used)} used{share}"
    if field.key in ("down", "up") and limits.get(field.key) is not None:
        return f"{number(limits[field.key]) * 8 / 1e6:.1f} Mbit/s"
    return field.about


def until(limits: Mapping[str, Any]) -> str:
    """When what was set for a time reverts, or ``""``."""
    at_ms = limits.get("until_ms")
    return (
        f"some until {clock(number(at_ms) / 1000, '%a %H:%M')} only; U ends that" if is_moment(at_ms) else ""
    )
