"""The audit policy: what is verified in full, what a verdict brings with it, when a node is banned.

Pure functions of the state, the time and the run's secret seeds; the rule itself is
``barnraise.protocol.standing``, which an auditor of the ledger shares. As long as the
verifier keeps up, everything is verified. Under a backlog, work of proven nodes may be
accepted without the model's part, by a draw made after the work was stored. A failed
audit takes back the credit of everything since the last passed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import msgspec

from barnraise.coordinator.events import (
    AppealDecided,
    AuditCommitted,
    AuditRevealed,
    BanLifted,
    CreditClawedBack,
    CreditRestored,
    Event,
    NodeBanned,
    OffenceNoted,
    SubmissionJudged,
)
from barnraise.coordinator.state import Node, State, Submission
from barnraise.coordinator.state_parts import CLOCK_BACK_MS
from barnraise.coordinator.workers import Judged
from barnraise.protocol.ledger import credit_for
from barnraise.protocol.standing import (
    EVERYTHING_PPM,
    UNAUDITED,
    UNVERIFIABLE,
    AuditRecord,
    commitment_of,
    draw_ppm,
)

BAN_AFTER = 5  # offences not forgiven
FIRST_BAN_MS = 3_600_000  # an hour, then four times as long each time
LONGEST_BAN_MS = 30 * 86_400_000

SeedOf = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Pressure:
    """The backlog from which work may be spared: so many submissions that waited for so long (ms)."""

    submissions: int = 17  # more than one batch of the verifier
    age_ms: int = 30_000


def pressed(state: State, pressure: Pressure, now_ms: int) -> bool:
    """Whether the verifier has fallen behind: the n-th oldest submission waited for too long."""
    nth = next(islice(state.waiting, pressure.submissions - 1, None), None)
    return nth is not None and now_ms - state.submissions[nth].at_ms > pressure.age_ms


def is_audited(state: State, submission: Submission, seed_of: SeedOf, under_pressure: bool) -> bool:
    """Whether the model has to see this stored submission. Never asks for a draw that is not needed."""
    if not under_pressure or submission.epoch not in state.epochs:
        return True
    rate = state.nodes[submission.lease.node].audit.rate_ppm
    return rate >= EVERYTHING_PPM or draw_ppm(seed_of(submission.epoch), submission.submission_id) < rate


def verdict_events(
    state: State, results: Iterable[Judged], seed_of: SeedOf, parameters: int, now_ms: int
) -> list[Event]:
    """What the verifier's results make happen: verdicts, claw-backs and bans, to be recorded at once.

    A result without the model's part that the node's record no longer allows, because
    of a verdict since, is left out: its submission goes on waiting and is then audited.
    """
    events: list[Event] = []
    records: dict[bytes, AuditRecord] = {}
    offences: dict[bytes, int] = {}
    for result in results:
        submission = state.submissions.get(result.submission_id)
        if submission is None or submission.status != "waiting":
            continue
        node = state.nodes[submission.lease.node]
        record = records.setdefault(node.key, _copy(node.audit))
        judged = _judged(state, submission, result, record, seed_of, parameters, now_ms)
        if judged is None:
            continue
        events.append(judged)
        if judged.verdict.accepted or judged.blameless:
            continue
        offences[node.key] = offences.get(node.key, node.offences) + 1
        for voided in record.owed:
            events.append(CreditClawedBack(submission_id=voided, cause=result.submission_id, at_ms=now_ms))
        record.owed.clear()
        ban = ban_event(node, offences[node.key], f"the last by check {judged.verdict.check}", now_ms)
        if ban is not None and all(not isinstance(e, NodeBanned) or e.node != node.key for e in events):
            events.append(ban)
    return events


def _copy(record: AuditRecord) -> AuditRecord:
    return replace(record, unaudited=dict(record.unaudited), owed=dict(record.owed))


def _judged(
    state: State,
    submission: Submission,
    result: Judged,
    record: AuditRecord,
    seed_of: SeedOf,
    parameters: int,
    now_ms: int,
) -> SubmissionJudged | None:
    verdict = result.verdict
    credit = credit_for(parameters, result.tokens) if verdict.accepted else 0
    if verdict.check == UNAUDITED:
        if submission.epoch not in state.epochs:
            return None
        rate, draw = record.rate_ppm, draw_ppm(seed_of(submission.epoch), submission.submission_id)
        if draw < rate:
            return None
        # So that the node can make the draw again when the seed is published.
        verdict = msgspec.structs.replace(
            verdict, threshold=rate / EVERYTHING_PPM, value=draw / EVERYTHING_PPM
        )
        record.spared(submission.submission_id, submission.unproven(credit))
    elif verdict.accepted:
        record.passed(submission.number)
    elif verdict.check != UNVERIFIABLE:
        record.failed(submission.submission_id)
    return SubmissionJudged(
        submission_id=submission.submission_id,
        verdict=verdict,
        rewards=result.rewards if verdict.accepted else (),
        tokens=result.tokens if verdict.accepted else 0,
        credit=credit,
        blameless=verdict.check == UNVERIFIABLE,
        at_ms=now_ms,
    )


def review_events(
    state: State, submission_id: bytes, result: Judged, parameters: int, now_ms: int
) -> list[Event]:
    """The outcome of an open appeal and what follows from it, to be recorded at once."""
    item = state.submissions[submission_id]
    node = state.nodes[item.lease.node]
    verdict = result.verdict
    accepted = verdict.accepted
    events: list[Event] = [
        AppealDecided(
            submission_id=submission_id,
            verdict=verdict,
            rewards=result.rewards if accepted else (),
            tokens=result.tokens if accepted else 0,
            credit=credit_for(parameters, result.tokens) if accepted else 0,
            at_ms=now_ms,
        )
    ]
    if not accepted and verdict.check != UNVERIFIABLE:
        return events
    for voided in item.voided:
        events.append(CreditRestored(submission_id=voided, cause=submission_id, at_ms=now_ms))
    if item.ended_streak is not None:
        events += unban_events(node, submission_id, now_ms)
    return events


def unban_events(node: Node, submission_id: bytes, now_ms: int) -> list[Event]:
    """A verdict was overturned: a ban that it led to is lifted."""
    if not (node.banned_until > now_ms and 0 < node.ban_offences <= BAN_AFTER):
        return []
    reason = f"the verdict on submission {submission_id.hex()[:16]} was overturned"
    return [BanLifted(node=node.key, reason=reason, at_ms=now_ms)]


def offence_events(node: Node, what: Literal["bad-signature", "wrong-signer"], now_ms: int) -> list[Event]:
    """What a forged submission (``bad-signature`` or ``wrong-signer``) makes happen."""
    noted = OffenceNoted(node=node.key, what=what, at_ms=now_ms)
    ban = ban_event(node, node.offences + 1, f"the last a submission with a {what}", now_ms)
    return [noted] if ban is None else [noted, ban]


def ban_event(node: Node, offences: int, last: str, now_ms: int) -> NodeBanned | None:
    """The ban that ``offences``, not forgiven, bring, if they are enough and none is in force."""
    if offences < BAN_AFTER or node.banned_until > now_ms:
        return None
    until = now_ms + ban_ms(node.bans)
    reason = f"{offences} submissions failed, {last}"[:500]
    return NodeBanned(node=node.key, reason=reason, until=until, by_rule=True, at_ms=now_ms)


def ban_ms(bans: int) -> int:
    """How long the ban after ``bans`` earlier ones lasts: 1 h, 4 h, 16 h, ... at most 30 days (R19)."""
    return min(FIRST_BAN_MS << min(2 * bans, 40), LONGEST_BAN_MS)


def is_banned(node: Node, now_ms: int) -> bool:
    """Whether a ban is in force."""
    return node.banned_until > now_ms


def quiet_ms(node: Node, now_ms: int) -> int:
    """ms until a node may have its next lease. A pause that was set on a clock ahead of now is over."""
    return max(0, node.quiet_until - now_ms) if node.quiet_from <= now_ms + CLOCK_BACK_MS else 0


def ban_text(node: Node) -> str:
    """A ban in words: reason, end, and what to do."""
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(node.banned_until / 1000))
    return (
        f"this key gets no work until {end} UTC: {node.ban_reason[:200]}. Leave the node running, it goes on "
        "by itself then. See `barnraise receipts --rejected`; if a verdict was wrong, "
        "`barnraise appeal RECEIPT`; else look at the machine: memory, overclocking, the engine's version"
    )


def epoch_events(state: State, complete: bool, seed_of: SeedOf, now_ms: int) -> list[Event]:
    """Seeds to commit to, one for each version, and to publish, when nothing waits under them."""
    if not state.run_id:
        return []
    events: list[Event] = []
    newest = state.epoch
    if not complete and (newest < 0 or state.head > state.epoch_head):
        newest += 1
        commitment = commitment_of(seed_of(newest))
        events.append(AuditCommitted(epoch=newest, commitment=commitment, at_ms=now_ms))
    for epoch, waiting in state.epochs.items():
        if not waiting and (epoch < newest or complete):
            events.append(AuditRevealed(epoch=epoch, seed=seed_of(epoch), at_ms=now_ms))
    return events
