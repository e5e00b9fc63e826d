"""The node's state tree: one dict of plain values, pushed whole to every viewer.

Figures are finished work only (R7). Times are ms since the epoch, sizes bytes,
credit as in receipts. Viewers must tolerate keys that they do not know.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from barnraise.node.engine import Sized
from barnraise.node.fetching import kind_of
from barnraise.node.model import State
from barnraise.protocol.reachability import UNASKED, Reach

MAX_NOTICES = 20
DUPLICATE_S = 900.0  # how long a duplicate key is shown after the coordinator spoke of it


@dataclass
class Transfer:
    """A download under way."""

    version: int
    total: int
    started: float  # seconds, monotonic
    skipped: int = 0  # bytes that were on the disk already
    done: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)  # bytes by peer id or mirror's URL
    what: str = ""  # empty: the version

    def rate(self, now: float) -> float:
        """Bytes per second since it began."""
        elapsed = now - self.started
        return (self.done - self.skipped) / elapsed if elapsed > 0 else 0.0

    def shown(self, now: float, coordinator: str) -> dict[str, Any]:
        """For the state tree; ``barnraise.node.fetching`` puts it into words."""
        eta = self.eta(now)
        return {
            "version": self.version,
            "what": self.what or f"version {self.version}",
            "done": self.done,
            "total": self.total,
            "rate": round(self.rate(now)),
            "eta_s": None if eta is None else round(eta, 1),
            "sources": [
                {"peer": source, "kind": kind_of(source, coordinator), "bytes": size}
                for source, size in self.sources.items()
            ],
        }

    def eta(self, now: float) -> float | None:
        """Seconds until the end at the rate of the shards that are finished; None before the first."""
        rate = self.rate(now)
        return (self.total - self.done) / rate if rate > 0 else None


@dataclass
class UnitProgress:
    """What the engine has finished of the unit at work."""

    unit_id: int
    version: int
    of: int
    started: float
    completions: int = 0
    tokens: int = 0

    def in_words(self) -> str:
        """How far it is, for a line."""
        return f"{self.completions} of {self.of} completions done"

    def tree(self) -> dict[str, Any]:
        """For the state tree, but for when it began."""
        return {
            "kind": "rollout",
            "unit_id": self.unit_id,
            "version": self.version,
            "completions": self.completions,
            "of": self.of,
            "tokens": self.tokens,
        }


@dataclass
class BlockUnitProgress:
    """What the engine has done of the block unit at work.

    ``loss``: nats per token, of the last step; NaN before the first.
    """

    unit_id: int
    version: int
    block: int
    slot: int
    steps: int
    started: float
    step: int = 0
    tokens: int = 0
    loss: float = math.nan
    saved: int = 0  # segments whose state is on the disk
    saved_before: int = 0  # of those, from an earlier start of the engine

    def in_words(self) -> str:
        """``training block 1, step 40 of 128, loss 3.21``"""
        return block_words(self.tree())

    def tree(self) -> dict[str, Any]:
        """For the state tree, but for when it began. ``loss`` is None before the first step."""
        return {
            "kind": "block",
            "unit_id": self.unit_id,
            "version": self.version,
            "block": self.block,
            "slot": self.slot,
            "step": self.step,
            "steps": self.steps,
            "loss": None if math.isnan(self.loss) else self.loss,
            "saved": self.saved,
            "tokens": self.tokens,
        }


def block_words(unit: Mapping[str, Any]) -> str:
    """The state tree's block unit as text: ``training block 1, step 40 of 128, loss 3.21``."""
    loss = unit.get("loss")
    text = f"training block {unit.get('block')}, step {unit.get('step', 0)} of {unit.get('steps')}"
    return text if loss is None else f"{text}, loss {loss:.2f}"


@dataclass
class Facts:
    """What the decisions do not depend on but a person wants to see."""

    name: str
    peer_id: str
    run: str = ""
    run_id: str = ""
    coordinator: str = ""
    engine: str = ""
    engine_why: str = ""
    device: str = ""
    engine_memory: int = 0
    sized: Sized | None = None  # of the unit begun last
    hardware: dict[str, Any] = field(default_factory=dict)  # see barnraise.node.hardware
    accepted: int = 0
    rejected: int = 0
    credit: int = 0
    units_done: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    peers: int = 0  # that the coordinator named last
    tokens_per_s: float = 0.0
    last_verdict: dict[str, Any] | None = None
    standing: dict[str, object] | None = None  # as the coordinator told last
    transfer: Transfer | None = None
    unit: UnitProgress | BlockUnitProgress | None = None
    reach: Reach = UNASKED
    tree: dict[str, Any] | None = None  # see barnraise.protocol.gossip_state
    limits: dict[str, Any] = field(default_factory=dict)  # see Limits.tree
    presence: dict[str, Any] = field(default_factory=dict)  # these two: see barnraise.node.guard
    suspended: list[dict[str, Any]] = field(default_factory=list)
    offset_ms: int | None = None
    credit_since: tuple[int, int] = (0, 0)  # a local midnight (ms), and what was earned since
    started_ms: int = 0
    consent: dict[str, Any] | None = None  # see barnraise.node.consent
    duplicate_key_at: float | None = None  # monotonic: when the coordinator last told us (R9)
    key_kept: bool = False  # then it was this process that took over, perhaps from its own last life
    witness: dict[str, Any] | None = None  # see barnraise.node.witness.fields
    notices: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_NOTICES))


def _hardware(facts: Facts) -> dict[str, Any]:
    """What was found, with what the engine takes and how it was sized by that (R5)."""
    found = {name: value for name, value in facts.hardware.items() if name != "measured_tokens_per_s"}
    if not found:
        return {}
    rate = facts.hardware.get("measured_tokens_per_s") or (round(facts.tokens_per_s, 1) or None)
    sized = "" if facts.sized is None else facts.sized.in_words()
    return {**found, "engine_memory": facts.engine_memory, "tokens_per_s": rate, "sized": sized}


def midnight_ms(wall_ms: int) -> int:
    """When the local day of a moment began; both in ms since the epoch."""
    day = datetime.fromtimestamp(wall_ms / 1000).replace(hour=0, minute=0, second=0, microsecond=0)
    return round(day.timestamp() * 1000)


def _peers(facts: Facts) -> int:
    """Other nodes connected now, the coordinator apart; without a broadcast tree those that it named."""
    if not facts.tree:
        return facts.peers
    return sum(1 for neighbour in facts.tree["neighbours"] if neighbour["peer"] != facts.coordinator)


def state_tree(state: State, facts: Facts, mono: float, wall_ms: int) -> dict[str, Any]:
    """Build the tree from decisions and facts at one moment of both clocks."""

    def wall(moment: float | None) -> int | None:
        return None if moment is None else wall_ms + round((moment - mono) * 1000)

    activity = state.activity
    unit, transfer = facts.unit, facts.transfer
    return {
        "kind": "node",
        "name": facts.name,
        "peer_id": facts.peer_id,
        "pid": os.getpid(),
        "run": facts.run,
        "run_id": facts.run_id,
        "coordinator": facts.coordinator,
        "connected": state.link == "up",
        "mode": state.mode,
        "state": activity.name,
        "reason": activity.reason,
        "since_ms": wall(activity.since),
        "until_ms": wall(activity.until),
        "then": activity.then,
        "policy_version": state.ready,
        "head_version": state.head,
        "have_version": state.fetched,
        "final_version": state.final if state.joined_once else None,
        "complete": state.complete,
        "unit": None if unit is None else {**unit.tree(), "started_ms": wall(unit.started)},
        "fetch": None if transfer is None else transfer.shown(mono, facts.coordinator),
        "pending": len(state.pending),
        "awaiting_verdict": len(state.unjudged),
        "units_done": facts.units_done,
        "accepted": facts.accepted,
        "rejected": facts.rejected,
        "credit": facts.credit,
        "credit_today": facts.credit_since[1] if facts.credit_since[0] == midnight_ms(wall_ms) else 0,
        "started_ms": facts.started_ms or None,
        "consent": facts.consent,
        "last_verdict": facts.last_verdict,
        "standing": facts.standing,
        "bytes_in": facts.bytes_in,
        "bytes_out": facts.bytes_out,
        "limits": facts.limits,
        "presence": facts.presence or None,
        "suspended": list(facts.suspended),
        "reach": {
            "kind": facts.reach.kind,
            "reason": facts.reach.reason,
            "cure": facts.reach.cure,
            "addresses": list(facts.reach.addresses),
        },
        "tree": facts.tree,
        "witness": facts.witness,
        "peers": _peers(facts),
        "tokens_per_s": round(facts.tokens_per_s, 1),
        "engine": facts.engine,
        "engine_why": facts.engine_why,
        "device": facts.device,
        "engine_memory": facts.engine_memory,
        "hardware": _hardware(facts),
        "clock_offset_ms": facts.offset_ms,
        "duplicate_key": facts.duplicate_key_at is not None and mono - facts.duplicate_key_at < DUPLICATE_S,
        "notices": list(facts.notices),
    }
