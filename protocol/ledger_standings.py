"""Who did what, from the ledger's entries: counts, balance and recent average of every node.

The recent average is BOINC's (``update_average`` in lib/util.cpp; half-life one week, in
credit a day) in its limit of short intervals: each credit counts with ln 2 / half-life
when it is earned and half of that a half-life later. So a node that earns the same every
day comes to that number, it does not matter when anybody looks, and a claw-back takes
exactly away what its work had added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from barnraise.protocol.ledger_entries import (
    Appealed,
    BanLifted,
    BlockLeased,
    ClawedBack,
    Judged,
    LeaseClosed,
    LeaseIssued,
    LedgerEntry,
    NodeBanned,
    NodeJoined,
    Restored,
    Reviewed,
    Submitted,
)
from barnraise.protocol.ledger_fold import LedgerError, LedgerFold
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.standing import UNAUDITED

DAY_MS = 86_400_000
HALF_LIFE_MS = 7 * DAY_MS
NAMES_KEPT = 8


def decay(age_ms: int, half_life_ms: int = HALF_LIFE_MS) -> float:
    """What one credit earned ``age_ms`` ago adds to the average, per day. The future counts as now."""
    return math.log(2) * (DAY_MS / half_life_ms) * math.exp2(-max(0, age_ms) / half_life_ms)


def recent_average(
    credits: Iterable[tuple[int, int]], now_ms: int, half_life_ms: int = HALF_LIFE_MS
) -> float:
    """Recent average of (when earned in ms, credit) pairs at ``now_ms``: credit per day."""
    return math.fsum(credit * decay(now_ms - at_ms, half_life_ms) for at_ms, credit in credits)


@dataclass(slots=True)
class Standing:
    """One node. Credit in Mflop, times in ms since the epoch; ``names`` as it gave them, the last ones."""

    node: bytes
    joined_ms: int
    last_ms: int
    names: list[str] = field(default_factory=list)
    leased: int = 0
    closed: int = 0  # leases that ended without a submission
    submitted: int = 0
    accepted: int = 0
    unaudited: int = 0  # of those accepted, without the model's checks
    rejected: int = 0
    appeals: int = 0
    overturned: int = 0
    clawed_back: int = 0  # credit taken and not given back
    banned_until: int = 0
    ban_reason: str = ""
    credit: int = 0
    recent: float = 0.0  # credit per day

    @property
    def name(self) -> str:
        return self.names[-1] if self.names else ""


Earn = Callable[[Standing, bytes, int, int], None]
"""Given node, submission, when (ms) and credit (negative: taken back): counts it in balance and average."""


def count(node: Standing, entry: LedgerEntry, earn: Earn) -> None:
    """Count one entry that concerns ``node`` and breaks no rule; what credit it moves goes to ``earn``."""
    node.last_ms = max(node.last_ms, entry.at_ms)
    match entry:
        case NodeJoined():
            node.names = [*(name for name in node.names if name != entry.name), entry.name][-NAMES_KEPT:]
        case LeaseIssued() | BlockLeased():
            node.leased += 1
        case LeaseClosed():
            node.closed += 1
        case Submitted():
            node.submitted += 1
        case Judged() if entry.accepted:
            node.accepted += 1
            node.unaudited += entry.check == UNAUDITED
            earn(node, entry.submission_id, entry.at_ms, entry.credit)
        case Judged():
            node.rejected += 1
        case Appealed():
            node.appeals += 1
        case Reviewed() if entry.accepted:
            node.rejected, node.accepted = node.rejected - 1, node.accepted + 1
            node.overturned += 1
            earn(node, entry.submission_id, entry.at_ms, entry.credit)
        case ClawedBack():
            node.clawed_back += entry.credit
            earn(node, entry.submission_id, entry.at_ms, -entry.credit)
        case Restored():
            node.clawed_back -= entry.credit
            earn(node, entry.submission_id, entry.at_ms, entry.credit)
        case NodeBanned():
            node.banned_until, node.ban_reason = entry.until, entry.reason
        case BanLifted():
            node.banned_until, node.ban_reason = 0, ""
        case _:
            pass


@dataclass(slots=True)
class Standings:
    """Standings of all nodes at ``now_ms``. An entry that breaks a rule changes nothing."""

    now_ms: int
    spec: RunSpec | None = None
    nodes: dict[bytes, Standing] = field(default_factory=dict)
    broken: int = 0  # entries that break a rule
    _fold: LedgerFold = field(init=False)
    _leases: dict[bytes, bytes] = field(default_factory=dict)
    _earned: dict[bytes, int] = field(default_factory=dict)  # when, by submission

    def __post_init__(self) -> None:
        self._fold = LedgerFold(self.spec)

    def add(self, entry: LedgerEntry) -> None:
        """Count the next entry."""
        try:
            self._fold.add(entry)
        except LedgerError:
            self.broken += 1
            return
        if isinstance(entry, LeaseClosed):
            count(self.nodes[self._leases[entry.lease_id]], entry, self._earn)
            return
        key: bytes | None = getattr(entry, "node", None)
        if key is None:
            return
        if isinstance(entry, NodeJoined):
            self.nodes.setdefault(key, Standing(key, entry.at_ms, entry.at_ms))
        elif isinstance(entry, LeaseIssued | BlockLeased):
            self._leases[entry.lease_id] = key
        if (node := self.nodes.get(key)) is not None:
            count(node, entry, self._earn)

    def _earn(self, node: Standing, submission_id: bytes, at_ms: int, credit: int) -> None:
        earned = self._earned.setdefault(submission_id, at_ms)  # a claw-back is of that moment's credit
        node.credit += credit
        node.recent += credit * decay(self.now_ms - earned)
        if not node.credit:
            node.recent = 0.0  # nothing is left but rounding

    def ranked(self, by: str = "credit") -> list[Standing]:
        """All nodes, the most ``credit`` (or ``recent`` average) first; equal ones by key.

        Raises:
            ValueError: ``by`` is neither.
        """
        if by not in ("credit", "recent"):
            raise ValueError("nodes are ranked by credit or by recent")
        return sorted(self.nodes.values(), key=lambda node: (-getattr(node, by), node.node))


def standings(entries: Iterable[LedgerEntry], now_ms: int, spec: RunSpec | None = None) -> Standings:
    """Fold a whole ledger into standings at ``now_ms``."""
    found = Standings(now_ms, spec)
    for entry in entries:
        found.add(entry)
    return found
