"""What a node does next: a state machine without I/O, clocks or randomness.

The shell (``barnraise.node.daemon``) feeds events into ``apply`` (``barnraise.node.fold``) and carries
out the actions that ``step`` returns; every action marks its slot busy in the same
breath, so that nothing is ever started twice. All times are seconds on one
monotonic clock; ``jitter`` in an event is a number in [0, 1) that the shell drew.

One slot each: the link to the coordinator, the download, the engine, the question
for a lease, the upload, the lease given back. Uploading overlaps generating: one
submission may be in flight while the next unit is at work, no more.
"""

from __future__ import annotations

from dataclasses import replace

from barnraise.node.decisions import (
    Action,
    Ask,
    Connect,
    Fetch,
    FreeEngine,
    Generate,
    Load,
    Stop,
    StopEngine,
    StopFetch,
    Train,
    Upload,
)
from barnraise.node.describe import describe
from barnraise.node.events import Event
from barnraise.node.fold import fold, surrender
from barnraise.node.model import State

FINISH_GRACE_S = 60.0  # how long a finished node waits for its last acknowledgement
MAX_PENDING = 1  # submissions not acknowledged while the next unit is at work


def initial(exit_when_complete: bool, now: float) -> State:
    """A node that knows nothing yet."""
    return _settle(State(exit_when_complete=exit_when_complete), now)


def apply(state: State, event: Event, now: float) -> State:
    """Fold one event into the state."""
    return _settle(fold(state, event, now), now)


def step(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """Decide what to start or stop now; call again after every event and at ``next_wake``."""
    actions: list[Action] = []
    for rule in (_resume, _halt, _free, _end, _connect, _give_back, _upload, _download, _work):
        if state.stopped is not None:
            break
        state, action = rule(state, now)
        if action is not None:
            actions.append(action)
    return _settle(state, now), tuple(actions)


def next_wake(state: State, now: float) -> float | None:
    """The earliest moment after ``now`` at which ``step`` could decide something new without an event."""
    if state.stopped is not None:
        return None
    times: list[float | None] = [state.pause_until, state.stop_by]
    if state.link == "down":
        times.append(state.link_retry.at)
    if state.fetching is None and state.head > state.fetched:
        times.append(state.fetch_retry.at)
    if state.engine == "idle":
        times.append(state.engine_retry.at)
    if state.unit is not None and state.engine != "stopping":
        times.append(state.unit.deadline)
    if not state.asking:
        times.append(state.ask_retry.at)
    if state.pending and state.uploading is None:
        times.append(state.upload_retry.at)
    return min((t for t in times if t is not None and t > now), default=None)


# --- rules: each starts at most one thing


def _resume(state: State, now: float) -> tuple[State, Action | None]:
    if state.mode == "pause" and state.pause_until is not None and now >= state.pause_until:
        return replace(state, mode="run", pause_until=None), None
    return state, None


def _halt(state: State, now: float) -> tuple[State, Action | None]:
    """Stop what must not go on: a pause, a departure, a completed run, a dead lease."""
    unit = state.unit
    expired = unit is not None and now >= unit.deadline
    reason = {"pause": "paused", "leave": "the node is leaving"}.get(state.mode)
    if reason is None and state.suspended is not None:
        reason = "suspended by the machine's rules"  # which of them is nobody else's business
    rests = reason is not None and state.mode != "leave"
    if reason is None and state.complete and state.unit is not None:
        reason = "the run is complete"
    if reason is None and unit is not None and unit.is_block and not state.in_blocks:
        reason = "the blocks have been put together"
    if reason is None and not expired:
        return state, None
    if expired:
        reason = "the lease expired"
        state = replace(state, unit=None)
    assert reason is not None
    was = state.engine
    if not (rests and unit is not None and unit.is_block):  # which goes on afterwards
        state = surrender(state, reason)
    if was in ("generating", "training") or (was == "loading" and (rests or state.mode == "leave")):
        return replace(state, engine="stopping"), StopEngine(reason)
    return state, None


def _free(state: State, now: float) -> tuple[State, Action | None]:
    """Give the memory of an engine that rests back to the machine."""
    hold = state.suspended
    if hold is None or not hold.free or state.mode == "leave":
        return state, None
    if state.engine != "idle" or not state.engine_used:
        return state, None
    return replace(state, engine="stopping", engine_used=False, loaded=-1), FreeEngine(hold.reason)


def _end(state: State, now: float) -> tuple[State, Action | None]:
    """Decide whether the process is done."""
    due = state.stop_by is not None and now >= state.stop_by
    quiet = state.engine == "idle" and state.unit is None and not state.asking
    flushed = not state.returns or state.link != "up"
    stop: Stop | None = None
    if state.mode == "leave" and (due or (quiet and flushed and state.uploading is None)):
        stop = Stop(0, "left the run")
    elif state.mode == "finish" and quiet:
        if not state.pending or due:
            kept = f"; {len(state.pending)} unsent submission(s) kept for next time" if state.pending else ""
            stop = Stop(0, f"finished the last unit{kept}")
        elif state.stop_by is None:
            return replace(state, stop_by=now + FINISH_GRACE_S), None
    elif state.complete and state.exit_when_complete and quiet:
        nothing_left = not state.pending and not state.unjudged
        if due or (flushed and (nothing_left or state.link != "up")):
            stop = Stop(0, "the run is complete")
    if stop is None:
        return state, None
    return replace(state, stopped=stop), stop


def _connect(state: State, now: float) -> tuple[State, Action | None]:
    if state.link != "down" or state.mode == "leave" or now < state.link_retry.at:
        return state, None
    return replace(state, link="trying"), Connect(state.link_retry.failures + 1)


def _give_back(state: State, now: float) -> tuple[State, Action | None]:
    if state.link != "up" or state.returning or not state.returns:
        return state, None
    return replace(state, returning=True), state.returns[0]


def _upload(state: State, now: float) -> tuple[State, Action | None]:
    ready = state.link == "up" and state.uploading is None and state.pending
    if not ready or now < state.upload_retry.at:
        return state, None
    return replace(state, uploading=state.pending[0]), Upload(state.pending[0])


def _download(state: State, now: float) -> tuple[State, Action | None]:
    """Fetch the newest version, never one in between; a pause stops it."""
    halted = state.mode in ("pause", "leave") or not state.may_transfer
    if state.fetching is not None:
        if (halted or state.fetch_renew) and not state.fetch_stopping:
            return replace(state, fetch_stopping=True), StopFetch()
        return state, None
    idle = halted or state.mode != "run" or (state.complete and state.exit_when_complete)
    if idle or state.head <= state.fetched or now < state.fetch_retry.at:
        return state, None
    return replace(state, fetching=state.head, fetch_renew=False), Fetch(state.head)


def _work(state: State, now: float) -> tuple[State, Action | None]:
    """The engine's next task; versions are swapped between units only."""
    resting = state.mode == "pause" or state.suspended is not None
    if resting or state.engine != "idle" or now < state.engine_retry.at:
        return state, None
    unit = state.unit
    if unit is not None and unit.is_block:
        return replace(state, engine="training", engine_used=True), Train(unit, state.shrink)
    if unit is not None:
        if state.loaded == unit.version:
            return replace(state, engine="generating", engine_used=True), Generate(unit, state.shrink)
        return _loading(state, unit.version)
    if not state.wants_work or state.asking:
        return state, None
    if state.fetched > max(state.loaded, state.last_block):
        return _loading(state, state.fetched)
    ready = state.link == "up" and state.ready >= 0 and not state.behind and not state.returns
    if not ready or len(state.pending) > MAX_PENDING or now < state.ask_retry.at:
        return state, None
    return replace(state, asking=True), Ask(state.ready)


def _loading(state: State, version: int) -> tuple[State, Action | None]:
    return replace(state, engine="loading", engine_target=version, engine_used=True), Load(version)


# --- saying what goes on


def _settle(state: State, now: float) -> State:
    """Refresh ``activity``; its ``since`` only moves when the activity itself changes."""
    new = describe(state)
    old = state.activity
    since = old.since if new.key == old.key else now
    new = replace(new, since=since)
    return state if new == old else replace(state, activity=new)
