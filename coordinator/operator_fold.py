"""The part of the state that the operator's own acts live in: a fold like the rest.

Called by ``barnraise.coordinator.state.apply`` and nobody else. Every function here
checks first and changes then, and asks no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from barnraise.coordinator.events import EventError
from barnraise.coordinator.operator_events import (
    AlarmCleared,
    AlarmRaised,
    InviteMade,
    InviteRevoked,
    InviteUsed,
    NodeAllowed,
    NodeDisallowed,
    OperatorEvent,
    RollbackOrdered,
    RunPaused,
    RunResumed,
    SettingsAmended,
)
from barnraise.coordinator.pool import leave_pool
from barnraise.protocol.amendments import amended
from barnraise.protocol.spec import RunSpec

if TYPE_CHECKING:  # the state's fold imports this module
    from barnraise.coordinator.state import State

INVITES_KEPT = 4_096
ALLOWED_KEPT = 65_536
GIVEN_UP_KEPT = 16  # only those within max_lag of the head matter


@dataclass(slots=True)
class Invite:
    """An invite that still counts: ``left`` new keys may come by it until ``expires_at`` (ms)."""

    invite: bytes
    left: int
    uses: int
    expires_at: int
    note: str


@dataclass(slots=True)
class Operations:
    """What the operator decided about the run, and what the guards hold against it."""

    amendments: list[SettingsAmended] = field(default_factory=list)
    invites: dict[bytes, Invite] = field(default_factory=dict)
    allowed: dict[bytes, str] = field(default_factory=dict)  # key -> note
    taken_off: dict[bytes, None] = field(default_factory=dict)  # no invite brings them back; oldest first
    alarms: dict[str, AlarmRaised] = field(default_factory=dict)  # in force, by kind
    paused: RunPaused | None = None
    rollback: RollbackOrdered | None = None  # ordered, its version not trained yet
    rollbacks: int = 0
    given_up: list[tuple[int, int]] = field(default_factory=list)  # versions, first and last, newest last

    def settings(self, spec: RunSpec) -> RunSpec:
        """The run spec with every amendment so far: what is in force, not what the run id is the hash of."""
        for event in self.amendments:
            spec = amended(spec, event.changes)
        return spec

    def is_given_up(self, version: int) -> bool:
        """Whether work at a policy version is of a branch that a rollback left."""
        return any(first <= version <= last for first, last in self.given_up)


def apply_operator(state: State, event: OperatorEvent) -> None:
    """Let ``event`` happen. Raises EventError, with the state unchanged, where it cannot."""
    mine = state.operations
    match event:
        case SettingsAmended():
            if event.number != len(mine.amendments) + 1:
                raise EventError(f"amendment {event.number} after {len(mine.amendments)}")
            mine.amendments.append(event)
        case InviteMade():
            if event.invite in mine.invites or event.uses < 1:
                raise EventError("an invite is made once, for somebody")
            if len(mine.invites) >= INVITES_KEPT:
                raise EventError(f"there are {INVITES_KEPT} invites already: revoke some")
            mine.invites[event.invite] = Invite(
                event.invite, event.uses, event.uses, event.expires_at, event.note
            )
        case InviteRevoked():
            if mine.invites.pop(event.invite, None) is None:
                raise EventError("no such invite is in force")
        case InviteUsed():
            _use_invite(mine, event)
        case NodeAllowed():
            _allow(mine, event.node, event.note)
        case NodeDisallowed():
            if mine.allowed.pop(event.node, None) is None:
                raise EventError("the key is not on the list")
            mine.taken_off[event.node] = None
            if len(mine.taken_off) > ALLOWED_KEPT:
                del mine.taken_off[next(iter(mine.taken_off))]
        case AlarmRaised():
            mine.alarms[event.kind] = event
        case AlarmCleared():
            if mine.alarms.pop(event.kind, None) is None:
                raise EventError("no such alarm is in force")
        case RunPaused():
            if mine.paused is not None:
                raise EventError("the run is paused already")
            mine.paused = event
        case RunResumed():
            if mine.paused is None:
                raise EventError("the run is not paused")
            mine.paused = None
        case RollbackOrdered():
            _roll_back(state, event)
        case _:
            assert_never(event)


def _use_invite(mine: Operations, event: InviteUsed) -> None:
    invite = mine.invites.get(event.invite)
    if invite is None or invite.left < 1 or invite.expires_at < event.at_ms:
        raise EventError("no such invite is in force")
    _allow(mine, event.node, invite.note)
    invite.left -= 1


def _allow(mine: Operations, node: bytes, note: str) -> None:
    if node not in mine.allowed and len(mine.allowed) >= ALLOWED_KEPT:
        raise EventError(f"there are {ALLOWED_KEPT} keys on the list already: take some off")
    mine.allowed[node] = note
    mine.taken_off.pop(node, None)


def _roll_back(state: State, event: RollbackOrdered) -> None:
    if not 0 <= event.to_version < state.head:
        raise EventError(f"back to version {event.to_version}, and the newest is {state.head}")
    if state.batch is not None or state.unpublished is not None or state.blocks.round is not None:
        raise EventError("a version is being trained or published: roll back after it")
    mine = state.operations
    if mine.rollback is not None:  # one that cannot be carried out: another takes its place
        if mine.rollback.to_version == event.to_version:
            raise EventError("that rollback was ordered already")
        del mine.given_up[-1]
    for submission_id in list(state.pool):
        leave_pool(state, submission_id, "stale")
    mine.rollback = event
    mine.rollbacks += 1
    mine.given_up = [*mine.given_up, (event.to_version + 1, state.head)][-GIVEN_UP_KEPT:]
