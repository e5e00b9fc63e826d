"""What a node does next: a state machine without I/O, clocks or randomness.

The shell (``barnraise.node.daemon``) feeds events into ``apply`` and carries out
the actions that ``step`` returns; every action marks its slot busy in the same
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
    GiveBack,
    Load,
    Stop,
    StopEngine,
    StopFetch,
    Train,
    Upload,
)
from barnraise.node.describe import describe
from barnraise.node.events import (
    AlreadyAnswered,
    AskFailed,
    Command,
    DeadlineMoved,
    EngineFailed,
    EngineLoaded,
    EngineStopped,
    Event,
    Fatal,
    FetchDone,
    FetchFailed,
    FetchStopped,
    Granted,
    HeadSeen,
    Held,
    Joined,
    Judged,
    LinkLost,
    Mode,
    NoLease,
    Restored,
    Retargeted,
    Returned,
    Slept,
    Unit,
    UnitDelayed,
    UnitDone,
    UnitUnusable,
    Uploaded,
    UploadFailed,
    VersionDamaged,
    WorkAgain,
)
from barnraise.node.model import Retry, State

LEAVE_GRACE_S = 1.5  # leaving acts within 2 s (R13), whatever the network does
FINISH_GRACE_S = 60.0  # how long a finished node waits for its last acknowledgement
VERDICT_GRACE_S = 10.0  # how long a completed run's last verdicts are waited for
MAX_PENDING = 1  # submissions not acknowledged while the next unit is at work
MAX_SHRINK = 8
STOOD_S = 30.0  # a session that lasted so long was sound
CROSSED_S = 5.0
AGAIN_WITHIN_S = 2.0  # when a paused run goes on; all its nodes ask then
TURNED_AWAY_S = 1800.0  # how long a node stays away at most that was told to come again later
REPLACED_S = 600.0  # how long a node stays away whose key another machine uses (half to whole of it)


def initial(exit_when_complete: bool, now: float) -> State:
    """A node that knows nothing yet."""
    return _settle(State(exit_when_complete=exit_when_complete), now)


def apply(state: State, event: Event, now: float) -> State:
    """Fold one event into the state."""
    return _settle(_fold(state, event, now), now)


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


# --- folding events


def _fold(state: State, event: Event, now: float) -> State:
    match event:
        case LinkLost(reason, jitter, replaced, wait_s):
            if wait_s > 0:  # sooner all the same now and then: its operator may let us in by hand
                at = now + min(wait_s, TURNED_AWAY_S) * (1.0 + 0.1 * jitter)
                retry = Retry(state.link_retry.failures + 1, at, reason)
                return replace(state, link="down", link_retry=retry)
            # Only a session that stood for a while starts the backoff afresh.
            stood = state.link == "up" and now - state.link_since >= STOOD_S
            before = Retry() if stood else state.link_retry
            base, cap = (REPLACED_S, REPLACED_S) if replaced else (1.0, 60.0)
            return replace(state, link="down", link_retry=backed_off(before, now, reason, jitter, base, cap))
        case Joined(head, final, max_lag, last_block):
            state = replace(state, link="up", joined_once=True, final=final, max_lag=max_lag)
            state = replace(state, last_block=last_block)
            state = replace(state, link_since=now, upload_retry=Retry(), ask_retry=Retry())
            state = replace(state, fetch_retry=Retry(), fetch_renew=state.fetching is not None)
            return _head(state, head, now)
        case Retargeted(final):
            return replace(state, final=final)
        case HeadSeen(version):
            return _head(state, version, now)
        case FetchDone(version):
            fetched = max(version, state.fetched)
            if state.unit is not None and state.unit.version == version:  # it was what a unit waited for
                state = replace(state, engine_retry=replace(state.engine_retry, at=now))
            if state.fetched < version <= state.last_block:  # the old round's answer is no more
                state = replace(state, ask_retry=Retry())
            return replace(state, fetching=None, fetch_stopping=False, fetched=fetched, fetch_retry=Retry())
        case FetchFailed(reason, jitter):
            retry = backed_off(state.fetch_retry, now, reason, jitter, 1.0, 30.0)
            return replace(state, fetching=None, fetch_stopping=False, fetch_retry=retry)
        case FetchStopped():
            return replace(state, fetching=None, fetch_stopping=False)
        case EngineLoaded(version):
            retry = state.engine_retry if state.unit is not None else Retry()
            return replace(state, engine="idle", loaded=version, engine_retry=replace(retry, at=now))
        case EngineFailed():
            return _engine_failed(state, event, now)
        case VersionDamaged(version, jitter):
            reason = f"version {version} was damaged on the disk"
            retry = backed_off(state.engine_retry, now, reason, jitter, 2.0, 300.0)
            fetched = -1 if state.fetched == version else state.fetched
            return _surrender(replace(state, engine="idle", fetched=fetched, engine_retry=retry), reason)
        case EngineStopped(alive):
            return replace(state, engine="idle", loaded=state.loaded if alive else -1)
        case UnitDone(submission_id):
            state = replace(state, engine="idle", unit=None, engine_retry=Retry())
            if submission_id in state.pending:
                return state
            return replace(state, pending=(*state.pending, submission_id))
        case UnitUnusable(reason, jitter):
            retry = backed_off(state.engine_retry, now, reason, jitter, 5.0, 300.0)
            return _surrender(replace(state, engine="idle", engine_retry=retry), reason)
        case UnitDelayed(reason, jitter):
            retry = backed_off(state.engine_retry, now, reason, jitter, 1.0, 30.0)
            return replace(state, engine="idle", engine_retry=retry)
        case Granted(unit):
            return _granted(replace(state, asking=False, ask_retry=Retry()), unit)
        case NoLease(reason, retry_after, jitter):
            at = now + max(0.5, retry_after) * (1.0 + 0.25 * jitter)
            return replace(state, asking=False, ask_retry=Retry(0, at, reason))
        case WorkAgain(jitter):
            at = min(state.ask_retry.at, now + AGAIN_WITHIN_S * jitter)
            return replace(state, ask_retry=replace(state.ask_retry, at=at))
        case AlreadyAnswered():
            at = now + (CROSSED_S if state.pending else 0.1)
            crossed = Retry(0, at, "the last submission is still on its way")
            return replace(state, asking=False, ask_retry=crossed, ask_after_upload=bool(state.pending))
        case AskFailed(reason, jitter):
            retry = backed_off(state.ask_retry, now, reason, jitter, 1.0, 60.0)
            return replace(state, asking=False, ask_retry=retry)
        case Uploaded(submission_id, acknowledged):
            left = tuple(p for p in state.pending if p != submission_id)
            unjudged = state.unjudged | {submission_id} if acknowledged else state.unjudged
            if state.ask_after_upload:
                state = replace(state, ask_retry=Retry(), ask_after_upload=False)
            state = replace(state, pending=left, unjudged=unjudged, upload_retry=Retry())
            return replace(state, uploading=None if state.uploading == submission_id else state.uploading)
        case UploadFailed(reason, jitter):
            retry = backed_off(state.upload_retry, now, reason, jitter, 1.0, 60.0)
            return replace(state, uploading=None, upload_retry=retry)
        case Judged(submission_id):
            # A verdict is as good as an acknowledgement: the coordinator has it on disk.
            keep = state.uploading == submission_id
            left = tuple(p for p in state.pending if p != submission_id or keep)
            return replace(state, pending=left, unjudged=state.unjudged - {submission_id})
        case Returned(lease_id, done):
            left_returns = tuple(r for r in state.returns if r.lease_id != lease_id or not done)
            return replace(state, returning=False, returns=left_returns)
        case Command(mode, until):
            return _command(state, mode, until, now)
        case Held(reason):
            return replace(state, held=event if reason else None)
        case Slept(seconds):
            return _slept(state, seconds)
        case DeadlineMoved(lease_id, deadline):
            if state.unit is None or state.unit.lease_id != lease_id:
                return state
            return replace(state, unit=replace(state.unit, deadline=deadline))
        case Restored(pending, leases, unit, last_block):
            new = tuple(p for p in pending if p not in state.pending)
            state = replace(state, pending=(*state.pending, *new), last_block=last_block)
            for lease_id in leases:
                state = _returned_later(state, lease_id, "the node was restarted")
            return state if unit is None else _granted(state, unit)
        case Fatal(reason, code):
            return replace(state, stopped=state.stopped or Stop(code, reason))


def _head(state: State, version: int, now: float) -> State:
    was_complete = state.complete
    state = replace(state, head=max(state.head, version))
    if state.complete and not was_complete and state.exit_when_complete and state.stop_by is None:
        return replace(state, stop_by=now + VERDICT_GRACE_S)
    return state


def _command(state: State, mode: Mode, until: float | None, now: float) -> State:
    if state.mode == "leave":
        return state  # leaving is final: the process is about to end
    stop_by = now + LEAVE_GRACE_S if mode == "leave" else None
    if mode != "leave" and state.complete and state.exit_when_complete:
        stop_by = state.stop_by
    return replace(state, mode=mode, pause_until=until if mode == "pause" else None, stop_by=stop_by)


def _slept(state: State, seconds: float) -> State:
    def sooner(retry: Retry) -> Retry:
        return replace(retry, at=retry.at - seconds)

    held, unit, until = state.held, state.unit, state.pause_until
    if held is not None and held.until is not None:
        held = replace(held, until=held.until - seconds)
    return replace(
        state,
        pause_until=None if until is None else until - seconds,
        held=held,
        unit=None if unit is None else replace(unit, deadline=unit.deadline - seconds),
        link_retry=sooner(state.link_retry),
        fetch_retry=sooner(state.fetch_retry),
        engine_retry=sooner(state.engine_retry),
        ask_retry=sooner(state.ask_retry),
        upload_retry=sooner(state.upload_retry),
    )


def _granted(state: State, unit: Unit) -> State:
    if state.unit is not None or not state.wants_work:
        why = "not taking work any more" if state.unit is None else "another unit is at work"
        return _returned_later(state, unit.lease_id, why)
    return replace(state, unit=unit)


def _engine_failed(state: State, event: EngineFailed, now: float) -> State:
    stopping = state.engine == "stopping"
    retry = backed_off(state.engine_retry, now, event.reason, event.jitter, 2.0, 300.0)
    shrink = min(MAX_SHRINK, state.shrink + 1) if event.out_of_memory else state.shrink
    state = replace(state, engine="idle", loaded=state.loaded if event.alive else -1, shrink=shrink)
    if stopping:
        return state
    unit = state.unit
    if unit is None:
        return replace(state, engine_retry=retry)
    if unit.attempt == 0 or event.advanced:
        # R5: once more, at once, with a smaller batch if memory was the reason.
        return replace(state, unit=replace(unit, attempt=1), engine_retry=replace(retry, at=now))
    return _surrender(replace(state, engine_retry=retry), event.reason)


def _returned_later(state: State, lease_id: bytes, reason: str) -> State:
    if any(r.lease_id == lease_id for r in state.returns):
        return state
    return replace(state, returns=(*state.returns, GiveBack(lease_id, reason[:200])))


def _surrender(state: State, reason: str) -> State:
    if state.unit is None:
        return state
    return _returned_later(replace(state, unit=None), state.unit.lease_id, reason)


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
        state = _surrender(state, reason)
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


def backed_off(retry: Retry, now: float, reason: str, jitter: float, base: float, cap: float) -> Retry:
    """The next try after one more failure: exponential from ``base`` to ``cap``, half of it jittered."""
    delay: float = min(cap, base * 2.0 ** min(retry.failures, 30))
    return Retry(retry.failures + 1, now + delay * (0.5 + 0.5 * jitter), reason)
