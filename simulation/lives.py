"""A volunteer's node through its lives: how its daemon begins, stands still, is killed and buried."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from barnraise.node.config import NodeConfig
from barnraise.node.daemon import run_node
from barnraise.node.engine import Engine
from barnraise.node.handle import NodeHandle
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemoryNetwork, MemorySwarm
from barnraise.protocol.memory_wires import DEAD_AFTER_S
from barnraise.simulation.bulk import BulkNetwork
from barnraise.simulation.determinism import drawn, virtual_ms
from barnraise.simulation.event_log import EventLog
from barnraise.simulation.freeze import Freezer
from barnraise.simulation.traits import Traits, usable_rate
from barnraise.simulation.watched import WatchedEngine

RESET_LOSS_S = 20.0  # over the loss: how often a line's connections break; 1 %: every 2000 s


@dataclass(eq=False)
class Node:
    """One volunteer, through all of its lives.

    Attributes:
        live: whether its daemon runs (it may be frozen, or cut off).
        lives: how often it was started.
        code: how the last daemon ended by itself; None while it runs, or after a crash.
    """

    name: str
    identity: Identity
    traits: Traits
    config: NodeConfig
    make: Callable[[random.Random], Engine]
    skew_s: float
    lives: int = 0
    code: int | None = None
    handle: NodeHandle | None = None
    network: MemoryNetwork | None = None
    wire: BulkNetwork | None = None
    engine: WatchedEngine | None = None
    scope: trio.CancelScope | None = None
    task: trio.lowlevel.Task | None = None
    gone: bool = False  # crashed; what is left of it ends in a moment
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def live(self) -> bool:
        return self.scope is not None and not self.gone and not self.ended.is_set()

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def key(self) -> bytes:
        return self.identity.public_key

    @property
    def tree(self) -> dict[str, Any]:
        """The node's state tree. Raises LookupError while it is down."""
        if self.handle is None:
            raise LookupError(f"{self.name} is not running")
        return self.handle.get_state()


class Lives:
    """Starts and ends the daemons of one world's nodes.

    Attributes:
        freezer: which of them stand still.
        started: called with each node whose daemon has just begun, at each of its lives.
    """

    def __init__(
        self,
        seed: int,
        memory: MemorySwarm,
        log: EventLog,
        nursery: trio.Nursery,
        died: Callable[[str, Exception], None],
    ) -> None:
        self.freezer = Freezer()
        self.started: list[Callable[[Node], None]] = []
        self._seed, self._memory, self._log, self._nursery, self._died = seed, memory, log, nursery, died

    async def begin(self, node: Node) -> None:
        """Start its daemon; returns once it runs, or has ended at once. Event ``join``."""
        node.lives += 1
        node.code, node.ended, node.scope, node.gone = None, trio.Event(), trio.CancelScope(), False
        its = node.traits
        self._log.note(
            "join",
            node=node.name,
            life=node.lives,
            cheat=its.cheat or None,
            nat=None if its.dialable else True,
            corrupt=its.corrupt or None,
        )
        await self._nursery.start(self._live, node, node.scope, node.ended)

    async def _live(
        self,
        node: Node,
        scope: trio.CancelScope,
        ended: trio.Event,
        task_status: Any = trio.TASK_STATUS_IGNORED,
    ) -> None:
        rng = drawn(self._seed, f"life {node.lives}", node.name)
        line = node.traits.line
        options: dict[str, Any] = {"dialable": node.traits.dialable, "outside": node.traits.outside}
        if line is not None:
            options |= {
                "latency_s": line.latency_ms / 1000,
                "bandwidth": usable_rate(line.down_mbit, line),
                "upload": usable_rate(line.up_mbit, line),
            }
        node.task = trio.lowlevel.current_task()
        node.engine = WatchedEngine(node.make(rng), node.name, self._log)
        begun = _Begun(node, task_status, self.started)
        code: int | None = None
        try:
            with scope:
                async with (
                    self._memory.network(node.peer_id, **options) as network,
                    trio.open_nursery() as side,
                ):
                    node.network, before = network, 0 if node.wire is None else node.wire.sent
                    wire = node.wire = BulkNetwork(network, corrupt=node.traits.corrupt)
                    wire.sent = before
                    if line is not None and line.loss > 0:
                        side.start_soon(
                            self._lose, node.peer_id, drawn(self._seed, "loss", node.name), line.loss
                        )
                    code = await run_node(
                        node.config,
                        wire,
                        node.engine,
                        node.identity,
                        lambda: virtual_ms() + round(node.skew_s * 1000),
                        rng,
                        task_status=begun,
                    )
                    side.cancel_scope.cancel()
        except Exception as error:
            self._died(node.name, error)
        finally:
            node.code, node.handle = code, None
            begun.at_last()
            ended.set()
        if code is not None:
            self._log.note("end", node=node.name, code=code)

    async def _lose(self, peer_id: str, rng: random.Random, loss: float) -> None:
        """Loss beyond what retransmission hides: now and then the connections are gone."""
        while True:
            await trio.sleep(rng.expovariate(loss / RESET_LOSS_S))
            self._memory.drop(peer_id)

    def kill(self, node: Node) -> None:
        """End its daemon; its connections break at once."""
        self._memory.crash(node.peer_id)
        assert node.scope is not None
        node.scope.cancel()
        self.move_on(node)

    def cut(self, node: Node) -> None:
        """Stop it as a power cut does; what is left of it is killed once everybody has noticed."""
        self.still(node)
        self._nursery.start_soon(self._bury, node, node.ended)

    async def _bury(self, node: Node, ended: trio.Event) -> None:
        with trio.move_on_after(DEAD_AFTER_S + 1):
            await ended.wait()
        if not ended.is_set():
            self.kill(node)

    def still(self, node: Node) -> None:
        """Let nothing of it run, and nobody hear of it."""
        self._memory.move(node.peer_id, f"asleep {node.name}")
        assert node.task is not None
        self.freezer.freeze(node.task)

    def move_on(self, node: Node) -> None:
        """Let it run again, where the coordinator is."""
        self._memory.move(node.peer_id)
        assert node.task is not None
        self.freezer.thaw(node.task)


class _Begun:
    """trio's task status for ``run_node``: keeps the handle, and answers once in any case."""

    def __init__(self, node: Node, task_status: Any, tell: list[Callable[[Node], None]]) -> None:
        self._node, self._task_status, self._tell = node, task_status, tell
        self._open = True

    def started(self, value: NodeHandle, /) -> None:
        self._node.handle = value
        for tell in self._tell:
            tell(self._node)
        self.at_last()

    def at_last(self) -> None:
        if self._open:
            self._open = False
            self._task_status.started()
