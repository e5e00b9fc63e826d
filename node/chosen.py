"""What a person allows a node, as kept in ``limits.json``: caps, quota, disk, and the rules.

What was set for a while (``--for 2h``) lies beside what holds otherwise, so that it ends
by itself, across restarts too. A file of an earlier version has fewer fields, and is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from barnraise.node.config import DEFAULT_DISK_BYTES, NodeConfig
from barnraise.node.hours import span
from barnraise.node.rules import Rules
from barnraise.protocol.bandwidth import MAX_RATE, MIN_RATE, checked_rate
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import RefusedError

MOST_MONTHLY = 2**60
LEAST_DISK, MOST_DISK = 10**8, 2**60
LONGEST_MS = 366 * 86_400_000
_MOST_FILE = 64 * 1024

_Rate = Annotated[float, msgspec.Meta(ge=MIN_RATE, le=MAX_RATE)]


class Chosen(Rules, frozen=True, kw_only=True):
    """Caps in bytes/s, quota and disk in bytes; None where there is no limit, for ``disk`` the default."""

    up: _Rate | None = None
    down: _Rate | None = None
    monthly: Annotated[int, msgspec.Meta(gt=0, le=MOST_MONTHLY)] | None = None
    disk: Annotated[int, msgspec.Meta(ge=LEAST_DISK, le=MOST_DISK)] | None = None


class Meanwhile(msgspec.Struct, frozen=True):
    """What was set for a while: names and values of ``Chosen``, and until when (ms since the epoch)."""

    until_ms: int
    changes: dict[str, Any]


class _File(Chosen, frozen=True, kw_only=True):
    format: int = 1
    meanwhile: Meanwhile | None = None


NAMES = frozenset(Chosen.__struct_fields__)
_NOTHING_IS_NONE = frozenset({"up", "down", "monthly", "disk", "threads_idle", "threads_in_use"}) | {
    "gpu_temperature"
}
_MEANT = {
    "up": "bytes a second",
    "down": "bytes a second",
    "monthly": "above 0 bytes",
    "disk": f"at least {LEAST_DISK / 1e6:.0f} MB, in bytes",
    "when": "'always' or 'idle'",
    "idle_s": "10 to 86400 seconds",
    "hours": "at most 16 spans such as 22:00-07:00",
    "on_battery": "true or false",
    "gpu_in_use": "true or false",
    "programs": "at most 64 names of 1 to 64 characters",
    "threads_idle": "1 to 1024",
    "threads_in_use": "1 to 1024",
    "memory_idle": "above 0 and at most 1 (of the RAM)",
    "memory_in_use": "above 0 and at most 1 (of the RAM)",
    "gpu_memory": "above 0 and at most 1 (of the GPU's memory)",
    "gpu_temperature": "30 to 120 degrees C",
}


def checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Values of ``Chosen`` by name; None becomes "no limit" or the default, whichever there is.

    Raises:
        RefusedError: an unknown name or an unusable value; says what would be usable.
    """
    strangers = sorted(arguments.keys() - NAMES)
    if strangers or not arguments:
        what = f"limits knows no {', '.join(map(str, strangers))[:100]}; it" if strangers else "limits"
        raise RefusedError("bad-argument", f"{what} takes {', '.join(sorted(NAMES))}")
    values = {
        name: _default(name) if value is None else _plain(name, value) for name, value in arguments.items()
    }
    for name in ("up", "down"):
        if values.get(name) is not None:
            try:
                values[name] = checked_rate(values[name])
            except ValueError as error:
                raise RefusedError("bad-argument", str(error)) from None
    return {name: getattr(_converted(values), name) for name in values}


def _default(name: str) -> Any:
    return None if name in _NOTHING_IS_NONE else getattr(_UNSET, name)


def _plain(name: str, value: Any) -> Any:
    numbers = ("up", "down", "monthly", "disk")
    if name in numbers and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise RefusedError("bad-argument", f"{name} must be a number or nothing")
    if name in ("monthly", "disk") and not 0 < value <= MOST_DISK:
        raise RefusedError("bad-argument", f"{name} must be {_MEANT[name]}, or nothing")
    return int(value) if name in ("monthly", "disk") else value


def _converted(values: Mapping[str, Any]) -> Chosen:
    for name, value in values.items():
        try:
            chosen = msgspec.convert({name: value}, Chosen)
            for text in chosen.hours:
                span(text)
        except (msgspec.ValidationError, ValueError):
            raise RefusedError("bad-argument", f"{name} must be {_MEANT[name]}") from None
    return msgspec.convert(dict(values), Chosen)


_UNSET = Chosen()


def load_chosen(path: Path) -> tuple[Chosen, Meanwhile | None, str]:
    """Read what was set before; the text is a warning if that cannot be known, else empty."""
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(_MOST_FILE), type=_File)
        meanwhile = found.meanwhile
        if meanwhile is not None:
            meanwhile = Meanwhile(meanwhile.until_ms, checked(meanwhile.changes))
        return _chosen(found), meanwhile, ""
    except FileNotFoundError:
        return Chosen(), None, ""
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError, RefusedError) as error:
        return (
            Chosen(),
            None,
            f"cannot read {path}, the limits and rules in it do not hold: {error}; set them anew with "
            "'barnraise limits set'",
        )


def save_chosen(path: Path, chosen: Chosen, meanwhile: Meanwhile | None) -> None:
    """Write it: whole or not at all.

    Raises:
        StorageError: the disk refused.
    """
    values = {name: getattr(chosen, name) for name in Chosen.__struct_fields__}
    write_durably(path, msgspec.json.encode(_File(**values, meanwhile=meanwhile)) + b"\n")


def with_changes(chosen: Chosen, changes: Mapping[str, Any]) -> Chosen:
    """``chosen`` but for ``changes``."""
    return msgspec.structs.replace(chosen, **changes) if changes else chosen


def _chosen(found: _File) -> Chosen:
    return Chosen(**{name: getattr(found, name) for name in Chosen.__struct_fields__})


def settled(config: NodeConfig) -> NodeConfig:
    """``config`` with the disk and the threads that hold where its options leave them open."""
    chosen = load_chosen(config.limits_path)[0]
    disk = config.disk_bytes or chosen.disk or DEFAULT_DISK_BYTES
    threads = config.threads or chosen.threads_idle or default_threads()
    return replace(config, disk_bytes=disk, threads=threads)


def default_threads() -> int:
    """Half of the cores that this process may use: the machine stays usable (R14)."""
    return max(1, usable_cores() // 2)


def usable_cores() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 2
