"""What an operator decides by, in one answer: queues, guards with thresholds, alarms with their cures."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from barnraise.coordinator import checkpoints
from barnraise.coordinator.guards import GRAVE, GUARDS, THRESHOLDS, GuardLimits
from barnraise.coordinator.operator_events import AlarmRaised
from barnraise.coordinator.state import State
from barnraise.coordinator.web.admin_words import (
    Alarm,
    AmendmentInForce,
    Guard,
    PauseSince,
    Queues,
    Status,
)
from barnraise.coordinator.web.overview import View, without_paths

_AMENDMENTS = 64


def admin_status(
    view: View,
    tree: dict[str, Any],
    state: State,
    limits: GuardLimits,
    folder: Path,
    room: tuple[list[int], int],
) -> Status:
    """Put it together, on the event loop. ``room``: what ``look_at_disk`` found; ``tree``: the state tree."""
    operations = state.operations
    paused = tree["paused"]
    return Status(
        now_ms=view["now_ms"],
        run=view["name"],
        run_id=view["run_id"],
        stage=view["stage"],
        state=view["state"],
        waiting_for=view["waiting_for"],
        complete=view["complete"],
        version=view["version"],
        target_version=view["target_version"],
        paused=None
        if paused is None
        else PauseSince(
            by=paused["by"], reason=without_paths(paused["reason"], folder), since_ms=paused["since_ms"]
        ),
        draining_until_ms=tree["draining_until_ms"],
        rolling_back_to=tree["rolling_back_to"],
        queues=Queues(**{name: tree[name] for name in Queues.__struct_fields__}),
        nodes_known=view["nodes"]["known"],
        nodes_live=view["nodes"]["live"],
        guards=guards(limits, operations.alarms),
        alarms=[Alarm(**alarm) for alarm in view["alarms"]],
        admission=view["admission"],
        invites=sum(
            1 for item in operations.invites.values() if item.left and item.expires_at >= view["now_ms"]
        ),
        allowed=len(operations.allowed),
        amendments=[
            AmendmentInForce(number=item.number, at_ms=item.at_ms, changes=item.changes, reason=item.reason)
            for item in operations.amendments[-_AMENDMENTS:]
        ],
        versions_kept=[version for version in room[0] if version < state.head],
        disk_free_bytes=room[1],
    )


def guards(limits: GuardLimits, alarms: Mapping[str, AlarmRaised]) -> list[Guard]:
    """Every guard with what it goes by, and what it saw where its alarm is in force."""
    keys = msgspec.structs.asdict(limits)
    found = []
    for kind in GUARDS:
        alarm = alarms.get(kind)
        found.append(
            Guard(
                guard=kind,
                alarm=alarm is not None,
                pauses=limits.pause and kind in GRAVE,
                thresholds={name: float(keys[name]) for name in THRESHOLDS[kind]},
                value=None if alarm is None else alarm.value,
                limit=None if alarm is None else alarm.limit,
                since_ms=None if alarm is None else alarm.at_ms,
            )
        )
    return found


def look_at_disk(folder: Path) -> tuple[list[int], int]:
    """The versions whose checkpoint is whole, and the bytes that are free (-1: not known). Blocking."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = -1
    return checkpoints.complete_versions(folder), free
