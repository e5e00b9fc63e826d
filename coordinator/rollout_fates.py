"""What became of submissions: read from the journal, for those whose rollouts are to be kept or handed on.

One pass over the events. No more is held than what is asked for and the leases that are open.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from barnraise.coordinator.events import (
    AppealDecided,
    BatchFormed,
    CreditClawedBack,
    CreditRestored,
    Event,
    LeaseClosed,
    LeaseIssued,
    SubmissionJudged,
    Submitted,
)
from barnraise.coordinator.operator_events import SettingsAmended
from barnraise.protocol.messages import RolloutLease, Verdict
from barnraise.protocol.spec import RunSpec

NORMALISE = "grpo.normalise_std"


@dataclass(slots=True)
class Fate:
    """One submission of rollouts.

    ``size``: bytes of its payload. ``rewards``: by prompt, then sample; empty while it is not accepted.
    ``trained``: the version that was made of it; -1: none yet, or none ever. ``normalised``: whether
    advantages were divided by their group's deviation. ``void``: its credit was clawed back.
    """

    submission: bytes
    lease: RolloutLease
    size: int
    at_ms: int
    normalised: bool
    verdict: Verdict | None = None
    rewards: tuple[float, ...] = ()
    trained: int = -1
    void: bool = False

    @property
    def accepted(self) -> bool:
        """Whether it counts as work that was verified, or spared a check and never held against its node."""
        return self.verdict is not None and self.verdict.accepted and not self.void


@dataclass
class Story:
    """A pass over events. ``fates`` has those that were asked for, oldest first.

    ``void``: every submission whose credit is clawed back; ``length``: events that were read.
    """

    wanted: Container[bytes]
    spec: RunSpec
    amendments: dict[int, SettingsAmended] = field(default_factory=dict)
    fates: dict[bytes, Fate] = field(default_factory=dict)
    void: set[bytes] = field(default_factory=set)
    length: int = 0
    _open: dict[bytes, RolloutLease] = field(default_factory=dict)

    def read(self, events: Iterable[Event]) -> Story:
        """Take in ``events``, in their order; the first is no later than the first lease asked about."""
        for event in events:
            self.note(event)
        return self

    def note(self, event: Event) -> None:
        """Take in one event."""
        self.length += 1
        match event:
            case LeaseIssued():
                self._open[event.lease.lease_id] = event.lease
            case LeaseClosed():
                self._open.pop(event.lease_id, None)
            case Submitted():
                lease = self._open.pop(event.lease_id, None)
                if lease is not None and event.submission_id in self.wanted:
                    self.fates[event.submission_id] = Fate(
                        event.submission_id, lease, event.size, event.at_ms, self._normalised(event.at_ms)
                    )
            case SubmissionJudged() | AppealDecided():
                fate = self.fates.get(event.submission_id)
                if fate is not None:
                    fate.verdict, fate.rewards = event.verdict, event.rewards
            case BatchFormed():
                for submission in event.submissions:
                    fate = self.fates.get(submission)
                    if fate is not None:
                        fate.trained, fate.normalised = event.version, self._normalised(event.at_ms)
            case CreditClawedBack():
                self._void(event.submission_id, True)
            case CreditRestored():
                self._void(event.submission_id, False)
            case SettingsAmended():
                self.amendments[event.number] = event
            case _:
                pass

    def _void(self, submission: bytes, void: bool) -> None:
        (self.void.add if void else self.void.discard)(submission)
        fate = self.fates.get(submission)
        if fate is not None:
            fate.void = void

    def _normalised(self, at_ms: int) -> bool:
        """What ``grpo.normalise_std`` was at a moment."""
        found = self.spec.grpo.normalise_std
        for event in self.amendments.values():
            if event.at_ms <= at_ms and NORMALISE in event.changes:
                found = bool(json.loads(event.changes[NORMALISE]))
        return found
