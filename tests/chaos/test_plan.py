"""The plan alone: the same for the same seed, and never more than a swarm can outlive."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.plan import AT_COORDINATOR, AT_NODE, MOST_CRASHES, NODES, SMALL, Act, plan

seeds, lengths = st.integers(0, 2**64), st.floats(5.0, 600.0)


@settings(max_examples=30)
@given(seeds, lengths)
def test_a_seed_gives_one_plan_within_its_time(seed: int, seconds: float) -> None:
    acts = plan(seed, seconds)
    assert acts == plan(seed, seconds)
    assert [act.at_s for act in acts] == sorted(act.at_s for act in acts)
    assert all(act.at_s > 0 and act.at_s + act.seconds <= seconds + 0.02 for act in acts)


@settings(max_examples=30)
@given(seeds, lengths)
def test_nothing_is_done_twice_at_once_and_no_supervisor_gives_up(seed: int, seconds: float) -> None:
    places: dict[str, list[Act]] = defaultdict(list)
    for act in plan(seed, seconds):
        places[f"{act.kind} {act.target}" if act.kind in ("link", "fill") else act.target].append(act)
    for acts in places.values():
        for first, second in pairwise(acts):
            assert second.at_s >= first.at_s + first.seconds - 0.02
    crashes = [act for act in places[NODES[2]] if act.kind != "freeze"]
    assert len(crashes) <= MOST_CRASHES


def test_in_ten_minutes_everything_goes_wrong_once() -> None:
    for seed in range(20):
        acts = plan(seed, 600.0)
        assert {act.kind for act in acts} == {"kill", "freeze", "fill", "link", "damage"}
        assert {act.how for act in acts if act.kind == "damage"} == {*AT_COORDINATOR, *AT_NODE}
        assert {act.target for act in acts if act.kind == "fill"} == set(SMALL)
