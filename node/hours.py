"""Times of day within which a node works: ``22:00-07:00``, in a time zone, across midnight. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, tzinfo

DAY = 24 * 60  # minutes


def inside(hours: Sequence[str], wall: float, zone: tzinfo | None = None) -> bool:
    """Whether ``wall`` (seconds since the epoch) lies within any of ``hours``, by the clock on the wall.

    A span whose end is not after its begin goes across midnight; equal ends are a whole day.
    """
    moment = datetime.fromtimestamp(wall, zone)
    minute = moment.hour * 60 + moment.minute
    return any(_holds(*span(text), minute) for text in hours)


def next_start(hours: Sequence[str], wall: float, zone: tzinfo | None = None) -> float | None:
    """When, in seconds since the epoch, one of ``hours`` begins next after ``wall``.

    For people: on the day on which summer begins it may be up to an hour late.
    """
    moment = datetime.fromtimestamp(wall, zone)
    starts: list[float] = []
    for text in hours:
        begin = span(text)[0]
        for days in (0, 1, 2):
            day = (moment + timedelta(days=days)).date()
            for fold in (0, 1):  # the hour that comes twice when summer ends
                start = datetime(
                    day.year, day.month, day.day, begin // 60, begin % 60, tzinfo=zone, fold=fold
                ).timestamp()
                if start > wall:
                    starts.append(start)
    return min((start for start in starts if inside(hours, start, zone)), default=None)


def span(text: str) -> tuple[int, int]:
    """``HH:MM-HH:MM`` as minutes of the day.

    Raises:
        ValueError: it is none.
    """
    begin, dash, end = text.partition("-")
    if not dash:
        raise ValueError(f"{text!r} is no span of hours: write it like 22:00-07:00")
    first, last = _minute(begin), _minute(end)
    if first == DAY:
        raise ValueError(f"{text!r} begins when the day ends: write it like 00:00")
    return first, last


def _minute(text: str) -> int:
    hour, colon, minute = text.partition(":")
    good = colon and len(hour) in (1, 2) and len(minute) == 2 and f"{hour}{minute}".isascii()
    if not good or not (hour + minute).isdigit() or int(minute) > 59 or int(hour) * 60 + int(minute) > DAY:
        raise ValueError(f"{text!r} is no time of day: write it like 22:00")
    return int(hour) * 60 + int(minute)


def _holds(begin: int, end: int, minute: int) -> bool:
    if begin < end:
        return begin <= minute < end
    return minute >= begin or minute < end
