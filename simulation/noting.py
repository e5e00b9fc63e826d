"""The coordinator's events as lines of the event log: short names, only what measures and checks read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from barnraise.coordinator import events
from barnraise.coordinator.block_events import (
    BlockEvent,
    BlockJudged,
    BlockLeased,
    BlockOverdue,
    BlockSubmitted,
    RoundFormed,
)
from barnraise.coordinator.journal import Write
from barnraise.protocol.messages import RolloutLease
from barnraise.protocol.pretrain import BlockLease
from barnraise.simulation.event_log import EventLog


class Noting:
    """Listens to one coordinator after the other, and remembers whose work is whose."""

    def __init__(self, log: EventLog, name_of: Callable[[bytes], str]) -> None:
        self._log = log
        self._name_of = name_of
        self._node: dict[bytes, str] = {}  # lease -> node
        self._lease: dict[bytes, bytes] = {}  # submission -> lease

    def hear(self, write: Write) -> None:
        """A listener of ``Core``: everything in ``write`` is durable."""
        for event in write.events:
            self._note(event)

    def _work(self, submission: bytes) -> dict[str, str]:
        lease = self._lease.get(submission, b"")
        return {"node": self._node.get(lease, ""), "lease": _short(lease), "work": _short(submission)}

    def _lent(self, lease: RolloutLease | BlockLease) -> dict[str, Any]:
        self._node[lease.lease_id] = self._name_of(lease.node)
        return {
            "node": self._node[lease.lease_id],
            "lease": _short(lease.lease_id),
            "unit": lease.unit_id,
            "version": lease.policy_version,
        }

    def _note(self, event: events.Event) -> None:
        note = self._log.note
        match event:
            case events.NodeJoined():
                note("known", node=self._name_of(event.node))
            case events.LeaseIssued(lease=lease):
                note("lease", **self._lent(lease))
            case events.LeaseTimedOut():
                note("timed-out", node=self._node.get(event.lease_id), lease=_short(event.lease_id))
            case events.LeaseClosed():
                node = self._node.get(event.lease_id)
                note("closed", node=node, lease=_short(event.lease_id), why=event.reason)
            case events.Submitted():
                self._lease[event.submission_id] = event.lease_id
                note("submitted", **self._work(event.submission_id), bytes=event.size)
            case events.SubmissionJudged():
                note(
                    "judged",
                    **self._work(event.submission_id),
                    accepted=event.verdict.accepted,
                    check=event.verdict.check,
                    tokens=event.tokens,
                    credit=event.credit,
                )
            case events.BatchFormed():
                works = [_short(item) for item in event.submissions]
                note("batch", version=event.version, groups=event.groups, usable=event.usable, works=works)
            case events.SubmissionsSkipped():
                note("skipped", works=[_short(item) for item in event.submissions])
            case events.VersionTrained():
                lag = None if event.stats is None else event.stats.lag_mean
                note("trained", version=event.version, accuracy=event.accuracy, lag=lag)
            case events.VersionPublished():
                note("published", version=event.version, bytes=event.size)
            case events.CreditClawedBack():
                note("clawed-back", **self._work(event.submission_id), cause=_short(event.cause))
            case events.CreditRestored():
                note("restored", **self._work(event.submission_id), cause=_short(event.cause))
            case events.OffenceNoted():
                note("offence", node=self._name_of(event.node), why=event.what)
            case events.NodeBanned():
                note("banned", node=self._name_of(event.node), why=event.reason, by_rule=event.by_rule)
            case events.BanLifted():
                note("ban-lifted", node=self._name_of(event.node))
            case events.AppealFiled():
                note("appeal", **self._work(event.submission_id))
            case events.AppealDecided():
                note("appeal-decided", **self._work(event.submission_id), accepted=event.verdict.accepted)
            case BlockLeased() | BlockSubmitted() | BlockOverdue() | BlockJudged() | RoundFormed():
                self._note_block(event)
            case _:  # the run's opening, audit seeds
                note("other", kind=type(event).__name__)

    def _note_block(self, event: BlockEvent) -> None:
        note = self._log.note
        match event:
            case BlockLeased(lease=lease):
                note("lease", **self._lent(lease), block=lease.block, slot=lease.slot)
            case BlockSubmitted():
                self._lease[event.submission_id] = event.lease_id
                note("submitted", **self._work(event.submission_id), bytes=event.size)
            case BlockOverdue():
                note("overdue", **self._work(event.submission_id))
            case BlockJudged():
                note(
                    "judged",
                    **self._work(event.submission_id),
                    accepted=event.verdict.accepted,
                    check=event.verdict.check,
                    tokens=event.tokens,
                    credit=event.credit,
                    blameless=event.blameless or None,
                )
            case RoundFormed():
                works = [_short(item) for item in event.submissions]
                note("round", version=event.version, works=works)


def _short(identifier: bytes) -> str:
    return identifier.hex()[:16]
