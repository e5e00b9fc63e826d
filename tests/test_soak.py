"""A run of days: what it holds in memory, on the disk and open does not grow with its age.

Real coordinator and node code in virtual time, eight nodes that come and go, a coordinator that is
killed and comes back. It goes on for ``BARNRAISE_SOAK_MINUTES`` of processor time (3; 20 for
docs/operate.md), about an hour of the run for each two to three seconds. What grows by design is allowed
for, entry by entry: the journal, the ledger's tiles, and each node's own receipts.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from barnraise.coordinator import main as coordinator_main
from barnraise.coordinator.checkpoints import OPTIMIZER_FILE, Record, write_record
from barnraise.coordinator.core import Core
from barnraise.coordinator.journal import Write
from barnraise.coordinator.operator_events import AlarmRaised
from barnraise.coordinator.run_file import Keep
from barnraise.coordinator.workers import Trained, checkpoint_folder
from barnraise.protocol.manifest import WEIGHTS_FILE
from barnraise.simulation import headquarters
from barnraise.simulation.churn import plan
from barnraise.simulation.determinism import run_virtual
from barnraise.simulation.event_log import EventLog
from barnraise.simulation.run import carry_out, scratch_folder
from barnraise.simulation.scenario import Churn, Happening, Scenario, Swarm, Work
from barnraise.simulation.world import World, open_world

MINUTES = float(os.environ.get("BARNRAISE_SOAK_MINUTES", "3"))
HOUR_S = 3600.0
LEAST = 16  # looks, one an hour: the first third warms up
KEEP = Keep(every=2, most=1000, disk_gb=0.0015)
LOG_BYTES = 65_536
EXPECTED_ALARMS = {"volunteers-lost", "stall"}  # most sleep at night
SCENARIO = Scenario(
    swarm=Swarm(nodes=8, hours=24 * 40, arrive_s=600, model_bytes=65_536, shard_bytes=16_384, heartbeat_s=40),
    work=Work(unit_s=600, learn_s=30, timeout_s=1800, deadline_s=3600),
    churn=Churn(session_median_s=3 * HOUR_S, away_s=HOUR_S, wave=0.5),
    happens=tuple(
        Happening(at_s=(5 + 11 * day) * HOUR_S, what="coordinator-crash", for_s=60.0) for day in range(90)
    ),
)
KB, MB = 1024, 1024**2


@dataclass(frozen=True)
class Look:
    """What there was at one moment. ``ours``: objects of our own classes; sizes in bytes, by part."""

    hours: float
    entries: int
    head: int
    objects: int
    ours: Counter[str]
    rss: int
    files_open: int
    disk: dict[str, int]
    nodes_disk: int


@dataclass
class Watch:
    """Everything seen."""

    looks: list[Look] = field(default_factory=list)
    alarms: set[str] = field(default_factory=set)
    deaths: list[str] = field(default_factory=list)

    def hear(self, write: Write) -> None:
        """A listener of each coordinator in turn."""
        self.alarms |= {event.kind for event in write.events if isinstance(event, AlarmRaised)}

    def look(self, world: World) -> None:
        world.coordinator.jobs.clear()  # the simulator's own notes
        self.deaths = world.deaths
        core = world.core
        if core is None:
            return
        gc.collect()
        objects = gc.get_objects()
        kinds = Counter(type(item) for item in objects)
        ours = {kind: count for kind, count in kinds.items() if kind.__module__.startswith("barnraise")}
        self.looks.append(
            Look(
                hours=world.now / HOUR_S,
                entries=len(core.ledger),
                head=world.head,
                objects=len(objects),
                ours=Counter({f"{kind.__module__}.{kind.__name__}": n for kind, n in ours.items()}),
                rss=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
                files_open=len(os.listdir("/proc/self/fd")),
                disk=sizes(world.folder / "run"),
                nodes_disk=sum(sizes(world.folder / "nodes").values()),
            )
        )


def sizes(folder: Path) -> dict[str, int]:
    """Bytes below a folder, by the first part of their path."""
    found: Counter[str] = Counter()
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            try:
                found[path.relative_to(folder).parts[0]] += path.stat().st_size
            except OSError:  # gone meanwhile
                continue
    return dict(found)


def learn_as_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the stand-in learner leave what the real one does: optimiser and record, which may be kept."""
    train = headquarters._Learner.train

    async def recorded(self: Any, job: Any) -> Trained:
        self._gain = 0.0  # days of learning, and no group would have an advantage any more
        made = await train(self, job)
        folder = checkpoint_folder(Path(self._setup.folder), made.version)
        (folder / OPTIMIZER_FILE).write_bytes(bytes(65_536))
        bare = Trained(version=made.version, weights=WEIGHTS_FILE, stats=made.stats, accuracy=made.accuracy)
        write_record(folder, Record(version=made.version, step=made.version, trained=bare))
        return made

    monkeypatch.setattr(headquarters._Learner, "train", recorded)


def live(folder: Path, minutes: float) -> Watch:
    """The run, for so much processor time."""
    watch = Watch()

    async def main() -> None:
        log = EventLog(Path(os.devnull), trio.current_time)
        async with open_world(SCENARIO, 1, folder, log) as world, trio.open_nursery() as nursery:

            def opened(core: Core) -> None:
                core.listeners.remove(world.coordinator._noting.hear)  # it remembers every unit
                core.listeners.append(watch.hear)

            world.coordinator.opened.append(opened)
            assert world.core is not None
            opened(world.core)
            nursery.start_soon(carry_out, world, plan(SCENARIO, 1), nursery)
            began = time.process_time()
            while time.process_time() - began < 60 * minutes or len(watch.looks) < LEAST:
                await trio.sleep(HOUR_S)
                watch.look(world)
            nursery.cancel_scope.cancel()

    run_virtual(1, main)
    return watch


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_days_of_a_run_need_no_more_memory_disk_and_files_than_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(headquarters, "KEEP", KEEP)
    monkeypatch.setattr(coordinator_main, "_LOG_BYTES", LOG_BYTES)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's keep every record, and all it names
    learn_as_the_real_one(monkeypatch)
    with scratch_folder() as folder:
        logs = folder / "logs"
        logs.mkdir()
        with coordinator_main._logging(logs, lambda line: None):
            watch = live(folder / "world", MINUTES)
        logged = sizes(logs)
    print(*(f"{name}: {size}" for name, size in logged.items()), sep="\n")
    for look in watch.looks:
        print(look.hours, look.entries, look.head, look.objects, look.rss // MB, look.files_open, look.disk)
    assert watch.deaths == []
    assert watch.alarms <= EXPECTED_ALARMS
    assert max(logged.values()) <= LOG_BYTES + 4 * KB
    assert len(logged) <= 16
    check(watch.looks)


def check(looks: list[Look]) -> None:
    """That the end is like what came after warming up, but for what each entry of the ledger explains."""
    first, last = looks[len(looks) // 3 : len(looks) // 2], looks[-(len(looks) // 4) :]
    begun, ended = first[-1], last[-1]
    entries = ended.entries - begun.entries
    assert entries > 500
    by_design = {"barnraise.protocol.messages.Receipt", "barnraise.coordinator.state_parts.VersionInfo"}
    assert ended.ours["barnraise.protocol.messages.Receipt"] <= ended.entries
    assert ended.ours["barnraise.coordinator.state_parts.VersionInfo"] <= ended.head + 2, "two states"
    for kind in {kind for look in last for kind in look.ours} - by_design:
        before = max(look.ours[kind] for look in first)
        after = min(look.ours[kind] for look in last)
        assert after <= 1.5 * before + 50, f"{kind}: {before} objects became {after}"
    assert min(look.files_open for look in last) <= max(look.files_open for look in first)
    least = min(look.rss for look in last)
    assert least <= max(look.rss for look in first) + 16 * MB + 2 * KB * entries
    assert ended.disk["checkpoints"] <= 1e9 * KEEP.disk_gb + MB / 4
    assert ended.disk["state.sqlite-wal"] <= 32 * MB
    for part, allowed in (("state.sqlite", 2 * KB), ("log", KB)):
        grown = ended.disk[part] - begun.disk[part]
        assert grown <= 4 * MB + allowed * entries, f"{part}: {grown} bytes more for {entries} entries"
    assert ended.disk.get("store", 0) <= begun.disk.get("store", 0) + MB
    assert ended.nodes_disk <= begun.nodes_disk + 2 * MB + KB * entries
