"""What an event makes of a node's state; what the node does about it is ``barnraise.node.core``'s.

All times are seconds on one monotonic clock; ``jitter`` in an event is a number in [0, 1) that the
shell drew.
"""

from __future__ import annotations

from dataclasses import replace

from barnraise.node.decisions import GiveBack, Stop
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
VERDICT_GRACE_S = 10.0  # how long a completed run's last verdicts are waited for
MAX_SHRINK = 8
STOOD_S = 30.0  # a session that lasted so long was sound
CROSSED_S = 5.0
AGAIN_WITHIN_S = 2.0  # when a paused run goes on; all its nodes ask then
TURNED_AWAY_S = 1800.0  # how long a node stays away at most that was told to come again later
REPLACED_S = 600.0  # how long a node stays away whose key another machine uses (half to whole of it)


def fold(state: State, event: Event, now: float) -> State:
    """The state after ``event``, but for what is said of it (``State.activity``)."""
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
            return surrender(replace(state, engine="idle", fetched=fetched, engine_retry=retry), reason)
        case EngineStopped(alive):
            return replace(state, engine="idle", loaded=state.loaded if alive else -1)
        case UnitDone(submission_id):
            state = replace(state, engine="idle", unit=None, engine_retry=Retry())
            if submission_id in state.pending:
                return state
            return replace(state, pending=(*state.pending, submission_id))
        case UnitUnusable(reason, jitter):
            retry = backed_off(state.engine_retry, now, reason, jitter, 5.0, 300.0)
            return surrender(replace(state, engine="idle", engine_retry=retry), reason)
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
    return surrender(replace(state, engine_retry=retry), event.reason)


def _returned_later(state: State, lease_id: bytes, reason: str) -> State:
    if any(r.lease_id == lease_id for r in state.returns):
        return state
    return replace(state, returns=(*state.returns, GiveBack(lease_id, reason[:200])))


def surrender(state: State, reason: str) -> State:
    """The state without its unit, whose lease goes back; the same if there is none."""
    if state.unit is None:
        return state
    return _returned_later(replace(state, unit=None), state.unit.lease_id, reason)


def backed_off(retry: Retry, now: float, reason: str, jitter: float, base: float, cap: float) -> Retry:
    """The next try after one more failure: exponential from ``base`` to ``cap``, half of it jittered."""
    delay: float = min(cap, base * 2.0 ** min(retry.failures, 30))
    return Retry(retry.failures + 1, now + delay * (0.5 + 0.5 * jitter), reason)
