"""One simulation from beginning to end: a scenario, a seed, a folder; an outcome."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from barnraise.node.attend import EXIT_VERSION
from barnraise.simulation.churn import UPGRADE_S, Planned, plan
from barnraise.simulation.determinism import run_virtual
from barnraise.simulation.event_log import EventLog
from barnraise.simulation.scenario import Scenario
from barnraise.simulation.world import World, open_world, speaks

PROGRESS_S = 0.5  # of real time, at least, between two calls of ``progress``
_STEP_S = 5.0  # virtual
_ROOM = 2 * 2**30  # bytes that a folder in main memory must have free

Watch = Callable[[World], Awaitable[None]]
Final = Callable[[World], None]


@dataclass(frozen=True)
class Now:
    """What a progress line shows. ``pace``: virtual seconds per real one."""

    virtual_s: float
    end_s: float
    live: int
    version: int
    accepted: int
    events: int
    pace: float


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        error: what ended it early (an invariant that broke, a defect), or None.
        interrupted: a person ended it early; everything is of what was so far.
        digest: SHA-256 of the event log, in hex; the same for the same scenario, seed and code.
        folder: the run's and the nodes' folders, and ``events.jsonl``.
    """

    scenario: Scenario
    seed: int
    folder: Path
    virtual_s: float = 0.0
    wall_s: float = 0.0
    digest: str = ""
    events: int = 0
    error: Exception | None = None
    interrupted: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def log_path(self) -> Path:
        return self.folder / "events.jsonl"


def simulate(
    scenario: Scenario,
    seed: int,
    folder: Path,
    progress: Callable[[Now], None] | None = None,
    *,
    acts: Sequence[Planned] | None = None,
    watch: Sequence[Watch] = (),
    final: Sequence[Final] = (),
    lines: bool = False,
) -> Outcome:
    """Run a scenario in a folder that is empty or not there yet. Blocking.

    Args:
        progress: told about twice a second how it goes.
        acts: what happens, instead of what ``plan`` makes of scenario and seed.
        watch: run beside the swarm; one that raises ends the run, and is the outcome's ``error``.
        final: called when time is up, with everybody still there.
        lines: also write what every node says into the event log.
    """
    folder = folder.absolute()  # it is taken out of what nodes say, and "there" would be a common word
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(scenario, seed, folder)
    planned = plan(scenario, seed) if acts is None else list(acts)
    began = time.monotonic()
    log = EventLog(outcome.log_path, trio.current_time)
    try:
        with _quiet():
            run_virtual(seed, lambda: _main(outcome, planned, log, progress, watch, final, lines))
    except KeyboardInterrupt:
        outcome.interrupted = True
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        outcome.interrupted = True
    finally:
        log.close()
    outcome.wall_s = time.monotonic() - began
    outcome.digest, outcome.events = log.digest, log.count
    return outcome


async def _main(
    outcome: Outcome,
    planned: Sequence[Planned],
    log: EventLog,
    progress: Callable[[Now], None] | None,
    watch: Sequence[Watch],
    final: Sequence[Final],
    lines: bool,
) -> None:
    try:
        async with open_world(outcome.scenario, outcome.seed, outcome.folder, log) as world:
            try:
                if lines:
                    world.listen_to_nodes()
                async with trio.open_nursery() as nursery:
                    for watcher in watch:
                        nursery.start_soon(watcher, world)
                    nursery.start_soon(_tell, world, outcome, progress)
                    await carry_out(world, planned, nursery)
                    await trio.sleep_until(outcome.scenario.end_s)
                    for check in final:
                        check(world)
                    nursery.cancel_scope.cancel()
            finally:
                outcome.virtual_s = trio.current_time()
                outcome.facts = facts(world)
                log.note("over", **outcome.facts)
    except Exception as error:
        outcome.error = _first(error)


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def carry_out(world: World, planned: Sequence[Planned], nursery: trio.Nursery) -> None:
    """Do what is planned, each at its time. What takes time (a goodbye) goes on beside the rest.

    An act that makes no sense as things are (who crashed before cannot leave) is left out, so
    that a plan may be cut anywhere.
    """
    for act in planned:
        await trio.sleep_until(act.at_s)
        await _do(world, act, nursery)


async def _do(world: World, act: Planned, nursery: trio.Nursery) -> None:
    known = [who for who in act.nodes if who in world.nodes]
    live = [who for who in known if world.nodes[who].live]
    match act.do:
        case "join":
            for who in [who for who in act.nodes if who not in world.nodes]:
                await world.join(who)
        case "rejoin":
            for who in known:
                if not world.nodes[who].live:
                    await world.rejoin(who)
        case "leave":
            for who in live:
                nursery.start_soon(world.leave, who)
        case "crash" | "power-cut":
            for who in live:
                world.crash(who, silent=act.do == "power-cut")
        case "upgrade":
            refused = [who for who in known if world.nodes[who].code == EXIT_VERSION]
            for who in live + refused:
                nursery.start_soon(_upgrade, world, who, act.to)
        case "partition":
            world.partition(known)
        case "heal":
            world.heal(known)
        case "network-down":
            world.network_down(known)
        case "network-up":
            world.network_up(known)
        case "freeze":
            for who in live:
                world.freeze(who)
        case "thaw":
            for who in known:
                world.thaw(who)
        case "skew":
            for who in known:
                world.skew(who, act.by_s)
        case "disk-full":
            for who in known:
                world.fill_disk(who)
        case "disk-free":
            for who in known:
                world.free_disk(who)
        case "coordinator-crash":
            if world.core is not None:
                await world.coordinator_crash()
        case "coordinator-return":
            if world.core is None:
                await world.coordinator_return()
        case "coordinator-upgrade":
            if world.core is not None:
                await world.coordinator_upgrade(act.to, act.grace_s)
        case "coordinator-disk-full":
            world.fill_coordinator_disk()
        case "coordinator-disk-free":
            world.free_coordinator_disk()


async def _upgrade(world: World, who: str, to: str) -> None:
    if to and world.nodes[who].config.hello == speaks(to):
        return
    if world.nodes[who].live:
        await world.leave(who)
    if to:
        world.install(who, to)
    await trio.sleep(UPGRADE_S)
    if not world.nodes[who].live:
        await world.rejoin(who)


async def _tell(world: World, outcome: Outcome, progress: Callable[[Now], None] | None) -> None:
    began = told = time.monotonic()
    while True:
        await trio.sleep(_STEP_S)
        now = time.monotonic()
        if progress is not None and now - told >= PROGRESS_S:
            told = now
            core = world.core
            progress(
                Now(
                    virtual_s=world.now,
                    end_s=outcome.scenario.end_s,
                    live=len(world.live),
                    version=world.head,
                    accepted=0 if core is None else core.state.accepted,
                    events=world.log.count,
                    pace=world.now / max(1e-9, now - began),
                )
            )


def facts(world: World) -> dict[str, Any]:
    """What only the living can tell at the end: bytes by host, deaths, the ledger's size and root."""
    core, origin = world.core, world.coordinator.wire
    wires = [node.wire for node in world.nodes.values() if node.wire is not None]
    return {
        "nodes": len(world.nodes),
        "live": len(world.live),
        "deaths": len(world.deaths),
        "version": world.head,
        "ledger": None if core is None else len(core.ledger),
        "root": None if core is None else core.ledger.root().hex(),
        "origin_bulk": 0 if origin is None else origin.sent,
        "nodes_bulk": sum(wire.sent for wire in wires),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """A thousand nodes do not write to the terminal, nor format what nobody reads."""
    logger = logging.getLogger("barnraise")
    before = logger.level, logger.propagate
    logger.setLevel(logging.CRITICAL + 1)
    logger.propagate = False
    try:
        yield
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextmanager
def scratch_folder(keep: Path | None = None) -> Iterator[Path]:
    """An empty folder, in main memory where there is room; deleted at the end unless it is ``keep``."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > _ROOM
    made = Path(tempfile.mkdtemp(prefix="barnraise-simulation-", dir=memory if roomy else None))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
