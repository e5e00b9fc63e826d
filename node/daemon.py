"""The volunteer's daemon: runs what ``barnraise.node.core`` decides, on any network and engine.

``run_node`` is the whole of it: the same code runs over libp2p with an engine child,
and over the in-memory network with an in-process engine on trio's autojump clock.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Protocol

import trio

from barnraise.node import actions, core, guard, hardware, overlay, reach, room, sleep, witness
from barnraise.node.attend import attend
from barnraise.node.clock import Clock
from barnraise.node.config import NodeConfig
from barnraise.node.consent import Approve
from barnraise.node.context import CONSENT, Context
from barnraise.node.decisions import (
    Action,
    Ask,
    Connect,
    Fetch,
    FreeEngine,
    Generate,
    GiveBack,
    Load,
    Stop,
    StopEngine,
    StopFetch,
    Train,
    Upload,
)
from barnraise.node.describe import sentence
from barnraise.node.engine import Engine
from barnraise.node.fetching import in_words
from barnraise.node.generate import generate
from barnraise.node.handle import NodeHandle, keep_wish, take_up_wish
from barnraise.node.known import KnownRuns
from barnraise.node.machine import Sensors
from barnraise.node.state import Facts
from barnraise.node.traffic import Limits
from barnraise.node.train import train
from barnraise.protocol.errors import StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.network import Network
from barnraise.protocol.paced_network import PacedNetwork
from barnraise.protocol.shards import off_loop
from barnraise.protocol.store import DiskStore
from barnraise.protocol.unit_context import Lent, about

SILENCE_S = 30.0  # no state lasts longer without a line (R3)
QUIET_SILENCE_S = 600.0  # but a pause or a completed run was announced and is nobody's worry
DOWNLOAD_SILENCE_S = 10.0  # while a download makes no progress
SETTLED_S = 2.0  # what lasts less needs no line
CLOSE_S = 5.0
COUNT_EVERY_S = 1.0
TIDY_EVERY_S = 30.0
AT_WORK = frozenset({"generating", "training"})  # which speak for themselves


class Starting(Protocol):
    """trio's task status, as ``nursery.start`` passes it."""

    def started(self, value: NodeHandle, /) -> None:
        """Report the handle and let ``nursery.start`` return."""


async def run_node(
    config: NodeConfig,
    network: Network,
    engine: Engine,
    identity: Identity,
    now_ms: Callable[[], int],
    rng: random.Random,
    *,
    approve: Approve | None = None,
    sensors: Sensors | None = None,
    asleep: sleep.SleepClock | None = None,
    task_status: Starting = trio.TASK_STATUS_IGNORED,
) -> int:
    """Lend a machine to a run until it is told to stop; return the exit code.

    ``now_ms`` is the wall clock (ms since the epoch), ``rng`` draws jitter and
    orders. ``approve`` is asked once per unknown run (``barnraise.node.consent``). The handle
    for viewers is handed to ``task_status``. ``sensors`` tell of the machine and the person
    (``barnraise.node.guard``); without, nothing is known of either. ``asleep`` tells how long the
    machine has slept (``barnraise.node.sleep``). Cancelling ends the node at once; the
    lease at work is then given back by the next start.

    Exit codes: 0 left, finished or run complete; 3 protocol version refused;
    4 the run's key or id changed; 5 the person chose not to join.

    Raises:
        StorageError: the data folder cannot be used.
    """
    now = trio.current_time()
    limits = Limits(config)
    ctx = Context(
        config=config,
        network=PacedNetwork(network, limits.up, limits.down),
        limits=limits,
        engine=engine,
        identity=identity,
        clock=Clock(now_ms),
        rng=rng,
        known=KnownRuns(config.known_path),
        store=DiskStore(config.store_path, limits.disk),
        approve=approve,
        sensors=sensors,
        instance=rng.randbytes(16),
        facts=Facts(config.called(identity.peer_id), identity.peer_id),
        state=core.initial(config.exit_when_complete, now),
        spoke_at=now,
    )
    ctx.facts.started_ms = ctx.clock.wall_ms()
    if config.after_crash:
        ctx.say(config.after_crash, logging.WARNING)
    take_up_wish(ctx)
    task_status.started(NodeHandle(ctx))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_speak_up, ctx)
            if config.tree:
                nursery.start_soon(overlay.take_part, ctx)
            nursery.start_soon(reach.watch, ctx)
            nursery.start_soon(hardware.watch, ctx)
            nursery.start_soon(witness.watch, ctx)
            nursery.start_soon(_count_traffic, ctx)
            nursery.start_soon(room.watch, ctx)
            nursery.start_soon(guard.watch, ctx)
            nursery.start_soon(sleep.watch, ctx, asleep)
            nursery.start_soon(_tidy_units, ctx)
            stop = await _decide(ctx, nursery)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
            await engine.close()
        _save_traffic(ctx, at_once=True)
    if ctx.state.mode == "finish":
        keep_wish(ctx, "leave", None)  # fulfilled: the next start is a new wish
    ctx.say(f"stopped: {stop.reason}", logging.INFO if stop.code == 0 else logging.ERROR)
    return stop.code


async def _decide(ctx: Context, nursery: trio.Nursery) -> Stop:
    """Step, start what was decided, wait for an event or the next due moment; until the end."""
    while True:
        before = ctx.state.activity
        ctx.state, decided = core.step(ctx.state, trio.current_time())
        if ctx.state.activity != before:
            ctx.spoken.set()
        for action in decided:
            ctx.changed.set()
            _start(ctx, nursery, action)
        if ctx.state.stopped is not None:
            return ctx.state.stopped
        if decided:
            await trio.lowlevel.checkpoint()
            continue
        due = core.next_wake(ctx.state, trio.current_time())
        with trio.move_on_at(math.inf if due is None else due):
            await ctx.wake.wait()


def _start(ctx: Context, nursery: trio.Nursery, action: Action) -> None:
    match action:
        case Connect(attempt):
            nursery.start_soon(attend, ctx, attempt)
        case Fetch():
            ctx.fetch_scope = trio.CancelScope()
            nursery.start_soon(actions.fetch, ctx, action, ctx.fetch_scope)
        case StopFetch():
            if ctx.fetch_scope is not None:
                ctx.fetch_scope.cancel()
        case Load():
            ctx.engine_scope = trio.CancelScope()
            nursery.start_soon(actions.load, ctx, action, ctx.engine_scope)
        case Generate():
            ctx.engine_scope = trio.CancelScope()
            with about(_at_hand(ctx)):
                nursery.start_soon(generate, ctx, action, ctx.engine_scope)
        case Train():
            ctx.engine_scope = trio.CancelScope()
            with about(_at_hand(ctx)):
                nursery.start_soon(train, ctx, action, ctx.engine_scope)
        case StopEngine(reason):
            with about(_at_hand(ctx)):
                ctx.say(f"stopping the engine: {reason}")
            if ctx.engine_scope is not None:
                ctx.engine_scope.cancel()
        case FreeEngine():
            nursery.start_soon(actions.free_engine, ctx, action)
        case Ask():
            nursery.start_soon(actions.ask, ctx, action)
        case Upload():
            lease_id = None if ctx.pending is None else ctx.pending.lease_of(action.submission_id)
            with about(lease_id or b"", action.submission_id):
                nursery.start_soon(actions.upload, ctx, action)
        case GiveBack():
            with about(action.lease_id):
                nursery.start_soon(actions.give_back, ctx, action)
        case Stop():
            pass


def _at_hand(ctx: Context) -> Lent | bytes:
    """The unit that the engine is at, for the log; empty if it is at none. A task started there keeps it."""
    return ctx.lease or b""


async def _speak_up(ctx: Context) -> None:
    """Put every lasting state into words, and repeat it before it is silent for too long (R3)."""
    announced: tuple[str, str] | None = None
    while True:
        activity, now = ctx.state.activity, trio.current_time()
        asks = ctx.consent.open is not None
        key = ("consent", "") if asks else activity.key
        quiet = activity.name in ("paused", "complete")
        due = ctx.spoke_at + (QUIET_SILENCE_S if quiet else SILENCE_S)
        if ctx.facts.transfer is not None and activity.name not in AT_WORK:
            due = min(due, ctx.spoke_at + DOWNLOAD_SILENCE_S)
        just_said = bool(ctx.link_said) and ctx.link_said in activity.reason
        if key != announced and activity.name not in AT_WORK and not just_said:
            due = min(due, activity.since + SETTLED_S)
        if now >= due:
            announced = key
            with about(_at_hand(ctx) if activity.name in AT_WORK and not asks else b""):
                ctx.say(CONSENT if asks else sentence(activity, now, ctx.clock.wall_ms()) + _progress(ctx))
            continue
        with trio.move_on_at(due):
            await ctx.spoken.wait()


async def _count_traffic(ctx: Context) -> None:
    """Count what goes over the wire, keep the count on disk, and keep to the quota."""
    if ctx.limits.warning:
        ctx.say(ctx.limits.warning, logging.WARNING)
    while True:
        ctx.limits.count(ctx.network, ctx.clock.wall_ms())
        guard.hold(ctx)
        _save_traffic(ctx)
        # Without a quota nothing hangs on the count, and whoever looks at it counts first.
        await trio.sleep(ctx.config.look_s if ctx.limits.quota.limit is None else COUNT_EVERY_S)


async def _tidy_units(ctx: Context) -> None:
    """Delete the files of block units that nobody will ask for any more."""
    seen = -1
    while ctx.run is None:
        seen = await ctx.changed.wait(seen)
    if ctx.run.spec.pretrain is None:
        return
    while True:
        await trio.sleep(TIDY_EVERY_S)
        if ctx.units is None or ctx.pending is None or ctx.receipts is None:
            continue
        keep = set(ctx.pending.lease_ids)
        if ctx.state.unit is not None:
            keep.add(ctx.state.unit.lease_id)
        if ctx.lease is not None and ctx.state.engine != "idle":
            keep.add(ctx.lease.lease_id)
        ctx.units.judged({lease_id: ctx.receipts.verdicts(lease_id) for lease_id in ctx.units.kept})
        known = ctx.clock.offset_ms is not None
        ctx.units.tidy(keep, ctx.clock.coordinator_ms() if known else None)
        await off_loop(ctx.units.dropped_bytes(), ctx.units.empty)


def _save_traffic(ctx: Context, *, at_once: bool = False) -> None:
    try:
        ctx.limits.save(trio.current_time(), at_once=at_once)
    except StorageError as error:
        if str(error) != ctx.limits.warning:
            ctx.limits.warning = str(error)
            ctx.say(f"the month's traffic is counted, but not on disk: {error}", logging.WARNING)


def _progress(ctx: Context) -> str:
    unit, transfer = ctx.facts.unit, ctx.facts.transfer
    if unit is not None and transfer is None and ctx.state.engine in AT_WORK:
        return f"; {unit.in_words()}"
    if transfer is not None:
        return f"; {in_words(transfer.shown(trio.current_time(), ctx.coordinator))}"
    return ""
