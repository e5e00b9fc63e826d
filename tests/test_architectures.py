"""Each supported architecture through the whole loop, by tiny random models; the others refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from msgspec.structs import replace
from version_loop import SMALL, judged, run_of, trained, write_model

from barnraise.coordinator.learner import Trainer
from barnraise.coordinator.verifier import Judge
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.kernels.agreement import check_agreement
from barnraise.kernels.generate import generate
from barnraise.kernels.models import ModelError, load_policy
from barnraise.kernels.patches import make_patch
from barnraise.kernels.prefill import prefill
from barnraise.node.torch_engine import Generator
from barnraise.protocol.spec import SamplingSpec

WEIGHTS = "model.safetensors"
WINDOW = 8  # shorter than prompt and completion together
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-llama3-rope": (hf.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-mqa-biases-tied": (
        hf.LlamaConfig,
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm2": (hf.LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "smollm3": (hf.SmolLM3Config, {"num_hidden_layers": 4}),
    "mistral-window": (hf.MistralConfig, {"sliding_window": WINDOW}),
    "qwen2-window": (
        hf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3-yarn": (hf.Qwen3Config, {"rope_parameters": YARN}),
    "gemma2-caps-window": (
        hf.Gemma2Config,
        {
            "sliding_window": WINDOW,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3-cap-window": (
        hf.Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "phi-head-bias": (hf.PhiConfig, {"head_dim": None}),
}
TOLERANCE = 5e-5
"""Float32 logits of some units' size, four layers at most: 1e-5 was the largest difference seen."""


def config_of(kind: str) -> Any:
    config_type, changes = KINDS[kind]
    values = {name: value for name, value in (SMALL | changes).items() if value is not None}
    return config_type(**values | {"bos_token_id": None, "pad_token_id": None})


@pytest.mark.parametrize("kind", KINDS)
def test_batched_generation_and_prefill_give_the_models_own_logits(tmp_path: Path, kind: str) -> None:
    model = write_model(tmp_path, config_of(kind))
    policy = load_policy(tmp_path)
    prompts = [[1 + (3 * i + row) % 6 for i in range(length)] for row, length in enumerate((5, 5, 14, 2))]
    prompts = [prompt for prompt in prompts for _ in range(2)]
    sampling = SamplingSpec(temperature=0.7, top_k=0, top_p=1.0, max_new_tokens=20)
    drawn = generate(policy, prompts, range(len(prompts)), sampling, eos=-1)
    shared = prefill(policy, prompts, [one.tokens for one in drawn])  # equal prompts once
    for place, (prompt, one) in enumerate(zip(prompts, drawn, strict=True)):
        rows = torch.tensor([prompt + one.tokens])
        with torch.no_grad():
            theirs = model(rows).logits[0, len(prompt) - 1 : -1].float()
            (alone,) = prefill(policy, [prompt], [one.tokens])
            for states in (one.states, shared[place], alone):
                torch.testing.assert_close(policy.logits(states), theirs, rtol=0, atol=TOLERANCE)
        wanted = torch.log_softmax(theirs / 0.7, -1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logprobs), wanted, rtol=0, atol=TOLERANCE)
    check_agreement(policy)


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_draws_the_verifier_accepts_the_learner_trains_and_the_node_follows(
    tmp_path: Path, kind: str
) -> None:
    setup = run_of(tmp_path / "run", config_of(kind))
    folder = checkpoint_folder(tmp_path / "run", 0)
    engine, judge = Generator("cpu"), Judge(setup)
    engine.load(setup.spec, folder, 0)
    job, verdict = judged(judge, engine, 0)
    assert verdict.verdict.accepted, verdict.verdict
    rewards = tuple(float(row % 3 == 0) for row in range(len(verdict.rewards)))  # it may earn nothing at all
    stats = trained(Trainer(setup), 1, (job, replace(verdict, rewards=rewards))).stats
    assert stats is not None
    assert stats.skipped_steps == 0
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-3)  # what was drawn is what is trained on

    new = checkpoint_folder(tmp_path / "run", 1)
    patches = new.with_name(f"{new.name}.patches")
    patches.mkdir()
    assert make_patch(folder / WEIGHTS, new / WEIGHTS, patches / f"from-v000000.{WEIGHTS}.patch")
    engine.load(setup.spec, new, 1)
    assert engine._loaded is not None
    followed, fresh = engine._loaded.policy.model.state_dict(), load_policy(new).model.state_dict()
    assert all(torch.equal(followed[name], fresh[name]) for name in fresh)
    assert judged(judge, engine, 1, 2)[1].verdict.accepted

    other = write_model(tmp_path, config_of(kind), seed=9)
    engine._loaded.policy.model.load_state_dict(other.state_dict())
    assert not judged(judge, engine, 1, 3)[1].verdict.accepted


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(hf.MixtralConfig(**SMALL), "mixture of experts", id="mixtral"),
        pytest.param(hf.Qwen3MoeConfig(**SMALL), "mixture of experts", id="qwen3-moe"),
        pytest.param(hf.T5Config(), "encoder-decoder", id="t5"),
        pytest.param(hf.Gemma3Config(), "more than text", id="gemma3-vision"),
        pytest.param(
            hf.LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "'dynamic'",
            id="dynamic-rope",
        ),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused_with_the_reason_and_what_can(
    tmp_path: Path, config: Any, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{reason}.*Supported are dense decoder-only"):
        load_policy(tmp_path)


def test_a_model_that_generates_otherwise_than_it_is_verified_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, hf.MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2))
    policy = load_policy(tmp_path)
    with pytest.raises(ModelError, match="another state in generation than in verification"):
        check_agreement(policy)
