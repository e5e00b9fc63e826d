"""A node's caps and monthly quota: what is configured, what is used, and changing it live (R12).

What is changed while the node runs is kept in ``limits.json`` and holds after a restart,
except for what the command line then says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from barnraise.node.config import NodeConfig
from barnraise.node.pending import write_durably
from barnraise.node.quota import load_quota, month_of, save_quota
from barnraise.protocol.bandwidth import MAX_RATE, MIN_RATE, Pacer, checked_rate
from barnraise.protocol.errors import RefusedError, StorageError
from barnraise.protocol.network import Network

SAVE_EVERY_S = 5.0
SAVE_IDLE_S = 60.0  # while less than SAVE_BYTES were added: disks may sleep
SAVE_BYTES = 1_000_000
_KEYS = frozenset({"up", "down", "monthly"})
_MOST_MONTHLY = 2**60
_MOST_FILE = 4096

_Rate = Annotated[float, msgspec.Meta(ge=MIN_RATE, le=MAX_RATE)]


class Chosen(msgspec.Struct, frozen=True):
    """``limits.json``: caps in bytes/s, the quota in bytes; None where there is no limit."""

    format: int = 1
    up: _Rate | None = None
    down: _Rate | None = None
    monthly: Annotated[int, msgspec.Meta(gt=0, le=_MOST_MONTHLY)] | None = None


def load_chosen(path: Path) -> tuple[Chosen, str]:
    """Read what was set before; the text is a warning if that cannot be known, else empty."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MOST_FILE), type=Chosen), ""
    except FileNotFoundError:
        return Chosen(), ""
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        return Chosen(), (
            f"cannot read {path}, the caps and the quota in it do not hold: {error}; set them anew with "
            "'barnraise limits set'"
        )


class Limits:
    """The pacers that every transfer passes, and the quota that counts what did.

    Attributes:
        warning: what a person should know about the count, or ``""``.

    Raises:
        ValueError: a cap too low to be usable.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._chosen_path = config.limits_path
        self._chosen, warning = load_chosen(self._chosen_path)
        kept = self._chosen
        self.up = Pacer(checked_rate(kept.up if config.up_bytes_s is None else config.up_bytes_s))
        self.down = Pacer(checked_rate(kept.down if config.down_bytes_s is None else config.down_bytes_s))
        monthly = kept.monthly if config.monthly_bytes is None else config.monthly_bytes
        self._path = config.traffic_path
        self.quota, uncounted = load_quota(self._path, monthly)
        self.warning = "; ".join(filter(None, (warning, uncounted)))
        self._counted = (0, 0)
        self._saved_at = 0.0

    def count(self, network: Network, wall_ms: int) -> None:
        """Add what ``network`` has carried since the last call."""
        now = (network.bytes_out, network.bytes_in)
        self.quota.add(now[0] - self._counted[0], now[1] - self._counted[1], wall_ms)
        self._counted = now

    def save(self, now: float, *, at_once: bool = False) -> None:
        """Write the counts if it is time; ``now`` in seconds of any clock.

        Raises:
            StorageError: the disk refused; the counts are kept and written later.
        """
        unsaved, waited = self.quota.unsaved, now - self._saved_at
        due = waited >= (SAVE_EVERY_S if unsaved >= SAVE_BYTES else SAVE_IDLE_S)
        if unsaved and (due or at_once):
            self._saved_at = now
            save_quota(self._path, self.quota)

    def spent(self, wall_ms: int) -> tuple[str, int] | None:
        """Why transfers must pause, and until when (ms since the epoch); None: they need not."""
        until = self.quota.spent_until(wall_ms)
        if until is None or self.quota.limit is None:
            return None
        used, month = self.quota.used(wall_ms), month_of(wall_ms)[0]
        return (
            f"the monthly quota of {self.quota.limit / 1e9:.2f} GB is spent: "
            f"{used / 1e9:.2f} GB went up and down in {month}"
        ), until

    def tree(self, wall_ms: int) -> dict[str, Any]:
        """For the state tree: caps in bytes/s, quota and use in bytes, None where there is no limit."""
        return {
            "up": self.up.rate,
            "down": self.down.rate,
            "monthly": self.quota.limit,
            "monthly_used": self.quota.used(wall_ms),
            "spent_until_ms": self.quota.spent_until(wall_ms),
        }

    def change(self, arguments: Mapping[str, Any]) -> str:
        """Set ``up``, ``down`` (bytes/s) and ``monthly`` (bytes); None lifts one, one left out stays.

        Returns a sentence about what holds now, and after a restart; all or nothing is changed.

        Raises:
            RefusedError: an unknown argument or an unusable value.
            StorageError: it holds now, but the disk refused to keep it.
        """
        strangers = arguments.keys() - _KEYS
        if strangers or not arguments:
            raise RefusedError("bad-argument", "limits takes up and down (bytes/s) and monthly (bytes)")
        for name, value in arguments.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise RefusedError("bad-argument", f"{name} must be a number or nothing")
        monthly = arguments.get("monthly")
        if monthly is not None and not 0 < monthly <= _MOST_MONTHLY:
            raise RefusedError("bad-argument", "monthly must be above 0 bytes, or nothing for no quota")
        try:
            rates = {name: checked_rate(arguments[name]) for name in ("up", "down") if name in arguments}
        except ValueError as error:
            raise RefusedError("bad-argument", str(error)) from None
        for name, rate in rates.items():
            getattr(self, name).set_rate(rate)
        if "monthly" in arguments:
            self.quota.limit = None if monthly is None else int(monthly)
        self._keep(rates, arguments)
        return self.sentence()

    def sentence(self) -> str:
        """What holds now, for a person."""
        limit = self.quota.limit
        return (
            f"caps: {_mbit(self.up.rate)} up, {_mbit(self.down.rate)} down, "
            f"{'no monthly quota' if limit is None else f'{limit / 1e9:.2f} GB a month'}"
        )

    def _keep(self, rates: Mapping[str, float | None], arguments: Mapping[str, Any]) -> None:
        changed: dict[str, float | int | None] = dict(rates)
        if "monthly" in arguments:
            changed["monthly"] = self.quota.limit
        chosen = msgspec.structs.replace(self._chosen, **changed)
        try:
            write_durably(self._chosen_path, msgspec.json.encode(chosen) + b"\n")
        except StorageError as error:
            raise StorageError(f"{self.sentence()}; but only until the node ends: {error}") from error
        self._chosen = chosen


def _mbit(rate: float | None) -> str:
    return "any rate" if rate is None else f"{rate * 8 / 1e6:.2f} Mbit/s"
