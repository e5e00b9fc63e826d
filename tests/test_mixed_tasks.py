"""Mixtures, target lengths, and what the swarm measures of them."""

import json
from collections import Counter

import msgspec
import pytest
from spec_support import run_spec

from barnraise.coordinator.difficulty import DifficultyError, kept, measure
from barnraise.coordinator.events import LeaseIssued, SubmissionJudged, Submitted
from barnraise.coordinator.task_check import task_troubles
from barnraise.protocol import wire
from barnraise.protocol.environments import Task, TaskError, build_environment
from barnraise.protocol.messages import RolloutLease, Verdict
from barnraise.protocol.seeds import task_seed
from barnraise.protocol.spec import EnvironmentSpec, EvalSpec
from barnraise.protocol.tasks_mixed import shaped

REVERSE = {"name": "reverse", "settings": {"letters": 5}}
SUMS = {"name": "chain_sum", "settings": {"min_terms": 2, "max_terms": 2}, "weight": 3}


def spec(name: str, **settings) -> EnvironmentSpec:
    return EnvironmentSpec(name=name, settings=json.dumps(settings), prompt_format="plain", system_prompt="")


MIXTURE = spec("mixture", parts=[REVERSE, SUMS])


def test_a_mixture_draws_its_parts_by_weight_and_scores_with_the_parts_own_rules():
    mixture = build_environment(MIXTURE)
    tasks = [mixture.task(seed * 7919, held_out=False) for seed in range(400)]
    counts = Counter(json.loads(task.key)[0] for task in tasks)
    assert 60 < counts[0] < 140  # a quarter
    letters = next(task for task in tasks if json.loads(task.key)[0] == 0)
    assert mixture.score(letters, letters.prompt[1:-1][::-1]) == 1.0
    assert mixture.score(letters, "?") == 0.0
    assert tasks == [build_environment(MIXTURE).task(seed * 7919, held_out=False) for seed in range(400)]


def test_held_out_tasks_of_a_mixture_are_none_of_its_training_tasks_whatever_the_weights():
    trained, held = set(), set()
    for weight in (0.1, 1, 10):
        mixture = build_environment(spec("mixture", parts=[{**REVERSE, "weight": weight}, SUMS]))
        trained |= {mixture.task(seed, held_out=False).prompt for seed in range(200)}
        held |= {mixture.task(seed, held_out=True).prompt for seed in range(200)}
    assert not trained & held


def test_a_target_length_is_drawn_from_the_seed_and_costs_by_the_token():
    environment = build_environment(spec("length", of=REVERSE, targets=[8, 16], weight=0.01))
    tasks = [environment.task(seed * 31, held_out=False) for seed in range(40)]
    assert {task.target_tokens for task in tasks} == {8, 16}
    assert all(f"about {task.target_tokens} tokens" in task.prompt for task in tasks)
    task = tasks[0]
    assert shaped(task, 1.0, task.target_tokens) == 1.0
    assert shaped(task, 1.0, task.target_tokens + 5) == pytest.approx(0.95)
    assert shaped(task, 0.0, 500) == 0.0  # a reward never leaves [0, 1]
    assert shaped(Task(prompt="", key=""), 0.7, 500) == 0.7


def test_a_length_may_be_asked_of_a_mixture():
    environment = build_environment(
        spec("length", of={"name": "mixture", "settings": {"parts": [REVERSE]}}, targets=[8])
    )
    task = environment.task(3, held_out=False)
    letters = task.prompt.partition("=")[0][1:]
    assert environment.score(task, letters[::-1]) == 1.0


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("mixture", {}, "needs parts"),
        ("mixture", {"parts": []}, "needs parts"),
        ("mixture", {"parts": [REVERSE] * 65}, "1 to 64"),
        ("mixture", {"parts": [{"name": "absent_"}]}, "absent_"),
        ("mixture", {"parts": [{**REVERSE, "weight": 0}]}, "weight of part 1"),
        ("mixture", {"parts": [{**REVERSE, "share": 1}]}, "share"),
        ("mixture", {"parts": [7]}, "must be an object"),
        ("mixture", {"pieces": []}, "no setting 'pieces'"),
        ("length", {"of": REVERSE}, "needs targets"),
        ("length", {"of": REVERSE, "targets": [True]}, "needs targets"),
        ("length", {"targets": [8]}, "'of'"),
        ("length", {"of": REVERSE, "targets": [8], "weight": 2}, "at most 1"),
    ],
)
def test_settings_that_make_no_sense_are_named(name, settings, why):
    with pytest.raises(TaskError, match=why):
        build_environment(spec(name, **settings))


def test_environments_are_not_nested_without_end():
    inner = REVERSE
    for _ in range(5):
        inner = {"name": "mixture", "settings": {"parts": [inner]}}
    with pytest.raises(TaskError, match="deep"):
        build_environment(spec("mixture", parts=[inner]))


def test_a_held_out_environment_of_its_own_changes_no_spec_that_has_none():
    plain = EvalSpec(tasks=3, every=2)
    assert b"environment" not in wire.encode(plain)
    own = EvalSpec(tasks=3, every=2, environment=spec("reverse", letters=4))
    assert wire.decode(wire.encode(own), EvalSpec) == own


def history(solves: dict[int, float], units: int = 12):
    """Verified units of a mixture whose part n is solved with rate ``solves[n]``, exactly."""
    mixture, run = build_environment(MIXTURE), b"r" * 32
    for unit in range(units):
        lease = RolloutLease(
            run_id=run,
            lease_id=unit.to_bytes(16, "big"),
            unit_id=unit,
            node=b"n" * 32,
            policy_version=0,
            prompts=8,
            group_size=10,
            issued_at=1,
            timeout_at=2,
            deadline_at=3,
        )
        rewards = []
        for index in range(lease.prompts):
            rate = solves[mixture.part_of(task_seed(run, lease.lease_id, lease.node, index))]
            rewards += [float(sample < rate * 10) for sample in range(10)]
        done = unit.to_bytes(32, "big")
        yield LeaseIssued(lease=lease, instance=b"i" * 16)
        yield Submitted(submission_id=done, lease_id=lease.lease_id, size=1, at_ms=2)
        yield SubmissionJudged(
            submission_id=done,
            verdict=Verdict(accepted=True, check="all", threshold=0.0, value=0.0, position="", message=""),
            rewards=tuple(rewards),
            tokens=1,
            credit=1,
            blameless=False,
            at_ms=3,
        )


def measured(solves: dict[int, float], units: int = 12, of: EnvironmentSpec = MIXTURE):
    return measure(history(solves, units), run_spec(environment=of), b"r" * 32)


def test_the_swarm_measures_each_part_and_what_is_of_use_stays():
    parts = measured({0: 1.0, 1: 0.5})
    assert [round(part.rate, 6) for part in parts] == [1.0, 0.5]
    assert sum(part.prompts for part in parts) == 96
    left = build_environment(msgspec.structs.replace(kept(parts, MIXTURE), prompt_format="plain"))
    assert "reverse" not in kept(parts, MIXTURE).settings
    assert left.task(1, held_out=False).prompt


def test_a_mixture_of_which_lengths_are_asked_is_filtered_by_its_parts_and_keeps_its_lengths():
    inner = {"name": "mixture", "settings": {"parts": [REVERSE, SUMS]}}
    asked = spec("length", of=inner, targets=[8, 16], weight=0.001)
    parts = measured({0: 1.0, 1: 0.5}, of=asked)
    assert [part.name for part in parts] == ["reverse", "chain_sum"]
    left = kept(parts, asked)
    assert left.name == "length"
    assert json.loads(left.settings) == {
        "of": {"name": "mixture", "settings": {"parts": [{**SUMS, "weight": 3.0}]}},
        "targets": [8, 16],
        "weight": 0.001,
    }
    assert build_environment(left).task(1, held_out=False).target_tokens in (8, 16)


@pytest.mark.parametrize(
    ("environment", "held_out", "said"),
    [
        (MIXTURE, None, []),
        (MIXTURE, spec("absent_"), ["[held_out] "]),
        (spec("mixture", parts=[]), spec("absent_"), ["[environment] ", "[held_out] "]),
        (spec("length", of=REVERSE, targets=[4, 8]), None, []),
        (spec("length", of=REVERSE, targets=[4, 9]), None, ["[environment] asks for answers of 9 tokens"]),
        (
            spec("mixture", parts=[{"name": "length", "settings": {"of": REVERSE, "targets": [99]}}]),
            MIXTURE,
            ["[environment] asks for answers of 99 tokens"],
        ),
    ],
    ids=["good", "no held-out", "neither", "short", "too long", "too long within"],
)
def test_tasks_that_will_not_do_are_named_before_a_run_is_made(environment, held_out, said):
    found = task_troubles(environment, held_out, 8)
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


def test_a_filter_says_what_is_missing():
    with pytest.raises(DifficultyError, match="wanted"):
        kept(measured({0: 0.5, 1: 0.5}, units=1), MIXTURE)
    with pytest.raises(DifficultyError, match="harder or easier"):
        kept(measured({0: 1.0, 1: 0.0}), MIXTURE)
