"""The verifier on real completions of a small model: honest work passes, every cheat is named."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from spec_support import run_spec
from torch import Tensor

from barnraise.coordinator import held_policies, measuring
from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.verifier import Judge, LocalVerifier
from barnraise.coordinator.verifier_child import ChildVerifier
from barnraise.coordinator.workers import Judged, VerifyJob, WorkerSetup, checkpoint_folder
from barnraise.kernels.generate import Completion, generate
from barnraise.kernels.models import Policy, load_policy, save_weights
from barnraise.kernels.tokens import Codec
from barnraise.kernels.toploc import build_proofs
from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import BarnraiseError, ChildError
from barnraise.protocol.log_lines import read_line
from barnraise.protocol.messages import Rollout, RolloutLease, RolloutSubmission
from barnraise.protocol.seeds import sample_seed, task_seed
from barnraise.protocol.spec import (
    RunSpec,
    SamplingSpec,
)
from barnraise.protocol.wire import encode

RUN_ID, NODE = bytes(range(32)), bytes([9]) * 32
SYMBOLS = ["<eos>", "r", "=", *"abcdefghijklmnopqstuvwxyz"]
PROMPTS, GROUP = 2, 4

SPEC = run_spec(
    model__parameters=50_000,
    model__vocabulary=len(SYMBOLS),
    environment__settings='{"letters": 5, "alphabet": 8}',
    sampling__max_new_tokens=40,
    rollout__prompts_per_unit=PROMPTS,
    rollout__group_size=GROUP,
    rollout__max_lag=1,
    verify=default_verify_spec(),
)


def _make_version(folder: Path, seed: int) -> None:
    """A random Qwen3 model with peaked predictions, and a tokenizer of one symbol per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True)
    values: dict[str, Any] = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**values))
    model.config.save_pretrained(folder)
    save_weights(model, folder / "model.safetensors", "float32")
    vocabulary = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def _next_version(folder: Path, source: int, version: int, noise: float) -> None:
    """A version whose weights differ a little from those of ``source``."""
    policy = load_policy(checkpoint_folder(folder, source))
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    target = checkpoint_folder(folder, version)
    target.mkdir()
    for file in checkpoint_folder(folder, source).iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    save_weights(policy.model, target / "model.safetensors", "float32")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    _make_version(checkpoint_folder(folder, 0), seed=1)
    _next_version(folder, 0, 1, noise=0.0003)
    _next_version(folder, 1, 2, noise=0.0003)
    return folder


@pytest.fixture(scope="module")
def setup(run_folder: Path) -> WorkerSetup:
    return WorkerSetup(spec=SPEC, run_id=RUN_ID, folder=str(run_folder), threads=1)


def _lease(number: int, version: int = 0) -> RolloutLease:
    return RolloutLease(
        run_id=RUN_ID,
        lease_id=number.to_bytes(16, "big"),
        unit_id=number,
        node=NODE,
        policy_version=version,
        prompts=PROMPTS,
        group_size=GROUP,
        issued_at=0,
        timeout_at=1,
        deadline_at=2,
    )


def _draw(
    setup: WorkerSetup,
    lease: RolloutLease,
    *,
    spec: RunSpec | None = None,
    change: Callable[[Policy], None] = lambda policy: None,
    seed_of: Callable[[int, int], int] | None = None,
    node: bytes = NODE,
    max_batch: int = 256,
    dtype: str = "float32",
    version: int | None = None,
) -> list[Completion]:
    """What a node draws for a lease; every argument is something that a cheat could change."""
    spec = setup.spec if spec is None else spec
    folder = checkpoint_folder(Path(setup.folder), lease.policy_version if version is None else version)
    policy = load_policy(folder, dtype)
    change(policy)
    codec, environment = Codec(folder, spec.environment), build_environment(spec.environment)
    prompts, seeds = [], []
    for prompt in range(lease.prompts):
        seed = task_seed(RUN_ID, lease.lease_id, node, prompt)
        tokens = codec.encode_prompt(environment.task(seed, held_out=False).prompt)
        for sample in range(lease.group_size):
            prompts.append(tokens)
            seeds.append(
                sample_seed(RUN_ID, lease.lease_id, prompt, sample)
                if seed_of is None
                else seed_of(prompt, sample)
            )
    return generate(policy, prompts, seeds, spec.sampling, spec.model.eos_token, max_batch=max_batch)


def _rollouts(completions: list[Completion]) -> list[Rollout]:
    proofs = build_proofs([completion.states for completion in completions])
    return [
        Rollout(
            prompt=number // GROUP,
            sample=number % GROUP,
            tokens=np.array(completion.tokens, dtype="<u4").tobytes(),
            logprobs=np.array(completion.logprobs, dtype="<f4").tobytes(),
            proofs=proof,
        )
        for number, (completion, proof) in enumerate(zip(completions, proofs, strict=True))
    ]


def _job(lease: RolloutLease, rollouts: list[Rollout], **changes: Any) -> VerifyJob:
    submission = RolloutSubmission(
        run_id=RUN_ID,
        lease_id=lease.lease_id,
        policy_version=lease.policy_version,
        engine="test",
        generate_ms=1,
        rollouts=tuple(rollouts),
    )
    payload = encode(structs.replace(submission, **changes))
    return VerifyJob(submission_id=lease.lease_id * 2, lease=lease, payload=payload)


def _honest(setup: WorkerSetup, number: int, version: int = 0, **options: Any) -> VerifyJob:
    lease = _lease(number, version)
    return _job(lease, _rollouts(_draw(setup, lease, **options)))


def _check(setup: WorkerSetup, job: VerifyJob) -> str:
    (result,) = Judge(setup).judge([job])
    assert (result.rewards == ()) == (not result.verdict.accepted)
    return result.verdict.check


# --- honest work


@pytest.mark.parametrize("max_batch", [1, 3, 256])
def test_honest_work_passes_whatever_batch_it_was_drawn_in(setup: WorkerSetup, max_batch: int) -> None:
    job = _honest(setup, 1, max_batch=max_batch)
    (result,) = Judge(setup).judge([job])
    assert result.verdict.accepted, result.verdict
    assert len(result.rewards) == PROMPTS * GROUP
    assert result.tokens == result.verdict.value > PROMPTS * GROUP


@pytest.mark.parametrize(("top_k", "top_p", "temperature"), [(5, 1.0, 1.0), (0, 0.7, 1.3), (8, 0.9, 0.6)])
def test_honest_work_passes_with_truncated_sampling(
    setup: WorkerSetup, top_k: int, top_p: float, temperature: float
) -> None:
    sampling = SamplingSpec(temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=40)
    setup = structs.replace(setup, spec=structs.replace(SPEC, sampling=sampling))
    for number in range(3):
        assert _check(setup, _honest(setup, number, max_batch=3)) == "all"


def test_bfloat16_engines_pass_the_thresholds_for_bfloat16(setup: WorkerSetup) -> None:
    spec = structs.replace(
        SPEC,
        model=structs.replace(SPEC.model, compute_dtype="bfloat16"),
        verify=default_verify_spec("bfloat16"),
        sampling=structs.replace(SPEC.sampling, max_new_tokens=16),
    )
    setup = structs.replace(setup, spec=spec)
    for number in range(4):
        assert _check(setup, _honest(setup, number, dtype="bfloat16", max_batch=3)) == "all"


def test_the_reward_is_computed_here_from_the_tokens(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(setup)
    seen: list[tuple[str, str]] = []

    class Environment:
        def task(self, seed: int, *, held_out: bool) -> Any:
            return build_environment(SPEC.environment).task(seed, held_out=held_out)

        def score(self, task: Any, answer: str) -> float:
            seen.append((task.prompt, answer))
            return len(seen) / 10

    monkeypatch.setattr(judge, "_environment", Environment())
    (result,) = judge.judge([_honest(setup, 2)])
    assert result.rewards == tuple((i + 1) / 10 for i in range(PROMPTS * GROUP))
    assert len({prompt for prompt, _ in seen}) == PROMPTS
    assert all("<eos>" not in answer for _, answer in seen)


def test_many_jobs_of_several_versions_are_judged_in_one_batch(setup: WorkerSetup) -> None:
    good = [_honest(setup, number, version=number % 3) for number in range(5)]
    broken = VerifyJob(submission_id=bytes(32), lease=_lease(77), payload=b"\xc1 not a message")
    stale = _job(_lease(80, 2), _rollouts(_draw(setup, _lease(80, 2), version=0)))
    jobs = [good[0], broken, good[1], good[2], stale, good[3], good[4]]
    results = Judge(setup).judge(jobs)
    assert [result.submission_id for result in results] == [job.submission_id for job in jobs]
    assert [result.verdict.accepted for result in results] == [True, False, True, True, False, True, True]
    assert [result.rewards for result in Judge(setup).judge([good[1]])] == [results[2].rewards]


# --- cheats that need a model to be found


def _quantised(policy: Policy) -> None:
    """Weights in 5 bits, one scale per matrix; 8 differ by no more than honest bfloat16 may."""
    for parameter in policy.model.parameters():
        if parameter.ndim == 2:
            scale = parameter.detach().abs().max() / 15
            parameter.data = (parameter.data / scale).round() * scale


def _other_model(policy: Policy) -> None:
    for parameter in policy.model.parameters():
        parameter.data = parameter.data + 0.05 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(5)
        )


def test_another_model_fails_toploc(setup: WorkerSetup) -> None:
    lease = _lease(10)
    assert _check(setup, _job(lease, _rollouts(_draw(setup, lease, change=_other_model)))).startswith(
        "toploc-"
    )


def test_quantised_weights_are_found(setup: WorkerSetup) -> None:
    lease = _lease(11)
    check = _check(setup, _job(lease, _rollouts(_draw(setup, lease, change=_quantised))))
    assert check.startswith(("toploc-", "sampling-"))


def test_weights_of_the_version_before_are_found_though_toploc_is_blind_to_them(setup: WorkerSetup) -> None:
    lease = _lease(12, version=1)
    (result,) = Judge(setup).judge([_job(lease, _rollouts(_draw(setup, lease, version=0)))])
    assert result.verdict.check == "stale-weights"


def test_an_easier_prompt_is_found(setup: WorkerSetup) -> None:
    lease = _lease(13)
    assert _check(setup, _job(lease, _rollouts(_draw(setup, lease, node=bytes(32))))).startswith("toploc-")


def test_samples_drawn_with_other_noise_are_found(setup: WorkerSetup) -> None:
    lease = _lease(14)
    job = _job(lease, _rollouts(_draw(setup, lease, seed_of=lambda prompt, sample: prompt + sample)))
    assert _check(setup, job) == "sampling-margin"


def test_one_rollout_handed_in_for_a_whole_group_is_found(setup: WorkerSetup) -> None:
    lease = _lease(15)
    job = _job(
        lease,
        _rollouts(
            _draw(setup, lease, seed_of=lambda prompt, sample: sample_seed(RUN_ID, lease.lease_id, prompt, 0))
        ),
    )
    assert _check(setup, job) == "sampling-margin"


def test_another_temperature_is_found(setup: WorkerSetup) -> None:
    lease = _lease(16)
    spec = structs.replace(SPEC, sampling=structs.replace(SPEC.sampling, temperature=0.7))
    # Which of the two limits it passes first is a matter of the lease's draws.
    assert _check(setup, _job(lease, _rollouts(_draw(setup, lease, spec=spec)))) in (
        "sampling-margin",
        "sampling-mean",
    )


def _recomputed(setup: WorkerSetup, lease: RolloutLease, tokens: list[list[int]]) -> list[Completion]:
    """Valid proofs and log-probabilities for tokens that were chosen, not drawn."""
    from barnraise.kernels.prefill import prefill

    folder = checkpoint_folder(Path(setup.folder), lease.policy_version)
    policy, codec = load_policy(folder), Codec(folder, SPEC.environment)
    environment = build_environment(SPEC.environment)
    prompts = [
        codec.encode_prompt(
            environment.task(task_seed(RUN_ID, lease.lease_id, NODE, prompt), held_out=False).prompt
        )
        for prompt in range(PROMPTS)
        for _ in range(GROUP)
    ]
    states: list[Tensor] = prefill(policy, prompts, tokens)
    result = []
    for own, state in zip(tokens, states, strict=True):
        logprobs = policy.logits(state).log_softmax(-1).gather(1, torch.tensor(own)[:, None]).squeeze(1)
        result.append(Completion(own, logprobs.tolist(), state))
    return result


def test_an_end_appended_early_is_found_though_its_proofs_are_valid(setup: WorkerSetup) -> None:
    lease = _lease(17)
    honest = [completion.tokens for completion in _draw(setup, lease)]
    victim = max(range(len(honest)), key=lambda i: len(honest[i]))
    tokens = [list(row) for row in honest]
    tokens[victim] = [*honest[victim][:2], 0]
    (result,) = Judge(setup).judge([_job(lease, _rollouts(_recomputed(setup, lease, tokens)))])
    assert result.verdict.check == "sampling-margin"
    assert result.verdict.position == f"rollout {victim} token 2"


def test_a_single_better_token_is_found_though_its_proofs_are_valid(setup: WorkerSetup) -> None:
    lease = _lease(18)
    tokens = [list(completion.tokens) for completion in _draw(setup, lease)]
    victim = next(i for i, row in enumerate(tokens) if len(row) > 3)
    tokens[victim][1] = 3 if tokens[victim][1] != 3 else 4
    (result,) = Judge(setup).judge([_job(lease, _rollouts(_recomputed(setup, lease, tokens)))])
    assert result.verdict.check == "sampling-margin"
    assert result.verdict.position == f"rollout {victim} token 1"


def test_forged_log_probabilities_are_found(setup: WorkerSetup) -> None:
    lease = _lease(19)
    rollouts = _rollouts(_draw(setup, lease))
    slightly = [
        structs.replace(r, logprobs=(np.frombuffer(r.logprobs, "<f4") - np.float32(0.01)).tobytes())
        for r in rollouts
    ]
    assert _check(setup, _job(lease, slightly)) == "logprob-bias"
    one = np.frombuffer(rollouts[3].logprobs, "<f4").copy()
    one[0] -= 4
    rollouts[3] = structs.replace(rollouts[3], logprobs=one.tobytes())
    (result,) = Judge(setup).judge([_job(lease, rollouts)])
    assert (result.verdict.check, result.verdict.position) == ("logprob-max", "rollout 3 token 0")


# --- malformations


def _edit(rollouts: list[Rollout], number: int, **changes: bytes) -> list[Rollout]:
    return [structs.replace(r, **changes) if i == number else r for i, r in enumerate(rollouts)]


@pytest.mark.parametrize(
    ("check", "edit"),
    [
        ("rollout-count", lambda r: r[:-1]),
        ("rollout-order", lambda r: [*r[:-1], r[0]]),
        ("empty-completion", lambda r: _edit(r, 2, tokens=b"", logprobs=b"", proofs=b"")),
        ("completion-length", lambda r: _edit(r, 2, tokens=bytes([5, 0, 0, 0]) * 41)),
        ("vocabulary", lambda r: _edit(r, 2, tokens=b"\xff\xff\0\0" + r[2].tokens[4:])),
        ("logprob-range", lambda r: _edit(r, 2, logprobs=b"\0\0\xc0\x7f" + r[2].logprobs[4:])),
        ("logprob-range", lambda r: _edit(r, 2, logprobs=b"\0\0\x80\xff" + r[2].logprobs[4:])),
        ("proof-length", lambda r: _edit(r, 2, proofs=r[2].proofs[:-2])),
        ("proof-length", lambda r: _edit(r, 2, proofs=b"")),
        ("proof-format", lambda r: _edit(r, 2, proofs=b"\0\0" + r[2].proofs[2:])),
        ("proof-format", lambda r: _edit(r, 2, proofs=r[2].proofs[:2] + b"\xff\xff" + r[2].proofs[4:])),
        ("toploc-exponents", lambda r: _edit(r, 2, proofs=r[2].proofs[:2] + bytes(len(r[2].proofs) - 2))),
    ],
)
def test_a_malformed_submission_gets_a_verdict_that_names_the_check(
    setup: WorkerSetup, check: str, edit: Callable[[list[Rollout]], list[Rollout]]
) -> None:
    lease = _lease(30)
    setup = structs.replace(
        setup, spec=structs.replace(SPEC, sampling=structs.replace(SPEC.sampling, max_new_tokens=40))
    )
    rollouts = _long_proofs(setup, lease)
    assert _check(setup, _job(lease, rollouts)) == "all"
    assert _check(setup, _job(lease, edit(rollouts))) == check


_cache: dict[bytes, list[Rollout]] = {}


def _long_proofs(setup: WorkerSetup, lease: RolloutLease) -> list[Rollout]:
    if lease.lease_id not in _cache:
        _cache[lease.lease_id] = _rollouts(_draw(setup, lease))
    return list(_cache[lease.lease_id])


def test_what_makes_the_verifier_itself_fail_costs_that_submission_alone(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [_honest(setup, number) for number in (40, 41, 42)]
    judge = Judge(setup)
    conclude = judge._conclude

    def fragile(case: Any) -> Judged:
        if case.job is jobs[1]:
            raise ZeroDivisionError("a mistake of ours")
        return conclude(case)

    monkeypatch.setattr(judge, "_conclude", fragile)
    results = judge.judge(jobs)
    assert [result.verdict.check for result in results] == ["all", "verifier-error", "all"]
    assert "a mistake of ours" in results[1].verdict.message


def test_a_scorer_that_fails_costs_a_reward_and_no_verdict(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = _honest(setup, 43)
    judge = Judge(setup)
    real = build_environment(SPEC.environment)
    poison = real.task(task_seed(RUN_ID, job.lease.lease_id, NODE, 1), held_out=False)

    class Fragile:
        def task(self, seed: int, *, held_out: bool) -> Any:
            return real.task(seed, held_out=held_out)

        def score(self, task: Any, answer: str) -> float:
            return 1 / 0 if task == poison else 1.0

    monkeypatch.setattr(judge, "_environment", Fragile())
    (result,) = judge.judge([job])
    assert result.verdict.accepted
    assert result.rewards == (1.0,) * GROUP + (0.0,) * GROUP
    assert poison.key in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_version_that_is_gone_is_nobodys_fault(setup: WorkerSetup) -> None:
    good = _honest(setup, 50)
    lost = structs.replace(good, lease=structs.replace(good.lease, policy_version=9))
    lost = _job(lost.lease, _rollouts(_draw(setup, _lease(50))))
    results = Judge(setup).judge([lost, good])
    assert [result.verdict.check for result in results] == ["unverifiable", "all"]


def test_damaged_weights_are_an_error_of_the_run_and_no_verdict(setup: WorkerSetup, tmp_path: Path) -> None:
    _make_version(checkpoint_folder(tmp_path, 0), seed=1)
    broken = structs.replace(setup, folder=str(tmp_path))
    job = _honest(setup, 51)
    assert _check(broken, job) == "all"
    (checkpoint_folder(tmp_path, 0) / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(BarnraiseError, match="safetensors"):
        Judge(broken).judge([job])


def test_recent_versions_stay_in_memory_and_old_ones_make_room(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [_honest(setup, 60 + version, version=version) for version in range(3)]
    monkeypatch.setattr(held_policies, "_POLICY_BYTES", 1)
    judge = Judge(setup)
    assert all(result.verdict.accepted for result in judge.judge([*jobs, *jobs]))
    assert len(judge._policies) == 1
    for job in jobs[::-1]:
        assert judge.judge([job])[0].verdict.accepted


def test_slices_do_not_change_the_verdict(setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [_honest(setup, number) for number in (70, 71)]
    lease = _lease(72)
    bad = _job(lease, _rollouts(_draw(setup, lease, change=_other_model)))
    whole = Judge(setup).judge([good[0], bad, good[1]])
    monkeypatch.setattr(measuring, "_SLICE_TOKENS", 7)
    monkeypatch.setattr(measuring, "_LOGIT_ELEMENTS", 100)
    cut = Judge(setup).judge([good[0], bad, good[1]])
    assert [(r.verdict.check, r.rewards) for r in cut] == [(r.verdict.check, r.rewards) for r in whole]


# --- the seam, in process and in a child


async def test_the_child_gives_the_same_verdicts_and_is_replaced_when_it_dies(
    setup: WorkerSetup, tmp_path: Path
) -> None:
    jobs = (_honest(setup, 90), _honest(setup, 91, version=1))
    jobs += (structs.replace(jobs[0], payload=jobs[0].payload[:-3]),)
    local = LocalVerifier(setup)
    expected = await local.verify(jobs)
    await local.close()
    child = ChildVerifier(setup, tmp_path / "verifier.log")
    try:
        assert _brief(await child.verify(jobs)) == _brief(expected)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert _brief(await child.verify(jobs)) == _brief(expected)
        assert child.pid not in (None, first)
    finally:
        await child.close()
        await child.close()
    assert child.pid is None
    told = [read_line(line) for line in (tmp_path / "verifier.log").read_bytes().splitlines()]
    of_it = [line for line in told if line and line.unit == jobs[0].lease.lease_id.hex()[:16]]
    assert {line.role for line in of_it} == {"verifier"}
    assert {line.message.split(" (")[0] for line in of_it} >= {"accepted"}
    assert len({line.pid for line in of_it}) == 2


async def test_a_child_that_cannot_be_set_up_says_why(setup: WorkerSetup, tmp_path: Path) -> None:
    child = ChildVerifier(structs.replace(setup, folder=str(tmp_path)), tmp_path / "verifier.log")
    with pytest.raises(ChildError, match=r"tokenizer\.json is missing"):
        await child.verify((_honest(setup, 92),))
    await child.close()


def _brief(results: tuple[Judged, ...]) -> list[tuple[str, tuple[float, ...], int]]:
    return [(result.verdict.check, result.rewards, result.tokens) for result in results]


# --- what the audit policy spares


def test_spared_work_is_rewarded_as_ever_and_only_the_models_checks_are_left_out(setup: WorkerSetup) -> None:
    job = _honest(setup, 60)
    spared = structs.replace(job, model_check=False)
    full, short = Judge(setup).judge([job]), Judge(setup).judge([spared])
    assert (short[0].verdict.accepted, short[0].verdict.check) == (True, "unaudited")
    assert (short[0].rewards, short[0].tokens) == (full[0].rewards, full[0].tokens)
    lease = _lease(61)
    wrong = structs.replace(_job(lease, _rollouts(_draw(setup, _lease(62)))), model_check=False)
    assert _check(setup, wrong) == "unaudited"  # nobody looked: that is what being spared means


def test_spared_work_still_needs_its_form(setup: WorkerSetup) -> None:
    lease = _lease(63)
    rollouts = _rollouts(_draw(setup, lease))
    for changed, check in (
        (structs.replace(rollouts[0], proofs=rollouts[0].proofs[:-2]), "proof-length"),
        (structs.replace(rollouts[0], tokens=rollouts[0].tokens[:-1]), "token-bytes"),
        (structs.replace(rollouts[0], logprobs=b""), "logprob-count"),
    ):
        job = structs.replace(_job(lease, [changed, *rollouts[1:]]), model_check=False)
        assert _check(setup, job) == check
