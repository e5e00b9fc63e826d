"""Adapters instead of whole models: the same loop, with a base that nobody sends or changes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from learner_support import RUN_ID
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from spec_support import pretrain_spec
from version_loop import SMALL, adapter_run, judged, submitted, trained

from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.learner_policy import trained_policy
from barnraise.coordinator.learner_step import make_optimizer
from barnraise.coordinator.model_source import AdapterChoice, ModelSourceError, prepare_model
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.workers import Judged, VerifyJob, checkpoint_folder
from barnraise.kernels import lora
from barnraise.kernels.models import ModelError, Policy, load_policy, swap_weights
from barnraise.node.needs import Machine, description, needs
from barnraise.node.torch_engine import Generator
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    WEIGHTS_FILE,
    build_manifest,
    check_manifest,
    largest_version,
)
from barnraise.protocol.messages import Signed
from barnraise.protocol.runid import open_run_spec
from barnraise.protocol.spec import RunSpec

OPERATOR = Identity.from_private_bytes(b"o" * 32)
ALL = AdapterChoice(rank=4, alpha=8.0, targets=())
SOME = AdapterChoice(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))
IDS = torch.tensor([[3, 1, 4, 1, 5, 2, 6]])
KINDS = {
    "llama": hf.LlamaConfig(**SMALL),
    "qwen2-biases": hf.Qwen2Config(**SMALL),
    "gemma3": hf.Gemma3TextConfig(**SMALL, sliding_window=8, sliding_window_pattern=2),
}


def rewarded(unit: tuple[VerifyJob, Judged]) -> tuple[VerifyJob, Judged]:
    """Rewards that differ, whatever a random model earned."""
    job, verdict = unit
    return job, replace(verdict, rewards=tuple(float(row % 3 == 0) for row in range(len(verdict.rewards))))


def base_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p for name, p in policy.model.named_parameters() if ".lora_" not in name}


@pytest.mark.parametrize("choice", [ALL, SOME], ids=["all-linear", "q-and-v"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_version_of_adapters_is_drawn_judged_trained_and_followed_without_touching_the_base(
    tmp_path: Path, kind: str, choice: AdapterChoice
) -> None:
    setup = adapter_run(tmp_path, KINDS[kind], choice)
    first, second = checkpoint_folder(tmp_path, 0), checkpoint_folder(tmp_path, 1)
    engine, judge, trainer = Generator("cpu"), Judge(setup), Trainer(setup)
    engine.load(setup.spec, first, 0)
    unit = judged(judge, engine, 0)
    assert unit[1].verdict.accepted, unit[1].verdict
    stats = trained(trainer, 1, rewarded(unit)).stats
    assert stats is not None
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-3)
    assert (second / WEIGHTS_FILE).samefile(first / WEIGHTS_FILE)
    assert (second / ADAPTER_FILE).stat().st_size < 0.9 * (first / WEIGHTS_FILE).stat().st_size

    assert engine._loaded is not None
    before = {name: p.data_ptr() for name, p in base_of(engine._loaded.policy).items()}
    engine.load(setup.spec, second, 1)
    assert {name: p.data_ptr() for name, p in base_of(engine._loaded.policy).items()} == before
    assert judged(judge, engine, 1, 2)[1].verdict.accepted
    with lora.adapter_off(engine._loaded.policy.model):
        assert not judged(judge, engine, 1, 3)[1].verdict.accepted  # who skips the adapters is found out


def test_in_bfloat16_the_learner_computes_what_the_verifier_does_to_the_bit(tmp_path: Path) -> None:
    changes = {"model__compute_dtype": "bfloat16", "model__weights_dtype": "bfloat16"}
    setup = adapter_run(tmp_path, KINDS["llama"], ALL, **changes)
    engine, judge = Generator("cpu"), Judge(setup)
    engine.load(setup.spec, checkpoint_folder(tmp_path, 0), 0)
    unit = rewarded(
        (submitted(engine, 0), Judged(submission_id=b"", verdict=None, rewards=(0.0,) * 24, tokens=0))
    )
    trained(Trainer(setup), 1, unit)
    folder = checkpoint_folder(tmp_path, 1)
    ours = trained_policy(folder, setup.spec, "cpu")
    theirs = judge._policies.of(1)
    assert {p.dtype for p in lora.adapter_tensors(ours.model).values()} == {torch.float32}
    assert {p.dtype for p in base_of(ours).values()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(ours.hidden(IDS), theirs.hidden(IDS))


def test_a_run_goes_on_from_its_adapters_and_moments_as_if_nothing_had_happened(tmp_path: Path) -> None:
    one, other = (adapter_run(tmp_path / name, KINDS["llama"], ALL) for name in ("one", "other"))
    engine = Generator("cpu")
    engine.load(one.spec, checkpoint_folder(tmp_path / "one", 0), 0)
    units = [rewarded(judged(Judge(one), engine, 0, number)) for number in (1, 2)]
    steady = Trainer(one)
    for version, unit in enumerate(units, start=1):
        trained(steady, version, unit)
        trained(Trainer(other), version, unit)  # a new process for each version
    files = [checkpoint_folder(tmp_path / name, 2) / ADAPTER_FILE for name in ("one", "other")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_kl_penalty_holds_on_to_the_base_without_a_second_copy(tmp_path: Path) -> None:
    setup = adapter_run(tmp_path, KINDS["llama"], ALL, grpo__kl_coefficient=0.1)
    engine, trainer = Generator("cpu"), Trainer(setup)
    engine.load(setup.spec, checkpoint_folder(tmp_path, 0), 0)
    unit = rewarded(judged(Judge(setup), engine, 0))
    trained(trainer, 1, unit)
    trained(trainer, 2, unit)
    assert trainer._reference is None
    with lora.adapter_off(trainer._sound.policy.model), torch.no_grad():
        alone = load_policy(tmp_path / "source").hidden(IDS)
        assert torch.equal(trainer._sound.policy.hidden(IDS), alone)


def test_merged_weights_are_the_same_function_within_rounding(tmp_path: Path) -> None:
    adapter_run(tmp_path, KINDS["qwen2-biases"], ALL)
    policy = load_policy(checkpoint_folder(tmp_path, 0))
    with torch.no_grad():
        for parameter in lora.adapter_tensors(policy.model).values():
            parameter.normal_(std=0.1)
        adapted = policy.hidden(IDS)
        lora.merge_adapter(policy.model)
        torch.testing.assert_close(policy.hidden(IDS), adapted, rtol=1e-4, atol=1e-4)
        assert not torch.equal(policy.hidden(IDS), adapted)  # and so nobody merges within a run


def test_training_adapters_holds_a_fraction_of_the_bytes_of_training_all(tmp_path: Path) -> None:
    wide: dict[str, Any] = SMALL | {"hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    held = {}
    for name, dtype in (("whole", "float32"), ("adapters", "bfloat16")):
        changes = {"model__compute_dtype": "bfloat16", "model__weights_dtype": dtype}
        setup = adapter_run(tmp_path / name, hf.LlamaConfig(**wide), ALL, **changes)
        spec = (
            setup.spec
            if name == "adapters"
            else replace(setup.spec, model=replace(setup.spec.model, adapter=None))
        )
        folder = checkpoint_folder(tmp_path / name, 0)
        if name == "whole":
            (folder / ADAPTER_CONFIG).unlink()
        policy = trained_policy(folder, spec, "cpu")
        optimizer = make_optimizer(policy, spec.grpo)
        policy.hidden(IDS).float().sum().backward()
        optimizer.step()
        tensors = [*policy.model.parameters(), *(p.grad for p in policy.model.parameters())]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        held[name] = sum(t.numel() * t.element_size() for t in tensors if t is not None)
    assert held["adapters"] < 0.25 * held["whole"]  # 2 bytes a weight and 16 an adapter's, against 16


# --- files


def test_a_volunteer_is_told_that_the_base_is_fetched_once(tmp_path: Path) -> None:
    spec = adapter_run(tmp_path, KINDS["llama"], ALL).spec
    assert spec.model.adapter is not None
    whole, added = spec.model.parameters * 4, spec.model.adapter.parameters * 4
    asks = needs(spec)
    assert (asks.version, asks.disk, asks.memory) == (whole + added, whole + 4 * added, whole + 2 * added)
    machine = Machine(where=tmp_path, coordinator="x", disk=10**9, free=None, threads=1)
    assert (
        f"{spec.model.adapter.parameters:,} of adapters (rank 4)"
        in dict(description(spec, bytes(32), machine))["model"]
    )


def signed_manifest(spec: RunSpec, folder: Path, version: int, **files: Path) -> Signed:
    names = [*spec.model.assets, WEIGHTS_FILE, ADAPTER_FILE]
    paths = {name: files.get(name.split(".")[0], folder / name) for name in names}
    paths = {name: path for name, path in paths.items() if path != Path()}
    return sign(build_manifest(RUN_ID, version, paths, 4096, 0, lambda digest, data: None), OPERATOR)


def test_a_manifest_must_hold_the_base_of_the_spec_and_adapters(tmp_path: Path) -> None:
    setup = adapter_run(tmp_path, KINDS["llama"], ALL, operator=OPERATOR.public_key)
    spec, folder = setup.spec, checkpoint_folder(tmp_path, 0)
    check_manifest(signed_manifest(spec, folder, 1), spec, RUN_ID)
    other = tmp_path / "other"
    other.write_bytes((folder / WEIGHTS_FILE).read_bytes()[:-1] + b"x")
    with pytest.raises(MalformedError, match="differs from the one that the run spec pins"):
        check_manifest(signed_manifest(spec, folder, 1, model=other), spec, RUN_ID)
    with pytest.raises(MalformedError, match="a version with adapters is the base"):
        check_manifest(signed_manifest(spec, folder, 1, adapter_model=Path()), spec, RUN_ID)
    assert spec.model.adapter is not None
    without = replace(spec, model=replace(spec.model, adapter=None))
    room = largest_version(spec, 1) - largest_version(without, 1)
    assert room == 2 * 4 * spec.model.adapter.parameters


def test_a_run_spec_with_adapters_pins_their_config_and_does_not_pretrain(tmp_path: Path) -> None:
    spec = adapter_run(tmp_path, KINDS["llama"], ALL, operator=OPERATOR.public_key).spec
    assert open_run_spec(sign(spec, OPERATOR)) == spec
    bare = replace(spec, model=replace(spec.model, assets={}))
    with pytest.raises(MalformedError, match="pins adapter_config"):
        open_run_spec(sign(bare, OPERATOR))
    both = replace(spec, phase="pretrain", pretrain=pretrain_spec())
    with pytest.raises(MalformedError, match="cannot have adapters"):
        open_run_spec(sign(both, OPERATOR))


def test_adapters_are_not_put_on_adapters(tmp_path: Path) -> None:
    setup = adapter_run(tmp_path, KINDS["llama"], ALL)
    with pytest.raises(ModelSourceError, match="merge them"):
        prepare_model(checkpoint_folder(tmp_path, 0), tmp_path / "x", "float32", setup.spec.environment)


def test_the_files_are_those_of_peft(tmp_path: Path) -> None:
    adapter_run(tmp_path, KINDS["llama"], SOME)
    folder = checkpoint_folder(tmp_path, 0)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4.0)
    tensors = load_file(folder / ADAPTER_FILE)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert tensors[name].shape == (2, 32)
    assert len(tensors) == 2 * 2 * 2  # layers, targets, parts
    assert not tensors[name.replace("lora_A", "lora_B")].any()
    assert lora.read_adapter_config(folder) == lora.Adapter(2, 4.0, ("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": 10**9}, "r is 1000000000"),
        ({"lora_alpha": "inf"}, "lora_alpha is 'inf'"),
        ({"target_modules": "all-linear"}, "target_modules is no list"),
        ({"target_modules": ["q_proj", "q_proj"]}, "one twice"),
        ({"use_dora": True}, "other than plain LoRA"),
        ({"peft_type": "IA3"}, "other than plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "other than plain LoRA"),
        ({"target_modules": ["nothing"]}, "names no layer of LlamaForCausalLM; there are down_proj"),
        ({"target_modules": ["lm_head"]}, "names lm_head, the output head"),
        ({"target_modules": ["self_attn"]}, "a LlamaAttention, no linear layer"),
        ({"r": 3}, "do not fit"),
        ({"target_modules": ["k_proj"]}, "do not fit"),
    ],
)
def test_adapters_that_cannot_be_meant_are_refused_with_their_cause(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    adapter_run(tmp_path, KINDS["llama"], SOME)
    path = checkpoint_folder(tmp_path, 0) / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        load_policy(path.parent)


def test_adapters_that_do_not_fit_leave_a_policy_as_it_was(tmp_path: Path) -> None:
    adapter_run(tmp_path, KINDS["llama"], SOME)
    folder = checkpoint_folder(tmp_path, 0)
    policy = load_policy(folder)
    before = policy.hidden(IDS)
    tensors = load_file(folder / ADAPTER_FILE)
    tensors.pop(min(tensors))
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / ADAPTER_FILE)
    with pytest.raises(ModelError, match="do not fit"):
        swap_weights(policy, folder)
    (folder / ADAPTER_FILE).unlink()
    with pytest.raises(ModelError, match="is missing"):
        swap_weights(policy, folder)
    assert torch.equal(policy.hidden(IDS), before)
