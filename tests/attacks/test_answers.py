"""Answers made for the parser and not for the task: none is paid, none takes long, none ends the process."""

from __future__ import annotations

import json

import pytest

from barnraise.coordinator.scoring_child import guarded
from barnraise.protocol.environments import Environment, TaskError, build_environment
from barnraise.protocol.spec import EnvironmentSpec
from barnraise.protocol.tasks_gym import MAX_TEXT, extract_answer

MANY = " ".join(str(number) for number in range(-300, 3000))
HOSTILE = {
    "nothing": "",
    "spaces": " \n\t ",
    "every number": MANY,
    "every number in one tag": f"<answer>{MANY}</answer>",
    "tags that never close": "<answer>" * (MAX_TEXT // 8),
    "tags that only close": "</answer>" * (MAX_TEXT // 9),
    "opened often, closed once": "<answer>" * (MAX_TEXT // 10) + "</answer>",
    "nested": "<answer>" * 500 + "x" + "</answer>" * 500,
    "half a tag, again and again": "<answer" * (MAX_TEXT // 7),
    "a huge number": "9" * 4000,
    "a number longer than an answer may be": "9" * 100_000,
    "a tower": "9**9**9**9",
    "an exponent": "1e999999999",
    "not a number": "nan",
    "infinity": "<answer>inf</answer>",
    "minus nothing": "-0",
    "superscripts": "\u00b2\u00b3\u00b9",
    "fractions": "\u00bd\u2153",
    "roman": "\u2164\u216b",
    "combining marks": "1\u0301\u0302" * 1000,
    "right to left": "\u202e123\u202c",
    "lone surrogates": "\ud800\udfff",
    "null bytes": "\0" * 5000,
    "a sympy bomb": "<answer>factorial(factorial(20))</answer>",
    "a lambda": "(lambda f: f(f))(lambda f: f(f))",
    "an import": "__import__('os').abort()",
    "brackets": "[" * 4000,
    "parentheses": "(" * 4000,
    "commas": "1," * 2000,
    "commas alone": "," * 4096,
    "points": "1." * 2000,
    "minus signs": "-" * 4096,
    "a backtracker": "a" * 4000 + "!",
    "lines": "\n" * 4096,
    "every word for yes and no": "yes no true false True False 0 1 on off None undetermined",
    "json": '{"a": ' * 600,
}
NAMES = (
    "reverse",
    "chain_sum",
    "basic_arithmetic",
    "decimal_chain_sum",
    "bitwise_arithmetic",
    "products",
    "fraction_simplification",
    "number_sorting",
    "number_filtering",
    "time_intervals",
    "base_conversion",
    "spell_backward",
    "caesar_cipher",
    "knights_knaves",
    "propositional_logic",
    "sudoku",
    "maze",
    "gsm_symbolic",
)


def _build(name: str, **settings: object) -> Environment:
    text = json.dumps(settings)
    return build_environment(
        EnvironmentSpec(name=name, settings=text, prompt_format="plain", system_prompt="")
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_that_fits_every_task_is_paid_for(name: str) -> None:
    environment = _build(name)
    # The best of one fixed answer over several tasks: luck with one of them is no hack.
    best: dict[str, float] = dict.fromkeys(HOSTILE, 1.0)
    for seed in (2, 3, 5, 7):
        task = environment.task(seed, held_out=False)
        for kind, answer in HOSTILE.items():
            scored = guarded(environment, task, answer)
            assert not scored.fault, (kind, scored.fault)
            best[kind] = min(best[kind], scored.reward)
    assert all(reward < 0.5 for reward in best.values()), best


@pytest.mark.parametrize("name", ["complex_arithmetic", "game_of_life_halting", "coin_flip"])
def test_scorers_that_pay_for_no_work_are_refused_unless_exact(name: str) -> None:
    with pytest.raises(TaskError, match="exact"):
        _build(name)
    environment = _build(name, scoring="exact")
    task = environment.task(1, held_out=False)
    assert [environment.score(task, answer) for answer in ("nan", "0", "x", MANY)] == [0.0] * 4


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("<answer><answer>1</answer></answer>", "1"),
        ("<answer>1</answer> </answer>", "1"),
        ("<answer>1</answer><answer>2", "1"),
        ("</answer>3<answer>4</ANSWER>", "4"),
        ("</answer> 5", "5"),
        ("<answer>6", "6"),
    ],
)
def test_the_last_closed_tag_counts(text: str, given: str) -> None:
    assert extract_answer(text, "0") == given
