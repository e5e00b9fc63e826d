"""The monthly quota: bytes up and down per calendar month, counted on disk (R12).

``Quota`` is pure; ``load_quota`` and ``save_quota`` keep it in ``traffic.json`` in the
data folder. Months are those of the machine's time zone. Several are kept, so that a
clock that was wrong for a while costs no count.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from barnraise.protocol.durable import write_durably

MONTHS_KEPT = 12
_MAX_FILE = 64 * 1024

_Bytes = Annotated[int, msgspec.Meta(ge=0)]


class Month(msgspec.Struct):
    """Bytes of one month."""

    up: _Bytes = 0
    down: _Bytes = 0


class _File(msgspec.Struct):
    format: int = 1
    months: dict[str, Month] = {}


class Quota:
    """What was used, by month, and how much may be: ``limit`` bytes up and down together, None is any."""

    def __init__(self, limit: int | None = None, months: dict[str, Month] | None = None) -> None:
        self.limit = limit
        self.months = dict(months or {})
        self.unsaved = 0

    def add(self, up: int, down: int, wall_ms: int) -> None:
        """Count bytes that went over the wire about now."""
        name = month_of(wall_ms)[0]
        month = self.months.setdefault(name, Month())
        month.up += up
        month.down += down
        self.unsaved += up + down
        while len(self.months) > MONTHS_KEPT:
            del self.months[min(self.months)]

    def used(self, wall_ms: int) -> int:
        """Bytes of this month, up and down."""
        month = self.months.get(month_of(wall_ms)[0], Month())
        return month.up + month.down

    def spent_until(self, wall_ms: int) -> int | None:
        """When this month's spent quota is renewed, ms since the epoch; None: it is not spent."""
        if self.limit is None or self.used(wall_ms) < self.limit:
            return None
        return month_of(wall_ms)[1]


def month_of(wall_ms: int) -> tuple[str, int]:
    """The local calendar month of a moment, ``"2026-03"``, and when the next one begins (ms)."""
    moment = datetime.fromtimestamp(wall_ms / 1000)
    year, month = (moment.year + 1, 1) if moment.month == 12 else (moment.year, moment.month + 1)
    return f"{moment.year:04d}-{moment.month:02d}", round(datetime(year, month, 1).timestamp() * 1000)


def load_quota(path: Path, limit: int | None) -> tuple[Quota, str]:
    """Read what was used before; the text is a warning if that cannot be known, else empty."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE)
        return Quota(limit, msgspec.json.decode(data, type=_File).months), ""
    except FileNotFoundError:
        return Quota(limit), ""
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        return Quota(limit), f"cannot read {path}, the month's traffic is counted from zero: {error}"


def save_quota(path: Path, quota: Quota) -> None:
    """Write the counts: whole or not at all.

    Raises:
        StorageError: the disk refused.
    """
    unsaved = quota.unsaved
    write_durably(path, msgspec.json.encode(_File(months=quota.months)) + b"\n")
    quota.unsaved -= unsaved
