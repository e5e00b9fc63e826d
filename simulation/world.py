"""One swarm in virtual time: the real coordinator and the real nodes, and the hand that disturbs them.

``run_node`` and ``run_coordinator`` are what a volunteer and an operator run. Stand-ins are only
the wire (``MemorySwarm``), the model (``standin``, ``workers``) and the clock. Everything that
happens is written to ``World.log``. Use it inside of ``determinism.run_virtual``:

    async with open_world(scenario, seed, folder, log) as world:
        await world.join("n0")
        await world.advance(600)
        world.crash("n0")
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import trio

from barnraise.coordinator.core import Core
from barnraise.coordinator.folder import Run
from barnraise.coordinator.hub import Hub
from barnraise.node.config import NodeConfig
from barnraise.node.engine import Engine
from barnraise.protocol.hello import Floor
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Hello
from barnraise.simulation import full_disk
from barnraise.simulation.bulk import BULK, SMALLEST
from barnraise.simulation.cheats import make_engine
from barnraise.simulation.churn import UPGRADE_S
from barnraise.simulation.event_log import EventLog, Said
from barnraise.simulation.headquarters import Headquarters
from barnraise.simulation.lives import Lives, Node
from barnraise.simulation.noting import Noting
from barnraise.simulation.scenario import Scenario
from barnraise.simulation.traits import draw_traits, identity_of

LEAVE_S = 120.0  # a goodbye that takes longer becomes a crash


class World:
    """See the module. Every method that changes something writes an event of that name.

    Attributes:
        nodes: everybody who ever joined, by name.
        memory: the network between them. ``lives``: their daemons (``Lives``).
        coordinator: the operator's side: ``core``, ``hub``, ``jobs`` of the learner (``Headquarters``).
        deaths: daemons and coordinators that ended by an exception, which is always a defect.
    """

    def __init__(
        self, scenario: Scenario, seed: int, folder: Path, log: EventLog, nursery: trio.Nursery
    ) -> None:
        self.scenario, self.seed, self.folder, self.log = scenario, seed, folder, log
        self.nodes: dict[str, Node] = {}
        self.deaths: list[str] = []
        self.last_error: Exception | None = None
        swarm = scenario.swarm
        factor = swarm.stands_for_bytes / swarm.model_bytes if swarm.stands_for_bytes else 1.0
        self.memory = MemorySwarm(
            latency_s=swarm.latency_ms / 1000,
            weigh=lambda protocol, size: size * factor if protocol in BULK and size >= SMALLEST else size,
        )
        self.lives = Lives(seed, self.memory, log, nursery, self._died)
        self._closing: list[Callable[[], None]] = []
        self._names: dict[bytes, str] = {}
        noting = Noting(log, lambda key: self._names.get(key, key.hex()[:8]))
        self.coordinator = Headquarters(
            scenario, seed, folder / "run", self.memory, nursery, noting, self._died
        )

    @property
    def core(self) -> Core | None:
        """State, ledger and journal of the live coordinator; None while it is down."""
        return self.coordinator.core

    @property
    def hub(self) -> Hub | None:
        """The live coordinator's sessions."""
        return self.coordinator.hub

    @property
    def run(self) -> Run:
        """The run, as opened last."""
        assert self.coordinator.run is not None
        return self.coordinator.run

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return trio.current_time()

    @property
    def live(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.live]

    @property
    def head(self) -> int:
        """The newest published version, as far as the live coordinator knows; -1 without one."""
        return -1 if self.core is None else self.core.state.head

    def listen_to_nodes(self) -> None:
        """From now on, what every node and the coordinator say goes into the event log, too."""
        handler = Said(self.log, self._speaker, {str(self.folder): "FOLDER"})
        logger = logging.getLogger("barnraise")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        self._closing.append(lambda: logger.removeHandler(handler))

    def _speaker(self) -> str:
        task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        by_task = {node.task: node.name for node in self.nodes.values() if node.live}
        while task is not None:
            if task in by_task:
                return by_task[task]
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return "coordinator"

    def _died(self, who: str, error: Exception) -> None:
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        self.deaths.append(f"{who}: {type(error).__name__}: {error}")
        self.last_error = error
        self.log.note("died", node=who, error=type(error).__name__)

    def close(self) -> None:
        """Give back what this world had of the process: full disks, frozen tasks, the logger."""
        for node in self.nodes.values():
            full_disk.clear(node.config.data)
            if node.task is not None:
                self.lives.freezer.thaw(node.task)
        full_disk.clear(self.coordinator.folder)
        for close in self._closing:
            close()

    def reachable(self, name: str) -> bool:
        """Whether a node runs, is awake, is where the coordinator is, and both have room on their disks."""
        node = self.nodes[name]
        frozen = node.task is not None and self.lives.freezer.frozen(node.task)
        there = self.coordinator.identity.peer_id not in self.memory.wires.islands
        return (
            node.live
            and not frozen
            and there
            and node.peer_id not in self.memory.wires.islands
            and not full_disk.is_full(node.config.data)
            and not self.coordinator.full
        )

    # --- time

    async def advance(self, seconds: float) -> None:
        """Let so much virtual time go by."""
        await trio.sleep(seconds)

    async def until(
        self, reached: Callable[[], bool], patience_s: float = 3600.0, every_s: float = 1.0
    ) -> None:
        """Wait for a condition, looked at every ``every_s``. Raises TimeoutError (virtual seconds)."""
        deadline = self.now + patience_s
        while not reached():
            if self.now >= deadline:
                raise TimeoutError(f"not reached within {patience_s:g} virtual seconds")
            await trio.sleep(every_s)

    # --- nodes

    async def join(
        self,
        name: str,
        *,
        engine: Callable[[random.Random], Engine] | None = None,
        disk_bytes: int = 0,
        **traits: Any,
    ) -> Node:
        """A node comes for the first time.

        ``traits`` replace what the scenario draws for it (see ``Traits``); ``engine`` makes its
        engine from a generator; ``disk_bytes`` is its quota.
        """
        if name in self.nodes:
            raise ValueError(f"{name} has joined before: rejoin({name!r}) starts it again")
        its = replace(draw_traits(self.scenario, self.seed, name), **traits)
        data = self.folder / "nodes" / name
        config = NodeConfig(
            address=self.coordinator.address,
            data=data,
            key=data / "node.key",
            name=name,
            exit_when_complete=True,
            assume_yes=True,
            heartbeat_s=self.scenario.swarm.heartbeat_s,
            gossip_s=2 * self.scenario.swarm.heartbeat_s,  # a thousand nodes that talk less often
            look_s=self.scenario.swarm.heartbeat_s,
            witness_s=12 * self.scenario.swarm.heartbeat_s,
            tree=self.scenario.swarm.tree,
            disk_bytes=disk_bytes,
        )
        make = engine or partial(make_engine, its, self.scenario)
        node = Node(name, identity_of(self.seed, name), its, config, make, its.skew_s)
        self.nodes[name] = node
        self._names[node.key] = name
        await self.lives.begin(node)
        return node

    async def rejoin(self, name: str) -> Node:
        """It comes back with the same key and folder."""
        node = self.nodes[name]
        if node.live:
            raise ValueError(f"{name} is running")
        if not node.ended.is_set():  # of a power cut others may not have heard yet
            self.lives.kill(node)
            await node.ended.wait()
        await self.lives.begin(node)
        return node

    def crash(self, name: str, *, silent: bool = False) -> None:
        """Kill a node without a goodbye; its folder stays as it is.

        ``silent``: as a power cut does, of which others learn when nothing comes any more. Else
        its connections break at once, as those of a killed process do.
        """
        node = self._running(name)
        self.log.note("crash", node=name, silent=silent or None)
        node.gone = True
        if silent:
            self.lives.cut(node)
        else:
            self.lives.kill(node)

    async def leave(self, name: str) -> None:
        """Have a node say goodbye and end; returns when it has. One that hangs is killed after 2 min."""
        node = self._running(name)
        self.log.note("leave", node=name)
        if node.handle is not None:
            await node.handle.commands["leave"]({})
        with trio.move_on_after(LEAVE_S):
            await node.ended.wait()
        if not node.ended.is_set():
            self.log.note("hangs", node=name)
            node.gone = True
            self.lives.kill(node)
            await node.ended.wait()

    def _running(self, name: str) -> Node:
        node = self.nodes[name]
        if not node.live:
            raise ValueError(f"{name} is not running")
        return node

    def install(self, name: str, version: str) -> None:
        """Put another release on a node, which speaks protocol ``version`` ("1.1") from its next life on."""
        node = self.nodes[name]
        self.log.note("install", node=name, version=version)
        node.config = replace(node.config, hello=speaks(version))

    # --- the network

    def partition(self, names: Iterable[str], island: str = "island") -> None:
        """Put nodes on an island, away from the coordinator; they hear each other."""
        self._move("partition", names, island)

    def heal(self, names: Iterable[str] | None = None) -> None:
        """Bring nodes (everybody by default) back to where the coordinator is."""
        self._move("heal", list(self.nodes) if names is None else names, "")

    def network_down(self, names: Iterable[str]) -> None:
        """Cut nodes off from everybody, each for itself."""
        self._move("network-down", names, None)

    def network_up(self, names: Iterable[str]) -> None:
        """Connect them again."""
        self._move("network-up", names, "")

    def _move(self, what: str, names: Iterable[str], island: str | None) -> None:
        names = list(names)
        self.log.note(what, nodes=names)
        for name in names:
            node = self.nodes[name]
            if not self.lives.freezer.frozen(node.task):
                self.memory.move(node.peer_id, f"alone {name}" if island is None else island)

    # --- the machine

    def freeze(self, name: str) -> None:
        """Close a laptop's lid: nothing of the node runs, nobody hears of it."""
        node = self._running(name)
        self.log.note("freeze", node=name)
        self.lives.still(node)

    def thaw(self, name: str) -> None:
        """Open the lid. Nothing happens if the node is not frozen."""
        node = self.nodes[name]
        if self.lives.freezer.frozen(node.task):
            self.log.note("thaw", node=name)
            self.lives.move_on(node)

    def skew(self, name: str, seconds: float) -> None:
        """Set a node's wall clock so far ahead of the coordinator's."""
        self.log.note("skew", node=name, by=seconds)
        self.nodes[name].skew_s = seconds

    def fill_disk(self, name: str) -> None:
        """Refuse every write to a node's folder with ENOSPC."""
        self.log.note("disk-full", node=name)
        full_disk.fill(self.nodes[name].config.data)

    def free_disk(self, name: str) -> None:
        """Make room again."""
        self.log.note("disk-free", node=name)
        full_disk.clear(self.nodes[name].config.data)

    # --- the coordinator

    async def coordinator_crash(self) -> None:
        """Kill the coordinator; its folder stays as it is."""
        self.log.note("coordinator-crash")
        await self.coordinator.crash()

    async def coordinator_return(self) -> None:
        """Start it again from its journal, at the same address."""
        self.log.note("coordinator-return")
        await self.coordinator.start()

    async def coordinator_upgrade(self, to: str, grace_s: float = 0.0) -> None:
        """Stop it and start another that speaks ``to`` ("1.1"; "": as before), UPGRADE_S later.

        Nodes of an older minor are served for ``grace_s`` more, those of an older major not at all.
        """
        self.log.note("coordinator-upgrade", to=to)
        await self.coordinator.crash()
        await trio.sleep(UPGRADE_S)
        if to:
            hello = self.coordinator.hello = speaks(to)
            from_ms = self.coordinator.now_ms() + round(grace_s * 1000)
            self.coordinator.floor = Floor(hello.minor, from_ms)
        await self.coordinator.start()

    def fill_coordinator_disk(self) -> None:
        """Refuse every write to the run's folder, and every page that its database asks for."""
        self.log.note("coordinator-disk-full")
        self.coordinator.fill_disk()

    def free_coordinator_disk(self) -> None:
        """Make room again."""
        self.log.note("coordinator-disk-free")
        self.coordinator.free_disk()


def speaks(version: str) -> Hello:
    """The hello of a release whose protocol version is ``version``, as "1.1"."""
    major, minor = (int(part) for part in version.split("."))
    return Hello(major=major, minor=minor, software=f"barnraise of {version}")


@asynccontextmanager
async def open_world(scenario: Scenario, seed: int, folder: Path, log: EventLog) -> AsyncIterator[World]:
    """A run with its coordinator started and nobody there yet. Everything ends with the block.

    ``folder``: empty or not there yet; holds the run and the nodes' folders afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    async with trio.open_nursery() as nursery:
        world = World(scenario, seed, folder, log, nursery)
        await world.coordinator.start()
        if (plan := world.run.spec.pretrain) is not None:
            log.note(
                "plan", blocks=plan.blocks, places=plan.contributors, quorum=plan.quorum, round_s=plan.round_s
            )
        try:
            yield world
        finally:
            world.close()
            nursery.cancel_scope.cancel()
