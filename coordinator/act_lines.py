"""What an operator, a guard or a rule did to a run: a line each in the coordinator's log, once durable."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from barnraise.coordinator.core import Core
from barnraise.coordinator.events import BanLifted, NodeBanned
from barnraise.coordinator.journal import Write
from barnraise.coordinator.operator_events import (
    AlarmCleared,
    InviteMade,
    InviteRevoked,
    InviteUsed,
    NodeAllowed,
    NodeDisallowed,
    RollbackOrdered,
    RunPaused,
    RunResumed,
    SettingsAmended,
)
from barnraise.protocol.identity import peer_id_of
from barnraise.protocol.moments import minute
from barnraise.protocol.wire import printable

log = logging.getLogger(__name__)

MOST_LINES = 8  # of one decision: a list may be long
_MOST_TEXT = 500


def log_acts(core: Core, write: Write) -> None:
    """A listener of ``Core``."""
    lines = list(_lines(core, write))
    for line in lines[:MOST_LINES]:
        log.info("%s", printable(line, _MOST_TEXT))
    if len(lines) > MOST_LINES:
        log.info("and %d more like that", len(lines) - MOST_LINES)


def _lines(core: Core, write: Write) -> Iterator[str]:
    for event in write.events:
        match event:
            case SettingsAmended(number=number, changes=changes, reason=reason):
                what = ", ".join(f"{key} = {text}" for key, text in changes.items())
                yield f"amendment {number}: {what} ({reason})"
            case RunPaused(by="operator", reason=reason):  # a guard's is in its alarm
                yield f"paused by the operator: {reason}"
            case RunResumed():
                yield "resumed: work is lent again"
            case RollbackOrdered(to_version=version, reason=reason):
                yield f"rollback to version {version}: {reason}"
            case AlarmCleared(kind=kind):
                yield f"the alarm {kind} is over"
            case InviteMade(invite=invite, uses=uses, expires_at=until):
                yield f"invite {_short(invite)} was made, for {uses}, until {minute(until)} UTC"
            case InviteRevoked(invite=invite):
                yield f"invite {_short(invite)} lets nobody in any more"
            case InviteUsed(invite=invite, node=node):
                yield f"{_who(core, node)} came in by invite {_short(invite)}"
            case NodeAllowed(node=node):
                yield f"{_who(core, node)} was put on the list"
            case NodeDisallowed(node=node):
                yield f"{_who(core, node)} was taken off the list"
            case NodeBanned(node=node, reason=reason, until=until):
                yield f"{_who(core, node)} is banned until {minute(until)} UTC: {reason}"
            case BanLifted(node=node, reason=reason):
                yield f"the ban of {_who(core, node)} is over: {reason}"


def _who(core: Core, key: bytes) -> str:
    node = core.state.nodes.get(key)
    return peer_id_of(key) if node is None else f"{printable(node.name, 64)} ({peer_id_of(key)})"


def _short(invite: bytes) -> str:
    return invite.hex()[:12]
