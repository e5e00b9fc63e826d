"""Changing settings of a run that is under way: checked, signed, durable, public, told to the nodes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from barnraise.coordinator.core import Core
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.journal_place import journal_begun, journal_path
from barnraise.coordinator.operator_events import SettingsAmended
from barnraise.coordinator.run_bounds import too_small
from barnraise.protocol import wire
from barnraise.protocol.amendments import Amendment, AmendmentError, amended
from barnraise.protocol.envelope import content_id
from barnraise.protocol.errors import BarnraiseError, RefusedError
from barnraise.protocol.messages import AmendmentsPush, Signed
from barnraise.protocol.spec import RunSpec

MOST_AMENDMENTS = 4_096
_AT_ONCE = 64


async def amend(core: Core, args: dict[str, Any]) -> dict[str, Any]:
    """Command ``amend``: ``changes`` (dotted key -> JSON text), ``reason`` (text).

    What is in force already is left out; if nothing is left, nothing happens, so that it may be repeated.

    Raises:
        RefusedError: ``bad-argument`` or ``not-amendable``, with the key and what may be done.
        StorageError: the disk refused.
    """
    changes, reason = args.get("changes"), args.get("reason")
    if not isinstance(changes, dict) or not changes or not isinstance(reason, str) or not reason.strip():
        raise RefusedError("bad-argument", "an amendment needs changes and a reason: both are public")
    if not all(isinstance(key, str) and isinstance(text, str) for key, text in changes.items()):
        raise RefusedError("bad-argument", "changes are texts: a dotted key, and its value as JSON")
    try:
        before = core.settings
        new = {key: text for key, text in changes.items() if amended(before, {key: text}) != before}
        if wrong := too_small({key: json.loads(text) for key, text in new.items()}):
            raise AmendmentError(wrong)
        check_together(core, new)
    except AmendmentError as error:
        raise RefusedError("not-amendable", str(error)) from None
    number = len(core.state.operations.amendments)
    if new:
        if number >= MOST_AMENDMENTS:
            raise RefusedError("not-amendable", f"the run was amended {number} times: no more")
        number += 1
        await core.record([amendment_event(core, number, new, reason.strip()[:500])])
    return {"number": number, "changed": new}


def check_together(core: Core, changes: dict[str, str]) -> None:
    """That the settings make sense together and with what has happened.

    Raises:
        AmendmentError: they do not; says which and why.
    """
    after = amended(core.settings, changes)
    rollout = after.rollout
    if rollout.max_groups_per_version < rollout.groups_per_version:
        raise AmendmentError(
            f"rollout.max_groups_per_version {rollout.max_groups_per_version} is below "
            f"rollout.groups_per_version {rollout.groups_per_version}: change both"
        )
    if rollout.deadline_s < rollout.timeout_s:
        raise AmendmentError(
            f"rollout.deadline_s {rollout.deadline_s:g} is below rollout.timeout_s {rollout.timeout_s:g}: "
            "change both"
        )
    begun = core.state.made + (core.state.batch is not None)
    if "rollout.versions" in changes and rollout.versions < begun:
        raise AmendmentError(
            f"rollout.versions {rollout.versions} is below version {begun}, which is made or being made"
        )


def amendment_event(core: Core, number: int, changes: dict[str, str], reason: str) -> SettingsAmended:
    """The next amendment, signed."""
    now = core.now_ms()
    try:
        signed = core.sign(
            Amendment(run_id=core.run_id, number=number, at_ms=now, changes=changes, reason=reason)
        )
    except BarnraiseError as error:
        raise RefusedError("bad-argument", f"this makes no amendment: {error}") from None
    return SettingsAmended(
        number=number,
        changes=changes,
        reason=reason,
        amendment=content_id(signed),
        signed=wire.encode(signed),
        at_ms=now,
    )


def settings_in_force(folder: Path, spec: RunSpec) -> RunSpec:
    """The run spec of a run folder with every amendment in its journal; its coordinator may be running.

    Raises:
        RunFolderError, StorageError: the journal cannot be read.
    """
    if not journal_begun(folder):
        return spec
    with closing(Journal(journal_path(folder), reading=True)) as journal:
        for event in journal.events():
            if isinstance(event, SettingsAmended):
                spec = amended(spec, event.changes)
    return spec


def amendments_in_force(core: Core) -> list[AmendmentsPush]:
    """What a node is told after joining; nothing, where nothing was amended."""
    signed = [wire.decode(event.signed, Signed) for event in core.state.operations.amendments]
    return [
        AmendmentsPush(amendments=tuple(signed[at : at + _AT_ONCE])) for at in range(0, len(signed), _AT_ONCE)
    ]


def tell_amendments(hub: Hub, write: Write) -> None:
    """A listener of ``Core``: every node hears of an amendment once it is durable."""
    for event in write.events:
        if isinstance(event, SettingsAmended):
            push = AmendmentsPush(amendments=(wire.decode(event.signed, Signed),))
            for live in hub.by_key.values():
                live.session.push(push)
