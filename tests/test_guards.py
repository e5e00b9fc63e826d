"""Guards: what a run's own numbers give away, and what they must not be mistaken for."""

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.coordinator.guard_belt import ended
from barnraise.coordinator.guards import GRAVE, GUARDS, OF_THE_MOMENT, Finding, GuardLimits, Seen, look
from barnraise.coordinator.state_parts import VersionInfo
from barnraise.coordinator.workers import TrainStats

LIMITS = GuardLimits()
CALM = Seen(now_ms=100_000, max_lag=2, oldest_waiting_ms=None, live=10, most_live=10, working=True)
STATS = TrainStats(
    reward_mean=0.4,
    groups=20,
    groups_used=12,
    loss=0.1,
    grad_norm=0.5,
    clip_fraction=0.02,
    ratio_max=1.5,
    entropy=0.8,
    kl=0.01,
    lag_mean=1.0,
    seconds=5.0,
)


def version(number: int, accuracy: float = -1.0, **changes: float) -> VersionInfo:
    stats = msgspec.structs.replace(STATS, **changes)
    return VersionInfo(number, b"m" * 32, "w", 1, stats, accuracy, 1000 * number)


def healthy(count: int = 20, seed: int = 1) -> list[VersionInfo]:
    """A run that learns, with the noise of one."""
    rng = random.Random(seed)
    return [
        version(
            number,
            reward_mean=min(1.0, 0.1 + 0.03 * number + rng.uniform(-0.08, 0.08)),
            grad_norm=0.5 * rng.uniform(0.4, 2.5),
            entropy=max(0.03, 0.9 - 0.03 * number),
            clip_fraction=rng.uniform(0, 0.1),
        )
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_raises_no_alarm_at_any_time(seed):
    versions = healthy(60, seed)
    for count in range(61):
        seen = replace(CALM, now_ms=1000 * count + 500)
        assert look(versions[max(0, count - 33) : count], seen, LIMITS) == []


@pytest.mark.parametrize(
    ("kind", "grave", "changes"),
    [
        ("reward-collapse", True, {"reward_mean": 0.1}),
        ("entropy-explosion", True, {"entropy": 4.0}),
        ("entropy-collapse", False, {"entropy": 0.001, "reward_mean": 0.35}),
        ("gradient-norm", False, {"grad_norm": 9.0}),
        ("clip-ratio", False, {"clip_fraction": 0.5}),
        ("kl", True, {"kl": 0.8}),
        ("zero-advantage", False, {"groups_used": 1}),
        ("stale-work", False, {"lag_mean": 1.95}),
        ("not-finite", True, {"skipped_steps": 1}),
    ],
)
def test_each_way_to_collapse_is_named_with_numbers_and_a_cure(kind, grave, changes):
    before = [version(number) for number in range(1, 21)]
    one = [*before, version(21, **changes), version(22), version(23)]
    assert kind not in {finding.kind for finding in look(one, CALM, LIMITS)}  # a single version is none
    found = look([*before, *(version(21 + at, **changes) for at in range(3))], CALM, LIMITS)
    assert [(finding.kind, finding.grave) for finding in found] == [(kind, grave)]
    seen, _, cure = found[0].text.partition(": ")
    assert seen
    assert cure


def test_a_policy_that_has_learnt_its_task_may_be_sure_of_itself():
    before = [version(number, reward_mean=0.5, entropy=0.8) for number in range(1, 21)]
    after = [version(21 + at, reward_mean=0.97, entropy=0.005) for at in range(3)]
    assert look([*before, *after], CALM, LIMITS) == []


def test_a_learnt_policy_that_wavers_a_little_is_not_paused():
    """Entropies of a real run at rewards of 0.96 to 0.99, whose median rose from 0.010 to 0.062 nats."""
    sure = [0.0035, 0.027, 0.013, 0.023, 0.016, 0.013, 0.0052, 0.013, 0.0071, 0.0069, 0.026, 0.013, 0.042]
    wavers = [0.0047, 0.024, 0.07, 0.016, 0.062]
    versions = [
        version(number, reward_mean=0.97, entropy=value)
        for number, value in enumerate([*sure, *sure, *wavers], 1)
    ]
    assert look(versions, replace(CALM, now_ms=1000 * len(versions)), LIMITS) == []


def evaluated(*accuracies: float, every: int = 10) -> list[VersionInfo]:
    """Version 0 and every ``every``-th after it have these held-out accuracies, the others none."""
    return [
        version(number, accuracy=accuracies[number // every] if number % every == 0 else -1.0)
        for number in range(every * (len(accuracies) - 1) + 1)
    ]


@pytest.mark.parametrize("every", [1, 10, 100])
def test_held_out_accuracy_that_falls_is_grave_though_rewards_rise(every):
    versions = evaluated(0.6, 0.58, 0.6, 0.62, 0.2, 0.22, every=every)
    now = replace(CALM, now_ms=1000 * len(versions))
    (found,) = look(versions, now, LIMITS)
    assert (found.kind, found.grave, found.value) == ("held-out-collapse", True, 0.22)
    assert f"(version {versions[-1].version})" in found.text
    assert look(versions[:-1], now, LIMITS) == []  # the second bad one says it


@pytest.mark.parametrize(
    "accuracies",
    [
        (0.6, 0.1),
        (0.6, 0.1, 0.1),  # too few to know a level
        (0.6, 0.58, 0.6, 0.62, 0.6, 0.0),  # one bad one
        (0.3, 0.3, 1.0, 0.3, 0.3, 0.3),  # one lucky one
        (0.3, 1.0, 0.3, 0.3, 0.3, 0.2),  # both
    ],
)
def test_one_evaluation_is_no_collapse(accuracies):
    versions = evaluated(*accuracies)
    for count in range(len(versions) + 1):
        assert look(versions[:count], CALM, LIMITS) == []


NUMBERS = {
    "reward_mean": st.floats(0.0, 1.0),
    "groups_used": st.integers(0, 20),
    "groups": st.integers(20, 2**40),
    "grad_norm": st.floats(0.0, 1e300),
    "clip_fraction": st.floats(0.0, 1.0),
    "entropy": st.floats(0.0, 1e6),
    "kl": st.floats(0.0, 1e300),
    "lag_mean": st.floats(0.0, 2.0),
    "skipped_steps": st.integers(0, 100),
}


@given(st.integers(0, 40), st.fixed_dictionaries(NUMBERS), st.floats(0.0, 1.0), st.sampled_from([1, 3, 10]))
@settings(deadline=None)
def test_no_limit_is_about_a_single_version_whatever_its_numbers(odd, numbers, accuracy, every):
    versions = evaluated(*[0.5] * (40 // every + 1), every=every)
    plain = versions[odd] if odd < len(versions) else versions[-1]
    versions[plain.version] = replace(
        plain,
        stats=msgspec.structs.replace(STATS, **numbers),
        accuracy=plain.accuracy if plain.accuracy < 0 else accuracy,
    )
    for count in range(plain.version + 1, len(versions) + 1):
        assert look(versions[:count], replace(CALM, now_ms=1000 * count), LIMITS) == []


def test_versions_that_a_rollback_left_are_no_evidence():
    good = [version(number, accuracy=0.6) for number in range(1, 11)]
    bad = [version(number, accuracy=0.1, reward_mean=0.01, kl=3.0) for number in range(11, 14)]
    again = VersionInfo(14, b"m" * 32, "w", 1, None, 0.6, 14_000)
    better = VersionInfo(9, b"m" * 32, "w", 1, None, 0.99, 9_000)
    kinds = {finding.kind for finding in look([*good, *bad], CALM, LIMITS)}
    assert {"reward-collapse", "held-out-collapse", "kl"} <= kinds

    def left(number: int) -> bool:
        return 11 <= number <= 13

    assert look([*good, *bad, again], CALM, LIMITS, left) == []
    assert look([*good[:8], better, *good[9:]], CALM, LIMITS, lambda number: number == 9) == []
    late = replace(CALM, now_ms=14_000 + 1_900_000)
    assert [item.kind for item in look([*good, *bad], late, LIMITS, left)] == ["stall"]


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("verifier-backlog", replace(CALM, oldest_waiting_ms=100_000 - 700_000)),
        ("volunteers-lost", replace(CALM, live=3)),
        ("clock-back", replace(CALM, now_ms=-100_000)),
        ("newcomer-flood", replace(CALM, turned_away=21)),
        ("stall", replace(CALM, now_ms=20_000 + 1_900_000)),
    ],
)
def test_what_stops_a_run_is_named(kind, seen):
    assert [finding.kind for finding in look(healthy(), seen, LIMITS)] == [kind]


def test_some_new_keys_that_are_turned_away_are_no_flood():
    assert look(healthy(), replace(CALM, turned_away=20), LIMITS) == []


def test_a_run_that_is_paused_or_alone_does_not_stall():
    assert look(healthy(), replace(CALM, now_ms=10**9, working=False), LIMITS) == []


@pytest.mark.parametrize("field", ["reward_mean", "entropy", "kl", "grad_norm", "clip_fraction", "lag_mean"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_statistics_that_are_no_numbers_are_one_grave_finding_and_enter_no_comparison(field, value):
    versions = [*(version(number) for number in range(1, 21)), version(21, **{field: value})]
    found = look(versions, CALM, LIMITS)
    assert [(finding.kind, finding.value, finding.grave) for finding in found] == [("no-numbers", 21.0, True)]
    assert look([*versions, version(22)], CALM, LIMITS) == []


def test_a_number_about_its_limit_is_one_alarm_that_ends_when_it_stays_away():
    kl, backlog = (Finding(kind, 1.0, 0.5, "x") for kind in ("kl", "verifier-backlog"))
    found_at = {}
    for head in range(1, 20, 2):  # above and below in turn
        assert ended({"kl"}, [kl], head, found_at, 3) == []
        assert ended({"kl"}, [], head + 1, found_at, 3) == []
    assert ended({"kl"}, [], 21, found_at, 3) == []
    assert ended({"kl", "verifier-backlog"}, [], 21, found_at, 3) == ["verifier-backlog"]
    assert ended({"kl"}, [backlog], 22, found_at, 3) == ["kl"]
    assert ended({"kl"}, [], 30, {}, 3) == []  # after a restart it counts from there
    assert set(GUARDS) > OF_THE_MOMENT
    assert not OF_THE_MOMENT & GRAVE


ANY = st.floats() | st.sampled_from([0.0, 1.0, 1e308, -1e308, 5e-324])
COUNT = st.integers(0, 2**63)
ANY_STATS = st.builds(
    TrainStats,
    **{field.name: COUNT if field.type is int else ANY for field in msgspec.structs.fields(TrainStats)},
)
ANY_VERSION = st.builds(
    VersionInfo,
    version=st.integers(0, 50),
    manifest=st.just(b""),
    weights=st.just(""),
    size=st.just(1),
    stats=st.none() | ANY_STATS,
    accuracy=ANY,
    at_ms=COUNT,
)
ANY_SEEN = st.builds(
    Seen,
    now_ms=st.integers(-(2**60), 2**60),  # a clock that jumps
    max_lag=st.integers(0, 64),
    oldest_waiting_ms=st.none() | COUNT,
    live=COUNT,
    most_live=COUNT,
    working=st.booleans(),
)


@given(st.lists(ANY_VERSION, max_size=9), ANY_SEEN, st.integers(1, 3))
@settings(deadline=None)
def test_whatever_a_learner_or_a_clock_says_guards_answer_in_words(versions, seen, recent):
    for finding in look(versions, seen, GuardLimits(recent=recent, past=4)):
        assert finding.text.isprintable()
        assert finding.kind in GUARDS
