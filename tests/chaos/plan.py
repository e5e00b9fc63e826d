"""What goes wrong, and when: a pure function of a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeVar

NODES = ("node-1", "node-2", "node-3")  # the second has a small disk, the third a supervisor
SMALL = ("coordinator", NODES[1])  # disks that may be full
ENGINES = tuple(f"engine of {name}" for name in NODES)
PROCESSES = ("coordinator", "learner", "verifier", *NODES, *ENGINES)
LINKS = ("cut", "stall", "trickle")
AT_COORDINATOR = ("snapshot", "tile")
AT_NODE = ("shard", "version", "version while it lives", "lease", "known", "receipts")
TOLD = ("lease", "known", "receipts")  # of those: what is found is said in the node's log
MOST_CRASHES = 4  # of the supervised node: its supervisor gives up at eight, and waits longer each time

_Word = TypeVar("_Word", bound=str)
Kind = Literal["kill", "freeze", "fill", "link", "damage"]
KINDS: tuple[Kind, ...] = ("kill", "kill", "freeze", "link", "fill", "damage", "damage")


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that goes wrong.

    Attributes:
        at_s: seconds from the start of the plan; it is done then, or as soon after as one can.
        kind: kill (SIGKILL), freeze (SIGSTOP), fill (a disk), link (to the coordinator), damage (a file).
        target: of kill and freeze a process, else the node or ``coordinator``.
        how: of ``link`` one of ``LINKS``, of ``damage`` one of ``AT_COORDINATOR`` or ``AT_NODE``.
        seconds: until it is undone: started again, continued, emptied, connected.
    """

    at_s: float
    kind: Kind
    target: str
    how: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s  {self.kind} {self.target} {self.how} ({self.seconds:.1f} s)"


def plan(seed: int, seconds: float) -> list[Act]:
    """Acts between 0 and ``seconds``, in order; all are undone before ``seconds``.

    One after the other in each place, many places at once. Every kind of damage comes up once
    before any comes again, as far as the time goes.
    """
    random = Random(seed)
    acts: list[Act] = []
    busy: dict[str, float] = {}
    crashes = 0
    disks = _rounds(random, SMALL)
    damages = _rounds(random, (*AT_COORDINATOR, *AT_NODE))
    kinds: Iterator[Kind] = _rounds(random, KINDS)
    at = random.uniform(0.5, 2.0)
    while at < seconds:
        kind = next(kinds)
        lasts = round(min(seconds - at, random.uniform(0.5, 3.0 if kind in ("kill", "damage") else 10.0)), 2)
        how = ""
        if kind in ("kill", "freeze"):
            target = random.choice(PROCESSES)
        elif kind == "fill":
            target = next(disks)
        elif kind == "link":
            target, how = random.choice(NODES), random.choice(LINKS)
        else:
            how = next(damages)
            told = (NODES[0], NODES[2])  # a full disk would not take the line in the log
            target = random.choice(told if how in TOLD else NODES)
            target = "coordinator" if how in AT_COORDINATOR else target
        crash = target == NODES[2] and kind in ("kill", "damage")
        place = f"{kind} {target}" if kind in ("link", "fill") else target
        if busy.get(place, 0.0) <= at and not (crash and crashes == MOST_CRASHES):
            crashes += crash
            busy[place] = at + lasts
            acts.append(Act(round(at, 2), kind, target, how, lasts))
        at += random.expovariate(1 / 3.0)
    return acts


def _rounds(random: Random, of: Sequence[_Word]) -> Iterator[_Word]:
    """Endlessly: all of them, shuffled, again and again."""
    while True:
        yield from random.sample(of, len(of))
