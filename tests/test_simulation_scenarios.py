"""What the long scenarios are about, in swarms of seconds; and shrinking a failure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs
from test_planted_faults import forget_leases_on_restart

from barnraise.simulation.churn import Planned
from barnraise.simulation.event_log import Event, read_log
from barnraise.simulation.invariants import Broken, Invariants
from barnraise.simulation.run import scratch_folder, simulate
from barnraise.simulation.scenario import Happening, Scenario, Swarm, Work
from barnraise.simulation.shrink import shrink

WORK = Work(unit_s=12, load_s=0.5, learn_s=1, timeout_s=60, deadline_s=90)


def play(folder: Path, *happens: Happening, hours: float = 0.06) -> list[Event]:
    """The event log of a swarm of four to which this happens; every invariant holds."""
    swarm = Swarm(nodes=4, hours=hours, arrive_s=1, model_bytes=8192, shard_bytes=2048)
    checks = Invariants(wait_s=60.0)
    scenario = Scenario(swarm=swarm, work=WORK, happens=happens)
    outcome = simulate(scenario, 3, folder, watch=[checks.watch], final=[checks.final], lines=True)
    assert outcome.error is None
    return list(read_log(outcome.log_path))


def times(events: list[Event], what: str, **traits: object) -> list[float]:
    return [
        event["t"]
        for event in events
        if event["what"] == what and all(event.get(key) == value for key, value in traits.items())
    ]


def saying(events: list[Event], text: str) -> set[str]:
    return {event["node"] for event in events if event["what"] == "line" and text in event["text"]}


def test_a_coordinator_without_room_acknowledges_nothing_says_why_and_goes_on(tmp_path: Path) -> None:
    events = play(tmp_path, Happening(at_s=60, what="coordinator-disk-full", for_s=60))
    verdicts = times(events, "judged", accepted=True)
    assert [at for at in verdicts if at < 60]
    assert not [at for at in verdicts if 61 < at < 120]
    assert [at for at in verdicts if at > 120]
    assert len(saying(events, "the coordinator's disk is full")) == 4
    assert saying(events, "free some disk space") == {"coordinator"}


def test_old_nodes_are_told_in_time_then_turned_away_and_lose_nothing(tmp_path: Path) -> None:
    """R20, with two releases in one swarm."""
    events = play(
        tmp_path,
        Happening(at_s=40, what="coordinator-upgrade", to="1.2", grace_s=60),
        Happening(at_s=80, what="upgrade", share=0.5, to="1.2"),
        Happening(at_s=150, what="upgrade", to="1.2"),
        Happening(at_s=210, what="coordinator-upgrade", to="2.0"),
        Happening(at_s=250, what="upgrade", to="2.0"),
        hours=0.085,
    )
    assert len(saying(events, "update soon: your side will be too old")) == 4
    ended = {event["node"]: event["t"] for event in events if event["what"] == "end" and event["code"] == 3}
    late = saying(events, "this run needs 1.2 or newer: pip install --upgrade barnraise")
    assert len(late & saying(events, "your side is too old")) == 2
    assert times(events, "install", version="1.2") == pytest.approx([80, 80, 150, 150], abs=1)
    assert len(ended) == 4  # in the end nobody spoke 2.0 yet
    assert len(saying(events, "it needs 2.x")) == 4
    assert {event["node"] for event in events if event["what"] == "judged" and event["t"] > 270} == set(ended)


def test_one_address_brings_so_many_new_keys_and_whoever_comes_from_elsewhere_does_not_notice(
    tmp_path: Path,
) -> None:
    swarm = Swarm(nodes=3, hours=0.015, arrive_s=1, model_bytes=8192, shard_bytes=2048, tree=False)
    scenario = Scenario(
        swarm=structs.replace(swarm, network="2001:db8::/32"),
        work=Work(unit_s=300),  # what they work at is another matter
        happens=(
            Happening(at_s=10, what="flash-crowd", share=24, network="203.0.113.7"),
            Happening(at_s=20, what="flash-crowd", share=2, over_s=20, network="198.18.0.0/15"),
        ),
    )
    checks = Invariants(wait_s=60.0)
    outcome = simulate(scenario, 3, tmp_path, watch=[checks.watch], final=[checks.final], lines=True)
    assert outcome.error is None
    events = list(read_log(outcome.log_path))
    away = saying(events, "64 keys a day that it has never seen")
    assert len(away) == 72 - 64
    assert all(3 <= int(name[1:]) < 75 for name in away)
    inside = saying(events, "joined run")
    assert len(inside) == 3 + 64 + 6
    assert not inside & away


def test_a_failure_in_a_large_swarm_shrinks_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_leases_on_restart(monkeypatch)
    scenario = Scenario(
        swarm=Swarm(nodes=20, hours=0.01, arrive_s=1, model_bytes=8192, shard_bytes=2048),
        work=Work(unit_s=12, load_s=0.5, learn_s=1, timeout_s=60, deadline_s=90),
        happens=(
            Happening(at_s=5, what="partition", share=0.3, for_s=6),
            Happening(at_s=6, what="mass-exit", share=0.3, for_s=3),
            Happening(at_s=10, what="coordinator-crash", for_s=2),
            Happening(at_s=7, what="skew", share=0.2, by_s=60),
        ),
    )

    def run(scenario: Scenario, acts: Sequence[Planned] | None) -> Broken | None:
        checks = Invariants()
        with scratch_folder() as folder:
            found = simulate(scenario, 3, folder, acts=acts, watch=[checks.watch], final=[checks.final]).error
        assert found is None or isinstance(found, Broken)
        return found

    whole = run(scenario, None)
    assert whole is not None
    assert whole.at_s is not None

    def fails(scenario: Scenario, acts: Sequence[Planned]) -> bool:
        found = run(scenario, acts)
        return found is not None and found.name == whole.name

    small = shrink(scenario, 3, whole.at_s, fails)
    assert [act.do for act in small.acts] == ["join", "coordinator-crash", "coordinator-return"]
