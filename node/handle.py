"""What a running node offers to viewers, and the wishes of a person that outlive it."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from barnraise.node import distrust, guard
from barnraise.node.appeal import appeal
from barnraise.node.context import Context
from barnraise.node.events import Command, Mode
from barnraise.node.mode import Wish, load_wish, save_wish
from barnraise.node.prove import prove
from barnraise.node.receipt_fields import page
from barnraise.protocol.control import Changed
from barnraise.protocol.errors import RefusedError, StorageError

MAX_PAUSE_S = 366 * 86_400.0

CommandHandler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class NodeHandle:
    """What a running node offers to viewers: its state tree, a signal of changes, commands.

    Attributes:
        context: what the daemon's tasks share, to look at and listen to (simulations do); change nothing.
        changed: set whenever the tree may have changed.
        commands: ``pause`` (``seconds`` or none), ``resume``, ``finish``, ``leave``,
            ``appeal`` (``receipt``: see ``barnraise.node.appeal``),
            ``receipts`` (``after``, ``limit``: see ``barnraise.node.receipt_fields``),
            ``prove`` (``index``: see ``barnraise.node.prove``),
            ``agree`` and ``decline`` (``run_id``: as in the tree's ``consent``),
            ``limits`` (what the tree's ``limits`` may hold; nil for none: ``Limits.change``).
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = self.context = ctx
        self.changed: Changed = ctx.changed
        self.commands: dict[str, CommandHandler] = {
            "pause": self._pause,
            "resume": self._resume,
            "finish": self._finish,
            "leave": self._leave,
            "limits": self._limits,
            "appeal": self._appeal,
            "receipts": self._receipts,
            "prove": lambda arguments: prove(ctx, arguments),
            "agree": self._agree,
            "decline": self._decline,
        }

    def get_state(self) -> dict[str, Any]:
        """The state tree at this moment (``barnraise.node.state``)."""
        return self._ctx.tree()

    async def _pause(self, arguments: dict[str, Any]) -> dict[str, Any]:
        seconds = arguments.get("seconds")
        if seconds is None:
            return self._command("pause", "paused")
        good = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
        if not good or not 0 < seconds <= MAX_PAUSE_S:
            raise RefusedError("bad-argument", f"seconds must be above 0 and at most {MAX_PAUSE_S:.0f}")
        return self._command("pause", f"paused for {seconds:g} s", trio.current_time() + seconds)

    async def _resume(self, arguments: dict[str, Any]) -> dict[str, Any]:
        ctx = self._ctx
        if ctx.distrusted is not None and ctx.state.mode == "run":  # a pause is taken back first
            ctx.say(text := distrust.override(ctx))
            guard.hold(ctx)
            return {"ok": True, "text": text}
        reply, held = self._command("run", "resumed"), ctx.facts.suspended
        if reply["ok"] and held:
            reply["text"] += f", but work stays suspended: {held[0]['reason']}; {held[0]['cure']}"
        return reply

    async def _finish(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._command("finish", "finishing the unit at work, then stopping")

    async def _leave(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._command("leave", "leaving")

    def end(self) -> None:
        """Leave because the machine wants it (it shuts down): a pause still holds at the next start."""
        self._command("leave", "leaving", keep=True)

    async def _receipts(self, arguments: dict[str, Any]) -> dict[str, Any]:
        book = self._ctx.receipts
        return {"receipts": page([] if book is None else book.receipts(), arguments)}

    async def _agree(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._ctx.consent.answer(arguments, True)
        return {"ok": True, "text": "agreed: joining the run"}

    async def _decline(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._ctx.consent.answer(arguments, False)
        return {"ok": True, "text": "declined: the node ends"}

    async def _appeal(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return await appeal(self._ctx, arguments)

    async def _limits(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            text = self._ctx.limits.change(arguments, self._ctx.clock.wall_ms())
            self._ctx.say(text)
        finally:  # what could not be written holds all the same
            await guard.look(self._ctx)
            self._ctx.wake.set()  # caps may be others now
            self._ctx.allowed.set()
        limits = self._ctx.limits.tree(self._ctx.clock.wall_ms())
        return {"ok": True, "text": text, "limits": limits}

    def _command(
        self, mode: Mode, text: str, until: float | None = None, *, keep: bool = False
    ) -> dict[str, Any]:
        ctx = self._ctx
        if ctx.state.mode == "leave" or ctx.state.stopped is not None:
            return {"ok": mode == "leave", "text": "the node is leaving"}
        ctx.say(text)
        ctx.feed(Command(mode, until))
        if not keep:
            keep_wish(ctx, mode, until)
        return {"ok": True, "text": text}


def keep_wish(ctx: Context, mode: Mode, until: float | None) -> None:
    """Let a pause or a finish outlive a crash or a shutdown."""
    until_ms = None if until is None else ctx.clock.wall_ms() + round((until - trio.current_time()) * 1000)
    try:
        save_wish(ctx.config.wish_path, Wish(mode, until_ms) if mode in ("pause", "finish") else None)
    except StorageError as error:
        ctx.say(f"this would not outlive a crash: {error}", logging.WARNING)


def take_up_wish(ctx: Context) -> None:
    """Go on pausing or finishing, if that is what the person wished before a crash."""
    wall = ctx.clock.wall_ms()
    wish = load_wish(ctx.config.wish_path, wall)
    if wish is not None:
        until = None if wish.until_ms is None else trio.current_time() + (wish.until_ms - wall) / 1000
        ctx.say(f"{wish.mode}: as wished before the last start ended; 'barnraise resume' takes it back")
        ctx.feed(Command(wish.mode, until))
