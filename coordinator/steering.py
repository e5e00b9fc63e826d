"""The operator's commands to a running coordinator: pause, resume, rollback, stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from barnraise.coordinator.core import Core
from barnraise.coordinator.draining import is_drain
from barnraise.coordinator.events import Event
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal import Write
from barnraise.coordinator.operator_events import AlarmCleared, RollbackOrdered, RunPaused, RunResumed
from barnraise.coordinator.rollback import can_return, cannot_be_done, published_as
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.messages import RESUMED, NoticePush
from barnraise.protocol.wire import printable

log = logging.getLogger(__name__)

MOST_REASON = 500


async def pause(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``pause``: ``reason``. No new leases and batches; work at hand is taken and judged.

    One that is in force stays as it is, unless it would end with a draining.

    Raises:
        RefusedError: no reason is given.
        StorageError: the disk refused.
    """
    reason, now, before = _reason(args), core.now_ms(), core.state.operations.paused
    if before is None or is_drain(before):
        events: list[Event] = [] if before is None else [RunResumed(at_ms=now)]
        await core.record([*events, RunPaused(by="operator", reason=reason, at_ms=now)])
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


def tell_resumed(core: Core, hub: Hub, write: Write) -> None:
    """A listener of ``Core``: nodes that were told to ask for work later hear that a pause is over."""
    resumed = any(isinstance(event, RunResumed) for event in write.events)
    if resumed and core.state.operations.paused is None:
        hub.broadcast(NoticePush(code=RESUMED, message="the run goes on: work is lent again"))


async def roll_back(core: Core, run_folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``rollback``: ``version``, ``reason``. The next version is that one again.

    Asked for the same again, while it is under way or before another version was made, it answers
    as it did and does nothing. One that cannot be carried out, since its checkpoint was lost or
    damaged after it was ordered, is replaced by another.
    Alarms about training end with it; a pause does not.

    Raises:
        RefusedError: there is no such earlier version, it is not kept, or this is no time for it.
        StorageError: the disk refused.
    """
    version, reason = args.get("version"), _reason(args)
    if not isinstance(version, int) or isinstance(version, bool):
        raise RefusedError("bad-argument", "back to which version?")
    why, hopeless = "", None
    if 0 <= version < core.state.head:
        why = await core.offload(lambda: can_return(run_folder, version))
        hopeless = await _hopeless(core, run_folder)
    state = core.state  # from here to the record nothing else may happen
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
    if ordered is not None and ordered is not hopeless:
        raise RefusedError("not-now", f"a rollback to version {ordered.to_version} is under way")
    if why:
        raise RefusedError("not-kept", why)
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


async def _hopeless(core: Core, run_folder: Path) -> RollbackOrdered | None:
    """The rollback that is ordered and can never be carried out."""
    ordered, next_one = core.state.operations.rollback, core.state.made + 1
    if ordered is None:
        return None
    earlier = ordered.to_version
    lost = await core.offload(
        lambda: cannot_be_done(
            run_folder, next_one, earlier, published_as(run_folder, core.journal, core.spec, earlier)
        )
    )
    return ordered if lost else None


async def stop(end: Callable[[], None], args: dict[str, Any]) -> dict[str, Any]:
    """Command ``stop``: a clean end, as by Ctrl-C."""
    if args:
        raise RefusedError("bad-argument", "stop takes no arguments")
    log.info("the operator ends this coordinator")
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
