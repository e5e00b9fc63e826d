"""What lending and taking in have in common, whatever the unit: record first, then answer."""

from __future__ import annotations

from collections.abc import Iterable

from barnraise.coordinator import unit_lines
from barnraise.coordinator.block_events import BlockLeased, BlockSubmitted
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Event, LeaseIssued, LeaseTimedOut, Submitted
from barnraise.coordinator.journal import Payload
from barnraise.coordinator.scheduler import Wait
from barnraise.coordinator.submissions import TurnedAway, check_room
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.messages import Acknowledged, LeaseReply, LeaseRequest, RolloutLease, SubmitRequest
from barnraise.protocol.pretrain import BlockLease


def later(message: LeaseRequest, wait: Wait) -> LeaseReply:
    """No lease now, why, and when to ask again."""
    return LeaseReply(id=message.id, lease=None, reason=wait.reason[:500], retry_after_ms=wait.retry_after_ms)


async def lend(
    core: Core,
    message: LeaseRequest,
    terms: RolloutLease | BlockLease,
    issued: LeaseIssued | BlockLeased | None,
    name: str,
    release: Iterable[bytes] = (),
) -> LeaseReply:
    """A lease that is on the disk, for the node called ``name``.

    ``issued`` None: it was so before. ``release``: what it replaces.
    """
    events: list[Event] = [LeaseTimedOut(lease_id=key, at_ms=terms.issued_at) for key in release]
    # One that was issued before may still be on its way to the disk: an empty record waits for it.
    await core.record([*events, issued] if issued is not None else [])
    unit_lines.overdue(events)
    if issued is None:
        unit_lines.lent_again(terms, name)
    else:
        unit_lines.lent(issued, name)
    return LeaseReply(id=message.id, lease=core.sign(terms), reason="", retry_after_ms=0)


def make_room(
    turned_away: TurnedAway, lease_id: bytes, waiting: int, waiting_bytes: int, now_ms: int
) -> None:
    """Bound what waits for a verdict; whoever is sent away for that may come again.

    Raises:
        RefusedError: ``busy``.
    """
    try:
        check_room(waiting, waiting_bytes)
    except RefusedError:
        turned_away.note(lease_id, now_ms)
        raise


async def take_in(
    core: Core,
    message: SubmitRequest,
    terms: RolloutLease | BlockLease,
    event: Submitted | BlockSubmitted,
    name: str,
) -> Acknowledged:
    """A submission of the node called ``name`` that is on the disk, with its payload."""
    payload = Payload(event.submission_id, terms.policy_version, message.submission)
    await core.record([event], payloads=[payload])
    unit_lines.received(terms, event.submission_id, event.size, name)
    return Acknowledged(id=message.id, duplicate=False)
