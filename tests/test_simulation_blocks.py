"""Pretraining by blocks in simulation: rounds, liars, crashes; and a seed's log is the same each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.errors import MalformedError
from barnraise.simulation import block_standin
from barnraise.simulation.block_training import BLOCK_FOUND_BY
from barnraise.simulation.churn import Planned, plan
from barnraise.simulation.event_log import read_log
from barnraise.simulation.invariants import Invariants
from barnraise.simulation.measure import Measures, measure
from barnraise.simulation.measure_blocks import BlockFacts
from barnraise.simulation.report import rows
from barnraise.simulation.run import Outcome, simulate
from barnraise.simulation.scenario import (
    Blocks,
    Cheat,
    Scenario,
    ScenarioError,
    Swarm,
    Work,
    load_scenario,
    read_scenario,
)
from barnraise.simulation.swarm import Swarm as Fixture

QUICK = Scenario(
    phase="blocks",
    swarm=Swarm(nodes=4, hours=0.05, arrive_s=1, model_bytes=4096),
    work=Work(unit_s=15, load_s=0.5, learn_s=1, verify_s=0.2, timeout_s=40, deadline_s=60),
    blocks=Blocks(places=1.0, round_s=60, segments=4, weights=32),
)


def play(
    folder: Path, scenario: Scenario, seed: int = 1, acts: Sequence[Planned] | None = None
) -> tuple[Outcome, Measures, BlockFacts]:
    """A run that breaks no invariant, and what it came to."""
    checks = Invariants(wait_s=60.0)
    outcome = simulate(scenario, seed, folder, acts=acts, watch=[checks.watch], final=[checks.final])
    assert outcome.error is None
    found = measure(read_log(outcome.log_path))
    assert found.blocks is not None
    return outcome, found, found.blocks


def test_full_rounds_bring_the_blocks_nearer_to_their_goals(tmp_path: Path) -> None:
    outcome, found, blocks = play(tmp_path, QUICK)
    assert [item.full for item in blocks.rounds[:3]] == [True] * 3
    assert {tuple(item.differences) for item in blocks.rounds} == {(2, 2)}
    assert blocks.used == 4 * len(blocks.rounds)
    assert blocks.used_share > 0.9
    assert found.honest_rejected == {}
    shown = dict(rows(outcome, found))
    assert "differences" in shown
    assert "credit" in shown
    notes = [json.loads(line) for line in (tmp_path / "run" / "pretrain.jsonl").read_text().splitlines()]
    losses = [sum(note["block_losses"]) for note in notes]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("kind", BLOCK_FOUND_BY)
def test_a_liar_is_found_by_the_check_that_is_meant_for_it_and_nobody_else_is(
    kind: Any, tmp_path: Path
) -> None:
    scenario = structs.replace(
        QUICK,
        swarm=structs.replace(QUICK.swarm, hours=0.07),
        cheats=(Cheat(kind=kind, share=0.25),),
        blocks=structs.replace(QUICK.blocks, quorum=0.5, round_s=30),
    )
    _, found, _ = play(tmp_path, scenario)
    facts = found.cheats[kind]
    meant, _ = BLOCK_FOUND_BY[kind]
    assert facts.nodes == 1
    assert facts.rejected >= 1
    assert meant in facts.found_by
    assert found.honest_rejected == {}
    if kind in ("copy", "noise", "untrained", "scaled"):
        assert facts.accepted == facts.credit == 0


def test_a_crash_costs_what_was_not_yet_written_and_a_power_cut_a_place(tmp_path: Path) -> None:
    names = [f"n{number:04d}" for number in range(4)]
    acts = [
        *(Planned(0.0, "join", (name,)) for name in names),
        Planned(9.0, "crash", ("n0000",)),  # in its second segment or later
        Planned(14.0, "rejoin", ("n0000",)),
        Planned(50.0, "power-cut", ("n0001",)),
        Planned(120.0, "rejoin", ("n0001",)),
    ]
    _, found, blocks = play(tmp_path, QUICK, acts=acts)
    assert blocks.resumed >= 1
    assert found.departures == 2
    assert 0 < blocks.lost_per_departure_s < 30
    assert len(blocks.rounds) >= 3


def test_the_coordinator_comes_back_and_the_blocks_become_a_model_that_goes_on_by_rewards(
    tmp_path: Path,
) -> None:
    scenario = structs.replace(
        QUICK,
        work=structs.replace(QUICK.work, units_per_version=1),
        blocks=structs.replace(QUICK.blocks, rounds=2, posttrain=True),
    )
    acts = [
        *plan(scenario, 1),
        Planned(12.0, "coordinator-crash"),  # units are under way
        Planned(17.0, "coordinator-return"),
        Planned(22.4, "coordinator-crash"),  # others are judged
        Planned(23.0, "coordinator-return"),
    ]
    outcome, found, blocks = play(tmp_path, scenario, acts=acts)
    assert [item.version for item in blocks.rounds] == [1, 2]
    assert outcome.facts["version"] >= 5  # two rounds, the model, and policies
    assert found.staleness  # which were trained on rollouts
    assert (checkpoint_folder(tmp_path / "run", 3) / "model.safetensors").is_file()


WILD = """
phase = "blocks"
[swarm]
nodes = 6
hours = 0.05
arrive_s = 5
nat_share = 0.3
corrupt_share = 0.17
skew_s = 300
[work]
unit_s = 14
load_s = 1
learn_s = 1
verify_s = 0.3
timeout_s = 40
deadline_s = 60
[blocks]
places = 1.0
round_s = 40
segments = 4
weights = 32
[churn]
session_median_s = 90
away_s = 30
[[cheats]]
kind = "noise"
share = 0.17
[[happens]]
at_s = 45
what = "coordinator-crash"
for_s = 6
[[happens]]
at_s = 80
what = "partition"
share = 0.5
for_s = 20
[[happens]]
at_s = 120
what = "disk-full"
share = 0.4
for_s = 20
"""


def test_the_same_seed_gives_the_same_log_in_every_process_whatever_its_hashes(tmp_path: Path) -> None:
    (tmp_path / "wild.toml").write_text(WILD)
    command = [sys.executable, "-P", "-m", "barnraise.tui.main", "simulate", "wild.toml", "--seed", "3"]
    other = subprocess.Popen(
        [*command, "--json", "--keep", "there"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "1"},  # ours is drawn anew for each session of tests
        stdout=subprocess.PIPE,
    )
    checks = Invariants()
    scenario = read_scenario(WILD, "wild")
    here = simulate(scenario, 3, tmp_path / "here", watch=[checks.watch], final=[checks.final])
    told = json.loads(other.communicate()[0])
    assert told["error"] is None
    assert (tmp_path / "there" / "events.jsonl").read_bytes() == here.log_path.read_bytes()
    assert told["measures"]["blocks"]["used"] > 3


@pytest.mark.swarm(
    scenario="blocks-steady", seed=2, unit_s=10, load_s=1, learn_s=1, timeout_s=40, deadline_s=60
)
def test_the_fixture_starts_a_swarm_that_trains_blocks(swarm: Fixture) -> None:
    first, *_ = swarm.start(4)
    (liar,) = swarm.cheat("scaled")
    swarm.until(lambda: swarm.accepted >= 3, patience_s=120)
    swarm.crash(first)
    swarm.crash_coordinator()
    swarm.advance(5)
    swarm.return_coordinator()
    swarm.rejoin(first)
    before = swarm.credit(first)
    swarm.until(lambda: swarm.credit(first) > before, patience_s=120)
    assert swarm.credit(liar) == 0


def test_a_fifth_of_the_churning_scenarios_nodes_leaves_within_an_hour() -> None:
    scenario = load_scenario("blocks-churn")
    many = structs.replace(scenario, swarm=structs.replace(scenario.swarm, nodes=2000))
    gone = {
        act.nodes for act in plan(many, 5) if act.do in ("crash", "power-cut", "leave") and act.at_s < 3600
    }
    assert len(gone) / 2000 == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[blocks]\nblocks = 3", "add that line"),
        ('phase = "blocks"\n[blocks]\nblock = 3', "the keys there are blocks, places"),
        ('phase = "blocks"\n[[cheats]]\nkind = "tokens"\nshare = 0.1', "choose one of stale, replay"),
        ('[[cheats]]\nkind = "lazy"\nshare = 0.1', "choose one of stale, other-model"),
    ],
)
def test_what_belongs_to_the_other_phase_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        read_scenario(text, "mine")


def test_a_block_file_that_is_none_is_refused() -> None:
    good = np.zeros(8, dtype=np.float32)
    assert (block_standin.read_block(block_standin.block_bytes(good)) == good).all()
    for data in (
        b"",
        b"\xff" * 40,
        block_standin.block_bytes(np.array([1.0, np.nan], dtype=np.float32)),
        block_standin.block_bytes(good.astype(np.float64)),  # type: ignore[arg-type]
        block_standin.state_bytes(block_standin.start(good)),
    ):
        with pytest.raises(MalformedError):
            block_standin.read_block(data)


def test_a_trimmed_mean_leaves_a_liar_out() -> None:
    honest = [np.full(3, value, dtype=np.float32) for value in (1.0, 2.0, 3.0)]
    mean = block_standin.trimmed_mean([*honest, np.full(3, 1e6, dtype=np.float32)], 0.25)
    assert mean.tolist() == [2.5, 2.5, 2.5]
