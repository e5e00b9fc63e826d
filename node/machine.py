"""What this machine shows of itself: the person, battery, programs, memory, the GPU's temperature (R14).

Cheap enough to be asked twice a second: what changes seldom is looked at less often, and
nothing here loads torch. What a system does not say is None, never a guess.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import trio

from barnraise.node.gpu_heat import GpuHeat
from barnraise.node.presence import UNKNOWN, Presence, Source, combined
from barnraise.node.processor import memory_limit

POWER = Path("/sys/class/power_supply")
PROC = Path("/proc")
BATTERY_S = 1.0
PROGRAMS_S = 1.0
HEAT_S = 2.0
MEMORY_S = 1.0
_SETTLED_S = 3.0  # a process that is older has become what it was started for
_ALL_AGAIN_S = 15.0
_COMM_LENGTH = 15


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is worth looking at: names of programs, a GPU's temperature, the engine's process."""

    programs: tuple[str, ...] = ()
    heat: bool = False
    engine: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen; bytes, degrees C; see ``barnraise.node.rules.Reading``."""

    presence: Presence = UNKNOWN
    on_battery: bool | None = None
    programs: frozenset[str] = frozenset()
    gpu_temperature: float | None = None
    memory_total: int = 0
    memory_free: int | None = None
    engine_memory: int = 0


class Sensors(Protocol):
    """Where the daemon's readings come from."""

    async def read(self, wanted: Wanted) -> Seen:
        """Look now. Never raises."""


class Machine:
    """The machine that this process runs on."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """``sources``: who is asked about the person (``barnraise.node.presence_sources``)."""
        self._sources = tuple(sources)
        self._battery = Seldom(BATTERY_S, on_battery)
        self._programs = Programs()
        self._heat = GpuHeat()
        self._temperature = Seldom(HEAT_S, self._heat.read)
        self._memory = Seldom(MEMORY_S, _memory)
        self._most = memory_limit()
        self._engine: psutil.Process | None = None

    async def read(self, wanted: Wanted) -> Seen:
        """See ``Sensors.read``; in a worker thread, since a driver or a bus may be slow to answer."""
        return await trio.to_thread.run_sync(self.look, wanted, abandon_on_cancel=True)  # type: ignore[call-arg]

    def look(self, wanted: Wanted) -> Seen:
        """Look now. Blocking, for a millisecond as a rule."""
        now = time.monotonic()
        answers = [source.ask() for source in self._sources]
        total, free = self._memory(now)
        return Seen(
            presence=combined(answers, [source.name for source in self._sources], time.time()),
            on_battery=self._battery(now),
            programs=self._programs.running(wanted.programs, now),
            gpu_temperature=self._temperature(now) if wanted.heat else None,
            memory_total=total if self._most is None else min(total, self._most),
            memory_free=free,
            engine_memory=self._engine_memory(wanted.engine),
        )

    def _engine_memory(self, pid: int | None) -> int:
        if pid is None:
            self._engine = None
            return 0
        try:
            if self._engine is None or self._engine.pid != pid:
                self._engine = psutil.Process(pid)
            return int(self._engine.memory_info().rss)
        except (psutil.Error, OSError):
            return 0


class Seldom:
    """Remembers a reading for a while."""

    def __init__(self, every_s: float, read: Callable[[], Any]) -> None:
        self._every_s, self._read = every_s, read
        self._at = -float("inf")
        self._value: Any = None

    def __call__(self, now: float) -> Any:
        """The reading, at most ``every_s`` old at ``now`` (monotonic seconds)."""
        if now - self._at >= self._every_s:
            self._at, self._value = now, self._read()
        return self._value


def _memory() -> tuple[int, int | None]:
    found = psutil.virtual_memory()
    return int(found.total), int(found.available)


# --- battery


def on_battery(power: Path = POWER) -> bool | None:
    """Whether the machine runs on a battery of its own; None where it does not say."""
    if sys.platform == "linux":
        return battery_in_sysfs(power)
    with suppress(Exception):  # psutil knows no sensors there
        found = psutil.sensors_battery()
        return None if found is None or found.power_plugged is None else not found.power_plugged
    return None


def battery_in_sysfs(power: Path) -> bool | None:
    """As Linux's ``/sys/class/power_supply`` has it; a wireless mouse's battery is nobody's supply."""
    supplies: list[bool] = []
    batteries: list[Path] = []
    try:
        entries = sorted(power.iterdir())
    except OSError:
        return None
    for entry in entries:
        kind = _word(entry / "type")
        if kind in ("Mains", "USB"):
            supplies.append(_word(entry / "online") not in ("", "0"))
        elif kind in ("Battery", "UPS") and _word(entry / "scope") != "Device":
            batteries.append(entry)
    if any(supplies):
        return False
    if not batteries:
        return None
    states = [_word(entry / "status") for entry in batteries]
    return "Discharging" in states or (bool(supplies) and not {"Charging", "Full"} & set(states))


def _word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# --- programs


class Programs:
    """Which of some programs run. Processes that were there before are not looked at each time."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._names: dict[int, tuple[str, float]] = {}  # and when it was first seen
        self._looked_at = self._all_at = -float("inf")
        self._found: frozenset[str] = frozenset()
        self._asked: tuple[str, ...] = ()

    def running(self, wanted: tuple[str, ...], now: float) -> frozenset[str]:
        """Those of ``wanted`` that run; ``now``: monotonic seconds."""
        if not wanted:
            self._names.clear()
            return frozenset()
        if wanted != self._asked or now - self._looked_at >= PROGRAMS_S:
            self._asked, self._looked_at = wanted, now
            self._found = among(wanted, self._running(now))
        return self._found

    def _running(self, now: float) -> Iterable[str]:
        if sys.platform != "linux":
            return [process.info["name"] or "" for process in psutil.process_iter(["name"])]
        if now - self._all_at >= _ALL_AGAIN_S:
            self._all_at = now
            self._names.clear()
        try:
            pids = {int(name) for name in _names(self._proc) if name.isdigit()}
        except OSError:
            return ()
        for pid in self._names.keys() - pids:
            del self._names[pid]
        for pid in pids:
            name, since = self._names.get(pid, ("", now))
            if not name or now - since < _SETTLED_S:
                self._names[pid] = (_process_name(self._proc / str(pid)), since)
        return [name for name, _ in self._names.values()]


def _names(folder: Path) -> Iterable[str]:
    return (entry.name for entry in folder.iterdir())


def _process_name(process: Path) -> str:
    """As ``ps`` shows it; names that the kernel has cut are taken from the command line."""
    name = _word(process / "comm")
    if len(name) < _COMM_LENGTH:
        return name
    try:
        first = (process / "cmdline").read_bytes()[:4096].split(b"\0")[0].decode(errors="replace")
    except OSError:
        return name
    base = first.replace("\\", "/").rpartition("/")[2]
    return base if base.startswith(name) else name


def among(wanted: Iterable[str], running: Iterable[str]) -> frozenset[str]:
    """Those of ``wanted`` that are among ``running``, whatever their case and with or without ``.exe``."""
    there = {_bare(name) for name in running}
    return frozenset(name for name in wanted if _bare(name) in there)


def _bare(name: str) -> str:
    return name.casefold().removesuffix(".exe")
