"""Scenarios, plans and folds over event logs: nothing here runs a swarm."""

from __future__ import annotations

import json
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from barnraise.protocol.errors import StorageError
from barnraise.simulation.cheats import FOUND_BY
from barnraise.simulation.churn import plan
from barnraise.simulation.event_log import Event, EventLog, read_log
from barnraise.simulation.measure import measure
from barnraise.simulation.plots import draw
from barnraise.simulation.scenario import (
    Churn,
    Happening,
    Line,
    Scenario,
    ScenarioError,
    Swarm,
    load_scenario,
    read_scenario,
    scenario_names,
)
from barnraise.simulation.shrink import shrink
from barnraise.simulation.trace import trace, write_trace
from barnraise.simulation.traits import draw_traits, usable_rate


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_of_the_package_loads_says_what_it_is_and_plans_something(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.description
    assert sum(act.do == "join" for act in plan(scenario, 1)) >= scenario.swarm.nodes


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[swarm]\nnods = 3", "unknown field `nods`.*the keys there are nodes, hours"),
        ("[[happens]]\nat_s = 1\nwhat = 'rain'", "Invalid enum value"),
        ("[swarm]\nnodes = 0", ">= 1"),
        ("[swarm]\nnetwork = '203.0.113.7/24'", "has host bits set; write"),
        ("[[happens]]\nat_s = 1\nwhat = 'flash-crowd'\nnetwork = 'home'", "network: .*home"),
        ("[swarm", "no valid TOML"),
        ("[[cheats]]\nkind='stale'\nshare=0.7\n[[cheats]]\nkind='copy'\nshare=0.7", r"add up to 1\.4"),
    ],
    ids=["unknown-key", "unknown-event", "out-of-bounds", "host-bits", "no-network", "no-toml", "shares"],
)
def test_a_scenario_that_is_not_usable_is_refused_with_what_would_do(text: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        read_scenario(text, "mine")


def test_whoever_comes_from_a_network_has_an_address_of_it_and_keeps_it() -> None:
    scenario = load_scenario("sybils")
    where = [draw_traits(scenario, 1, f"n{number:04d}").outside for number in range(230)]
    assert all(ip_address(text[5:]) in ip_network("198.51.0.0/16") for text in where[:20])
    assert set(where[20:220]) == {"/ip4/203.0.113.7"}
    assert all(ip_address(text[5:]) in ip_network("198.18.0.0/15") for text in where[220:])
    assert len(set(where)) == 20 + 1 + 10
    assert where[:20] == [draw_traits(scenario, 1, f"n{number:04d}").outside for number in range(20)]
    assert draw_traits(load_scenario("steady"), 1, "n0000").outside == ""


def test_a_scenario_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(ScenarioError, match="choose one of blocks-cheats"):
        load_scenario("earthquake")
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario("/nowhere/mine.toml")


churning = st.builds(
    Scenario,
    swarm=st.builds(Swarm, nodes=st.integers(1, 30), hours=st.floats(0.1, 5)),
    churn=st.builds(
        Churn,
        session_median_s=st.sampled_from([0.0, 60.0, 2400.0]),
        wave=st.floats(0, 1),
        day_s=st.just(3600.0),
    ),
    happens=st.lists(
        st.builds(
            Happening,
            at_s=st.floats(0, 4000),
            what=st.sampled_from(["mass-exit", "partition", "flash-crowd", "sleep", "coordinator-crash"]),
            share=st.floats(0, 2),
            for_s=st.floats(0, 500),
        ),
        max_size=3,
    ).map(tuple),
)


@given(churning, st.integers(0, 1000))
def test_a_plan_is_in_order_within_its_time_and_begins_every_life_before_it_ends(
    scenario: Scenario, seed: int
) -> None:
    acts = plan(scenario, seed)
    assert acts == plan(scenario, seed)
    assert [act.at_s for act in acts] == sorted(act.at_s for act in acts)
    assert all(0 <= act.at_s < scenario.end_s for act in acts)
    there: set[str] = set()
    for act in acts:
        if act.do == "join":
            assert there.isdisjoint(act.nodes)
            there.update(act.nodes)
        else:
            assert there.issuperset(act.nodes)


def test_one_more_node_changes_nothing_about_the_others() -> None:
    few, more = (Scenario(swarm=Swarm(nodes=n), churn=Churn(session_median_s=300)) for n in (5, 6))
    others = [act for act in plan(more, 3) if act.nodes != ("n0005",)]
    assert others == plan(few, 3)


def test_half_of_all_sessions_are_shorter_than_the_median() -> None:
    scenario = Scenario(swarm=Swarm(nodes=400, hours=100, arrive_s=0), churn=Churn(session_median_s=2400))
    acts = plan(scenario, 5)
    began: dict[str, float] = {}
    lengths = []
    for act in acts:
        if act.do in ("join", "rejoin"):
            began[act.nodes[0]] = act.at_s
        else:
            lengths.append(act.at_s - began[act.nodes[0]])
    assert sum(length < 2400 for length in lengths) / len(lengths) == pytest.approx(0.5, abs=0.03)


def test_shares_are_kept_to_the_node() -> None:
    scenario = load_scenario("cheats-10")
    kinds = [draw_traits(scenario, 1, f"n{number:04d}").cheat for number in range(80)]
    assert sorted(filter(None, kinds)) == sorted(FOUND_BY)
    late = [draw_traits(scenario, 1, f"n{number:04d}").cheat for number in range(80, 160)]
    assert late == kinds  # a flash crowd is as honest as those before it


def test_loss_makes_a_line_slow_by_the_formula_of_mathis() -> None:
    assert usable_rate(8.0, Line(share=1)) == 1e6
    assert usable_rate(0.0, Line(share=1)) is None
    lossy = usable_rate(50.0, Line(share=1, latency_ms=40, loss=0.02))
    assert lossy == pytest.approx(1.22 * 1460 / 0.08 / 0.02**0.5)


def log_of(path: Path, *events: Event) -> Path:
    moments = iter(events)
    at = [0.0]
    log = EventLog(path, lambda: at[0])
    for event in moments:
        at[0] = event.pop("t")
        log.note(**event)
    log.close()
    return path


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """Two nodes: one crashes in its second unit, one cheats once and goes on."""
    return log_of(
        tmp_path / "events.jsonl",
        {"t": 0.0, "what": "published", "version": 0},
        {"t": 1.0, "what": "join", "node": "a"},
        {"t": 1.0, "what": "join", "node": "b", "cheat": "copy"},
        {"t": 4.0, "what": "loaded", "node": "a", "version": 0},
        {"t": 6.0, "what": "loaded", "node": "b", "version": 0},
        {"t": 10.0, "what": "lease", "node": "a", "lease": "1", "version": 0},
        {"t": 10.0, "what": "begin", "node": "a", "lease": "1", "version": 0},
        {"t": 11.0, "what": "lease", "node": "b", "lease": "2", "version": 0},
        {"t": 11.0, "what": "begin", "node": "b", "lease": "2", "version": 0},
        {"t": 40.0, "what": "made", "node": "a", "lease": "1"},
        {"t": 40.0, "what": "submitted", "node": "a", "lease": "1", "work": "w1"},
        {
            "t": 41.0,
            "what": "judged",
            "node": "a",
            "lease": "1",
            "work": "w1",
            "accepted": True,
            "check": "all",
        }
        | {"credit": 8},
        {"t": 42.0, "what": "begin", "node": "a", "lease": "3", "version": 0},
        {"t": 52.0, "what": "crash", "node": "a"},
        {"t": 52.0, "what": "stopped", "node": "a", "lease": "3"},
        {"t": 61.0, "what": "made", "node": "b", "lease": "2"},
        {"t": 61.0, "what": "submitted", "node": "b", "lease": "2", "work": "w2"},
        {"t": 63.0, "what": "judged", "node": "b", "lease": "2", "work": "w2", "accepted": False}
        | {"check": "toploc", "credit": 0},
        {"t": 70.0, "what": "batch", "version": 1, "groups": 2, "usable": 2, "works": ["w1"]},
        {"t": 80.0, "what": "over", "live": 1, "nodes": 2, "origin_bulk": 300, "nodes_bulk": 100},
    )


def test_the_measures_tell_useful_work_from_lost_work_and_cheats_from_honest_nodes(story: Path) -> None:
    found = measure(read_log(story))
    assert (found.computed_s, found.useful_s, found.lost_s) == (30 + 50 + 10, 30, 10)
    assert found.lost_per_departure_s == 10
    assert found.adoption_s == {0: (5.0, 6.0)}
    assert (found.staleness, found.copies, found.credit) == ({0: 1}, 1.5, 8)
    cheat = found.cheats["copy"]
    assert (cheat.nodes, cheat.submitted, cheat.rejected, cheat.first_found_s) == (1, 1, 1, 2.0)
    assert cheat.found_by == {"toploc": 1}
    assert not found.honest_rejected


def test_a_log_that_was_cut_short_can_be_measured(story: Path) -> None:
    events = list(read_log(story))
    for end in range(len(events)):
        assert measure(events[:end]).accepted <= 1


def test_an_event_log_has_one_hash_rounds_floats_and_ends_with_over(tmp_path: Path) -> None:
    logs = [EventLog(tmp_path / name, lambda: 1 / 3) for name in ("a", "b")]
    for log in logs:
        log.note("seen", node="n", value=2 / 3, nothing=None)
    assert logs[0].digest == logs[1].digest
    logs[1].note("over")
    logs[1].note("seen", node="late")
    for log in logs:
        log.close()
    assert logs[0].digest != logs[1].digest
    assert logs[1].count == 2
    assert (tmp_path / "a").read_text() == '{"t":0.333333,"what":"seen","node":"n","value":0.666667}\n'


def test_a_trace_closes_what_it_opens(story: Path, tmp_path: Path) -> None:
    write_trace(read_log(story), tmp_path / "trace.json")
    items = json.loads((tmp_path / "trace.json").read_text())
    assert items == list(trace(read_log(story)))
    depth = 0
    for item in items:
        if item.get("tid") == next(i["tid"] for i in items if i.get("args") == {"name": "a"}):
            depth += (item["ph"] == "B") - (item["ph"] == "E")
            assert depth >= 0
    assert depth == 0  # node a crashed


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_written(story: Path, tmp_path: Path, suffix: str) -> None:
    target = draw(story, measure(read_log(story)), tmp_path / f"swarm.{suffix}")
    assert target.stat().st_size > 5000
    with pytest.raises(StorageError, match=r"must end in \.png or \.svg"):
        draw(story, measure(read_log(story)), tmp_path / "swarm.gif")


def test_shrinking_finds_the_one_act_that_matters() -> None:
    scenario = structs.replace(load_scenario("mass-exit"), swarm=Swarm(nodes=20, hours=1))
    guilty = next(act for act in plan(scenario, 4) if act.do == "power-cut")

    def fails(smaller: Scenario, acts: object) -> bool:
        assert isinstance(acts, list)
        assert smaller.end_s <= 1500
        return guilty in acts

    found = shrink(scenario, 4, 1400.0, fails, most_runs=200)
    assert found.acts == (guilty,)
    assert found.runs < 60
