"""Loading, swapping and saving policies: safetensors alone, and no code from the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from learner_support import make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPTNeoConfig, LlamaConfig, T5Config

from barnraise.kernels.models import ModelError, Policy, load_policy, save_weights, swap_weights
from barnraise.protocol.errors import StorageError

SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def write(folder: Path, config: object, **kwargs: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    save_weights(model, folder / "model.safetensors", "float32")
    return model.eval()


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_policy_is_the_model_that_was_saved(tmp_path: Path, tied: bool) -> None:
    model = write(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=tied))
    policy = load_policy(tmp_path)
    assert torch.equal(policy.logits(policy.hidden(IDS)), model(IDS).logits)
    assert not policy.model.training
    assert (policy.hidden_size, policy.vocabulary) == (16, 24)
    assert policy.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    assert (policy.head_weight is policy.base.embed_tokens.weight) is tied


def test_a_file_that_holds_a_tied_weight_under_both_names_loads(tmp_path: Path) -> None:
    write(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=True))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert load_policy(tmp_path).vocabulary == 24


def test_shards_with_an_index_load_like_one_file(tmp_path: Path) -> None:
    write(tmp_path, LlamaConfig(**SMALL))
    whole = weights_of(load_policy(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = weights_of(load_policy(tmp_path))
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, LlamaConfig(**SMALL))
    shutil.move(folder / "model.safetensors", tmp_path / "other.safetensors")
    index = {"weight_map": {"x": "../other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="is not in"):
        load_policy(folder)


def test_gemmas_soft_cap_is_part_of_the_logits(tmp_path: Path) -> None:
    model = write(tmp_path, Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.5))
    policy = load_policy(tmp_path)
    assert policy.softcap == 0.5
    torch.testing.assert_close(policy.logits(policy.hidden(IDS)), model(IDS).logits)
    assert policy.logits(policy.hidden(IDS)).abs().max() < 0.5


def test_an_output_head_that_we_would_not_reproduce_is_refused(tmp_path: Path) -> None:
    write(tmp_path, CohereConfig(**SMALL, logit_scale=0.0625))
    with pytest.raises(ModelError, match="output head of cohere does more"):
        load_policy(tmp_path)


def test_weights_saved_as_bfloat16_are_rounded_once_and_run_in_either_dtype(tmp_path: Path) -> None:
    model = write(tmp_path, LlamaConfig(**SMALL))
    save_weights(model, tmp_path / "model.safetensors", "bfloat16")
    wide, narrow = load_policy(tmp_path, "float32"), load_policy(tmp_path, "bfloat16")
    assert wide.head_weight.dtype == torch.float32
    assert narrow.hidden(IDS).dtype == torch.bfloat16
    assert torch.equal(wide.head_weight, model.lm_head.weight.bfloat16().float())


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    model = write(tmp_path, LlamaConfig(**SMALL))
    save_weights(model, tmp_path / "again.safetensors", "float32")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_saving_where_nothing_can_be_written_says_where_and_how_much(tmp_path: Path) -> None:
    model = write(tmp_path, LlamaConfig(**SMALL))
    with pytest.raises(StorageError, match=r"nowhere.*MB"):
        save_weights(model, tmp_path / "nowhere" / "model.safetensors", "float32")


def test_swapping_changes_the_weights_in_place(tmp_path: Path) -> None:
    make_model(tmp_path / "a", seed=0)
    make_model(tmp_path / "b", seed=1)
    policy = load_policy(tmp_path / "a")
    head = policy.head_weight
    swap_weights(policy, tmp_path / "b")
    fresh = weights_of(load_policy(tmp_path / "b"))
    assert policy.head_weight is head
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in weights_of(policy).items())


def test_a_swap_that_does_not_fit_leaves_the_policy_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "a", LlamaConfig(**SMALL))
    write(tmp_path / "b", LlamaConfig(**(SMALL | {"hidden_size": 32})))
    policy = load_policy(tmp_path / "a")
    before = weights_of(policy)
    with pytest.raises(ModelError, match="of another shape"):
        swap_weights(policy, tmp_path / "b")
    truncated = tmp_path / "short.safetensors"
    truncated.write_bytes((tmp_path / "a" / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        swap_weights(policy, truncated)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(policy).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "code of its own"),
        ({"model_type": "llama-of-tomorrow"}, "unknown to the installed transformers"),
        ({"model_type": None}, "unknown to the installed transformers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, "not of this architecture"),
        ({"intermediate_size": 48}, "of another shape"),
        ({"num_hidden_layers": "many"}, "does not describe|cannot build"),
    ],
)
def test_a_config_that_cannot_be_trusted_is_refused_with_its_cause(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write(tmp_path, LlamaConfig(**SMALL))
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path)


def test_a_config_cannot_name_an_attention_kernel_to_be_fetched(tmp_path: Path) -> None:
    model = write(tmp_path, LlamaConfig(**SMALL))
    edit_config(tmp_path, _attn_implementation="somebody/kernel", attn_implementation="somebody/kernel")
    policy = load_policy(tmp_path)
    torch.testing.assert_close(policy.logits(policy.hidden(IDS)), model(IDS).logits)


def test_a_giant_config_is_refused_before_any_weight_is_allocated(tmp_path: Path) -> None:
    write(tmp_path, LlamaConfig(**SMALL))
    edit_config(tmp_path, vocab_size=2**40)
    with pytest.raises(ModelError, match="of another shape"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**10}, "num_hidden_layers 1e\\+10; at most 4096"),
        ({"num_hidden_layers": 4096}, "more than 2050 modules, but the weights beside it hold 21 tensors"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer 1e\\+09"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers 1e\\+09"),
        ({"hidden_size": 2**62}, "hidden_size 4.6.*at most"),
        (
            {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 10**9]], "num_layers": 2},
            "attention_types 1e\\+09",
        ),
    ],
)
def test_a_config_that_unrolls_without_end_is_refused_quickly_and_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write(tmp_path, LlamaConfig(**SMALL))
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_policy(tmp_path)


def test_labels_of_a_classifier_are_not_unrolled(tmp_path: Path) -> None:
    write(tmp_path, LlamaConfig(**SMALL))
    edit_config(tmp_path, num_labels=10**9)
    load_policy(tmp_path)


def test_tables_out_of_all_proportion_are_refused_before_they_are_made(tmp_path: Path) -> None:
    config = GPTNeoConfig(
        hidden_size=2,
        num_heads=1,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=16,
        vocab_size=8,
    )
    write(tmp_path, config)
    long = 2**17
    edit_config(tmp_path, max_position_embeddings=long)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.wpe.weight"] = torch.zeros(long, 2)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"34\.4 GB for tables that it computes itself"):
        load_policy(tmp_path)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="encoder-decoder"):
        load_policy(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    write(tmp_path, LlamaConfig(**SMALL))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelError, match="only safetensors are read"):
        load_policy(tmp_path)


def test_an_empty_folder_and_a_broken_config_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ModelError, match="not a JSON object"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be read"):
        load_policy(tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = write(tmp_path, LlamaConfig(**SMALL))
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    save_weights(model, tmp_path / "model.safetensors", "float32")
    with pytest.raises(ModelError, match="not finite"):
        load_policy(tmp_path)
