"""What must hold of every swarm, whatever happens to it: looked at all the time, and at the end.

    watching = Invariants()
    simulate(scenario, seed, folder, watch=[watching.watch], final=[watching.final])

The continuous ones cost as much as what changes: they listen to the coordinator's writes
(``Core.listeners``), to the nodes' events (``Context.listeners``) and to trio (steps of tasks);
twice a virtual minute, all leases and all waiting nodes are looked at. Each check is a plain
function in one of the ``invariant_*`` modules that raises ``Broken``.

===================== =====================================================================
acknowledged-kept     what a node was told is kept is on the disk, over coordinators' crashes
stored-with-payload   ... with the bytes that the verdict will be about
submission-signed     stored work is signed by the node that holds its lease
submitted-once, judged-once, credited-once
                      one submission for a lease, one verdict, one credit for a unit but where
                      its time ran out and somebody else did it, too
credit-conserved      state, ledger and verdicts give the same balances
ledger-rules, ledger-grows
                      the ledger keeps its own rules, and entries stay as they are
lent-once             nobody is lent a unit that another reserves
leases-bounded, leases-expire, lease-open, lease-durable
                      so many for a node, none beyond its time, none that is not on the disk
lease-honoured        work on an open lease is not refused
restart-forgets-nothing
                      a coordinator that begins knows what the one before had acknowledged
used-once, used-accepted, within-lag
                      a rollout goes into one version, if it counts and is not too old
published-signed, version-signed
                      what is published, and what a node loads, is what the operator signed
receipts-match        a node's receipts are the ledger's entries, and none is missing
shards-verified       nobody but who spoils shards is caught with one, no store holds one
place-lent-once, block-once
                      a place of a round is nobody else's while it is lent, judged or filled, and
                      nobody has two places of one block in a round
round-grows, round-quota, round-whole, round-closes
                      rounds come one after the other, with all places or, once their time is up,
                      a quorum of each block, take all that was accepted, and do so soon
difference-once, difference-of-round, difference-kept
                      a difference goes into the version after its own, once, and is not lost
judged-as-drawn       what counts was done again where the draw says, and often enough
waiting-bounded       no node waits for long while the coordinator is in reach and has work,
                      but for new keys from an address that has brought as many as it may
newcomers-bounded     ... which no address exceeds
memory-bounded        the coordinator remembers what nodes and open work explain
no-busy-loop          nor does anybody run more often than what happens explains
no-defect             no daemon, no coordinator ended by an exception
===================== =====================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from barnraise.coordinator.block_events import BlockSubmitted
from barnraise.coordinator.core import Core
from barnraise.coordinator.events import Submitted
from barnraise.coordinator.journal import Journal, Write
from barnraise.coordinator.newcomers import NewcomerLimits
from barnraise.node.events import Event
from barnraise.simulation.invariant_blocks import BlockRecord
from barnraise.simulation.invariant_bounds import (
    WAIT_S,
    check_leases,
    check_newcomers,
    check_state,
    check_waiting,
    is_waiting,
    work_for,
)
from barnraise.simulation.invariant_nodes import (
    Nodes,
    check_has_receipts,
    check_receipts,
    check_reports,
    check_store,
)
from barnraise.simulation.invariant_record import Broken, Record, check_log
from barnraise.simulation.invariant_steps import Steps
from barnraise.simulation.lives import Node

if TYPE_CHECKING:
    from barnraise.simulation.world import World

__all__ = ["Broken", "Invariants"]

LOOK_S = 30.0
PER_DAY = NewcomerLimits().per_day
SETTLED_S = 60.0  # connected for so long, a node has all of its receipts


class Invariants:
    """The checks of one world.

    Attributes:
        broken: what was found, in order. ``record``, ``blocks``, ``nodes``: what it was held against.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.broken: list[Broken] = []
        self.record: Record | None = None
        self.nodes: Nodes | None = None
        self.blocks: BlockRecord | None = None
        self._wait_s = wait_s
        self._world: World | None = None
        self._found = trio.Event()
        self._steps: Steps | None = None
        self._waits: dict[str, float] = {}  # node -> since when, as far as it counts
        self._moved: dict[str, int] = {}  # node -> bytes of its download, when looked at last
        self._settled: list[tuple[float, int]] = []  # when looked at -> ledger entries then

    def attach(self, world: World) -> None:
        """Begin to listen. Inside of the world's ``trio.run``."""
        self._world = world
        spec, run_id = world.run.spec, world.run.run_id
        self.record = Record(spec, run_id)
        if spec.pretrain is not None:
            self.blocks = BlockRecord(self.record, spec.pretrain)
        self.nodes = Nodes(self.record, world.coordinator.now_ms)
        self._steps = Steps(self._tell)
        trio.lowlevel.add_instrument(self._steps)
        world.coordinator.opened.append(self._opened)
        world.lives.started.append(self._started)
        if world.core is not None:
            self._opened(world.core)
        for node in world.live:
            if node.handle is not None:  # else it is about to start, and says so
                self._started(node)

    def detach(self) -> None:
        """Stop counting steps; nothing else is left behind."""
        if self._steps is not None:
            trio.lowlevel.remove_instrument(self._steps)
            self._steps = None

    async def watch(self, world: World) -> None:
        """Beside the swarm, until something is broken (for ``simulate``).

        Raises:
            Broken: the first.
        """
        if self._world is None:
            self.attach(world)
        try:
            while True:
                with trio.move_on_after(LOOK_S):
                    await self._found.wait()
                self.look()
                if self.broken:
                    raise self.broken[0]
        finally:
            self.detach()

    def look(self) -> None:
        """What is looked at twice a minute. What is broken is kept in ``broken``."""
        world, record = self._known()
        core, hub = world.core, world.hub
        if core is not None and hub is not None:
            now = world.coordinator.now_ms()
            if not core.trouble:  # a disk that refuses lets no lease end, either
                self._try(check_leases, core.state, now)
            self._try(check_state, core.state, hub, len(record.leases) + len(record.waiting))
            self._try(check_reports, hub, *self._peers())
            self._try(check_newcomers, self._came_from(core), world.now, PER_DAY)
            self._try(check_log, record, *core.head)
            if len(core.ledger) == len(record.log):  # else the state is ahead of the disk
                self._try(record.check_credit, core.state)
        self._try(record.check_jobs, world.coordinator.jobs)
        if self.blocks is not None:
            self._look_at_blocks(self.blocks, core)
        for node in world.live:
            self._try(self._look_at, node, core)
        if self._steps is not None:
            self._steps.nodes = len(world.live)
        for death in world.deaths:
            self._tell(Broken("no-defect", death))
        world.deaths.clear()
        self._settled.append((world.now, len(record.entries)))

    def _look_at_blocks(self, blocks: BlockRecord, core: Core | None) -> None:
        world = self._known()[0]
        self._try(blocks.check_jobs, world.coordinator.jobs)
        if core is None or core.trouble or world.coordinator.full:
            blocks.rest()
            return
        self._try(blocks.check_judged, world.coordinator.block_jobs, core.segment_draw)
        if core.state.operations.paused is None:
            learn_s = world.scenario.work.learn_s
            self._try(blocks.check_closes, world.now, world.coordinator.now_ms(), learn_s)

    def final(self, world: World) -> None:
        """Everything, with everybody still there.

        Raises:
            Broken: the first that was found, now or before.
        """
        record = self._known()[1]
        self.look()
        self._try(self._journal, world, record)
        operator, run_id = world.run.spec.operator, world.run.run_id
        for node in world.nodes.values():
            receipts = node.config.run_path(run_id) / "receipts.bin"
            self._try(check_receipts, record, operator, node.name, node.key, receipts)
            self._try(check_store, node.name, node.config.store_path)
            settled = self._settled_entries(node)
            if settled:
                self._try(check_has_receipts, record, node.name, node.key, receipts, settled)
        if self.broken:
            raise self.broken[0]

    def _known(self) -> tuple[World, Record]:
        if self._world is None or self.record is None:
            raise RuntimeError("attach() comes first")
        return self._world, self.record

    def _peers(self) -> tuple[set[str], set[str]]:
        world = self._known()[0]
        known = {node.peer_id for node in world.nodes.values()} | {world.coordinator.identity.peer_id}
        return {node.peer_id for node in world.nodes.values() if node.traits.corrupt}, known

    def _try(self, check: Callable[..., Any], *arguments: Any) -> None:
        try:
            check(*arguments)
        except Broken as broken:
            self._tell(broken)

    def _tell(self, broken: Broken) -> None:
        world = self._known()[0]
        if broken.at_s is None:
            broken = Broken(broken.name, broken.what, world.now)
        self.broken.append(broken)
        if len(self.broken) == 1:
            world.log.note("broken", name=broken.name, what_is=broken.what)
        self._found.set()

    # --- listening

    def _opened(self, core: Core) -> None:
        record = self._known()[1]
        if record.events:
            self._try(record.check_restart, core.state)
            self._try(_check_grown, record, core)
        missed = core.journal.events(record.events)
        self._try(record.replay, missed, core.entries_from(len(record.log)))
        core.listeners.append(self._written)

    def _written(self, write: Write) -> None:
        self._try(self._known()[1].hear, write)

    def _started(self, node: Node) -> None:
        assert node.handle is not None
        ctx = node.handle.context
        ctx.listeners.append(partial(self._happened, node, ctx))
        self._waits.pop(node.name, None)
        if self._steps is not None and node.task is not None:
            self._steps.nodes += 1  # counted anew at each look
            self._steps.belongs(node.task, node.name)

    def _happened(self, node: Node, ctx: Any, event: Event) -> None:
        assert self.nodes is not None
        self._try(self.nodes.hear, node, ctx, event)

    # --- looking

    def _look_at(self, node: Node, core: Core | None) -> None:
        world, now = self._known()[0], trio.current_time()
        if node.handle is None or core is None or not world.reachable(node.name):
            self._waits.pop(node.name, None)
            return
        ctx, ms = node.handle.context, world.coordinator.now_ms()
        transfer = ctx.facts.transfer
        done = -1 if transfer is None else transfer.done
        moves = done >= 0 and done != self._moved.get(node.name, -1)
        self._moved[node.name] = done
        idle = moves or not is_waiting(ctx.state) or not work_for(core.state, core.spec, node.key, ms)
        if idle or self._must_wait(node, core):
            self._waits.pop(node.name, None)
            return
        check_waiting(node.name, ctx.state, now - self._waits.setdefault(node.name, now), self._wait_s)

    def _must_wait(self, node: Node, core: Core) -> bool:
        """Whether it is new, and comes from where as many new keys came from as may."""
        outside = node.traits.outside
        new = outside != "" and node.key not in core.state.nodes
        return new and self._came_from(core)[outside] >= PER_DAY

    def _came_from(self, core: Core) -> Counter[str]:
        """How many keys that the coordinator knows came from each internet address ("": from none)."""
        nodes = self._known()[0].nodes.values()
        return Counter(node.traits.outside for node in nodes if node.key in core.state.nodes)

    def _settled_entries(self, node: Node) -> int:
        """How many ledger entries were there while the node was connected for long enough; 0: it was not."""
        world = self._known()[0]
        if not node.live or node.handle is None or world.core is None or not world.reachable(node.name):
            return 0
        ctx = node.handle.context
        now = trio.current_time()
        if ctx.state.link != "up" or now - ctx.state.link_since < SETTLED_S or ctx.receipts_refused:
            return 0
        return max((size for at, size in self._settled if at <= now - SETTLED_S), default=0)

    def _journal(self, world: World, record: Record) -> None:
        """What is really in the file, read beside the coordinator."""
        assert self.nodes is not None
        journal = Journal(world.run.journal_path, reading=True)
        try:
            durable = list(journal.events())
        finally:
            journal.close()
        if len(durable) < record.events:
            raise Broken("acknowledged-kept", f"of {record.events} durable events {len(durable)} are there")
        kept = {event.submission_id for event in durable if isinstance(event, Submitted | BlockSubmitted)}
        self.nodes.check_acknowledged(kept)
        core = world.core
        if core is not None and len(core.ledger) == len(record.log):
            check_log(record, len(core.ledger), core.ledger.root())
            record.check_credit(core.state)
        if record.ledger.owing():
            raise Broken("credit-conserved", "credit is owed since a failed audit, and was not taken back")


def _check_grown(record: Record, core: Core) -> None:
    """That a coordinator which has just begun has the ledger that was there before, or more of it."""
    size = len(record.log)
    if len(core.ledger) < size:
        raise Broken(
            "ledger-grows", f"the ledger had {size} entries, and has {len(core.ledger)} after a restart"
        )
    check_log(record, size, core.ledger.root(size))
