"""Draining: lend no more, wait until all work at hand is in and judged, then end the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Event
from barnraise.coordinator.guards import GRAVE
from barnraise.coordinator.operator_events import RunPaused, RunResumed
from barnraise.coordinator.progress import Progress
from barnraise.coordinator.state import State
from barnraise.protocol.errors import RefusedError, StorageError

log = logging.getLogger(__name__)

REASON = "draining: the operator ends this coordinator once the work at hand is in"
USUAL_S = 30 * 60
LONGEST_S = 3650 * 86_400
_LOOK_EVERY_S = 0.25


def at_hand(state: State) -> int:
    """How many units are lent or wait for their verdict."""
    lent = sum(1 for lease in state.leases.values() if not lease.timed_out)
    blocks = sum(1 for hold in state.blocks.leases.values() if not hold.timed_out)
    return lent + blocks + len(state.waiting) + len(state.blocks.waiting)


def is_drain(paused: RunPaused) -> bool:
    """Whether a pause is a draining's own, and ends with it."""
    return paused.by == "operator" and paused.reason == REASON


@dataclass
class Drain:
    """At most one at a time.

    Attributes:
        end: a clean end of this process, as by Ctrl-C.
        guards_pause: whether guards may pause the run.
    """

    core: Core
    progress: Progress
    end: Callable[[], None]
    guards_pause: bool = True
    _until: float = 0.0
    _asked: trio.Event = field(default_factory=trio.Event)

    async def ask(self, args: dict[str, Any]) -> dict[str, Any]:
        """Command ``drain``: ``seconds``, to wait at most. Asked again, the new time counts; 0 gives it up.

        The coordinator ends once nothing is at hand, and goes on lending when the time is over
        first. A pause that was there before outlives it; ``resume`` ends both.

        Raises:
            RefusedError: that is no time.
            StorageError: the disk refused.
        """
        seconds, core = args.get("seconds", USUAL_S), self.core
        if not isinstance(seconds, int) or isinstance(seconds, bool) or not 0 <= seconds <= LONGEST_S:
            raise RefusedError("bad-argument", f"draining waits for at most {LONGEST_S // 86_400} days")
        if not seconds:
            await self._go_on()
        else:
            if core.state.operations.paused is None:
                await core.record([RunPaused(by="operator", reason=REASON, at_ms=core.now_ms())])
            self._until = trio.current_time() + seconds
            self.progress.draining_until_ms = core.now_ms() + seconds * 1000
            self._asked.set()
        return {"at_hand": at_hand(core.state), "until": self.progress.draining_until_ms}

    async def run(self) -> None:
        """Drain whenever it is asked for, until cancelled. One that died with its process is over."""
        await self._try(self._unpause)
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            while self.progress.draining_until_ms is not None:
                await self._try(self._look)
                await trio.sleep(_LOOK_EVERY_S)

    async def _try(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except StorageError as error:
            log.error("draining: %s", error)

    async def _look(self) -> None:
        left = at_hand(self.core.state)
        if self.core.state.operations.paused is None:  # somebody resumed the run
            await self._go_on()
        elif not left:
            log.info("drained")
            await self._unpause()  # the next start goes on
            self.end()
            await trio.sleep_forever()
        elif trio.current_time() > self._until:
            log.warning("draining: %d units are still at work, and the time is over: going on", left)
            await self._go_on()

    async def _go_on(self) -> None:
        await self._unpause()
        self.progress.draining_until_ms = None

    async def _unpause(self) -> None:
        """End the draining's own pause. What a guard would have paused the run for meanwhile does now."""
        operations, now = self.core.state.operations, self.core.now_ms()
        paused = operations.paused
        if paused is None or not is_drain(paused):
            return
        events: list[Event] = [RunResumed(at_ms=now)]
        for alarm in operations.alarms.values():
            if self.guards_pause and alarm.kind in GRAVE and alarm.at_ms >= paused.at_ms:
                events.append(RunPaused(by="guard", reason=f"{alarm.kind}: {alarm.text}"[:500], at_ms=now))
                break
        await self.core.record(events)
