"""Looks at the run's health after every version and once a minute; raises and clears alarms, pauses."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from barnraise.coordinator import scheduler
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Event, VersionPublished
from barnraise.coordinator.guards import OF_THE_MOMENT, Finding, GuardLimits, Seen, look
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal import Write
from barnraise.coordinator.operator_events import AlarmCleared, AlarmRaised, RunPaused
from barnraise.protocol.errors import StorageError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
HOUR_S = 3600.0


@dataclass
class GuardBelt:
    """See ``run``. ``limits`` are the operator's; alarms and pauses are durable events."""

    core: Core
    hub: Hub
    limits: GuardLimits = field(default_factory=GuardLimits)
    turned_away: Callable[[], int] = lambda: 0  # new keys, within the last hour
    _published: trio.Event = field(default_factory=trio.Event)
    _live: deque[tuple[float, int]] = field(default_factory=deque)  # when, so many nodes: falling counts
    _found_at: dict[str, int] = field(default_factory=dict)  # kind -> head when it was found last

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self._published = trio.Event()
            try:
                await self.look()
            except StorageError as error:
                log.error("guards: %s", error)
            with trio.move_on_after(LOOK_EVERY_S):
                await self._published.wait()

    def hear(self, write: Write) -> None:
        """A listener of ``Core``: look when a version is published."""
        if any(isinstance(event, VersionPublished) for event in write.events):
            self._published.set()

    async def look(self) -> None:
        """One look; what is new is recorded.

        Raises:
            StorageError: the disk refused.
        """
        state = self.core.state
        found = look(state.versions, self._seen(), self.limits, state.operations.is_given_up)
        over = ended(set(state.operations.alarms), found, state.head, self._found_at, self.limits.recent)
        events = decide(found, over, self.core, self.limits.pause)
        for event in events:
            if isinstance(event, AlarmRaised):
                log.error("ALARM %s: %s", event.kind, event.text)
            elif isinstance(event, RunPaused):
                log.error("the run is paused: %s", event.reason)
        if events:
            await self.core.record(events)

    def _seen(self) -> Seen:
        core, state, now = self.core, self.core.state, trio.current_time()
        live = len(self.hub.by_key)
        while self._live and (self._live[0][0] < now - HOUR_S or self._live[-1][1] <= live):
            if self._live[0][0] < now - HOUR_S:
                self._live.popleft()
            else:
                self._live.pop()
        self._live.append((now, live))
        oldest = next(iter(state.waiting), None)
        complete = scheduler.is_complete(state, core.settings.rollout)
        return Seen(
            now_ms=core.now_ms(),
            max_lag=state.max_lag,
            oldest_waiting_ms=None if oldest is None else state.submissions[oldest].at_ms,
            live=live,
            most_live=self._live[0][1],
            working=bool(live) and not complete and state.operations.paused is None,
            turned_away=self.turned_away(),
        )


def _finite(value: float) -> float:
    """Everybody is told it, in formats that know no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, value))


def ended(
    alarms: set[str], found: list[Finding], head: int, found_at: dict[str, int], recent: int
) -> list[str]:
    """Which alarms are over; ``found_at`` is brought up to date.

    What versions' numbers say must stay away for ``recent`` versions: a number about its limit would
    else raise an alarm with every other version, and a grave one pause again whoever resumed.
    """
    for finding in found:
        found_at[finding.kind] = head
    gone = alarms - {finding.kind for finding in found}
    return sorted(
        kind for kind in gone if kind in OF_THE_MOMENT or head - found_at.setdefault(kind, head) >= recent
    )


def decide(found: list[Finding], over: list[str], core: Core, may_pause: bool) -> list[Event]:
    """What to record: alarms that are new, those that are ``over``, and a pause for a grave one.

    An alarm that is in force already pauses nothing again: whoever resumed the run knew of it.
    """
    now, version, alarms = core.now_ms(), max(0, core.state.head), core.state.operations.alarms
    events: list[Event] = []
    for finding in found:
        if finding.kind in alarms:
            continue
        raised = AlarmRaised(
            kind=finding.kind,
            value=_finite(finding.value),
            limit=_finite(finding.limit),
            text=finding.text,
            version=version,
            at_ms=now,
        )
        events.append(raised)
        free = core.state.operations.paused is None and not any(isinstance(e, RunPaused) for e in events)
        if finding.grave and may_pause and free:
            events.append(RunPaused(by="guard", reason=f"{finding.kind}: {finding.text}"[:500], at_ms=now))
    return events + [AlarmCleared(kind=kind, at_ms=now) for kind in over]
