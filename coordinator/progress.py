"""What the belts are doing right now, for people to see; nothing reads it to decide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """``*_trouble`` stays until the next success (R3)."""

    learner: str = "starting"
    learner_trouble: str = ""
    learner_share: float = -1.0  # of a long job; -1: none is under way
    publishing: int | None = None  # the version being hashed, patched and signed
    publisher_trouble: str = ""
    rollouts_trouble: str = ""  # why they are not kept
    verifying: int = 0
    verifiers: int = 1
    verifiers_busy: int = 0
    verifier_trouble: str = ""
    draining_until_ms: int | None = None  # the coordinator ends once the work at hand is in

    def begin(self, what: str) -> None:
        """The learner is at something else now."""
        self.learner, self.learner_share = what, -1.0

    def note(self, subject: str, share: float) -> None:
        """How far the learner is with a long job."""
        self.learner, self.learner_share = subject, share
