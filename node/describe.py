"""Says what a node does or waits for, since when, and what ends the wait (R3).

Total: whatever the state, there is a name for it and a reason that a person can read.
"""

from __future__ import annotations

import time

from barnraise.node.clock import duration
from barnraise.node.events import Held
from barnraise.node.model import Activity, State


def describe(state: State) -> Activity:
    """Name what the node does or waits for. Total: every state has a reason (R3)."""
    if state.stopped is not None:
        return Activity("stopped", state.stopped.reason)
    if state.mode == "leave":
        return Activity("leaving", "giving back the lease", until=state.stop_by, then="gives up")
    if state.engine == "stopping":
        return Activity("stopping", "the engine is being stopped")
    if state.mode == "pause":
        until = state.pause_until
        kept = "; its unit is kept and goes on afterwards" if state.unit is not None else ""
        return Activity("paused", f"paused by command{kept}", until=until, then="resumes" if until else "")
    last = "; the last unit, then the node stops" if state.mode == "finish" else ""
    if state.suspended is not None:
        return _held(state.suspended, state, last)
    if state.engine == "training" and state.unit is not None:
        unit = state.unit
        again = " (second try)" if unit.attempt else ""
        reason = f"block {unit.block}, {unit.steps} steps from version {unit.version}{again}{last}"
        return Activity("training", reason, until=unit.deadline, then="the lease expires")
    if state.engine == "generating" and state.unit is not None:
        unit = state.unit
        rows = unit.prompts * unit.group_size
        again = " (second try, smaller batch)" if unit.attempt else ""
        reason = f"{rows} completions at version {unit.version}{again}{last}"
        return Activity("generating", reason, until=unit.deadline, then="the lease expires")
    if state.engine == "loading":
        return Activity("loading", f"loading version {state.engine_target} into the engine")
    if state.unit is not None and state.engine_retry.reason:
        retry = state.engine_retry
        return Activity("waiting", f"the unit waits: {retry.reason}", until=retry.at, then="tries again")
    if state.unit is not None:
        return Activity(
            "loading", "about to start the unit", until=state.unit.deadline, then="the lease expires"
        )
    if state.held is not None and state.mode != "finish":
        return _held(state.held, state)
    if state.complete:
        return _complete(state)
    return _wait(state, last)


def _held(held: Held, state: State, last: str = "") -> Activity:
    kept = f"; its unit is kept and goes on afterwards{last}" if state.unit is not None else ""
    then = "resumes" if held.until is not None else ""
    return Activity("paused", f"{held.reason}{kept}", until=held.until, then=then)


def _complete(state: State) -> Activity:
    if state.fetching is not None:
        return Activity("complete", f"the run is complete; fetching its final version {state.fetching}")
    text = f"the run is complete at version {state.head}"
    if state.exit_when_complete:
        return Activity(
            "complete", f"{text}; waiting for the last verdicts", until=state.stop_by, then="ends"
        )
    return Activity("complete", text)


def _wait(state: State, last: str) -> Activity:
    if state.link == "trying":
        name = "offline" if state.joined_once else "connecting"
        why = f" (last time: {state.link_retry.reason})" if state.link_retry.reason else ""
        return Activity(name, f"waiting for the coordinator: connecting{why}")
    if state.link == "down":
        name = "offline" if state.joined_once else "connecting"
        why = state.link_retry.reason or "not tried yet"
        return Activity(
            name, f"waiting for the coordinator: {why}", until=state.link_retry.at, then="tries again"
        )
    if state.mode == "finish":
        text = f"waiting for {len(state.pending)} acknowledgement(s)" if state.pending else "ending"
        return Activity("finishing", f"{text}{last}", until=state.stop_by, then="ends")
    if state.engine_retry.reason and state.ready < 0:
        retry = state.engine_retry
        return Activity(
            "waiting", f"waiting for the engine: {retry.reason}", until=retry.at, then="tries again"
        )
    if state.head < 0:
        return Activity("waiting", "waiting for the coordinator to publish a first version")
    if state.ready < 0 or state.behind:
        if state.fetching is not None:
            return Activity("fetching", f"fetching version {state.fetching}")
        retry = state.fetch_retry
        why = retry.reason or "about to start"
        return Activity(
            "fetching", f"waiting for version {state.head}: {why}", until=retry.at, then="tries again"
        )
    if state.engine_retry.reason:
        retry = state.engine_retry
        return Activity(
            "waiting", f"waiting after an engine failure: {retry.reason}", until=retry.at, then="asks"
        )
    if state.returns:
        return Activity("waiting", "waiting for the coordinator to take back a lease")
    if len(state.pending) > 1:
        retry = state.upload_retry
        why = f" ({retry.reason})" if retry.reason else ""
        return Activity("uploading", f"waiting for {len(state.pending)} submissions to be acknowledged{why}")
    if state.ask_retry.reason:
        retry = state.ask_retry
        return Activity("waiting", f"waiting for work: {retry.reason}", until=retry.at, then="asks again")
    return Activity("asking", "asking the coordinator for a unit")


def sentence(activity: Activity, mono: float, wall_ms: int) -> str:
    """One line for a person: what, since when, and what ends it.

    ``mono`` and ``wall_ms`` are the same moment on the activity's clock (s) and on
    the wall (ms since the epoch).
    """
    since = time.strftime("%H:%M:%S", time.localtime(wall_ms / 1000 - (mono - activity.since)))
    end = ""
    if activity.until is not None and activity.then:
        end = f", {activity.then} in {duration(max(0.0, activity.until - mono) * 1000)}"
    return f"{activity.name}: {activity.reason} (since {since}{end})"
