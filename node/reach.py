"""How others reach this node (R1): the coordinator tries to dial it, and its relay helps where that fails.

Asked at the start of each session and every quarter of an hour after it. A node that
nobody can dial works all the same over the connections that it opens itself; where
the coordinator arranges hole punches, others can reach it, too.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import trio
from msgspec.structs import replace

from barnraise.node.context import Context
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.reachability import UNASKED, Reach, ask_reach, judge, reason_of

AGAIN_S = 900.0
SOON_S = 60.0  # after a question that failed
LOOK_S = 2.0
_WAYS = ("hole-punched", "relayed")
GIVE_UP_PUNCHES = 5  # that failed, without one that worked

log = logging.getLogger("barnraise.node.reach")


async def watch(ctx: Context) -> None:
    """Keep ``ctx.facts.reach`` true and announce it, until cancelled."""
    session: object = None
    due = place_until = 0.0
    place: tuple[str, bool] | None = None  # our circuit address, and whether it carries shards
    asked = UNASKED
    told = ""  # by what way the coordinator knows that others reach us
    while True:
        now = trio.current_time()
        if ctx.session is None or not ctx.coordinator:
            with trio.move_on_after(LOOK_S):
                await ctx.wake.wait()
            continue
        if ctx.session is not session or now >= due:
            session = ctx.session
            asked, relays = await _ask(ctx)
            told = ""
            due = now + (SOON_S if asked.kind == "unknown" else AGAIN_S)
            if asked.kind != "outbound-only" or not relays:
                place = None
            else:
                place, place_until = await _reserve(ctx)
        elif place is not None and now >= place_until:
            place, place_until = await _reserve(ctx)
        _tell(ctx, _with_detours(ctx, asked, place))
        if ctx.facts.reach.kind in _WAYS and ctx.facts.reach.kind != told:
            told = ctx.facts.reach.kind
            with suppress(BarnraiseError):
                await ask_reach(ctx.network, ctx.coordinator, told, tell_only=True)
        if ctx.network.detours is not None:  # what they did lately changes how we are reached
            await trio.sleep(LOOK_S)
            continue
        with trio.move_on_at(due):
            await ctx.linked.wait()


async def _ask(ctx: Context) -> tuple[Reach, bool]:
    """What dialling back gave, and whether there is a relay."""
    try:
        reply = await ask_reach(ctx.network, ctx.coordinator)
    except BarnraiseError as error:
        return reason_of(error), False
    return judge(ctx.network.addresses, reply), reply.relays


async def _reserve(ctx: Context) -> tuple[tuple[str, bool] | None, float]:
    """A place at the coordinator's relay: our address there, and when to renew it."""
    now = trio.current_time()
    detours = ctx.network.detours
    if detours is None:
        return None, now
    try:
        seconds, bulk = await detours.reserve(ctx.coordinator)
    except BarnraiseError as error:
        log.info("no place at the coordinator's relay: %s", error)
        return None, now
    relay = next((item for item in ctx.config.addresses if item.endswith(ctx.coordinator)), "")
    if not relay:
        return None, now
    return (f"{relay}/p2p-circuit/p2p/{ctx.network.peer_id}", bulk), now + seconds / 2


def _with_detours(ctx: Context, asked: Reach, place: tuple[str, bool] | None) -> Reach:
    """``asked``, with what a relay changes."""
    detours = ctx.network.detours
    if asked.kind == "unknown":
        return replace(asked, addresses=ctx.network.addresses)
    if asked.kind != "outbound-only" or detours is None or place is None:
        return asked
    address, bulk = place
    done, failed = detours.punched, detours.failed
    if done:
        reason = f"{done} hole punches worked, {failed} did not; {asked.reason}"
        return replace(asked, kind="hole-punched", reason=reason, addresses=(address,))
    if bulk and detours.relayed:
        reason = f"others come through the coordinator's relay; {asked.reason}"
        return replace(asked, kind="relayed", reason=reason, addresses=(address,))
    if failed >= GIVE_UP_PUNCHES and not bulk:
        reason = f"{asked.reason}; {failed} hole punches failed ({detours.last_failure})"
        return replace(asked, reason=reason)
    return replace(
        asked,
        reason=f"{asked.reason}; hole punching through the coordinator is offered to others",
        addresses=(address,),
    )


def _tell(ctx: Context, reach: Reach) -> None:
    """Show it, announce it, and say it in one line when it changes."""
    before = ctx.facts.reach
    if reach == before:
        return
    ctx.facts.reach = reach
    if ctx.treecast is not None:
        ctx.treecast.gossiper.announce(reach.addresses)
    ctx.changed.set()
    ctx.reach_known.set()
    if reach.kind != before.kind:
        ctx.say(f"reachable {reach.line}" if reach.kind != "unknown" else f"reachability {reach.line}")


async def wait_known(ctx: Context, seconds: float) -> None:
    """Wait until it is known how others reach us, or ``seconds`` are over."""
    with trio.move_on_after(seconds):
        await ctx.reach_known.wait()
