"""When this machine may work, and how much of it: rules, and a reading of the machine, into a verdict (R14).

Pure. ``judge`` takes what a person chose (``Rules``), what the machine shows at this
moment (``Reading``) and the verdict before; it says what suspends work, why, what would
change that, and which limits hold. What suspends work must be gone for ``CALM_S`` before
work goes on, so that it does not come and go with every breath.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import tzinfo
from typing import Annotated, Literal

from msgspec import Meta, Struct

from barnraise.node.clock import duration
from barnraise.node.hours import inside, next_start
from barnraise.node.presence import UNKNOWN, Presence

CALM_S = 10.0
COOLER_BY = 5.0  # degrees C below the limit
MEMORY_FLOOR = 0.04  # of the RAM: with less of it free, memory is short
LEAST_FLOOR, MOST_FLOOR = 256 * 2**20, 2**30  # bytes
OVERRUN_S = 1800.0  # how long an engine that took too much memory is kept away

_Fraction = Annotated[float, Meta(gt=0, le=1)]
_Threads = Annotated[int, Meta(ge=1, le=1024)]
Hours = Annotated[str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]-(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$")]
Program = Annotated[str, Meta(min_length=1, max_length=64)]
Kind = Literal[
    "quota", "idle", "gpu", "hours", "battery", "program", "heat", "memory", "overrun", "disk", "split-view"
]


class Rules(Struct, frozen=True, kw_only=True):
    """What a person may choose; the defaults are those that BOINC's users know, but for the processor.

    Attributes:
        when: ``"idle"``: work only while nobody uses the machine.
        idle_s: seconds without input after which nobody does.
        hours: local times of day within which work is done, ``"22:00-07:00"``; none: at any.
        on_battery: work on battery, too.
        gpu_in_use: the engine may use a GPU while somebody uses the machine.
        programs: names of programs while which run nothing is done.
        threads_idle, threads_in_use: the engine's; None: chosen by the machine.
        memory_idle, memory_in_use: most that the engine may take of the RAM.
        gpu_memory: most that the engine may take of a GPU's memory.
        gpu_temperature: degrees C from which the GPU rests; None: no limit.
    """

    when: Literal["always", "idle"] = "always"
    idle_s: Annotated[float, Meta(ge=10, le=86_400)] = 180.0
    hours: Annotated[tuple[Hours, ...], Meta(max_length=16)] = ()
    on_battery: bool = False
    gpu_in_use: bool = False
    programs: Annotated[tuple[Program, ...], Meta(max_length=64)] = ()
    threads_idle: _Threads | None = None
    threads_in_use: _Threads | None = None
    memory_idle: _Fraction = 0.9
    memory_in_use: _Fraction = 0.5
    gpu_memory: _Fraction = 0.9
    gpu_temperature: Annotated[float, Meta(ge=30, le=120)] | None = 85.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The machine at a moment. Bytes, degrees C; None where it does not say.

    ``engine_need``: bytes that the engine is known to need for the model at work, 0 if nothing
    is known; ``engine_memory``: what it holds now. ``programs``: of the rules', those that run.
    """

    presence: Presence = UNKNOWN
    on_battery: bool | None = None
    programs: frozenset[str] = frozenset()
    uses_gpu: bool = False
    gpu_temperature: float | None = None
    memory_total: int = 0
    memory_free: int | None = None
    engine_memory: int = 0
    engine_need: int = 0
    threads: int = 1  # what the machine chooses for the engine while nobody uses it


@dataclass(frozen=True, slots=True)
class Suspension:
    """Why nothing is done, what would change that, and when it ends by itself.

    ``until``: seconds since the epoch. ``transfers``: versions pass all the same.
    ``finish``: the unit at work is finished first. ``free``: the engine's memory is wanted back.
    ``program``: which one is running.
    """

    kind: Kind
    reason: str
    cure: str
    until: float | None = None
    transfers: bool = False
    finish: bool = False
    free: bool = False
    program: str = ""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the engine may use now. ``memory``: bytes, 0 where the machine's size is not known."""

    threads: int = 1
    memory: int = 0
    gpu_memory: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds, and what ``judge`` has to remember.

    ``seen``: causes that suspend, and when (monotonic) each was there last. ``overrun``: what the
    engine held when it held too much, and when.
    """

    in_use: bool = False
    suspensions: tuple[Suspension, ...] = ()
    allowance: Allowance = Allowance()
    seen: tuple[tuple[Suspension, float], ...] = ()
    overrun: tuple[int, float] = (0, 0.0)


def judge(
    rules: Rules, reading: Reading, before: Verdict, mono: float, wall: float, zone: tzinfo | None = None
) -> Verdict:
    """What may be done at this moment.

    Args:
        mono: seconds of a clock that never jumps.
        wall: seconds since the epoch.
        zone: in which ``hours`` are read; None: the machine's.
    """
    in_use = is_in_use(rules, reading.presence)
    allowance = allowed(rules, reading, in_use)
    overrun = _overrun(before, reading, allowance, mono)
    was = {suspension.kind for suspension, _ in before.seen}
    now = tuple(_causes(rules, reading, in_use, allowance, overrun[0], was, wall, zone))
    kinds = {suspension.kind for suspension in now}
    fading = tuple(
        (suspension, since)
        for suspension, since in before.seen
        if suspension.kind in _CALM and suspension.kind not in kinds and mono - since < CALM_S
    )
    still_on = _still_wanted(rules, fading)
    held = tuple(_fading(suspension, wall, since + CALM_S - mono) for suspension, since in still_on)
    seen = (*((suspension, mono) for suspension in now), *still_on)
    return Verdict(in_use, (*now, *held), allowance, seen, overrun)


def is_in_use(rules: Rules, presence: Presence) -> bool:
    """Whether somebody uses the machine; without a source nobody is known to."""
    return presence.idle_s is not None and presence.idle_s < rules.idle_s


def allowed(rules: Rules, reading: Reading, in_use: bool) -> Allowance:
    """The limits for the engine, in use or idle."""
    idle = rules.threads_idle or reading.threads
    threads = (rules.threads_in_use or max(1, idle // 2)) if in_use else idle
    fraction = rules.memory_in_use if in_use else rules.memory_idle
    return Allowance(threads, int(fraction * reading.memory_total), rules.gpu_memory)


def memory_floor(total: int) -> int:
    """Free bytes below which memory is short, of ``total``."""
    return int(min(MOST_FLOOR, max(LEAST_FLOOR, MEMORY_FLOOR * total)))


# Causes that flicker; the others end by a delay of their own, or at a moment.
_CALM = frozenset({"battery", "program", "heat", "memory"})


def _causes(
    rules: Rules,
    reading: Reading,
    in_use: bool,
    allowance: Allowance,
    overrun: int,
    was: set[Kind],
    wall: float,
    zone: tzinfo | None,
) -> Iterator[Suspension]:
    presence = reading.presence
    if rules.when == "idle" and not presence.source:
        yield Suspension(
            "idle",
            "to work only while nobody uses the machine needs to know whether somebody does, and here "
            f"nothing says so ({presence.text})",
            "barnraise limits set --when always, or --hours 22:00-07:00",
        )
    elif in_use and rules.when == "idle":
        yield Suspension(
            "idle", f"you use the machine ({presence.source})", _ANY_TIME, _until_idle(rules, presence, wall)
        )
    elif in_use and reading.uses_gpu and not rules.gpu_in_use:
        yield Suspension(
            "gpu",
            f"you use the machine ({presence.source}), and the GPU is yours meanwhile",
            "barnraise limits set --gpu-in-use yes",
            _until_idle(rules, presence, wall),
            transfers=True,
        )
    if rules.hours and not inside(rules.hours, wall, zone):
        yield Suspension(
            "hours",
            f"it is outside of the hours to work in, {', '.join(rules.hours)}",
            "barnraise limits set --hours none",
            next_start(rules.hours, wall, zone),
        )
    if reading.on_battery and not rules.on_battery:
        yield Suspension(
            "battery", "the machine runs on battery", "plug it in, or barnraise limits set --on-battery yes"
        )
    for name in sorted(reading.programs & set(rules.programs)):
        cure = f"close it, or barnraise limits set --allow-program {name}"
        yield Suspension("program", f"{name} is running", cure, program=name)
    yield from _heat(rules, reading, was)
    yield from _memory(reading, in_use, allowance, overrun, was)


_ANY_TIME = "it goes on once nobody does; or barnraise limits set --when always"


def _until_idle(rules: Rules, presence: Presence, wall: float) -> float | None:
    return None if presence.idle_s is None else wall + rules.idle_s - presence.idle_s


def _heat(rules: Rules, reading: Reading, was: set[Kind]) -> Iterator[Suspension]:
    limit, found = rules.gpu_temperature, reading.gpu_temperature
    if limit is None or found is None or not reading.uses_gpu:
        return
    if found >= limit - (COOLER_BY if "heat" in was else 0.0):
        yield Suspension(
            "heat",
            f"the GPU is hot: {found:.0f} C, the limit is {limit:.0f} C and work goes on below "
            f"{limit - COOLER_BY:.0f} C",
            "let it cool; or barnraise limits set --gpu-temperature",
            transfers=True,
        )


def _memory(
    reading: Reading, in_use: bool, allowance: Allowance, overrun: int, was: set[Kind]
) -> Iterator[Suspension]:
    total, free = reading.memory_total, reading.memory_free
    floor = memory_floor(total)
    # What the engine gave back counts as free only once it would fit in again.
    wanted = floor if "memory" not in was else 2 * floor + max(0, overrun - reading.engine_memory)
    if free is not None and total and free < wanted:
        yield Suspension(
            "memory",
            f"memory is short: {_gb(free)} of {_gb(total)} are free, work goes on with more than "
            f"{_gb(2 * floor + overrun)}",
            "close what takes it",
            transfers=True,
            free=True,
        )
    need = max(overrun, reading.engine_need)
    if allowance.memory and need > allowance.memory:
        option = "--memory-in-use" if in_use else "--memory"
        meanwhile = " while you use the machine" if in_use else ""
        yield Suspension(
            "overrun",
            f"the engine needs {_gb(need)} of memory, and may take {_gb(allowance.memory)} of "
            f"{_gb(total)}{meanwhile}",
            f"barnraise limits set {option} {min(100, -(-100 * need // max(1, total)) + 5)}%",
            transfers=True,
            free=True,
        )


def _overrun(before: Verdict, reading: Reading, allowance: Allowance, mono: float) -> tuple[int, float]:
    """The most that the engine held when it held too much or memory was short; forgotten after a while."""
    held, since = before.overrun
    if held and mono - since >= OVERRUN_S:
        held = 0
    total, free = reading.memory_total, reading.memory_free
    short = free is not None and total > 0 and free < memory_floor(total)
    over = 0 < allowance.memory < reading.engine_memory
    if (short or over) and reading.engine_memory > held:
        return reading.engine_memory, mono
    return (held, since) if held else (0, 0.0)


def _still_wanted(
    rules: Rules, fading: tuple[tuple[Suspension, float], ...]
) -> tuple[tuple[Suspension, float], ...]:
    """Without what a person has just allowed: that holds at once."""
    lifted = set[str]()
    if rules.on_battery:
        lifted.add("battery")
    if rules.gpu_temperature is None:
        lifted.add("heat")
    return tuple(
        entry
        for entry in fading
        if entry[0].kind not in lifted and (not entry[0].program or entry[0].program in rules.programs)
    )


def _fading(suspension: Suspension, wall: float, left_s: float) -> Suspension:
    return replace(suspension, reason=f"until a moment ago: {suspension.reason}", until=wall + left_s)


def quota_suspension(reason: str, until: float) -> Suspension:
    """The month's spent quota as a suspension: the unit at work is finished, nothing else passes."""
    return Suspension("quota", reason, "barnraise limits set --month", until, finish=True)


def words(suspension: Suspension, wall: float) -> str:
    """One line: why, until when, and the cure."""
    end = "" if suspension.until is None else f", {duration(max(0.0, suspension.until - wall) * 1000)} more"
    return f"{suspension.reason}{end}; {suspension.cure}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
