"""A node's standing, as it is told to the node: after joining, with every verdict, and when it is banned."""

from __future__ import annotations

from barnraise.coordinator.audit import ban_text, is_banned
from barnraise.coordinator.block_events import BlockJudged
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import (
    AppealDecided,
    BanLifted,
    NodeBanned,
    OffenceNoted,
    SubmissionJudged,
)
from barnraise.coordinator.hub import Hub, Live
from barnraise.coordinator.journal import Write
from barnraise.coordinator.state import Node
from barnraise.coordinator.state_parts import CLOCK_BACK_MS
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.messages import NoticePush, StandingPush


def standing_of(node: Node, now_ms: int) -> StandingPush:
    """What ``barnraise status`` shows on the node's side."""
    banned = is_banned(node, now_ms)
    reason = node.ban_reason if banned else ""
    if not banned and node.strikes and node.last_verdict is not None and not node.last_verdict.accepted:
        reason = f"the last by check {node.last_verdict.check}"
    return StandingPush(
        verified=node.audit.streak,
        needed=node.audit.needed,
        strikes=node.strikes,
        quiet_until=max(0, node.quiet_until) if node.quiet_from <= now_ms + CLOCK_BACK_MS else 0,
        banned_until=node.banned_until if banned else 0,
        reason=reason[:500],
    )


def check_not_banned(node: Node, now_ms: int) -> None:
    """Work of a banned node is not taken.

    Raises:
        RefusedError: ``banned``, with reason, end and cure.
    """
    if is_banned(node, now_ms):
        raise RefusedError("banned", ban_text(node)[:500])


def tell_standing(core: Core, live: Live) -> None:
    """Push a joined node its standing, and a notice for a person if it is banned."""
    node = core.state.nodes.get(live.key)
    if node is None:
        return
    now = core.now_ms()
    live.session.push(standing_of(node, now))
    if is_banned(node, now):
        live.session.push(NoticePush(code="banned", message=ban_text(node)[:500]))


def tell_of(core: Core, hub: Hub, write: Write) -> None:
    """Tell those whose standing a durable write has changed."""
    told: set[bytes] = set()
    for event in write.events:
        match event:
            case SubmissionJudged() | AppealDecided() | BlockJudged():
                state, submission = core.state, event.submission_id
                item = state.submissions.get(submission) or state.blocks.work.get(submission)
                key = item.lease.node if item is not None else b""
            case OffenceNoted() | NodeBanned() | BanLifted():
                key = event.node
            case _:
                continue
        live = hub.by_key.get(key)
        if live is not None and key not in told:
            told.add(key)
            tell_standing(core, live)
