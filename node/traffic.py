"""A node's limits: what is configured, what is used of it, and changing it live (R12, R14).

What is changed while the node runs is kept in ``limits.json`` (``barnraise.node.chosen``) and
holds after a restart, except for what the command line then says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from barnraise.node.chosen import (
    LONGEST_MS,
    Chosen,
    Meanwhile,
    checked,
    default_threads,
    load_chosen,
    save_chosen,
    with_changes,
)
from barnraise.node.clock import duration
from barnraise.node.config import DEFAULT_DISK_BYTES, NodeConfig
from barnraise.node.quota import load_quota, month_of, save_quota
from barnraise.protocol.bandwidth import Pacer, checked_rate
from barnraise.protocol.errors import RefusedError, StorageError
from barnraise.protocol.network import Network

SAVE_EVERY_S = 5.0
SAVE_IDLE_S = 60.0  # while less than SAVE_BYTES were added: disks may sleep
SAVE_BYTES = 1_000_000


class Limits:
    """The pacers that every transfer passes, the quota that counts what did, and the rules.

    Attributes:
        rules: what holds now, of everything that may be chosen (``barnraise.node.rules``).
        warning: what a person should know about the count, or ``""``.

    Raises:
        ValueError: a cap too low to be usable.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._chosen_path = config.limits_path
        self._chosen, self._meanwhile, warning = load_chosen(self._chosen_path)
        options = {
            "up": checked_rate(config.up_bytes_s),
            "down": checked_rate(config.down_bytes_s),
            "monthly": config.monthly_bytes,
            "disk": config.disk_bytes or None,
            "threads_idle": config.threads or None,
        }
        self._said = {name: value for name, value in options.items() if value is not None}
        self.rules = self._holding()
        self.up, self.down = Pacer(self.rules.up), Pacer(self.rules.down)
        self._path = config.traffic_path
        self.quota, uncounted = load_quota(self._path, self.rules.monthly)
        self.warning = "; ".join(filter(None, (warning, uncounted)))
        self._counted = (0, 0)
        self._saved_at = 0.0

    @property
    def disk(self) -> int:
        """Most bytes of shards on the disk."""
        return self.rules.disk or DEFAULT_DISK_BYTES

    @property
    def threads(self) -> int:
        """The engine's threads while nobody uses the machine."""
        return self.rules.threads_idle or default_threads()

    def _holding(self) -> Chosen:
        changes = {} if self._meanwhile is None else self._meanwhile.changes
        return with_changes(self._chosen, {**self._said, **changes})

    def _apply(self) -> None:
        self.rules = self._holding()
        for name in ("up", "down"):
            pacer, rate = getattr(self, name), getattr(self.rules, name)
            if pacer.rate != rate:
                pacer.set_rate(rate)
        self.quota.limit = self.rules.monthly

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
        """For the state tree: bytes, bytes/s, fractions, seconds, degrees C; None where there is no limit."""
        rules, threads = self.rules, self.threads
        return {
            "up": rules.up,
            "down": rules.down,
            "monthly": rules.monthly,
            "monthly_used": self.quota.used(wall_ms),
            "spent_until_ms": self.quota.spent_until(wall_ms),
            "disk": self.disk,
            "memory_idle": rules.memory_idle,
            "memory_in_use": rules.memory_in_use,
            "threads_idle": threads,
            "threads_in_use": rules.threads_in_use or max(1, threads // 2),
            "gpu_memory": rules.gpu_memory,
            "gpu_temperature": rules.gpu_temperature,
            "when": rules.when,
            "idle_s": rules.idle_s,
            "hours": list(rules.hours),
            "on_battery": rules.on_battery,
            "gpu_in_use": rules.gpu_in_use,
            "programs": list(rules.programs),
            "until_ms": None if self._meanwhile is None else self._meanwhile.until_ms,
            "for_now": [] if self._meanwhile is None else sorted(self._meanwhile.changes),
        }

    def change(self, arguments: Mapping[str, Any], wall_ms: int) -> str:
        """Set values of ``Chosen``; None lifts one (or brings back its default), one left out stays.

        ``until_ms`` (ms since the epoch) beside others: they hold until then only, and so does
        what was set for a while before. Alone: that ends then; None alone: it ends now.

        Returns a sentence about what holds now, and after a restart; all or nothing is changed.

        Raises:
            RefusedError: an unknown argument or an unusable value.
            StorageError: it holds now, but the disk refused to keep it.
        """
        wishes = dict(arguments)
        timed = "until_ms" in wishes
        until = _checked_until(wishes.pop("until_ms", None), wall_ms)
        if timed and not wishes:
            self._retime(until)
        else:
            changes = checked(wishes)
            before = {} if self._meanwhile is None else self._meanwhile.changes
            if until is not None:
                self._meanwhile = Meanwhile(until, {**before, **changes})
            else:
                self._chosen = with_changes(self._chosen, changes)
                self._said = {name: value for name, value in self._said.items() if name not in changes}
                left = {name: value for name, value in before.items() if name not in changes}
                self._meanwhile = (
                    Meanwhile(self._meanwhile.until_ms, left) if self._meanwhile and left else None
                )
        self._apply()
        self._keep()
        return self.sentence(wall_ms)

    def expire(self, wall_ms: int) -> str:
        """End what was set for a while if its time has come; a sentence then, else ``""``."""
        if self._meanwhile is None or wall_ms < self._meanwhile.until_ms:
            return ""
        names = ", ".join(sorted(self._meanwhile.changes))
        self._meanwhile = None
        self._apply()
        try:
            self._keep()
        except StorageError as error:
            return f"what was set for a while ({names}) has ended; {error}"
        return f"what was set for a while ({names}) has ended: {self.sentence(wall_ms)}"

    def sentence(self, wall_ms: int) -> str:
        """What holds now, for a person."""
        rules, limit = self.rules, self.quota.limit
        when = "while nobody uses the machine" if rules.when == "idle" else "at any time"
        parts = [
            f"caps: {_mbit(self.up.rate)} up, {_mbit(self.down.rate)} down",
            "no monthly quota" if limit is None else f"{limit / 1e9:.2f} GB a month",
            f"{self.disk / 1e9:.1f} GB of disk",
            f"works {when}" + (f", {', '.join(rules.hours)}" if rules.hours else ""),
        ]
        if rules.programs:
            parts.append(
                f"not while {', '.join(rules.programs)} run{'s' if len(rules.programs) == 1 else ''}"
            )
        if self._meanwhile is not None:
            parts.append(f"partly for {duration(max(0, self._meanwhile.until_ms - wall_ms))} only")
        return ", ".join(parts)

    def _retime(self, until: int | None) -> None:
        if self._meanwhile is None:
            raise RefusedError("bad-argument", "nothing was set for a while: say what, beside until when")
        self._meanwhile = None if until is None else Meanwhile(until, self._meanwhile.changes)

    def _keep(self) -> None:
        try:
            save_chosen(self._chosen_path, self._chosen, self._meanwhile)
        except StorageError as error:
            raise StorageError(f"this holds, but only until the node ends: {error}") from error


def _checked_until(value: Any, wall_ms: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not wall_ms < value:
        raise RefusedError("bad-argument", "until_ms must be a moment to come, in ms since 1970, or nothing")
    if value > wall_ms + LONGEST_MS:
        raise RefusedError("bad-argument", "until_ms may be a year away at most")
    return int(value)


def _mbit(rate: float | None) -> str:
    return "any rate" if rate is None else f"{rate * 8 / 1e6:.2f} Mbit/s"
