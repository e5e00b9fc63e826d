"""Notices that the machine slept, so that what waits for a moment waits for the right one (R26).

The clock that decisions are made by stands still while most machines sleep: a lease that
ran out meanwhile would be worked on for hours, and a pause of two hours would last longer.
Systems that keep a second clock, which counts sleep, tell how long it was. A process that
did not run for other reasons (a frozen container, SIGSTOP) is noticed by its own delay.
Where neither shows, the next comparison with the coordinator does (``barnraise.node.clock``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio

from barnraise.node.clock import duration
from barnraise.node.context import Context
from barnraise.node.events import Slept

LOOK_S = 1.0
NOTICED_S = 5.0  # shorter gaps are a busy machine's
SESSION_DEAD_S = 60.0  # the coordinator ends sessions that are silent for so long

SleepClock = Callable[[], float]


def sleep_clock() -> SleepClock | None:
    """Seconds that this machine has slept since some moment; None where the system cannot tell."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux: as CLOCK_MONOTONIC, and counts sleep
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    if hasattr(time, "CLOCK_UPTIME_RAW"):  # macOS: CLOCK_MONOTONIC counts sleep there
        uptime = time.CLOCK_UPTIME_RAW
        return lambda: time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(uptime)
    return None


async def watch(ctx: Context, asleep: SleepClock | None) -> None:
    """Look until cancelled: each second if ``asleep`` (as from ``sleep_clock``) tells more than our delay."""
    before = 0.0 if asleep is None else asleep()
    while True:
        due = trio.current_time() + (ctx.config.look_s if asleep is None else LOOK_S)
        await trio.sleep_until(due)
        late = max(0.0, trio.current_time() - due)  # our own clock ran on
        now = before if asleep is None else asleep()
        uncounted, before = max(0.0, now - before), now
        if late + uncounted >= NOTICED_S:
            await _woke(ctx, late, uncounted)


async def _woke(ctx: Context, late: float, uncounted: float) -> None:
    gap, unit = late + uncounted, ctx.state.unit
    ctx.clock.slept(uncounted)
    what = "this machine slept" if uncounted else "this machine, or this process, stood still"
    text = f"{what} for {duration(gap * 1000)}"
    if unit is not None and unit.deadline - uncounted <= trio.current_time():
        text += "; the unit at work expired meanwhile, which is no fault"
    ctx.say(text)
    if uncounted:
        ctx.feed(Slept(uncounted))
    if gap >= SESSION_DEAD_S and ctx.session is not None:
        await ctx.session.close("it did not outlive the sleep")  # at least not at the other end
