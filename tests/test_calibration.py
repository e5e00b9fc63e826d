"""Bounds measured on a run's own model: exact where they can be, roomy, and never too tight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.stage import Stage
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from barnraise.coordinator import calibration, presets
from barnraise.coordinator.calibration import Observed, compare, measured_verify_spec, with_room
from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.draw_checks import sum_limit, token_limit
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.workers import VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.demo_model import create_demo_model
from barnraise.kernels.models import ModelError, load_policy, save_weights
from barnraise.kernels.sampling import draw, margins
from barnraise.node.engine import Work
from barnraise.node.torch_engine import Generator
from barnraise.protocol.messages import RolloutLease, RolloutSubmission
from barnraise.protocol.spec import Dtype, Noise, RunSpec, VerifySpec
from barnraise.protocol.wire import encode

GENERAL = default_verify_spec()


class _Logits:
    """An engine whose states are its logits."""

    @staticmethod
    def logits(states: torch.Tensor) -> torch.Tensor:
        return states


def _pair(noise: float, temperature: float = 1.0, rows: int = 40, vocabulary: int = 50) -> Any:
    torch.manual_seed(1)
    mine = 3 * torch.randn(rows, vocabulary)
    engine: Any = _Logits()
    return compare((engine, mine), (engine, mine + noise * torch.randn_like(mine)), temperature)


def test_the_margins_of_real_draws_are_what_the_closed_form_says() -> None:
    torch.manual_seed(0)
    mine = 2 * torch.randn(1, 12)
    theirs = mine + 0.3 * torch.randn(1, 12)
    engine: Any = _Logits()
    pair = compare((engine, mine), (engine, theirs), 1.0)
    tails = calibration._margin_tails(mine.double().log_softmax(-1), theirs.double().log_softmax(-1))[0]
    count = 40_000
    seeds, positions = list(range(count)), torch.zeros(count, dtype=torch.int64)
    tokens, claimed = draw(mine.expand(count, -1), seeds, positions, 1.0)
    seen, ours = margins(theirs.expand(count, -1), tokens, seeds, positions, 1.0)
    for rung in (0, 20, 28, 32):
        exact = float(tails[rung])
        share = float((seen > float(calibration._RUNGS[rung]) + 1e-6).double().mean())
        assert share == pytest.approx(exact, abs=5 * math.sqrt(exact / count) + 1e-4)
    assert float((claimed - ours).mean()) == pytest.approx(pair.bias, abs=0.01)
    assert pair.margins.fit().noise.mean == pytest.approx(float(seen.mean()), rel=0.25)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(1e-6, 1)), min_size=1, max_size=30))
def test_a_fit_bounds_what_it_was_fitted_to(points: list[tuple[float, float]]) -> None:
    seen = Observed()
    values = torch.tensor([[value for value, _ in points]], dtype=torch.float64)
    weights = torch.tensor([[weight for _, weight in points]], dtype=torch.float64)
    weights /= weights.sum()
    seen.add(values.expand(50, -1), weights.expand(50, -1))
    noise = seen.fit().noise
    for share in (0.05, 0.3, 0.6, 0.9):
        rate = share / noise.scale
        exact = float(torch.logsumexp(weights.log() + rate * (values - noise.mean), 1))
        # Between two rates of the fit the bound may be short by a little.
        assert exact <= 1.1 * noise.variance * rate**2 / (2 * (1 - share)) + 1e-9


def test_honest_work_breaks_the_limits_of_its_own_fit_as_seldom_as_promised() -> None:
    pair = _pair(0.05)
    for seen in (pair.margins, pair.errors):
        for tokens in (16, 512, 8192):
            assert seen.chance(seen.fit().noise, tokens, 1e-7, 1.0) <= 2e-7
    assert pair.errors.chance(Noise(mean=1e-4, variance=1e-6, scale=1e-3), 512, 1e-7, 1.0) == 1.0


def test_a_quiet_machine_does_not_make_the_bounds_too_tight() -> None:
    verify = with_room([_pair(0.0)], 1.0, GENERAL)
    assert verify.draws.mean >= calibration.FLOOR_DRAWS.mean
    assert verify.logprobs.variance >= calibration.FLOOR_LOGPROBS.variance
    assert verify.bias >= calibration.FLOOR_BIAS
    assert (verify.draws.scale, verify.logprobs.scale) == (GENERAL.draws.scale, GENERAL.logprobs.scale)
    for tokens in (64, 4096):
        assert sum_limit(verify.draws, tokens, 1e-7, 1.0) < sum_limit(GENERAL.draws, tokens, 1e-7, 1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_noisy_model_gets_the_room_that_its_honest_engines_need(temperature: float) -> None:
    pair = _pair(0.5, temperature)
    assert pair.errors.chance(GENERAL.logprobs, 512, 1e-7, temperature) > 1e-3
    verify = with_room([_pair(0.01, temperature), pair], temperature, GENERAL)
    for tokens in (64, 4096):
        assert pair.margins.chance(verify.draws, tokens, 1e-7, temperature) < 1e-7
        assert pair.errors.chance(verify.logprobs, tokens, 1e-7, temperature) < 1e-7
    assert token_limit(verify.draws, 64, 1e-7, 1.0) > token_limit(GENERAL.draws, 64, 1e-7, 1.0)


# --- the demo model, whole submissions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "demo"
    create_demo_model(folder, 0)
    return folder


@pytest.fixture(scope="module")
def measured(model: Path) -> VerifySpec:
    run = presets.demo()
    verify, whence = measured_verify_spec(model, run.environment, run.sampling, run.compute_dtype)
    assert "measured on this model" in whence
    return verify


@pytest.fixture(scope="module")
def stage(measured: VerifySpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("stage") / "run", verify=measured)
    yield made
    made.judge.close()


def test_bounds_measured_on_the_demo_model_are_tighter_and_hold_for_both_dtypes(measured: VerifySpec) -> None:
    for own, general, tighter in (
        (measured.draws, GENERAL.draws, 1.0),
        (measured.logprobs, GENERAL.logprobs, 1.4),
    ):
        ratio = sum_limit(general, 400, 1e-7, 1.0) / sum_limit(own, 400, 1e-7, 1.0)
        assert ratio > tighter
        # One token of a policy in training may be as noisy as anybody's.
        assert own.scale >= general.scale
    assert measured.toploc_top_k == GENERAL.toploc_top_k


def _spec(stage: Stage, dtype: Dtype) -> RunSpec:
    return structs.replace(stage.spec, model=structs.replace(stage.spec.model, compute_dtype=dtype))


def _work(lease: RolloutLease) -> Work:
    return Work(
        run_id=lease.run_id,
        lease_id=lease.lease_id,
        node=lease.node,
        policy_version=lease.policy_version,
        prompts=lease.prompts,
        group_size=lease.group_size,
        shrink=0,
    )


@pytest.mark.parametrize(
    ("engine", "verifier"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")],
)
def test_whole_submissions_of_the_nodes_engine_pass_whatever_the_verifier_computes_in(
    stage: Stage, engine: Dtype, verifier: Dtype
) -> None:
    generator = Generator("cpu")
    generator.load(_spec(stage, engine), checkpoint_folder(stage.folder, stage.head), stage.head)
    judge = Judge(
        WorkerSetup(spec=_spec(stage, verifier), run_id=stage.run_id, folder=str(stage.folder), threads=1)
    )
    jobs = []
    for number in range(4):
        lease = stage.lend(stage.join(f"{engine} {verifier} {number}"))
        generated = generator.generate(_work(lease), lambda event: None, lambda: False)
        submission = RolloutSubmission(
            run_id=lease.run_id,
            lease_id=lease.lease_id,
            policy_version=lease.policy_version,
            engine="torch",
            generate_ms=1,
            rollouts=generated.rollouts,
        )
        jobs.append(VerifyJob(submission_id=bytes(32), lease=lease, payload=encode(submission)))
    verdicts = [judged.verdict for judged in judge.judge(jobs)]
    judge.close()
    assert [verdict.check for verdict in verdicts] == ["all"] * 4


def test_without_time_to_measure_the_general_bounds_are_used(model: Path) -> None:
    run = presets.demo()
    verify, whence = measured_verify_spec(
        model, run.environment, run.sampling, run.compute_dtype, patience_s=0.0
    )
    assert verify == GENERAL
    assert "more than" in whence


def test_with_truncation_the_bounds_on_draws_are_at_least_the_general_ones(model: Path) -> None:
    run = presets.demo()
    sampling = structs.replace(run.sampling, top_p=0.9)
    verify, _ = measured_verify_spec(model, run.environment, sampling, run.compute_dtype)
    assert verify.draws == GENERAL.draws
    assert verify.logprobs.mean < GENERAL.logprobs.mean


def test_a_model_that_computes_no_numbers_is_named_before_a_run_is_made(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    policy = load_policy(model)
    next(policy.base.parameters()).data.fill_(math.inf)
    save_weights(policy.model, broken / "model.safetensors", "float32")
    run = presets.demo()
    with pytest.raises(ModelError, match="not finite"):
        measured_verify_spec(broken, run.environment, run.sampling, run.compute_dtype)
