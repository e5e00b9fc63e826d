"""A swarm for a test that is an ordinary function: each call lets virtual time go by, or nothing at all.

The swarm lives in a thread of its own with a trio loop and a virtual clock. Between two calls
that loop stands still on purpose, so nothing happens behind the test's back, and what it looks
at (``world``) does not change meanwhile. It works beside any plugin for asynchronous tests.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import trio

from barnraise.simulation.determinism import run_virtual
from barnraise.simulation.event_log import EventLog
from barnraise.simulation.invariants import Invariants
from barnraise.simulation.run import scratch_folder
from barnraise.simulation.scenario import Scenario
from barnraise.simulation.world import World, open_world

T = TypeVar("T")
Story = Callable[[World], Awaitable[Any]]


class Swarm:
    """One run: a coordinator from the beginning, and no node yet.

    Attributes:
        seed: the same seed and the same calls give the same run. ``world``: everything else there is.
    """

    def __init__(self, scenario: Scenario | None = None, seed: int = 0) -> None:
        self.scenario, self.seed = scenario or Scenario(), seed
        self.checks = Invariants()
        self._world: World | None = None
        self._folder: AbstractContextManager[Path] | None = None
        self._asked: queue.Queue[Story | None] = queue.Queue()
        self._answered: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._count = 0

    # --- nodes

    def start(self, count: int = 1, **traits: Any) -> list[str]:
        """``count`` nodes come; their names. ``traits``: see ``barnraise.simulation.traits.Traits``."""
        names = [f"n{self._count + number}" for number in range(count)]
        self._count += count

        async def join(world: World) -> None:
            for name in names:
                await world.join(name, **traits)

        self.do(join)
        return names

    def cheat(self, kind: str, count: int = 1) -> list[str]:
        """Nodes come that cheat in one way (``barnraise.simulation.cheats.FOUND_BY``)."""
        return self.start(count, cheat=kind)

    def crash(self, name: str, *, silent: bool = False) -> None:
        """Kill a node; ``silent``: as a power cut does."""
        self._do(lambda world: world.crash(name, silent=silent))

    def rejoin(self, name: str) -> None:
        """It comes back with its key and its folder."""
        self.do(lambda world: world.rejoin(name))

    def leave(self, name: str) -> None:
        """It says goodbye; returns when it is gone."""
        self.do(lambda world: world.leave(name))

    def freeze(self, name: str) -> None:
        """Close its lid."""
        self._do(lambda world: world.freeze(name))

    def thaw(self, name: str) -> None:
        """Open it."""
        self._do(lambda world: world.thaw(name))

    def partition(self, names: Iterable[str]) -> None:
        """Cut nodes off from the coordinator and the rest; they hear each other."""
        self._do(lambda world: world.partition(names))

    def heal(self, names: Iterable[str] | None = None) -> None:
        """Bring them back; everybody by default."""
        self._do(lambda world: world.heal(names))

    def delay(self, a: str, b: str, seconds: float) -> None:
        """From now on a byte takes so long between two nodes, or between ``"coordinator"`` and one."""
        self._do(lambda world: world.memory.link(self._peer(a), self._peer(b), latency_s=seconds))

    def _peer(self, name: str) -> str:
        world = self.world
        return world.coordinator.identity.peer_id if name == "coordinator" else world.nodes[name].peer_id

    def crash_coordinator(self) -> None:
        """Kill the coordinator."""
        self.do(lambda world: world.coordinator_crash())

    def return_coordinator(self) -> None:
        """Start it again, from its journal."""
        self.do(lambda world: world.coordinator_return())

    # --- time

    def advance(self, seconds: float) -> None:
        """Let so much virtual time go by."""
        self.do(lambda world: world.advance(seconds))

    def until(self, reached: Callable[[], bool], patience_s: float = 3600.0) -> None:
        """Let time go by until something is so. Raises TimeoutError after ``patience_s`` virtual seconds."""
        self.do(lambda world: world.until(reached, patience_s))

    # --- what there is to see

    @property
    def world(self) -> World:
        """See ``barnraise.simulation.world``: to look at, between two calls."""
        self._begin()
        assert self._world is not None
        return self._world

    @property
    def head(self) -> int:
        """The newest published version; -1 before the first."""
        return self.world.head

    @property
    def accepted(self) -> int:
        """Units accepted so far, by the live coordinator; -1 while there is none."""
        core = self.world.core
        return -1 if core is None else core.state.accepted

    def credit(self, name: str) -> int:
        """What a node has earned, as the coordinator has it. Raises LookupError while there is none."""
        core = self.world.core
        if core is None:
            raise LookupError("the coordinator is down")
        node = core.state.nodes.get(self.world.nodes[name].key)
        return 0 if node is None else node.credit

    def check(self) -> None:
        """Look at every invariant now. Raises ``Broken``."""
        self._do(self.checks.final)

    # --- the loop

    def do(self, story: Story) -> Any:
        """Let an ``async def story(world)`` happen, in virtual time; what it returns.

        Raises:
            Broken: an invariant did not hold meanwhile.
        """
        self._begin()
        result = self._ask(story)
        if self.checks.broken:
            raise self.checks.broken[0]
        return result

    def _do(self, act: Callable[[World], Any]) -> None:
        async def at_once(world: World) -> None:
            act(world)

        self.do(at_once)

    def _begin(self) -> None:
        if self._thread is None:
            self._folder = scratch_folder()
            path = self._folder.__enter__()
            self._thread = threading.Thread(target=self._live, args=(path,), name="swarm", daemon=True)
            self._thread.start()
            self._wait()

    def _ask(self, story: Story | None) -> Any:
        self._asked.put(story)
        return self._wait()

    def _wait(self) -> Any:
        result, error = self._answered.get()
        if error is not None:
            raise error
        return result

    def _live(self, folder: Path) -> None:
        log = EventLog(folder / "events.jsonl", trio.current_time)
        try:
            run_virtual(self.seed, lambda: self._main(folder, log))
            self._answered.put((None, None))
        except BaseException as error:
            self._answered.put((None, error))
        finally:
            log.close()

    async def _main(self, folder: Path, log: EventLog) -> None:
        async with open_world(self.scenario, self.seed, folder, log) as world, trio.open_nursery() as nursery:
            self._world = world
            self.checks.attach(world)
            nursery.start_soon(self._look)
            self._answered.put((None, None))
            while (story := self._asked.get()) is not None:  # nothing moves while the test thinks
                try:
                    self._answered.put((await story(world), None))
                except Exception as error:
                    self._answered.put((None, error))
            self.checks.detach()
            nursery.cancel_scope.cancel()

    async def _look(self) -> None:
        while True:
            await trio.sleep(30)
            self.checks.look()

    def close(self) -> None:
        """Look at every invariant for the last time, and end everything.

        Raises:
            Broken: one does not hold, or did not before.
        """
        thread, folder = self._thread, self._folder
        if thread is None or folder is None:
            return
        try:
            if thread.is_alive():
                try:
                    self.check()
                finally:
                    self._ask(None)
                    thread.join()
        finally:
            self._thread = None
            folder.__exit__(None, None, None)
