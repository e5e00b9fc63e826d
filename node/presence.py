"""Whether a person uses this machine: what was asked, and what it said (R14).

"Idle" means the person, never the processor that we load ourselves. Where nothing says
so, that is what is shown; nobody pretends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Presence:
    """What is known of the person.

    Attributes:
        source: who said so, such as ``"x11"``; ``""``: nobody could be asked.
        idle_s: seconds since the last input; None: nobody is logged in, or nothing is known.
        text: one line, for people.
    """

    source: str = ""
    idle_s: float | None = None
    text: str = ""


UNKNOWN = Presence(text="not looked at yet")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one source says: seconds since the last input, None for nobody there; ``detail`` for people."""

    source: str
    idle_s: float | None
    detail: str = ""


class Source(Protocol):
    """Something that knows of input. Blocking, and cheap: it is asked every second."""

    name: str

    def ask(self) -> Answer | None:
        """What it knows; None: it cannot say (now). Never raises."""


def combined(answers: Sequence[Answer | None], names: Sequence[str], wall: float) -> Presence:
    """The last input that any source knows of. ``names``: of all that were asked; ``wall``: seconds."""
    given = [answer for answer in answers if answer is not None]
    if not given:
        return Presence(
            text=f"asked in vain: {', '.join(names)}" if names else "nothing to ask on this system"
        )
    seen = [answer for answer in given if answer.idle_s is not None]
    if not seen:
        best = given[0]
        return Presence(best.source, None, f"{best.source}: {best.detail or 'nobody is logged in'}")
    best = min(seen, key=lambda answer: answer.idle_s or 0.0)
    assert best.idle_s is not None
    # A moment, not a length: the line stays the same while nobody touches anything.
    last = time.strftime("%H:%M:%S", time.localtime(wall - best.idle_s))
    detail = f" ({best.detail})" if best.detail else ""
    return Presence(best.source, best.idle_s, f"{best.source}{detail}: last input at {last}")
