"""The environments: same task from the same seed, disjoint sides, scores that never raise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.protocol import environments, tasks_gym
from barnraise.protocol.environments import (
    Environment,
    Task,
    TaskError,
    build_environment,
    copy_prompt,
    is_held_out,
    reverse_prompt,
)
from barnraise.protocol.spec import EnvironmentSpec
from barnraise.protocol.tasks_gym import extract_answer


def build(name: str, **values: Any) -> Environment:
    return build_environment(
        EnvironmentSpec(name=name, settings=json.dumps(values), prompt_format="plain", system_prompt="")
    )


def test_prompts_are_the_ones_that_the_demo_model_is_warmed_up_on() -> None:
    assert reverse_prompt("abc") == "rabc="
    assert copy_prompt("abc") == "cabc="


def test_a_reverse_task_is_its_seeds_alone() -> None:
    first, again = build("reverse"), build("reverse")
    assert first.task(7, held_out=False) == again.task(7, held_out=False)
    # A second implementation must draw the same: a vector, written down once.
    assert [first.task(seed, held_out=False).key for seed in (0, 1, 2**64 - 1)] == VECTORS


VECTORS = ["xxesg", "mkajg", "aywpn"]


def test_empty_settings_mean_the_defaults() -> None:
    spec = EnvironmentSpec(name="reverse", settings="", prompt_format="plain", system_prompt="")
    assert len(build_environment(spec).task(0, held_out=False).key) == 5


@given(
    seed=st.integers(0, 2**64 - 1),
    letters=st.integers(4, 12),
    alphabet=st.integers(4, 26),
    held_out=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_reverse_tasks_fit_their_settings_and_their_side(
    seed: int, letters: int, alphabet: int, held_out: bool
) -> None:
    task = build("reverse", letters=letters, alphabet=alphabet).task(seed, held_out=held_out)
    assert len(task.key) == letters
    assert set(task.key) <= set("abcdefghijklmnopqrstuvwxyz"[:alphabet])
    assert is_held_out(task.key) == held_out
    assert task.prompt == reverse_prompt(task.key)


def test_training_and_held_out_tasks_never_coincide() -> None:
    environment = build("reverse", letters=3, alphabet=4)
    sides = [{environment.task(seed, held_out=side).key for seed in range(400)} for side in (True, False)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 4**3


def test_reverse_pays_for_the_exact_answer_only() -> None:
    environment = build("reverse")
    task = Task(prompt=reverse_prompt("abcde"), key="abcde")
    assert environment.score(task, "edcba") == 1.0
    assert [environment.score(task, answer) for answer in ("", "edcb", "edcbaa", "abcde", " edcba")] == [
        0.0
    ] * 5


def test_partial_reward_is_the_share_of_right_positions() -> None:
    environment = build("reverse", partial=True)
    task = Task(prompt=reverse_prompt("abcde"), key="abcde")
    assert environment.score(task, "edcba") == 1.0
    assert environment.score(task, "edcbx") == 0.8
    assert environment.score(task, "") == 0.0
    assert environment.score(task, "edcba" + "x" * 5) == 0.5


@pytest.mark.parametrize(
    "values",
    [
        {"letters": 0},
        {"letters": 5.0},
        {"letters": True},
        {"letters": 1000},
        {"alphabet": 1},
        {"alphabet": 27},
        {"partial": 1},
        {"lettres": 5},
        {"letters": 1, "alphabet": 2},
    ],
)
def test_wrong_reverse_settings_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="reverse"):
        build("reverse", **values)


@pytest.mark.parametrize("text", ["{", "[]", "5", '"x"', "[" * 4000])
def test_settings_that_are_no_json_object_are_refused(text: str) -> None:
    spec = EnvironmentSpec(name="reverse", settings=text, prompt_format="plain", system_prompt="")
    with pytest.raises(TaskError, match="JSON"):
        build_environment(spec)


def test_an_unknown_environment_says_what_is_known() -> None:
    with pytest.raises(TaskError, match="chain_sum"):
        build("no_such_thing")


class Echo:
    """An operator's own environment, as an installed package would offer it."""

    def __init__(self, values: dict[str, Any]) -> None:
        if values.get("broken"):
            raise RuntimeError("no data file")
        self.reward = float(values["reward"])

    def task(self, seed: int, *, held_out: bool) -> Task:
        return Task(prompt=str(seed), key=str(held_out))

    def score(self, task: Task, answer: str) -> float:
        return self.reward


def test_an_installed_entry_point_is_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Here(EntryPoint):
        def load(self) -> Any:
            return Echo

    def installed(*, group: str, name: str) -> list[EntryPoint]:
        assert group == "barnraise.environments"
        return [Here(name, "somewhere:Echo", group)] if name == "echo" else []

    monkeypatch.setattr(environments, "entry_points", installed)
    assert build("echo", reward=0.25).score(Task(prompt="", key=""), "") == 0.25
    with pytest.raises(TaskError, match=r"somewhere:Echo.*no data file"):
        build("echo", broken=True)


def test_chain_sum_draws_the_same_task_on_both_sides_and_splits_by_question() -> None:
    here, there = (build("chain_sum", min_terms=2, max_terms=2) for _ in range(2))
    for seed in (0, 1, 2**63, 2**64 - 1):
        for held_out in (True, False):
            task = here.task(seed, held_out=held_out)
            assert task == there.task(seed, held_out=held_out)
            assert is_held_out(task.prompt) == held_out


def test_chain_sum_scores_the_answer_and_not_its_wrapping() -> None:
    environment = build("chain_sum", min_terms=2, max_terms=2, min_digits=2, max_digits=2)
    task = environment.task(3, held_out=False)
    question = task.prompt.split(":")[1].split("=")[0]
    answer = sum(int(term) for term in question.replace(" ", "").replace("-", "+-").split("+"))
    for text in (f"{answer}", f"The sum is {answer}.", f"1 + 1 = 2, so <answer> {answer} </answer> or 7"):
        assert environment.score(task, text) == 1.0
    for text in ("", "none", f"{answer + 1}", f"{answer} or 12345"):
        assert environment.score(task, text) < 1.0


def test_a_shotgun_of_numbers_earns_nothing() -> None:
    # The library's own scorer pays for any text that contains the reference answer.
    environment = build("chain_sum")
    task = environment.task(1, held_out=False)
    assert environment.score(task, " ".join(str(number) for number in range(20_000))) == 0.0


@pytest.mark.parametrize(
    ("text", "reference", "given"),
    [
        ("5 - 3 = 2", "2", "2"),
        ("x = -3", "3", "-3"),
        ("8-3", "3", "3"),
        ("1,234,567", "7", "1234567"),
        ("it is 3.50.", "3.5", "3.50"),
        ("\u22125", "1", "-5"),
        ("<answer>a</answer><ANSWER>b\n</ANSWER>", "c", "b"),
        ("  two words ", "word", "two words"),
        ("nothing", "5", None),
        ("", "5", None),
        ("x" * 5000, "word", None),
    ],
)
def test_answers_are_found_in_text(text: str, reference: str, given: str | None) -> None:
    assert extract_answer(text, reference) == given


@given(answer=st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_answer_makes_a_score_raise_or_leave_its_bounds(answer: str) -> None:
    for environment in ENVIRONMENTS:
        score = environment.score(environment.task(11, held_out=False), answer)
        assert 0.0 <= score <= 1.0


ENVIRONMENTS = [
    build("reverse"),
    build("reverse", partial=True),
    *(
        build(name)
        for name in ("chain_sum", "number_sorting", "propositional_logic", "gsm_symbolic", "sudoku")
    ),
]


def test_a_scorer_that_hangs_or_lies_is_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bad:
        def __init__(self, score: Any) -> None:
            self.score = score

        def score_answer(self, answer: str, entry: object) -> Any:
            if self.score == "hang":
                while True:
                    try:
                        time.sleep(10)
                    except Exception:
                        continue
            if self.score == "raise":
                raise RecursionError
            return self.score

    monkeypatch.setattr(tasks_gym, "SCORE_SECONDS", 0.05)
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    task = Task(prompt="", key='{"seed": 1}')
    for verdict, expected in [
        ("hang", 0),
        ("raise", 0),
        (float("nan"), 0),
        ("x", 0),
        (7, 1),
        (-1, 0),
        (0.5, 0.5),
    ]:
        gym = tasks_gym.Gym("bad", {}, "native", lambda _seed, v=verdict: (Bad(v), {"answer": "a"}))
        assert gym.score(task, "a") == expected
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(timer, abs=5)  # somebody else's, kept


def test_scorers_that_run_an_answer_as_code_are_refused() -> None:
    for name in ("spiral_matrix", "string_insertion", "binary_matrix", "n_queens", "countdown", "puzzle24"):
        with pytest.raises(TaskError, match="as code"):
            build(name)
    exact = build("spiral_matrix", scoring="exact")
    task = exact.task(5, held_out=False)
    assert exact.score(task, "__import__('os').abort()") == 0.0


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("word_ladder", {}, "different tasks"),
        ("chain_sum", {"seed": 5}, "seed"),
        ("chain_sum", {"no_such": 5}, "no_such"),
        ("chain_sum", {"min_terms": -5}, "settings"),
        ("chain_sum", {"scoring": "kind"}, "scoring"),
        ("chain_sum", {"reasoning_gym": "0.0.1"}, "pip install reasoning-gym==0.0.1"),
    ],
)
def test_wrong_generator_settings_are_refused(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        build(name, **values)


def test_tasks_do_not_depend_on_the_hash_seed_of_a_process() -> None:
    code = (
        "import json\n"
        "from barnraise.protocol.environments import build_environment\n"
        "from barnraise.protocol.spec import EnvironmentSpec\n"
        "for name in ('chain_sum', 'number_sorting', 'reverse'):\n"
        "    spec = EnvironmentSpec(name=name, settings='', prompt_format='plain', system_prompt='')\n"
        "    e = build_environment(spec)\n"
        "    print([e.task(s, held_out=s % 2 == 0).key for s in range(20)])\n"
        "    print([e.task(s, held_out=s % 2 == 0).prompt for s in range(20)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_settings_that_ask_for_more_than_anybody_has_are_refused_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks_gym, "DRAW_SECONDS", 1.0)
    settings = {"min_terms": 10**9, "max_terms": 10**9}
    with pytest.raises(TaskError, match=r"chain_sum.*(longer than 1 s|GB of memory)"):
        tasks_gym.build_gym("chain_sum", settings)
