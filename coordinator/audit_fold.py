"""The fold of standing and audits: strikes, pauses, bans, claw-backs, appeals, seeds.

Called by ``barnraise.coordinator.state.apply`` and nobody else. Like it, every function
here checks first and changes then, and asks no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from barnraise.coordinator import cover
from barnraise.coordinator.events import (
    AppealDecided,
    AppealFiled,
    AuditCommitted,
    AuditEvent,
    AuditRevealed,
    BanLifted,
    CreditClawedBack,
    CreditRestored,
    EventError,
    NodeBanned,
    OffenceNoted,
    SubmissionJudged,
)
from barnraise.coordinator.pool import enter_pool, leave_pool
from barnraise.coordinator.state_parts import CLOCK_BACK_MS
from barnraise.protocol.standing import ALL, UNAUDITED, UNVERIFIABLE

if TYPE_CHECKING:  # the state's fold imports this module
    from barnraise.coordinator.state import Node, State, Submission

MAX_STRIKES = 12
# Giving work back is no offence; doing so again and again would be a way to choose one's tasks.
UNFINISHED_FREE = 3
# So many verified in a row, and what was held against a node towards a ban is forgotten.
FORGIVEN_AFTER = 100
MAX_OFFENCES = 1 << 20
APPEAL_EVERY_MS = 600_000


def strike_pause_ms(strikes: int) -> int:
    """How long a node with ``strikes`` waits for its next lease: 2 s, then doubling up to 68 min (R19)."""
    return 1000 << min(strikes, MAX_STRIKES) if strikes else 0


def check_verdict(event: SubmissionJudged) -> None:
    """What a verdict of ours must be, whatever the state.

    Raises:
        EventError: blame, credit and check do not agree.
    """
    if event.blameless != (event.verdict.check == UNVERIFIABLE):
        raise EventError(f'blameless is what "{UNVERIFIABLE}" says, and nothing else')
    if event.credit and not event.verdict.accepted:
        raise EventError("a rejected submission earns nothing")


def check_spared(state: State, node: Node, submission: Submission) -> None:
    """An unaudited verdict needs a secret seed and a node that may be spared.

    Raises:
        EventError: the ledger's rules would be broken.
    """
    if submission.epoch not in state.epochs:
        raise EventError("spared, though no secret seed was in force when it was submitted")
    if not node.audit.proven or node.audit.rate_ppm >= 1_000_000:
        raise EventError("spared, though this one had to be audited")


def note_verdict(node: Node, submission: Submission, event: SubmissionJudged) -> None:
    """What a verdict does to a node's standing. Checked before."""
    record = node.audit
    if event.verdict.accepted:
        submission.credit = event.credit
        node.credit += event.credit
        make_good(node, event.at_ms)
        if event.verdict.check == UNAUDITED:
            record.spared(submission.submission_id, submission.unproven(event.credit))
        else:
            record.passed(submission.number)
            if record.streak >= FORGIVEN_AFTER:
                node.offences = 0
    elif not event.blameless:
        submission.ended_streak = record.failed(submission.submission_id)
        strike(node, event.at_ms)


def strike(node: Node, at_ms: int, offence: bool = True) -> None:
    """A mark against a node, and a longer pause; ``offence``: one towards a ban, too."""
    node.strikes = min(MAX_STRIKES, node.strikes + 1)
    node.quiet_from, node.quiet_until = at_ms, at_ms + strike_pause_ms(node.strikes)
    if offence:
        node.offences = min(node.offences + 1, MAX_OFFENCES)


def note_unfinished(node: Node, at_ms: int) -> None:
    """A lease ended without work; doing so often costs a pause."""
    node.unfinished = min(node.unfinished + 1, UNFINISHED_FREE + MAX_STRIKES)
    pause = strike_pause_ms(max(0, node.unfinished - UNFINISHED_FREE))
    if pause and (node.quiet_until < at_ms + pause or node.quiet_from > at_ms + CLOCK_BACK_MS):
        node.quiet_from, node.quiet_until = at_ms, at_ms + pause


def make_good(node: Node, at_ms: int) -> None:
    """Accepted work takes a mark away."""
    node.strikes = max(0, node.strikes - 1)
    node.quiet_until = min(node.quiet_until, at_ms + strike_pause_ms(node.strikes))


def apply_audit(state: State, event: AuditEvent) -> None:
    """Let ``event`` happen. Raises EventError, with the state unchanged, where it cannot."""
    match event:
        case AuditCommitted():
            if not state.run_id or event.epoch != state.epoch + 1:
                raise EventError("seeds are committed to in order, in an open run")
            state.epoch = event.epoch
            state.epochs[event.epoch] = 0
            state.epoch_head = state.head
        case AuditRevealed():
            if state.epochs.get(event.epoch, 1):
                raise EventError("a seed is revealed once, when nothing waits under it")
            del state.epochs[event.epoch]
        case CreditClawedBack():
            _claw_back(state, event)
        case AppealFiled():
            _appeal(state, event)
        case AppealDecided():
            _decide(state, event)
        case CreditRestored():
            _restore(state, event)
        case OffenceNoted():
            node = _node(state, event.node)
            strike(node, event.at_ms)
        case NodeBanned():
            _ban(state, event)
        case BanLifted():
            node = _node(state, event.node)
            node.banned_until, node.ban_reason, node.ban_offences = 0, "", 0
            node.quiet_until = min(node.quiet_until, event.at_ms + strike_pause_ms(node.strikes))
        case _:
            assert_never(event)


def _node(state: State, key: bytes) -> Node:
    node = state.nodes.get(key)
    if node is None:
        raise EventError("the node never joined")
    return node


def _claw_back(state: State, event: CreditClawedBack) -> None:
    cause = state.submissions.get(event.cause)
    if cause is None:
        raise EventError("claw-back because of a submission that is not known")
    node = state.nodes[cause.lease.node]
    owed = node.audit.owed.get(event.submission_id)
    if owed is None or node.audit.cause != event.cause:
        raise EventError("no such credit is owed because of that failed audit")
    del node.audit.owed[event.submission_id]
    cause.voided[event.submission_id] = owed
    node.credit -= owed.credit
    state.clawed_back += owed.credit
    item = state.submissions.get(event.submission_id)
    if item is None:  # long used: what was learnt from it stays learnt
        return
    item.credit = 0
    if event.submission_id in state.pool:
        leave_pool(state, event.submission_id, "void")
        cover.let_go(state, item.lease.unit_id)


def _appeal(state: State, event: AppealFiled) -> None:
    item = state.submissions.get(event.submission_id)
    if item is None or item.status != "rejected" or item.appealed:
        raise EventError("only a rejected submission that is still known can be appealed, once")
    item.appealed = True
    state.appeals[event.submission_id] = None
    state.nodes[item.lease.node].next_appeal_at = event.at_ms + APPEAL_EVERY_MS


def _decide(state: State, event: AppealDecided) -> None:
    item = state.submissions.get(event.submission_id)
    if item is None or event.submission_id not in state.appeals:
        raise EventError("an appeal that is not open was decided")
    verdict = event.verdict
    if verdict.accepted and (
        verdict.check != ALL or len(event.rewards) != item.lease.prompts * item.lease.group_size
    ):
        raise EventError("an appeal is granted after every check, with a reward for each rollout")
    if event.credit and not verdict.accepted:
        raise EventError("a rejected submission earns nothing")
    del state.appeals[event.submission_id]
    node = state.nodes[item.lease.node]
    node.last_verdict = verdict
    if (verdict.accepted or verdict.check == UNVERIFIABLE) and item.ended_streak is not None:
        node.audit.overturned(item.ended_streak)
        item.ended_streak = None
        node.offences = max(0, node.offences - 1)
        node.ban_offences = max(0, node.ban_offences - 1)
        make_good(node, event.at_ms)
    if not verdict.accepted:
        return
    node.accepted += 1
    node.rejected -= 1
    node.credit += event.credit
    item.credit = event.credit
    state.accepted += 1
    state.rejected -= 1
    cover.hold(state, item.lease.unit_id)
    enter_pool(state, item, event.rewards)


def _restore(state: State, event: CreditRestored) -> None:
    cause = state.submissions.get(event.cause)
    if cause is None or cause.ended_streak is not None or event.submission_id not in cause.voided:
        raise EventError("no such credit was taken for a verdict that was overturned")
    voided = cause.voided.pop(event.submission_id)
    state.nodes[cause.lease.node].credit += voided.credit
    state.clawed_back -= voided.credit
    item = state.submissions.get(event.submission_id)
    if item is not None:
        item.credit = voided.credit


def _ban(state: State, event: NodeBanned) -> None:
    node = _node(state, event.node)
    if event.until <= event.at_ms:
        raise EventError("a ban ends after it began")
    node.banned_from, node.banned_until, node.ban_reason = event.at_ms, event.until, event.reason
    if event.moved:
        return
    node.bans += 1
    node.ban_offences, node.offences = (node.offences, 0) if event.by_rule else (0, node.offences)
