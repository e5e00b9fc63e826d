"""Rules and readings into verdicts: when work is suspended, why, and when it goes on (R14)."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.node.hours import inside, next_start, span
from barnraise.node.presence import Answer, Presence, combined
from barnraise.node.rules import (
    CALM_S,
    OVERRUN_S,
    Reading,
    Rules,
    Verdict,
    judge,
    memory_floor,
    words,
)

GIB = 2**30
WALL = 1_800_000_000.0
UTC = ZoneInfo("UTC")
IDLE = Presence("x11", 1000.0, "x11: last input at 08:00:00")
THERE = Presence("x11", 2.0, "x11: last input at 08:16:38")
NOBODY = Presence("logind", None, "nobody is logged in")
UNKNOWN = Presence(text="asked in vain: x11")
MACHINE = Reading(presence=IDLE, on_battery=False, memory_total=16 * GIB, memory_free=8 * GIB, threads=8)


def kinds(verdict: Verdict) -> list[str]:
    return [cause.kind for cause in verdict.suspensions]


def at_once(rules: Rules, reading: Reading, **more: Any) -> Verdict:
    return judge(rules, reading, Verdict(), 0.0, WALL, UTC, **more)


def test_r14_by_default_a_processor_works_always_and_with_half_of_the_threads_beside_a_person() -> None:
    idle, beside = at_once(Rules(), MACHINE), at_once(Rules(), replace(MACHINE, presence=THERE))
    assert (idle.suspensions, beside.suspensions) == ((), ())
    assert (idle.in_use, idle.allowance.threads, idle.allowance.memory) == (False, 8, int(0.9 * 16 * GIB))
    assert (beside.in_use, beside.allowance.threads, beside.allowance.memory) == (True, 4, 8 * GIB)


def test_r14_by_default_the_gpu_is_the_persons_while_they_are_there_and_versions_pass() -> None:
    verdict = at_once(Rules(), replace(MACHINE, presence=THERE, uses_gpu=True))
    assert kinds(verdict) == ["gpu"]
    cause = verdict.suspensions[0]
    assert cause.transfers
    assert not cause.free
    assert cause.until == WALL + 178.0
    assert "--gpu-in-use" in cause.cure
    allowed = Rules(gpu_in_use=True)
    assert kinds(at_once(allowed, replace(MACHINE, presence=THERE, uses_gpu=True))) == []


@pytest.mark.parametrize(
    ("presence", "suspended"),
    [(THERE, True), (IDLE, False), (NOBODY, False), (UNKNOWN, True)],
    ids=["there", "idle", "nobody", "unknown"],
)
def test_r14_when_idle_is_never_pretended(presence: Presence, suspended: bool) -> None:
    verdict = at_once(Rules(when="idle"), replace(MACHINE, presence=presence))
    assert kinds(verdict) == (["idle"] if suspended else [])
    if presence is UNKNOWN:
        assert "asked in vain: x11" in verdict.suspensions[0].reason
        assert verdict.suspensions[0].until is None


def test_r14_without_a_source_nobody_is_there_unless_that_is_what_counts() -> None:
    assert at_once(Rules(), replace(MACHINE, presence=UNKNOWN, uses_gpu=True)).suspensions == ()


@pytest.mark.parametrize(
    ("rules", "reading", "kind", "said"),
    [
        (Rules(), replace(MACHINE, on_battery=True), "battery", "--on-battery yes"),
        (
            Rules(programs=("game",)),
            replace(MACHINE, programs=frozenset({"game"})),
            "program",
            "--allow-program",
        ),
        (Rules(hours=("01:00-01:01",)), MACHINE, "hours", "--hours none"),
        (Rules(), replace(MACHINE, uses_gpu=True, gpu_temperature=85.0), "heat", "--gpu-temperature"),
        (Rules(), replace(MACHINE, memory_free=100 * 2**20), "memory", "close"),
        (Rules(), replace(MACHINE, engine_memory=15 * GIB), "overrun", "--memory 99%"),
        (Rules(), replace(MACHINE, engine_need=15 * GIB), "overrun", "--memory 99%"),
    ],
    ids=["battery", "program", "hours", "heat", "memory", "overrun", "need"],
)
def test_r14_every_suspension_names_its_reason_and_its_cure(
    rules: Rules, reading: Reading, kind: str, said: str
) -> None:
    verdict = at_once(rules, reading)
    assert kinds(verdict) == [kind]
    assert said in verdict.suspensions[0].cure
    assert verdict.suspensions[0].reason in words(verdict.suspensions[0], WALL)


def test_what_a_machine_does_not_say_suspends_nothing() -> None:
    reading = Reading(presence=UNKNOWN, on_battery=None, memory_free=None, uses_gpu=True, threads=2)
    assert at_once(Rules(programs=("game",)), reading).suspensions == ()


def test_a_program_that_restarts_does_not_make_work_flap() -> None:
    rules = Rules(programs=("game",))
    running = replace(MACHINE, programs=frozenset({"game"}))
    verdict = judge(rules, running, Verdict(), 0.0, WALL, UTC)
    verdict = judge(rules, MACHINE, verdict, 4.0, WALL + 4, UTC)
    assert kinds(verdict) == ["program"]
    assert verdict.suspensions[0].until == WALL + CALM_S
    assert verdict.suspensions[0].reason.startswith("until a moment ago")
    verdict = judge(rules, running, verdict, 5.0, WALL + 5, UTC)
    verdict = judge(rules, MACHINE, verdict, 14.0, WALL + 14, UTC)
    assert kinds(verdict) == ["program"]
    assert verdict.suspensions[0].reason == "until a moment ago: game is running"
    assert judge(rules, MACHINE, verdict, 15.0, WALL + 15, UTC).suspensions == ()


def test_what_a_person_lifts_holds_at_once() -> None:
    verdict = judge(Rules(), replace(MACHINE, on_battery=True), Verdict(), 0.0, WALL, UTC)
    lifted = judge(Rules(on_battery=True), replace(MACHINE, on_battery=True), verdict, 0.1, WALL, UTC)
    assert lifted.suspensions == ()


def test_a_hot_gpu_rests_until_it_is_five_degrees_cooler() -> None:
    hot = replace(MACHINE, uses_gpu=True, gpu_temperature=86.0)
    verdict = judge(Rules(), hot, Verdict(), 0.0, WALL, UTC)
    for moment, degrees, suspended in ((20.0, 84.0, True), (40.0, 80.5, True), (60.0, 79.9, False)):
        verdict = judge(Rules(), replace(hot, gpu_temperature=degrees), verdict, moment, WALL + moment, UTC)
        verdict = judge(Rules(), replace(hot, gpu_temperature=degrees), verdict, moment + CALM_S, WALL, UTC)
        assert bool(verdict.suspensions) is suspended


def test_r14_short_memory_frees_the_engine_and_takes_it_back_once_it_fits_twice_over() -> None:
    floor = memory_floor(16 * GIB)
    short = replace(MACHINE, memory_free=floor - 1, engine_memory=3 * GIB)
    verdict = judge(Rules(), short, Verdict(), 0.0, WALL, UTC)
    assert kinds(verdict) == ["memory"]
    assert verdict.suspensions[0].free
    freed = replace(short, memory_free=floor + 3 * GIB, engine_memory=0)  # its own memory came back
    verdict = judge(Rules(), freed, verdict, 60.0, WALL + 60, UTC)
    assert kinds(verdict) == ["memory"]
    roomy = replace(freed, memory_free=2 * floor + 3 * GIB + 1)
    verdict = judge(Rules(), roomy, verdict, 120.0, WALL + 120, UTC)
    verdict = judge(Rules(), roomy, verdict, 140.0, WALL + 140, UTC)
    assert verdict.suspensions == ()


def test_r14_an_engine_too_large_beside_a_person_waits_until_they_are_gone() -> None:
    beside = replace(MACHINE, presence=THERE, engine_memory=10 * GIB)
    verdict = judge(Rules(), beside, Verdict(), 0.0, WALL, UTC)
    assert kinds(verdict) == ["overrun"]
    assert "--memory-in-use 68%" in verdict.suspensions[0].cure
    gone = replace(beside, engine_memory=0)
    verdict = judge(Rules(), gone, verdict, 5.0, WALL + 5, UTC)
    assert kinds(verdict) == ["overrun"]  # it would need as much again
    verdict = judge(Rules(), replace(gone, presence=IDLE), verdict, 300.0, WALL + 300, UTC)
    assert verdict.suspensions == ()
    verdict = judge(Rules(), gone, verdict, 400.0, WALL + 400, UTC)
    assert kinds(verdict) == ["overrun"]
    assert judge(Rules(), gone, verdict, OVERRUN_S + 1, WALL, UTC).suspensions == ()


PRESENCES = st.sampled_from([THERE, IDLE, NOBODY, UNKNOWN])
READINGS = st.builds(
    Reading,
    presence=PRESENCES,
    on_battery=st.sampled_from([None, False, True]),
    programs=st.sampled_from([frozenset[str](), frozenset({"game"})]),
    uses_gpu=st.booleans(),
    gpu_temperature=st.none() | st.floats(20, 110),
    memory_total=st.just(16 * GIB),
    memory_free=st.none() | st.integers(0, 16 * GIB),
    engine_memory=st.integers(0, 16 * GIB),
    engine_need=st.integers(0, 20 * GIB),
    threads=st.integers(1, 64),
)
SPAN = st.tuples(st.integers(0, 1439), st.integers(0, 1440)).map(
    lambda pair: "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in pair)
)
RULES = st.builds(
    Rules,
    when=st.sampled_from(["always", "idle"]),
    hours=st.lists(SPAN, max_size=3).map(tuple),
    on_battery=st.booleans(),
    gpu_in_use=st.booleans(),
    programs=st.just(("game",)),
    gpu_temperature=st.none() | st.floats(30, 100),
)


@given(RULES, st.lists(st.tuples(READINGS, st.floats(0.1, 400.0)), min_size=1, max_size=12))
def test_no_history_leaves_a_suspension_without_words_or_lets_work_on_where_a_rule_forbids_it(
    rules: Rules, history: list[tuple[Reading, float]]
) -> None:
    assert msgspec.convert(msgspec.to_builtins(rules), Rules) == rules  # what is kept is read again
    verdict, mono = Verdict(), 0.0
    for reading, pause in history:
        mono += pause
        verdict = judge(rules, reading, verdict, mono, WALL + mono, UTC)
        found = set(kinds(verdict))
        assert len(kinds(verdict)) == len(found)
        assert all(cause.reason and cause.cure for cause in verdict.suspensions)
        assert all(cause.until is None or cause.until > WALL + mono for cause in verdict.suspensions)
        assert ("battery" in found) >= (reading.on_battery is True and not rules.on_battery)
        assert ("program" in found) >= bool(reading.programs)
        assert ("hours" in found) == (bool(rules.hours) and not inside(rules.hours, WALL + mono, UTC))
        there = reading.presence is THERE
        assert ("idle" in found) == (rules.when == "idle" and reading.presence in (THERE, UNKNOWN))
        assert ("gpu" in found) == (
            there and rules.when == "always" and reading.uses_gpu and not rules.gpu_in_use
        )
        assert verdict.allowance.threads == (max(1, reading.threads // 2) if there else reading.threads)
        assert 0 < verdict.allowance.memory <= 16 * GIB


@settings(max_examples=100)
@given(RULES, READINGS, READINGS)
def test_a_quiet_machine_works_again_after_a_while_whatever_was_before(
    rules: Rules, first: Reading, second: Reading
) -> None:
    rules = msgspec.structs.replace(rules, hours=())
    verdict = judge(rules, first, Verdict(), 0.0, WALL, UTC)
    verdict = judge(rules, second, verdict, 1.0, WALL + 1, UTC)
    for moment in (2.0, OVERRUN_S + 2, OVERRUN_S + CALM_S + 3):
        verdict = judge(rules, MACHINE, verdict, moment, WALL + moment, UTC)
    assert verdict.suspensions == ()


# --- hours


@pytest.mark.parametrize(
    ("clock", "hours", "works"),
    [
        ("21:59", ["22:00-07:00"], False),
        ("22:00", ["22:00-07:00"], True),
        ("00:00", ["22:00-07:00"], True),
        ("06:59", ["22:00-07:00"], True),
        ("07:00", ["22:00-07:00"], False),
        ("12:30", ["22:00-07:00", "12:00-13:00"], True),
        ("23:59", ["00:00-24:00"], True),
        ("03:00", ["05:00-05:00"], True),
    ],
)
def test_hours_go_across_midnight(clock: str, hours: list[str], works: bool) -> None:
    moment = datetime(2026, 6, 1, int(clock[:2]), int(clock[3:]), 30, tzinfo=UTC).timestamp()
    assert inside(hours, moment, UTC) is works


def test_hours_are_those_of_the_time_zone() -> None:
    moment = datetime(2026, 6, 1, 23, 0, tzinfo=UTC).timestamp()
    assert inside(["22:00-07:00"], moment, UTC)
    assert not inside(["22:00-07:00"], moment, ZoneInfo("America/Los_Angeles"))
    assert inside(["08:00-09:00"], moment, ZoneInfo("Asia/Tokyo"))


ZONES = st.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia"]
).map(ZoneInfo)


@settings(max_examples=60, deadline=None)
@given(st.lists(SPAN, min_size=1, max_size=3), st.integers(1_767_225_600, 1_830_000_000), ZONES)
def test_work_begins_when_it_is_said_to_begin(hours: list[str], wall: int, zone: ZoneInfo) -> None:
    if inside(hours, wall, zone):
        return
    said = next_start(hours, wall, zone)
    assert said is not None
    assert inside(hours, said, zone)
    first = wall - wall % 60 + 60
    while not inside(hours, first, zone):
        first += 60
    gap = datetime.fromtimestamp(first, zone).utcoffset() != datetime.fromtimestamp(wall, zone).utcoffset()
    assert 0 <= said - first <= (3600 if gap else 0)


@pytest.mark.parametrize(
    "text", ["", "22-07", "22:00", "24:00-01:00", "22:60-01:00", "25:00-01:00", "a:bc-d"]
)
def test_what_are_no_hours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        span(text)


@given(st.text(max_size=12))
def test_no_text_breaks_the_reading_of_hours(text: str) -> None:
    try:
        begin, end = span(text)
    except ValueError:
        return
    assert 0 <= begin < 1440
    assert 0 <= end <= 1440


# --- presence


def test_the_last_input_that_anybody_knows_of_counts() -> None:
    wall = datetime(2026, 6, 1, 12, 0).timestamp()
    answers = [Answer("logind", None), Answer("x11", 600.0), None, Answer("terminals", 60.0, "2 terminals")]
    found = combined(answers, ["logind", "x11", "wayland", "terminals"], wall)
    assert (found.source, found.idle_s) == ("terminals", 60.0)
    assert found.text == "terminals (2 terminals): last input at 11:59:00"
    later = combined(answers[:2], ["logind", "x11"], wall)
    assert (later.source, later.idle_s) == ("x11", 600.0)


def test_no_source_and_nobody_there_are_told_apart() -> None:
    assert combined([None, None], ["x11", "logind"], 0.0) == Presence("", None, "asked in vain: x11, logind")
    assert combined([], [], 0.0).source == ""
    nobody = combined([None, Answer("logind", None)], ["x11", "logind"], 0.0)
    assert (nobody.source, nobody.idle_s) == ("logind", None)
    assert "nobody is logged in" in nobody.text


def test_the_line_about_a_person_stays_the_same_while_they_rest() -> None:
    wall = datetime(2026, 6, 1, 12, 0).timestamp()
    texts = {combined([Answer("x11", 100.0 + s)], ["x11"], wall + s).text for s in range(60)}
    assert len(texts) == 1
