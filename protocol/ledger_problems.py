"""What is wrong with a ledger, and which of it only follows from something else that is.

One damaged entry makes others wrong: the work of a lease that cannot be read breaks a rule with every
later entry, each head signed since is of other entries. A problem says what it makes wrong and what it
may be due to; one that is due to what another makes wrong follows from that one. Never folded so: two
entries of different leases, a receipt for an entry that a good head covers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from barnraise.protocol.ledger_entries import ClawedBack, LeaseIssued, LedgerEntry, Restored

MAX_PROBLEMS = 1000
CUT, ALTERED = ("cut",), ("altered",)  # entries are missing at the end; are not those that were signed
_BY_NODE = frozenset({"joined-first", "claw-back-first"})  # what is missing is of the node
_MISSING = frozenset(  # what must come before is not there, or broke a rule itself
    {"lease-first", "submission-first", "appeal-first", "appeal-once", "claw-back-owed", "restore-overturned"}
)
_IN_ORDER = frozenset({"versions-increase", "epochs-in-order", "amendments-in-order"})

Keys = frozenset[Hashable]
NOTHING: Keys = frozenset()


@dataclass(frozen=True)
class Problem:
    """Something wrong with a ledger. ``index`` is the entry's, or None where no single entry is at fault.

    ``makes``, ``due_to``: names of what it makes wrong, and of what may have made it wrong.
    """

    index: int | None
    rule: str
    text: str
    makes: Keys = field(default=NOTHING, compare=False, repr=False)
    due_to: Keys = field(default=NOTHING, compare=False, repr=False)


class Problems:
    """Collects the first ``MAX_PROBLEMS``, and counts the others."""

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self.unnamed = 0

    def add(
        self, index: int | None, rule: str, text: str, makes: Keys = NOTHING, due_to: Keys = NOTHING
    ) -> None:
        """Take in one."""
        self.take(Problem(index, rule, text, makes, due_to))

    def take(self, problem: Problem) -> None:
        """Take in one."""
        if len(self.found) < MAX_PROBLEMS:
            self.found.append(problem)
        else:
            self.unnamed += 1


def subjects(entry: LedgerEntry, rule: str) -> tuple[Keys, Keys]:
    """What an entry that breaks a rule makes wrong with others, and what may be why it breaks it."""
    both: set[Hashable] = set()
    if rule in _BY_NODE:
        both.add((rule, getattr(entry, "node", b"")))
    if rule == "version-published" and isinstance(entry, LeaseIssued):
        both.add((rule, entry.policy_version))
    if rule in _IN_ORDER:
        both.add((rule,))
    ids = {(name, getattr(entry, name)) for name in ("lease_id", "submission_id") if hasattr(entry, name)}
    makes = both if isinstance(entry, ClawedBack | Restored) else both | ids  # nothing is built on those
    return frozenset(makes), frozenset(both | ids if rule in _MISSING else both)


def causes(problems: Sequence[Problem], size: int) -> list[int | None]:
    """For each problem the place in ``problems`` of the one that it follows from in the end; None: none.

    ``size``: of the ledger. The earliest entry's is the cause of those that share something with it.
    """
    order = sorted(range(len(problems)), key=lambda place: _where(problems[place], size))
    rank = {place: number for number, place in enumerate(order)}
    first: dict[Hashable, int] = {}
    for place in order:
        for key in problems[place].makes:
            first.setdefault(key, place)
    found: list[int | None] = []
    for place, problem in enumerate(problems):
        known = {first[key] for key in problem.due_to if key in first} - {place}
        found.append(min(known, key=lambda other: rank[other], default=None))
    for place in range(len(found)):
        while (cause := found[place]) is not None and (further := found[cause]) is not None:
            found[place] = further
    return found


def _where(problem: Problem, size: int) -> int:
    return size if problem.index is None else problem.index


def in_order(problems: Sequence[Problem], size: int) -> list[tuple[Problem, int]]:
    """The problems that follow from no other, the earliest entry's first, and how many follow from each."""
    found = causes(problems, size)
    roots = [place for place, cause in enumerate(found) if cause is None]
    roots.sort(key=lambda place: _where(problems[place], size))
    following = Counter(found)
    return [(problems[place], following[place]) for place in roots]
