"""Watches the machine for a daemon: suspends work by the rules, and holds the engine to its limits (R14).

Twice a second it reads the machine (``barnraise.node.machine``), judges (``barnraise.node.rules``)
and tells the core what holds. A suspension reaches the engine within two seconds: half a
second until it is noticed, and what the engine takes to stop.
"""

from __future__ import annotations

import logging

import trio

from barnraise.node.context import Context
from barnraise.node.engine import EngineLimits, LimitedEngine
from barnraise.node.events import Held
from barnraise.node.machine import Seen, Sensors, Wanted
from barnraise.node.needs import needs
from barnraise.node.presence import Presence
from barnraise.node.rules import Reading, Suspension, Verdict, judge, quota_suspension, words
from barnraise.protocol.shards import off_loop
from barnraise.protocol.wire import printable

POLL_S = 0.5
BLIND_POLL_S = 5.0  # where there is nothing to read but the clock
MOVED_S = 5.0  # an end that moves by less is not told again
_GPUS = frozenset({"cuda", "mps", "xpu"})


async def watch(ctx: Context) -> None:
    """Read, judge and apply until cancelled."""
    while True:
        if ctx.sensors is not None:
            ctx.seen = await _read(ctx, ctx.sensors)
        ended = ctx.limits.expire(ctx.clock.wall_ms())
        if ended:
            ctx.say(ended)
        await look(ctx)
        await trio.sleep(max(BLIND_POLL_S, ctx.config.look_s) if ctx.sensors is None else POLL_S)


async def _read(ctx: Context, sensors: Sensors) -> Seen:
    try:
        return await sensors.read(_wanted(ctx))
    except Exception as error:  # a driver's or a system's; a node that cannot look still works
        text = f"this machine cannot be looked at: {printable(str(error) or type(error).__name__, 200)}"
        if ctx.seen.presence.text != text:
            ctx.say(f"{text}; rules that need it do not hold", logging.WARNING)
        return Seen(Presence(text=text))


async def look(ctx: Context) -> None:
    """Judge by what was seen last, and apply it: at once after a rule was changed."""
    before = ctx.verdict
    wall = ctx.clock.wall_ms() / 1000
    ctx.verdict = judge(ctx.limits.rules, _reading(ctx), before, trio.current_time(), wall)
    _speak(ctx, before, wall)
    presence = ctx.seen.presence
    shown = {
        "source": presence.source or "none",
        "idle_s": presence.idle_s,
        "in_use": ctx.verdict.in_use,
        "text": presence.text,
    }
    if not ctx.facts.presence or any(
        ctx.facts.presence[name] != shown[name] for name in ("source", "in_use")
    ):
        ctx.changed.set()
    ctx.facts.presence = shown
    hold(ctx)
    await _limit(ctx)


def hold(ctx: Context) -> None:
    """Tell the core what holds work up: the rules, and a spent quota."""
    wall_ms, now = ctx.clock.wall_ms(), trio.current_time()
    causes = list(ctx.verdict.suspensions)
    causes += [cause for cause in (ctx.full, ctx.distrusted) if cause is not None]
    spent = ctx.limits.spent(wall_ms)
    if spent is not None:
        causes.append(quota_suspension(spent[0], spent[1] / 1000))
    shown = [
        {
            "reason": cause.reason,
            "cure": cause.cure,
            "until_ms": None if cause.until is None else round(cause.until * 1000),
        }
        for cause in causes
    ]
    told = [(entry["reason"], entry["cure"]) for entry in ctx.facts.suspended]
    if told != [(entry["reason"], entry["cure"]) for entry in shown]:
        ctx.changed.set()
    ctx.facts.suspended = shown
    held = merged(causes, now, wall_ms / 1000)
    if not _alike(ctx.state.held, held):
        ctx.feed(held or Held(""))


def merged(causes: list[Suspension], now: float, wall: float) -> Held | None:
    """All causes as one hold, named after the first; ``now``: monotonic. None: nothing holds."""
    if not causes:
        return None
    first = causes[0]
    return Held(
        first.reason,
        None if first.until is None else now + max(0.0, first.until - wall),
        stop=not all(cause.finish for cause in causes),
        transfers=all(cause.transfers for cause in causes),
        free=any(cause.free for cause in causes),
    )


def _alike(old: Held | None, new: Held | None) -> bool:
    if old is None or new is None:
        return old is new
    if (old.reason, old.stop, old.transfers, old.free) != (new.reason, new.stop, new.transfers, new.free):
        return False
    if old.until is None or new.until is None:
        return old.until is new.until
    return abs(old.until - new.until) < MOVED_S


def _wanted(ctx: Context) -> Wanted:
    rules = ctx.limits.rules
    heat = rules.gpu_temperature is not None and uses_gpu(ctx)
    return Wanted(rules.programs, heat, getattr(ctx.engine, "pid", None))


def _reading(ctx: Context) -> Reading:
    seen, gpu = ctx.seen, uses_gpu(ctx)
    return Reading(
        presence=seen.presence,
        on_battery=seen.on_battery,
        programs=seen.programs,
        uses_gpu=gpu,
        gpu_temperature=seen.gpu_temperature,
        memory_total=seen.memory_total,
        memory_free=seen.memory_free,
        engine_memory=seen.engine_memory,
        engine_need=0 if gpu or not ctx.facts.engine or ctx.run is None else needs(ctx.run.spec).memory,
        threads=ctx.limits.threads,
    )


def uses_gpu(ctx: Context) -> bool:
    """Whether the engine uses a GPU: it says so once it has loaded; before, what hardware was found."""
    if ctx.facts.engine:
        return bool(_GPUS & set(ctx.facts.engine.split("-")))
    hardware = getattr(ctx.facts, "hardware", None) or {}
    return any(gpu.get("used") for gpu in hardware.get("gpus", ()))


def _speak(ctx: Context, before: Verdict, wall: float) -> None:
    old = {cause.kind for cause in before.suspensions}
    for cause in ctx.verdict.suspensions:
        if cause.kind not in old:
            ctx.say(f"suspended: {words(cause, wall)}")
    if before.suspensions and not ctx.verdict.suspensions:
        ctx.say("no rule suspends work any more")


async def _limit(ctx: Context) -> None:
    allowance = ctx.verdict.allowance
    limits = EngineLimits(threads=allowance.threads, memory=allowance.memory, gpu_memory=allowance.gpu_memory)
    if limits != ctx.engine_limits and isinstance(ctx.engine, LimitedEngine):
        ctx.engine_limits = limits
        await ctx.engine.limit(limits)
    disk = ctx.limits.disk
    if ctx.store.quota_bytes != disk:
        await off_loop(max(0, ctx.store.used_bytes - disk), lambda: ctx.store.set_quota(disk))
