"""The operator's commands to a running coordinator: pause, resume, rollback, stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Event
from barnraise.coordinator.operator_events import AlarmCleared, RollbackOrdered, RunPaused, RunResumed
from barnraise.coordinator.rollback import can_return
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.wire import printable

MOST_REASON = 500


async def pause(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``pause``: ``reason``. No new leases and batches; work at hand is taken and judged.

    Raises:
        RefusedError: no reason is given.
        StorageError: the disk refused.
    """
    reason = _reason(args)
    if core.state.operations.paused is None:
        await core.record([RunPaused(by="operator", reason=reason, at_ms=core.now_ms())])
    return _paused(core)


async def resume(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``resume``. Alarms stay in force until what they are about is over, and pause nothing again.

    Raises:
        StorageError: the disk refused.
    """
    if args:
        raise RefusedError("bad-argument", "resume takes no arguments")
    if core.state.operations.paused is not None:
        await core.record([RunResumed(at_ms=core.now_ms())])
    return _paused(core)


async def roll_back(core: Core, run_folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``rollback``: ``version``, ``reason``. The next version is that one again.

    Asked for the same again, while it is under way or before another version was made, it answers
    as it did and does nothing.
    Alarms about training end with it; a pause does not.

    Raises:
        RefusedError: there is no such earlier version, it is not kept, or this is no time for it.
        StorageError: the disk refused.
    """
    version, reason, state = args.get("version"), _reason(args), core.state
    if not isinstance(version, int) or isinstance(version, bool):
        raise RefusedError("bad-argument", "back to which version?")
    ordered = state.operations.rollback
    if ordered is not None and ordered.to_version == version:
        return {"to": version, "version": state.made + 1}
    if state.operations.given_up[-1:] == [(version + 1, state.made - 1)]:
        return {"to": version, "version": state.made}
    if core.spec.pretrain is not None:
        raise RefusedError("not-now", "runs that pretrain by blocks cannot be rolled back")
    if not 0 <= version < state.head:
        raise RefusedError(
            "bad-argument", f"version {version} is not an earlier one: the newest is {state.head}"
        )
    if ordered is not None:
        raise RefusedError("not-now", f"a rollback to version {ordered.to_version} is under way")
    why = await core.offload(lambda: can_return(run_folder, version))
    if why:
        raise RefusedError("not-kept", why)
    state = core.state
    if state.batch is not None or state.unpublished is not None:
        raise RefusedError(
            "not-now",
            f"version {state.made + 1} is being trained or published: pause the run "
            "(`barnraise coordinator pause`), and roll back once it is there",
        )
    now = core.now_ms()
    events: list[Event] = [RollbackOrdered(to_version=version, reason=reason, at_ms=now)]
    events += [AlarmCleared(kind=kind, at_ms=now) for kind in state.operations.alarms]
    await core.record(events)
    return {"to": version, "version": core.state.made + 1}


async def stop(end: Callable[[], None], args: dict[str, Any]) -> dict[str, Any]:
    """Command ``stop``: a clean end, as by Ctrl-C."""
    if args:
        raise RefusedError("bad-argument", "stop takes no arguments")
    end()
    return {"stopping": True}


def _reason(args: dict[str, Any]) -> str:
    reason = args.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise RefusedError("bad-argument", "say why: volunteers and the ledger's readers want to know")
    return printable(reason.strip(), MOST_REASON)


def _paused(core: Core) -> dict[str, Any]:
    paused = core.state.operations.paused
    return {"paused": None if paused is None else {"by": paused.by, "reason": paused.reason}}
