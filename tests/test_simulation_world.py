"""What the hand that disturbs a simulated swarm does to it, each in a small swarm of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import structs

from barnraise.node.receipts import read_receipts
from barnraise.simulation import run
from barnraise.simulation.churn import Planned
from barnraise.simulation.determinism import run_virtual
from barnraise.simulation.event_log import Event, EventLog, read_log
from barnraise.simulation.invariants import Invariants
from barnraise.simulation.measure import measure
from barnraise.simulation.run import simulate
from barnraise.simulation.scenario import Scenario, Swarm, Work, load_scenario, read_scenario
from barnraise.simulation.world import World, open_world

QUICK = Scenario(
    swarm=Swarm(nodes=3, hours=0.1, arrive_s=1, model_bytes=16_384),
    work=Work(unit_s=20, load_s=1, learn_s=2, units_per_version=2, timeout_s=120, deadline_s=240),
)


def in_world(
    folder: Path, story: Callable[[World], Awaitable[None]], scenario: Scenario = QUICK
) -> list[Event]:
    """Let ``story`` happen to three nodes that have been at work for a minute; the event log."""
    log = EventLog(folder / "events.jsonl", trio.current_time)

    async def main() -> None:
        async with open_world(scenario, 5, folder / "world", log) as world:
            world.listen_to_nodes()
            for number in range(3):
                await world.join(f"n{number:04d}")
            await world.advance(60)
            await story(world)
            assert world.deaths == []

    run_virtual(5, main)
    log.close()
    return list(read_log(log.path))


def said(events: list[Event], who: str, text: str) -> list[float]:
    return [event["t"] for event in events if event.get("node") == who and text in event.get("text", "")]


def of(events: list[Event], who: str) -> list[Event]:
    return [event for event in events if event.get("node") == who]


def accepted(events: list[Event], who: str) -> list[float]:
    return [e["t"] for e in events if e["what"] == "judged" and e["node"] == who and e["accepted"]]


def test_three_ways_to_go_a_crash_a_power_cut_a_goodbye(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        assert world.hub is not None
        world.crash("n0000")
        world.crash("n0001", silent=True)
        await world.leave("n0002")
        assert world.nodes["n0002"].code == 0
        assert world.live == []
        assert len(world.hub.by_key) == 1  # nobody has heard of the power cut
        with pytest.raises(ValueError, match="n0000 is not running"):
            world.crash("n0000")
        with pytest.raises(ValueError, match="has joined before"):
            await world.join("n0001")
        node = await world.rejoin("n0000")
        with pytest.raises(ValueError, match="n0000 is running"):
            await world.rejoin("n0000")
        await world.until(lambda: world.hub is not None and len(world.hub.by_key) == 1)
        await world.rejoin("n0001")
        await world.advance(50)
        folders = node.config.data.glob("runs/*/receipts.bin")
        held = [receipt for path in folders for receipt in read_receipts(path)]
        assert world.core is not None
        assert len(held) == world.core.state.nodes[node.key].accepted

    events = in_world(tmp_path, story)
    assert "n0002" in {event["node"] for event in events if event.get("why") == "returned"}
    for who in ("n0000", "n0001"):
        assert min(accepted(events, who)) < 60 < max(accepted(events, who))
        assert [event["life"] for event in events if event["what"] == "join" and event["node"] == who] == [
            1,
            2,
        ]


def test_a_full_disk_a_clock_that_is_set_and_a_closed_lid_cost_no_work_that_was_made(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.fill_disk("n0000")
        world.skew("n0001", -3600.0)
        world.freeze("n0002")
        await world.advance(70)
        world.free_disk("n0000")
        world.thaw("n0002")
        await world.advance(50)
        with pytest.raises(TimeoutError, match="5 virtual seconds"):
            await world.until(lambda: False, 5)

    events = in_world(tmp_path, story)
    assert said(events, "n0000", "the disk is full")
    assert 130 <= said(events, "n0000", "there is room on the disk again")[0] < 150
    assert said(events, "n0001", "this machine's clock was set by -1 h")
    assert said(events, "n0002", "stood still for 1 min")[0] == pytest.approx(130, abs=2)
    assert not [
        event
        for event in events
        if event.get("node") == "n0002" and event["what"] == "line" and 60 < event["t"] < 130
    ]
    made = {event["lease"] for event in events if event["what"] == "made" and event["t"] < 150}
    assert made <= {event["lease"] for event in events if event["what"] == "judged"}
    for number in range(3):
        assert [at for at in accepted(events, f"n{number:04d}") if at > 130]


def test_an_island_works_on_and_hands_in_when_it_is_found_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.partition(["n0000", "n0001"])
        await world.advance(60)
        world.heal()
        await world.advance(60)

    events = in_world(tmp_path, story)
    for who in ("n0000", "n0001"):
        assert not [at for at in accepted(events, who) if 61 < at < 120]
        assert [at for at in accepted(events, who) if at > 120]
    made = {e["lease"] for e in events if e["what"] == "made" and 61 < e["t"] < 120 and e["node"] != "n0002"}
    judged = {e["lease"] for e in events if e["what"] == "judged"}
    assert made
    assert made <= judged  # nothing that was made on the island is lost


def test_a_coordinator_that_is_killed_resumes_from_its_journal(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        assert world.core is not None
        size, root = len(world.core.ledger), world.core.ledger.root()
        await world.coordinator_crash()
        assert world.core is None
        await world.advance(30)
        await world.coordinator_return()
        core: Any = world.core
        assert core.ledger.root(size) == root
        await world.advance(60)
        assert len(core.ledger) > size
        assert world.coordinator.lives == 2

    events = in_world(tmp_path, story)
    for number in range(3):
        assert [at for at in accepted(events, f"n{number:04d}") if at > 90]


def test_a_corrupt_shard_is_not_adopted_and_the_version_comes_from_elsewhere(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.join("bad", corrupt=True)
        await world.until(lambda: world.head >= 2, 600)
        await world.advance(30)

    events = in_world(tmp_path, story)
    loaded = {(e["node"], e["version"]) for e in events if e["what"] == "loaded"}
    assert {(f"n{number:04d}", 2) for number in range(3)} <= loaded


def test_a_watcher_that_raises_ends_the_run_and_is_its_error(tmp_path: Path) -> None:
    async def watch(world: World) -> None:
        await world.advance(30)
        raise RuntimeError("broken")

    outcome = simulate(QUICK, 1, tmp_path, watch=[watch])
    assert str(outcome.error) == "broken"
    assert outcome.virtual_s == pytest.approx(30)
    assert next(iter(read_log(outcome.log_path)))["what"]


def test_what_is_planned_for_who_is_not_there_is_left_out(tmp_path: Path) -> None:
    acts = [
        Planned(0.0, "join", ("a",)),
        Planned(1.0, "crash", ("a", "nobody")),
        Planned(2.0, "leave", ("a",)),
        Planned(3.0, "thaw", ("a",)),
        Planned(4.0, "heal", ("nobody",)),
        Planned(5.0, "coordinator-return"),
    ]
    short = structs.replace(QUICK, swarm=structs.replace(QUICK.swarm, hours=0.005))
    outcome = simulate(short, 1, tmp_path, acts=acts)
    assert outcome.error is None
    assert measure(read_log(outcome.log_path)).departures == 1


def test_scratch_is_deleted_unless_it_is_kept(tmp_path: Path) -> None:
    with run.scratch_folder() as folder:
        (folder / "x").write_text("x")
    assert not folder.exists()
    with run.scratch_folder(tmp_path / "kept") as folder:
        (folder / "x").write_text("x")
    assert (tmp_path / "kept" / "x").exists()


WILD = """
[swarm]
nodes = 5
hours = 0.06
arrive_s = 10
nat_share = 0.4
corrupt_share = 0.2
skew_s = 400
[work]
unit_s = 20
learn_s = 3
load_s = 1
[churn]
session_median_s = 100
away_s = 40
[[cheats]]
kind = "copy"
share = 0.2
[[lines]]
share = 0.5
loss = 0.3
[[happens]]
at_s = 50
what = "coordinator-crash"
for_s = 15
[[happens]]
at_s = 80
what = "partition"
share = 0.5
for_s = 30
[[happens]]
at_s = 120
what = "sleep"
share = 0.4
for_s = 30
[[happens]]
at_s = 150
what = "disk-full"
share = 0.4
for_s = 30
[[happens]]
at_s = 170
what = "flash-crowd"
share = 0.5
"""


def test_the_same_seed_gives_the_same_log_in_every_process_whatever_its_hashes(tmp_path: Path) -> None:
    (tmp_path / "wild.toml").write_text(WILD)
    command = [sys.executable, "-P", "-m", "barnraise.tui.main", "simulate", "wild.toml", "--seed", "3"]
    other = subprocess.Popen(
        [*command, "--json", "--lines", "--keep", "there"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "1"},  # ours is drawn anew for each session of tests
        stdout=subprocess.PIPE,
    )
    checks = Invariants()  # they are tasks as well, and so part of what is scheduled
    here = simulate(
        *(read_scenario(WILD, "wild"), 3, tmp_path / "here"),
        watch=[checks.watch],
        final=[checks.final],
        lines=True,
    )
    told = json.loads(other.communicate()[0])
    assert told["error"] is None
    assert (tmp_path / "there" / "events.jsonl").read_bytes() == here.log_path.read_bytes()
    assert told["digest"] == here.digest
    assert told["measures"]["accepted"] > 3
    short = read_scenario(WILD.replace("hours = 0.06", "hours = 0.005"), "wild")
    assert simulate(short, 4, tmp_path / "other").digest != simulate(short, 3, tmp_path / "same").digest


def test_the_default_scenario_is_one_of_the_package() -> None:
    assert load_scenario("steady").swarm.nodes == 30
