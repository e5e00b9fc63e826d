"""Rewards are bounded: an answer or a scorer that hangs, crashes or eats memory costs one reward, no more."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from barnraise.coordinator import scoring
from barnraise.coordinator.scoring import Scorer
from barnraise.coordinator.scoring_child import guarded
from barnraise.protocol.environments import Task, build_environment
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.log_lines import read_line
from barnraise.protocol.spec import EnvironmentSpec

HOSTILE = '''
"""An operator's environment whose scorer does what the answer says."""
import os, re, time
class Hostile:
    def __init__(self, settings):
        if settings.get("broken"):
            raise RuntimeError("no data file")
    def task(self, seed, *, held_out):
        from barnraise.protocol.environments import Task
        return Task(prompt="say ok", key=str(seed))
    def score(self, task, answer):
        if answer == "hang":
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass
        if answer == "compiled":
            return float(len(str(7 ** (7 ** 8))) > 0)
        if answer == "backtrack":
            return float(bool(re.fullmatch(r"(a|a)*b", "a" * 64)))
        if answer == "crash":
            os.abort()
        if answer == "exit":
            raise SystemExit(0)
        if answer == "memory":
            return float(len(bytearray(2**36)))
        if answer == "print":
            os.write(1, b"not a frame" * 10000)
        if answer.startswith("forge"):
            print(answer)
            os.system("echo '" + answer[6:] + "' >&2")
        if answer == "raise":
            raise RecursionError("too deep")
        if answer == "nan":
            return float("nan")
        if answer == "generous":
            return 7.0
        return 1.0
'''


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSpec:
    """An installed package that offers an environment, as far as any process here can tell."""
    site = tmp_path / "site"
    (site / "hostile-1.0.dist-info").mkdir(parents=True)
    (site / "hostile.py").write_text(HOSTILE)
    (site / "hostile-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n"
    )
    (site / "hostile-1.0.dist-info" / "entry_points.txt").write_text(
        "[barnraise.environments]\nhostile = hostile:Hostile\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return EnvironmentSpec(name="hostile", settings="{}", prompt_format="plain", system_prompt="")


@pytest.fixture
def scorer(hostile: EnvironmentSpec) -> Iterator[Scorer]:
    scorer = Scorer(hostile, soft_seconds=0.5, hard_seconds=2.0, submission_seconds=60.0)
    yield scorer
    scorer.close()


def _score(scorer: Scorer, spec: EnvironmentSpec, *answers: str, group_size: int = 1) -> scoring.Scores:
    environment = build_environment(spec)
    tasks = [environment.task(number, held_out=False) for number in range(len(answers))]
    return scorer.score(environment, tasks, answers, group_size)


def test_answers_that_do_no_harm_are_scored_by_one_child(scorer: Scorer, hostile: EnvironmentSpec) -> None:
    assert _score(scorer, hostile, "ok", "print", "ok").rewards == [1.0, 1.0, 1.0]
    first = scorer.pid
    assert _score(scorer, hostile, "ok").rewards == [1.0]
    assert scorer.pid == first


def test_an_answer_that_is_printed_or_run_forges_no_line_of_the_log(
    scorer: Scorer,
    hostile: EnvironmentSpec,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BARNRAISE_LOG_LEVEL", "debug")
    forged = '{"time": "2026-12-02T00:00:00Z", "level": "error", "logger": "x", "message": "forged"}'
    environment, lease_id = build_environment(hostile), bytes(range(16))
    task = environment.task(0, held_out=False)
    answers = ["forge\n" + forged, "print", "ok"]
    assert scorer.score(environment, [task] * 3, answers, lease_id=lease_id).rewards == [1.0, 1.0, 1.0]
    seen = b""
    until = time.monotonic() + 30
    while seen.count(forged.replace('"', '\\"').encode()) < 2 and time.monotonic() < until:
        seen += capfdbinary.readouterr().err
        time.sleep(0.01)
    lines = [read_line(line) for line in seen.splitlines()]
    assert all(line is not None and line.role == "scorer" for line in lines)
    told = [line for line in lines if line is not None]
    assert [line.logger for line in told if line.message == forged] == ["printed", "printed"]
    earned = [line for line in told if "earns" in line.message]
    assert {(line.unit, line.level) for line in earned} == {(lease_id.hex()[:16], "debug")}
    assert len(earned) == 3


def test_what_fails_is_worth_nothing_and_the_next_answer_is_scored(
    scorer: Scorer, hostile: EnvironmentSpec, caplog: pytest.LogCaptureFixture
) -> None:
    scores = _score(scorer, hostile, "ok", "crash", "ok", "raise", "nan", "generous", "exit", "memory", "ok")
    assert scores.rewards == [1, 0, 1, 0, 0, 0, 0, 0, 1]
    assert [number for number, _ in scores.faults] == [1, 3, 4, 5, 6, 7]
    assert "signal 6" in scores.faults[0][1]
    assert "RecursionError" in scores.faults[1][1]
    assert "to task '1'" in caplog.text


@pytest.mark.parametrize("answer", ["hang", "compiled", "backtrack"])
def test_a_scorer_that_hangs_is_interrupted_or_killed(
    scorer: Scorer, hostile: EnvironmentSpec, answer: str
) -> None:
    scores = _score(scorer, hostile, answer, "ok")
    assert scores.rewards == [0.0, 1.0]
    assert "longer than 0.5 s" in scores.faults[0][1] or "killed" in scores.faults[0][1]


def test_a_submission_has_an_allowance_and_half_scored_groups_teach_nothing(
    scorer: Scorer, hostile: EnvironmentSpec
) -> None:
    answers = ["ok", "ok", "crash", "crash", "ok", "crash", "ok", "ok"]
    scores = _score(scorer, hostile, *answers, group_size=2)
    # After the third death answers are left unscored: the fourth group has no reward at all.
    assert scores.rewards == [1, 1, 0, 0, 1, 0, 0, 0]
    assert [text.startswith("left unscored") for _, text in scores.faults] == [False] * 3 + [True] * 2
    assert _score(scorer, hostile, "ok").rewards == [1.0]  # the next submission's allowance is its own


def test_a_child_that_dies_between_answers_costs_nobody(scorer: Scorer, hostile: EnvironmentSpec) -> None:
    _score(scorer, hostile, "ok")
    assert scorer.pid is not None
    os.kill(scorer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, scorer.pid, os.WEXITED | os.WNOWAIT)
    assert _score(scorer, hostile, "ok").faults == []


def test_an_environment_that_cannot_be_built_is_an_error_of_the_run(hostile: EnvironmentSpec) -> None:
    from msgspec import structs

    environment = build_environment(hostile)
    scorer = Scorer(structs.replace(hostile, settings='{"broken": true}'))
    with pytest.raises(BarnraiseError, match="no data file"):
        scorer.score(environment, [Task(prompt="", key="")], ["ok"])
    assert scorer.pid is None


def test_reverse_needs_no_child() -> None:
    spec = EnvironmentSpec(name="reverse", settings="", prompt_format="plain", system_prompt="")
    scorer = Scorer(spec)
    task = Task(prompt="rabc=", key="abc")
    assert scorer.score(build_environment(spec), [task, task], ["cba", "\ud800"]).rewards == [1.0, 0.0]
    assert scorer.pid is None


def test_a_forgotten_scorer_takes_its_child_along(hostile: EnvironmentSpec) -> None:
    scorer = Scorer(hostile)
    _score(scorer, hostile, "ok")
    pid = scorer.pid
    assert pid is not None
    del scorer
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_rewards_outside_of_their_range_are_faults() -> None:
    class Odd:
        def task(self, seed: int, *, held_out: bool) -> Task:
            return Task(prompt="", key="")

        def score(self, task: Task, answer: str) -> float:
            return {"low": -0.5, "high": 1.5}.get(answer, 0.25)

    for answer, reward in (("low", 0.0), ("high", 0.0), ("", 0.25)):
        assert guarded(Odd(), Task(prompt="", key=""), answer, None).reward == reward
