"""What an operator, or a guard in their place, does to a run; part of the closed union in ``events``."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class OperatorAct(Struct, frozen=True, kw_only=True):
    """What all of them are: folds tell them from other events by it."""

    at_ms: int


class SettingsAmended(OperatorAct, frozen=True, kw_only=True, tag=True):
    """A signed amendment is in force from here on (``barnraise.protocol.amendments``).

    ``signed``: the canonical bytes of the ``Signed`` amendment, as nodes and auditors get it;
    ``amendment``: SHA-256 of its payload; the rest is what it says.
    """

    number: int
    changes: dict[str, str]
    reason: str
    amendment: bytes
    signed: bytes


class InviteMade(OperatorAct, frozen=True, kw_only=True, tag=True):
    """An invite was signed. ``invite``: its id (16 bytes), good for ``uses`` new keys."""

    invite: bytes
    uses: int
    expires_at: int
    note: str


class InviteRevoked(OperatorAct, frozen=True, kw_only=True, tag=True):
    """An invite lets nobody in any more; whoever came by it stays."""

    invite: bytes


class InviteUsed(OperatorAct, frozen=True, kw_only=True, tag=True):
    """A key came in by an invite, and may come again."""

    invite: bytes
    node: bytes


class NodeAllowed(OperatorAct, frozen=True, kw_only=True, tag=True):
    """A key was put on the list of those that may join."""

    node: bytes
    note: str


class NodeDisallowed(OperatorAct, frozen=True, kw_only=True, tag=True):
    """A key was taken off the list: no new lease for it while the run admits by list or invite."""

    node: bytes


class AlarmRaised(OperatorAct, frozen=True, kw_only=True, tag=True):
    """A guard saw something wrong. ``kind``: the guard's name; ``text``: what was seen, and what to do."""

    kind: str
    value: float
    limit: float
    text: str
    version: int


class AlarmCleared(OperatorAct, frozen=True, kw_only=True, tag=True):
    """What an alarm was about is over, or the operator has dealt with it."""

    kind: str


class RunPaused(OperatorAct, frozen=True, kw_only=True, tag=True):
    """No new leases and no new batch until ``RunResumed``; work at hand is taken and judged."""

    by: Literal["operator", "guard"]
    reason: str


class RunResumed(OperatorAct, frozen=True, kw_only=True, tag=True):
    """Work goes on."""


class RollbackOrdered(OperatorAct, frozen=True, kw_only=True, tag=True):
    """The next version is ``to_version`` again: its weights and its optimiser's state.

    Accepted work that no batch has used yet was done under a policy that is given up:
    it keeps its credit and is trained on no more.
    """

    to_version: int
    reason: str


OperatorEvent = (
    SettingsAmended
    | InviteMade
    | InviteRevoked
    | InviteUsed
    | NodeAllowed
    | NodeDisallowed
    | AlarmRaised
    | AlarmCleared
    | RunPaused
    | RunResumed
    | RollbackOrdered
)
