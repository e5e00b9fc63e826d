"""What became of rounds and of their differences: a fold over the event log of a run of phase "blocks"."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from msgspec import Struct

from barnraise.simulation.event_log import Event

NOBODYS_FAULT = frozenset({"block-withheld", "block-hidden"})
"""Checks that a departure alone may fail, of whoever has handed in and goes before the verdict."""


class RoundFacts(Struct, kw_only=True):
    """One round: which ``version`` it made, how long it was open, and what went into it.

    ``differences``: of each block. ``unfilled``: places that stayed empty. ``full``: every place was
    filled; else its time was up, and there was a quorum.
    """

    version: int
    seconds: float
    differences: list[int]
    unfilled: int
    full: bool


class BlockFacts(Struct, kw_only=True):
    """All of it, in units and virtual seconds.

    Attributes:
        places: of a round, per block.
        used: units whose difference went into a version; ``late``: accepted when their round was over.
        used_share: of the computing for rounds that are over, the part whose difference was used.
        lost_s: computing of units whose node went before the verdict, and that were never accepted.
        overdue: stored units whose files were not to be had in time; ``resumed``: taken up by a later life.
        gone: units that failed because their node was not there any more, honest or not, by check.
        held_up_s: how long rounds stayed open beyond their time, by the block that they waited for.
    """

    places: int = 0
    rounds: list[RoundFacts] = []
    used: int = 0
    late: int = 0
    used_share: float = 0.0
    lost_s: float = 0.0
    lost_per_departure_s: float = 0.0
    overdue: int = 0
    resumed: int = 0
    gone: dict[str, int] = {}
    held_up_s: dict[int, float] = {}


@dataclass
class _Fold:
    block: dict[str, int] = field(default_factory=dict)  # lease -> block
    version: dict[str, int] = field(default_factory=dict)  # lease -> the version it is trained from
    lease: dict[str, str] = field(default_factory=dict)  # work -> lease
    spent: Counter[str] = field(default_factory=Counter)  # lease -> seconds of computing
    began: dict[str, float] = field(default_factory=dict)  # lease -> when
    open_of: dict[str, set[str]] = field(default_factory=dict)  # node -> begun leases without a verdict
    left: set[str] = field(default_factory=set)  # leases whose node went before the verdict
    accepted: dict[str, float] = field(default_factory=dict)  # work -> when
    used: set[str] = field(default_factory=set)
    opened: float = 0.0
    formed: int = 0  # the version of the round that was formed last
    departures: int = 0


class BlockFold:
    """Takes in events in order. ``plan``: the log's event of that name, which says how rounds are meant."""

    def __init__(self, plan: Event) -> None:
        self._blocks, self._round_s = plan["blocks"], plan["round_s"]
        self._found = BlockFacts(places=plan["places"], rounds=[], gone={}, held_up_s={})
        self._fold = _Fold()

    def take(self, event: Event) -> None:
        """The next event."""
        _take(self._found, self._fold, event, self._blocks, self._round_s)

    def facts(self) -> BlockFacts:
        """What it came to so far."""
        found, fold = self._found, self._fold
        over = {lease for lease, version in fold.version.items() if version < fold.formed}
        used = [fold.lease[work] for work in sorted(fold.used)]
        found.used = len(used)
        found.late = sum(fold.lease[work] in over for work in fold.accepted if work not in fold.used)
        total = sum(seconds for lease, seconds in fold.spent.items() if lease in over)
        found.used_share = sum(fold.spent[lease] for lease in used) / total if total else 0.0
        counts = {fold.lease[work] for work in fold.accepted}
        found.lost_s = sum(fold.spent[lease] for lease in sorted(fold.left - counts))
        found.lost_per_departure_s = found.lost_s / fold.departures if fold.departures else 0.0
        return found


def _take(found: BlockFacts, fold: _Fold, event: Event, blocks: int, round_s: float) -> None:
    at, node, lease = event["t"], event.get("node", ""), event.get("lease", "")
    match event["what"]:
        case "lease" if "block" in event:
            fold.block[lease], fold.version[lease] = event["block"], event["version"]
        case "begin" if "block" in event:
            fold.began[lease] = at
            fold.open_of.setdefault(node, set()).add(lease)
            fold.left.discard(lease)  # its node is back, and goes on with it
            found.resumed += "from_segment" in event
        case "made" | "stopped":
            fold.spent[lease] += at - fold.began.pop(lease, at)
        case "crash" | "leave":
            fold.departures += 1
            fold.left |= fold.open_of.get(node, set())
        case "submitted" if lease in fold.block:
            fold.lease[event["work"]] = lease
        case "overdue":
            found.overdue += 1
        case "judged" if lease in fold.block:
            fold.open_of.get(node, set()).discard(lease)
            if event["accepted"]:
                fold.accepted[event["work"]] = at
            elif event["check"] in NOBODYS_FAULT:
                found.gone[event["check"]] = found.gone.get(event["check"], 0) + 1
        case "round":
            _round(found, fold, event, blocks, round_s)
        case "published":
            fold.opened = at


def _round(found: BlockFacts, fold: _Fold, event: Event, blocks: int, round_s: float) -> None:
    works: list[str] = event["works"]
    if not works:
        return
    fold.formed = event["version"]
    fold.used |= set(works)
    counts = Counter(fold.block[fold.lease[work]] for work in works)
    seconds = event["t"] - fold.opened
    differences = [counts[block] for block in range(blocks)]
    unfilled = found.places * blocks - len(works)
    found.rounds.append(
        RoundFacts(
            version=event["version"],
            seconds=seconds,
            differences=differences,
            unfilled=unfilled,
            full=unfilled == 0,
        )
    )
    if seconds > round_s + 1:
        last = max(works, key=lambda work: fold.accepted.get(work, 0.0))
        block = fold.block[fold.lease[last]]
        found.held_up_s[block] = found.held_up_s.get(block, 0.0) + seconds - round_s
