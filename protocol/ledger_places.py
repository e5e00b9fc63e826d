"""Ledger entries with what they leave out (whose lease, which unit, which version), and filters over them.

An entry names its lease alone where that says everything; whoever reads a log from its
beginning can fill the rest in. Nothing here judges: ``LedgerFold`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from barnraise.protocol.ledger_entries import (
    BlockLeased,
    LeaseIssued,
    LedgerEntry,
    NodeJoined,
    VersionPublished,
)

_ALIASES = {
    "leased": "lease",
    "lent": "lease",
    "accepted": "judged",
    "verdict": "judged",
    "ban": "nodebanned",
}
KINDS: tuple[str, ...] = tuple(sorted(kind.__name__ for kind in get_args(LedgerEntry)))


@dataclass(frozen=True, slots=True)
class Place:
    """An entry where it stands. ``node``, ``unit`` and ``version``: its own, or its lease's, or None."""

    index: int
    entry: LedgerEntry
    node: bytes | None
    unit: int | None
    version: int | None


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries to show; None lets all through. Times are ms since the epoch, ``until`` not included."""

    nodes: frozenset[bytes] | None = None
    kinds: frozenset[str] | None = None
    unit: int | None = None
    version: int | None = None
    since: int | None = None
    until: int | None = None

    def takes(self, place: Place) -> bool:
        """Whether an entry passes."""
        entry = place.entry
        return (
            (self.nodes is None or place.node in self.nodes)
            and (self.kinds is None or type(entry).__name__ in self.kinds)
            and (self.unit is None or place.unit == self.unit)
            and (self.version is None or place.version == self.version)
            and (self.since is None or entry.at_ms >= self.since)
            and (self.until is None or entry.at_ms < self.until)
        )


def placed(entries: Iterable[LedgerEntry]) -> Iterator[Place]:
    """Each entry with its place, in order. The first lease of an id counts, as in the fold."""
    leases: dict[bytes, tuple[bytes, int, int]] = {}
    for index, entry in enumerate(entries):
        node: bytes | None = getattr(entry, "node", None)
        unit = version = None
        if isinstance(entry, LeaseIssued | BlockLeased):
            unit, version = entry.unit_id, entry.policy_version
            leases.setdefault(entry.lease_id, (entry.node, unit, version))
        elif isinstance(entry, VersionPublished):
            version = entry.version
        else:
            lease_id: bytes | None = getattr(entry, "lease_id", None)
            found = None if lease_id is None else leases.get(lease_id)
            if found is not None:
                holder, unit, version = found
                node = holder if node is None else node
        yield Place(index, entry, node, unit, version)


def kinds_named(text: str) -> frozenset[str]:
    """The kinds that a person means by ``text``: a kind's name or the beginning of some, in any case.

    Raises:
        ValueError: none begins so; the message lists them.
    """
    wanted = text.strip().lower().replace("-", "").replace("_", "")
    wanted = _ALIASES.get(wanted, wanted)
    found = frozenset(kind for kind in KINDS if wanted and kind.lower().startswith(wanted))
    if not found:
        raise ValueError(f"kinds of entries are {', '.join(KINDS)}")
    exact = frozenset(kind for kind in found if kind.lower() == wanted)
    return exact or found


def names_of(entries: Iterable[LedgerEntry]) -> dict[bytes, str]:
    """The last name that each node joined under, as it gave it: not yet safe for a terminal."""
    return {entry.node: entry.name for entry in entries if isinstance(entry, NodeJoined)}
