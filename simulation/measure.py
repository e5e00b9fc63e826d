"""What a simulation came to: pure folds over its event log.

Work is counted in seconds of computing. Of these, useful are those whose unit was accepted;
lost to departures are those of a unit at work whose node went and that was never accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from msgspec import Struct

from barnraise.simulation.event_log import Event
from barnraise.simulation.measure_blocks import NOBODYS_FAULT, BlockFacts, BlockFold


class CheatFacts(Struct, kw_only=True):
    """How one kind of cheat fared. ``first_found_s``: after its first submission; None: never found."""

    nodes: int = 0
    submitted: int = 0
    accepted: int = 0
    rejected: int = 0
    found_by: dict[str, int] = {}
    first_found_s: float | None = None
    credit: int = 0  # what was not clawed back
    banned: int = 0


class Measures(Struct, kw_only=True):
    """Everything, in virtual seconds, units and bytes.

    Attributes:
        useful: share of computing whose work was accepted, of what has come to an end.
        lost_per_departure_s: computing lost by each departure, on average.
        versions: moment at which each version was published, from version 0 on.
        adoption_s: version -> seconds from publication until half of its loaders had it, and all.
        copies: how many copies of what each node received the coordinator sent.
        staleness: lag in versions -> units trained on with it.
        blocks: of rounds and differences, where the run pretrains by blocks.
        honest_rejected: rejections of nodes that do not cheat, by check: should be empty.
    """

    virtual_s: float = 0.0
    nodes: int = 0
    live: int = 0
    departures: int = 0
    leases: int = 0
    expired: int = 0
    returned: int = 0
    submitted: int = 0
    accepted: int = 0
    rejected: dict[str, int] = {}
    computed_s: float = 0.0
    useful_s: float = 0.0
    useful: float = 0.0
    lost_s: float = 0.0
    lost_per_departure_s: float = 0.0
    versions: list[float] = []
    adoption_s: dict[int, tuple[float, float]] = {}
    copies: float = 0.0
    staleness: dict[int, int] = {}
    cheats: dict[str, CheatFacts] = {}
    honest_rejected: dict[str, int] = {}
    credit: int = 0
    deaths: int = 0
    blocks: BlockFacts | None = None


@dataclass
class _Fold:
    """What is remembered on the way."""

    began: dict[str, tuple[float, str]] = field(default_factory=dict)  # lease -> when, by whom
    at_work: dict[str, str] = field(default_factory=dict)  # node -> lease
    spent: dict[str, float] = field(default_factory=dict)  # lease -> seconds
    given_up: dict[str, float] = field(default_factory=dict)  # lease -> seconds when its node went
    accepted: set[str] = field(default_factory=set)
    lease_version: dict[str, int] = field(default_factory=dict)
    lease_of: dict[str, str] = field(default_factory=dict)  # work -> lease
    credit_of: dict[str, tuple[str, int]] = field(default_factory=dict)  # work -> node, credit
    cheat: dict[str, str] = field(default_factory=dict)
    first_sent: dict[str, float] = field(default_factory=dict)  # kind -> moment
    loads: dict[int, list[float]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    corrupt: set[str] = field(default_factory=set)  # nodes that send shards with a flipped bit
    rejected: Counter[str] = field(default_factory=Counter)
    honest: Counter[str] = field(default_factory=Counter)
    stale: Counter[int] = field(default_factory=Counter)


def measure(events: Iterable[Event]) -> Measures:
    """Fold a whole event log (``read_log``); one that was cut short is fine."""
    found, fold = Measures(), _Fold()
    blocks: BlockFold | None = None
    for event in events:
        found.virtual_s = event["t"]
        if event["what"] == "plan":
            blocks = BlockFold(event)
        _take(found, fold, event)
        if blocks is not None:
            blocks.take(event)
    found.blocks = None if blocks is None else blocks.facts()
    ended = fold.spent
    found.computed_s = sum(ended.values())
    found.useful_s = sum(spent for lease, spent in ended.items() if lease in fold.accepted)
    found.useful = found.useful_s / found.computed_s if found.computed_s else 0.0
    found.lost_s = sum(spent for lease, spent in fold.given_up.items() if lease not in fold.accepted)
    found.lost_per_departure_s = found.lost_s / found.departures if found.departures else 0.0
    for version, moments in sorted(fold.loads.items()):
        if version < len(found.versions):
            waits = sorted(moment - found.versions[version] for moment in moments)
            found.adoption_s[version] = (median(waits), waits[-1])
    found.nodes = len(fold.seen)
    found.rejected, found.honest_rejected = dict(fold.rejected), dict(+fold.honest)
    found.staleness = dict(sorted(fold.stale.items()))
    found.credit = sum(credit for _, credit in fold.credit_of.values())
    for node, credit in fold.credit_of.values():
        if fold.cheat.get(node):
            found.cheats[fold.cheat[node]].credit += credit
    return found


def _take(found: Measures, fold: _Fold, event: Event) -> None:
    at, node, lease = event["t"], event.get("node", ""), event.get("lease", "")
    match event["what"]:
        case "join":
            fold.seen.add(node)
            if event.get("corrupt"):
                fold.corrupt.add(node)
            kind = event.get("cheat", "")
            if kind and node not in fold.cheat:
                found.cheats.setdefault(kind, CheatFacts(found_by={})).nodes += 1
            fold.cheat[node] = kind
        case "crash" | "leave":
            found.departures += 1
            held = fold.at_work.get(node)
            if held is not None:
                fold.given_up[held] = at - fold.began[held][0]
        case "begin":
            fold.began[lease] = (at, node)
            fold.at_work[node] = lease
        case "made" | "stopped":
            begun = fold.began.pop(lease, None)
            if begun is not None:
                fold.spent[lease] = fold.spent.get(lease, 0.0) + fold.given_up.get(lease, at - begun[0])
            if fold.at_work.get(node) == lease:
                del fold.at_work[node]
        case "loaded":
            fold.loads.setdefault(event["version"], []).append(at)
        case "lease":
            found.leases += 1
            fold.lease_version[lease] = event["version"]
        case "closed":
            found.expired += event["why"] == "expired"
            found.returned += event["why"] == "returned"
        case "submitted":
            found.submitted += 1
            fold.lease_of[event["work"]] = lease
            kind = fold.cheat.get(node, "")
            if kind:
                fold.first_sent.setdefault(kind, at)
                found.cheats[kind].submitted += 1
        case "judged":
            _judged(found, fold, event)
        case "clawed-back":
            fold.credit_of.pop(event["work"], None)
        case "banned":
            if fold.cheat.get(node):
                found.cheats[fold.cheat[node]].banned += 1
        case "batch":
            for work in event["works"]:
                lag = event["version"] - 1 - fold.lease_version.get(fold.lease_of.get(work, ""), 0)
                fold.stale[lag] += 1
        case "published":
            found.versions.append(at)
        case "over":
            _over(found, event)


def _judged(found: Measures, fold: _Fold, event: Event) -> None:
    kind, check = fold.cheat.get(event["node"], ""), event["check"]
    facts = found.cheats.get(kind)
    if event["accepted"]:
        found.accepted += 1
        fold.accepted.add(event["lease"])
        fold.credit_of[event["work"]] = (event["node"], event["credit"])
        if facts is not None:
            facts.accepted += 1
        return
    fold.rejected[check] += 1
    if facts is None:
        spoiled = check == "block-files" and event["node"] in fold.corrupt
        fold.honest[check] += check not in NOBODYS_FAULT and not spoiled
        return
    facts.rejected += 1
    facts.found_by[check] = facts.found_by.get(check, 0) + 1
    if facts.first_found_s is None:
        facts.first_found_s = event["t"] - fold.first_sent.get(kind, event["t"])


def _over(found: Measures, event: dict[str, Any]) -> None:
    found.live, found.deaths = event.get("live", 0), event.get("deaths", 0)
    sent = event.get("origin_bulk", 0) + event.get("nodes_bulk", 0)
    if sent:
        found.copies = event["origin_bulk"] * event.get("nodes", 1) / sent
