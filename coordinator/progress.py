"""What the two belts are doing right now, for people to see; nothing reads it to decide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """``*_trouble`` stays until the next success (R3)."""

    learner: str = "starting"
    learner_trouble: str = ""
    verifying: int = 0
    verifier_trouble: str = ""
