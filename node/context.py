"""What the tasks of one daemon share: the decisions' state, the facts, and the parts it drives."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from barnraise.node import core
from barnraise.node.broadcast import TreecastFetcher
from barnraise.node.clock import Clock
from barnraise.node.config import NodeConfig
from barnraise.node.consent import Approve, Consent
from barnraise.node.engine import Engine, EngineLimits
from barnraise.node.events import Event
from barnraise.node.kept import KeptWork
from barnraise.node.known import KnownRuns
from barnraise.node.link import Run
from barnraise.node.machine import Seen, Sensors
from barnraise.node.model import State
from barnraise.node.pending import PendingWork
from barnraise.node.prefetch import Prefetch
from barnraise.node.receipts import ReceiptBook
from barnraise.node.rules import Suspension, Verdict
from barnraise.node.state import Facts, state_tree
from barnraise.node.traffic import Limits
from barnraise.node.units import Units
from barnraise.node.versions import Versions
from barnraise.node.weights import SwarmFetcher
from barnraise.protocol.control import Changed
from barnraise.protocol.errors import PeerError
from barnraise.protocol.gossip_state import tree_state
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import Peer, RolloutLease, Signed
from barnraise.protocol.paced_network import PacedNetwork
from barnraise.protocol.pretrain import BlockLease
from barnraise.protocol.session import Session
from barnraise.protocol.store import DiskStore
from barnraise.protocol.wire import printable

log = logging.getLogger("barnraise.node")


CONSENT = (
    "waiting for your consent to join the run: 'barnraise join ADDRESS' or 'barnraise tui' shows its "
    "description and asks; --yes agrees beforehand"
)


class Signal:
    """Wakes every waiter once per ``set``."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next ``set``."""
        await self._event.wait()


@dataclass
class Context:
    """One daemon. Only ``feed`` changes ``state``."""

    config: NodeConfig
    network: PacedNetwork
    limits: Limits
    engine: Engine
    identity: Identity
    clock: Clock
    rng: random.Random
    known: KnownRuns
    store: DiskStore
    approve: Approve | None
    instance: bytes
    facts: Facts
    state: State
    consent: Consent = field(default_factory=Consent)
    sensors: Sensors | None = None
    seen: Seen = field(default_factory=Seen)  # lately; see barnraise.node.guard
    verdict: Verdict = field(default_factory=Verdict)
    full: Suspension | None = None  # the disk is, see barnraise.node.room
    distrusted: Suspension | None = None  # the operator is, see barnraise.node.distrust
    distrust_overridden: bool = False
    witness_folder: Path | None = None
    receipts_refused: str = ""  # by the disk: why; those after it are not taken, so that no gap is left
    engine_limits: EngineLimits | None = None  # what the engine was told last
    wake: Signal = field(default_factory=Signal)
    linked: Signal = field(default_factory=Signal)  # ``session`` has changed
    allowed: Signal = field(default_factory=Signal)  # whether shards may move, or how fast, may have changed
    changed: Changed = field(default_factory=Changed)
    spoken: Signal = field(default_factory=Signal)  # what is to be said of the state may be another now
    run: Run | None = None
    amended: int = 0  # so many amendments are in ``run``
    session: Session | None = None
    pending: PendingWork | None = None
    receipts: ReceiptBook | None = None
    kept: KeptWork | None = None
    versions: Versions | None = None
    fetcher: SwarmFetcher | None = None
    corpus_fetcher: SwarmFetcher | None = None
    units: Units | None = None  # where the run pretrains by blocks
    treecast: TreecastFetcher | None = None
    prefetch: Prefetch | None = None
    entered: trio.Event = field(default_factory=trio.Event)  # the run is known, its folders are open
    reach_known: trio.Event = field(default_factory=trio.Event)  # facts.reach is more than a guess
    head: Signed | None = None  # the newest manifest, checked
    head_version: int = -1
    damaged_version: int = -1  # the newest one that the coordinator was told it published damaged
    answered: deque[bytes] = field(default_factory=lambda: deque(maxlen=256))  # leases, lately
    judged: deque[bytes] = field(default_factory=lambda: deque(maxlen=256))  # submissions, lately
    coordinator: str = ""  # peer id
    peers: tuple[Peer, ...] = ()
    lease: RolloutLease | BlockLease | None = None
    engine_scope: trio.CancelScope | None = None
    fetch_scope: trio.CancelScope | None = None
    spoke_at: float = 0.0
    link_said: str = ""  # why there is no session, as it was said last
    listeners: list[Callable[[Event], None]] = field(default_factory=list)  # must not raise

    def feed(self, event: Event) -> None:
        """Fold an event into the state and wake the loop."""
        before, transfers = self.state.activity, self.state.may_transfer
        self.state = core.apply(self.state, event, trio.current_time())
        self.wake.set()
        self.changed.set()
        if self.state.activity != before:
            self.spoken.set()
        if self.state.may_transfer is not transfers:
            self.allowed.set()
        for listener in self.listeners:
            listener(event)

    def jitter(self) -> float:
        """A number in [0, 1)."""
        return self.rng.random()

    def say(self, text: str, level: int = logging.INFO, **data: Any) -> None:
        """Print a line; warnings and errors are also kept in the state tree.

        ``data``: what goes into the line besides where lines are JSON.
        """
        self.spoke_at = trio.current_time()
        log.log(level, "%s", text, extra={"data": data})
        if level >= logging.WARNING:
            entry: dict[str, Any] = {
                "at_ms": self.clock.wall_ms(),
                "level": logging.getLevelName(level).lower(),
                "text": printable(text, 500),
            }
            self.facts.notices.append(entry)
        self.changed.set()

    def tree(self) -> dict[str, Any]:
        """The state tree now."""
        for name in ("bytes_in", "bytes_out"):
            setattr(self.facts, name, int(getattr(self.network, name, 0)))
        if self.treecast is not None:
            self.facts.tree = tree_state(self.treecast.gossiper, trio.current_time())
        self.limits.count(self.network, self.clock.wall_ms())
        self.facts.limits = self.limits.tree(self.clock.wall_ms())
        self.facts.consent = self.consent.open
        tree = state_tree(self.state, self.facts, trio.current_time(), self.clock.wall_ms())
        if self.consent.open is not None:
            tree |= {"state": "waiting", "reason": CONSENT, "until_ms": None, "then": ""}
        return tree

    def joined(self) -> Run:
        """The run; only asked for by tasks that cannot start before it is known."""
        assert self.run is not None
        return self.run

    def live_session(self) -> Session:
        """The session.

        Raises:
            PeerError: there is none at the moment.
        """
        if self.session is None:
            raise PeerError("not connected to the coordinator")
        return self.session
