"""Watches for a full disk: work waits, its cause is said with how much is needed where (R25).

Every write of a node copes with a disk that refuses: versions are fetched later, finished
work and limits hold in memory, a receipt is asked for again. Here is what they wait for
together, and what happens once there is room.
"""

from __future__ import annotations

import logging

import trio

from barnraise.node import guard
from barnraise.node.context import Context
from barnraise.node.needs import free_disk
from barnraise.node.rules import Suspension
from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import StorageError
from barnraise.protocol.shards import off_loop

LEAST = 32 * 2**20  # bytes; a download leaves more than this free (barnraise.protocol.store)
ENOUGH = 48 * 2**20  # and with so many work goes on
_RECEIPT = 64 * 1024  # what a receipt may need


async def watch(ctx: Context) -> None:
    """Look every few seconds until cancelled."""
    while True:
        await look(ctx)
        await trio.sleep(ctx.config.look_s)


async def look(ctx: Context) -> None:
    """Write what could not be written before, and say what is missing."""
    before, reason = ctx.full, await _missing(ctx)
    if reason:
        cure = f"free some room where {ctx.config.data} lies; it goes on by itself"
        ctx.full = Suspension("disk", reason, cure, transfers=True, finish=True)
    else:
        ctx.full = None
    if ctx.full is not None and before is None:
        ctx.say(f"the disk is full: {reason}; {ctx.full.cure}", logging.ERROR)
    if before is not None and ctx.full is None:
        ctx.say("there is room on the disk again")
    if ctx.full != before:
        guard.hold(ctx)


async def _missing(ctx: Context) -> str:
    """Why the disk does not do, or ``""``."""
    if ctx.pending is not None and ctx.pending.unsaved:
        try:
            await off_loop(0, ctx.pending.save)
        except StorageError as error:
            return f"{ctx.pending.unsaved} finished submission(s) are in memory alone: {error}"
    if ctx.receipts_refused and ctx.receipts is not None:
        probe = ctx.receipts.path.with_name(".room")
        try:
            write_durably(probe, bytes(_RECEIPT))
            probe.unlink(missing_ok=True)
        except (StorageError, OSError):
            return ctx.receipts_refused
        ctx.receipts_refused = ""
        if ctx.session is not None:  # a new one begins with the receipts that are missing
            await ctx.session.close("asking for the receipts that were not kept")
    free = free_disk(ctx.config.data)
    if free is not None and free < (LEAST if ctx.full is None else ENOUGH):
        short = (ENOUGH - free) / 1e6
        return f"{free / 1e6:.0f} MB are free for {ctx.config.data}: another {short:.0f} MB are needed there"
    return ""
