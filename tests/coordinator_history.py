"""Random but valid histories of a run, for the property tests of the coordinator's pure parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from barnraise.coordinator.core import Core
from barnraise.coordinator.events import (
    AppealDecided,
    AppealFiled,
    AuditCommitted,
    AuditRevealed,
    BanLifted,
    BatchFormed,
    CreditClawedBack,
    CreditRestored,
    Event,
    LeaseClosed,
    LeaseIssued,
    LeaseTimedOut,
    NodeBanned,
    NodeJoined,
    OffenceNoted,
    RunOpened,
    SubmissionJudged,
    SubmissionsSkipped,
    Submitted,
    VersionPublished,
    VersionTrained,
)
from barnraise.coordinator.journal import Write
from barnraise.coordinator.operator_events import (
    AlarmCleared,
    AlarmRaised,
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
from barnraise.coordinator.state import State, apply
from barnraise.protocol.messages import RolloutLease, Verdict
from barnraise.protocol.standing import UNAUDITED, UNVERIFIABLE, commitment_of

RUN_ID = b"r" * 32
MAX_LAG = 1
SEED = b"a secret"


@dataclass
class Recorded:
    """What a listener of events that keeps its own account (``Deadlines``, ``ClockBack``) needs of a core."""

    state: State = field(default_factory=lambda: State(max_lag=MAX_LAG))
    listeners: list[Callable[[Write], None]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def record(self, *events: Event) -> None:
        for event in events:
            apply(self.state, event)
        self.events += events
        for listener in self.listeners:
            listener(Write(events=events))


def as_core(recorded: Recorded) -> Core:
    return recorded  # type: ignore[return-value]


def verdict(accepted: bool, check: str = "toploc") -> Verdict:
    return Verdict(
        accepted=accepted,
        check="all" if accepted else check,
        threshold=1.0,
        value=2.0,
        position="",
        message="",
    )


def lease_for(
    state: State, node: bytes, rng: random.Random, now: int, version: int | None = None
) -> RolloutLease:
    unit = rng.choice([*state.free_units, state.next_unit])
    return RolloutLease(
        run_id=RUN_ID,
        lease_id=rng.randbytes(16),
        unit_id=unit,
        node=node,
        policy_version=rng.randint(max(0, state.head - MAX_LAG), state.head) if version is None else version,
        prompts=2,
        group_size=2,
        issued_at=now,
        timeout_at=now + 60_000,
        deadline_at=now + 120_000,
    )


def judged(
    state: State, submission_id: bytes, rng: random.Random, now: int, honesty: float = 0.7
) -> SubmissionJudged:
    good = rng.random() < honesty
    rewards = tuple(float(rng.randint(0, 1)) for _ in range(4)) if good else ()
    blameless = not good and rng.random() < 0.2
    said = verdict(good, UNVERIFIABLE if blameless else "toploc")
    item = state.submissions[submission_id]
    record = state.nodes[item.lease.node].audit
    if good and item.epoch in state.epochs and record.proven and record.rate_ppm < 1_000_000:
        said = msgspec.structs.replace(said, check=UNAUDITED)
    return SubmissionJudged(
        submission_id=submission_id,
        verdict=said,
        rewards=rewards,
        tokens=7 if good else 0,
        credit=7 if good else 0,
        blameless=blameless,
        at_ms=now,
    )


def owed(state: State, now: int) -> CreditClawedBack | None:
    """The claw-back that has to come before the next verdict on its node."""
    for node in state.nodes.values():
        for submission_id in node.audit.owed:
            return CreditClawedBack(submission_id=submission_id, cause=node.audit.cause, at_ms=now)
    return None


def standing_events(state: State, rng: random.Random, now: int) -> list[Event]:
    """Seeds, appeals, offences and bans that may follow."""
    choices: list[Event] = []
    if state.head >= 0:
        seed = SEED + state.epoch.to_bytes(1, "big", signed=True)
        choices.append(
            AuditCommitted(epoch=state.epoch + 1, commitment=commitment_of(sha256(seed).digest()), at_ms=now)
        )
    for epoch, waiting in state.epochs.items():
        if not waiting and epoch < state.epoch:
            secret = sha256(SEED + (epoch - 1).to_bytes(1, "big", signed=True)).digest()
            choices.append(AuditRevealed(epoch=epoch, seed=secret, at_ms=now))
    rejected = [key for key, item in state.submissions.items() if item.status == "rejected"]
    fresh = [key for key in rejected if not state.submissions[key].appealed]
    if fresh:
        choices.append(AppealFiled(submission_id=rng.choice(fresh), at_ms=now))
    if state.appeals:
        submission_id = rng.choice(list(state.appeals))
        good = rng.random() < 0.5
        choices.append(
            AppealDecided(
                submission_id=submission_id,
                verdict=verdict(good, rng.choice(("toploc", UNVERIFIABLE))),
                rewards=(0.0, 1.0, 0.0, 1.0) if good else (),
                tokens=7 if good else 0,
                credit=7 if good else 0,
                at_ms=now,
            )
        )
    for key, item in state.submissions.items():
        if item.voided and item.ended_streak is None and item.appealed:
            choices.append(CreditRestored(submission_id=next(iter(item.voided)), cause=key, at_ms=now))
    if state.nodes:
        node = rng.choice(list(state.nodes))
        choices.append(OffenceNoted(node=node, what="bad-signature", at_ms=now))
        choices.append(
            NodeBanned(node=node, reason="x", until=now + 9, by_rule=rng.random() < 0.5, at_ms=now)
        )
        choices.append(BanLifted(node=node, reason="x", at_ms=now))
    return choices


def operator_events(state: State, rng: random.Random, now: int) -> list[Event]:
    """What the operator or a guard may do next."""
    mine, node = state.operations, rng.randbytes(1) * 32
    changes = {rng.choice(("grpo.learning_rate", "grpo.kl_coefficient")): "0.25"}
    number = len(mine.amendments) + 1
    choices: list[Event] = [
        SettingsAmended(
            number=number, changes=changes, reason="x", amendment=b"a" * 32, signed=b"s", at_ms=now
        ),
        InviteMade(invite=rng.randbytes(16), uses=2, expires_at=now + 50, note="x", at_ms=now),
        NodeAllowed(node=node, note="x", at_ms=now),
        AlarmRaised(kind="reward", value=0.1, limit=0.2, text="x", version=max(0, state.head), at_ms=now),
        RunPaused(by="guard", reason="x", at_ms=now) if mine.paused is None else RunResumed(at_ms=now),
    ]
    choices += [NodeDisallowed(node=key, at_ms=now) for key in list(mine.allowed)[:1]]
    choices += [AlarmCleared(kind=kind, at_ms=now) for kind in mine.alarms]
    for invite in mine.invites.values():
        choices.append(InviteRevoked(invite=invite.invite, at_ms=now))
        if invite.left and invite.expires_at >= now:
            choices.append(InviteUsed(invite=invite.invite, node=node, at_ms=now))
    idle = state.batch is None and state.unpublished is None and state.blocks.round is None
    if state.head > 0 and idle and mine.rollback is None:
        choices.append(RollbackOrdered(to_version=rng.randrange(state.head), reason="x", at_ms=now))
    return choices


def published(state: State, now: int) -> VersionPublished:
    return VersionPublished(
        version=state.head + 1,
        manifest=b"m" * 32,
        weights="w",
        size=1,
        stats=None,
        accuracy=-1.0,
        at_ms=now,
    )


def trained(state: State, now: int) -> VersionTrained:
    return VersionTrained(version=state.made + 1, weights="w", stats=None, accuracy=-1.0, at_ms=now)


def next_event(state: State, rng: random.Random, now: int) -> Event:
    """Any event that may follow."""
    if not state.run_id:
        return RunOpened(run_id=RUN_ID, operator=b"o" * 32, at_ms=now)
    if (due := owed(state, now)) is not None:
        return due
    if rng.random() < 0.15 and (standing := standing_events(state, rng, now)):
        return rng.choice(standing)
    if rng.random() < 0.1:
        return rng.choice(operator_events(state, rng, now))
    choices: list[Event] = [NodeJoined(node=rng.randbytes(1) * 32, name=f"n{rng.randint(0, 3)}", at_ms=now)]
    if state.head < 0:
        choices.append(published(state, now))
        if state.unpublished is None:
            choices.append(trained(state, now))
    elif state.nodes:
        node = rng.choice(list(state.nodes))
        terms = lease_for(state, node, rng, now)
        choices += [LeaseIssued(lease=terms, instance=b"i" * 16)] * 3
    if state.leases:
        lease_id = rng.choice(list(state.leases))
        if not state.leases[lease_id].timed_out:
            choices.append(LeaseTimedOut(lease_id=lease_id, at_ms=now))
        why = rng.choice(("expired", "returned"))
        choices.append(LeaseClosed(lease_id=lease_id, reason=why, at_ms=now))
        done = Submitted(submission_id=rng.randbytes(32), lease_id=lease_id, size=10, at_ms=now)
        choices += [done] * 3
    if state.waiting:
        choices += [judged(state, rng.choice(list(state.waiting)), rng, now)] * 3
    if state.pool:
        chosen = tuple(rng.sample(list(state.pool), rng.randint(1, len(state.pool))))
        choices.append(SubmissionsSkipped(submissions=chosen, at_ms=now))
        if state.batch is None and state.operations.rollback is None:
            groups = 2 * len(chosen)
            formed = BatchFormed(
                version=state.made + 1, submissions=chosen, groups=groups, usable=1, at_ms=now
            )
            choices += [formed] * 2
    if state.unpublished is not None:
        choices += [published(state, now)] * 2
    elif state.operations.rollback is not None:
        choices.append(trained(state, now))
    elif state.batch is not None:  # with the event of today, or as journals of before have it
        choices += [trained(state, now), published(state, now)]
    return rng.choice(choices)


def history(seed: int, length: int) -> list[Event]:
    """``length`` events, each of which follows from those before."""
    rng = random.Random(seed)
    state = State(max_lag=MAX_LAG)
    events: list[Event] = []
    now = 1_000
    for _ in range(length):
        now += rng.randint(0, 5_000)
        event = next_event(state, rng, now)
        apply(state, event)
        events.append(event)
    return events
