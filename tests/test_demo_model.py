"""The demo's model: made, cached, and readable by any Hugging Face tool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from barnraise.kernels import demo_model
from barnraise.kernels.demo_model import EOS_ID, VOCABULARY, Recipe, create_demo_model
from barnraise.kernels.models import load_policy
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import is_held_out, reverse_prompt
from barnraise.protocol.errors import StorageError
from barnraise.protocol.spec import EnvironmentSpec

# A few steps of the real thing; the whole recipe takes half a minute.
SHORT = Recipe(
    width=32, layers=1, heads=2, key_value_heads=1, feed_forward=64, batch=8, max_steps=3, first_check=2
)
SHORT = replace(SHORT, check_every=1, check_tasks=4)
ENVIRONMENT = EnvironmentSpec(name="reverse", settings="", prompt_format="plain", system_prompt="")


def make(folder: Path, cache: Path, seed: int = 0, recipe: Recipe = SHORT) -> bytes:
    create_demo_model(folder, seed, cache=cache, recipe=recipe)
    return (folder / "model.safetensors").read_bytes()


def test_a_seed_decides_the_weights_whatever_the_thread_count(tmp_path: Path) -> None:
    first = make(tmp_path / "a", tmp_path / "cache-1")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(5)
    again = make(tmp_path / "b", tmp_path / "cache-2")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert first == again
    assert first != make(tmp_path / "c", tmp_path / "cache-1", seed=1)


def test_the_second_time_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(tmp_path / "a", tmp_path / "cache")
    monkeypatch.setattr(demo_model, "_warm_up", lambda *a: pytest.fail("warmed up again"))
    assert make(tmp_path / "b", tmp_path / "cache") == first


def test_a_half_written_cache_entry_is_made_again(tmp_path: Path) -> None:
    first = make(tmp_path / "a", tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / "tokenizer.json").unlink()
    assert make(tmp_path / "b", tmp_path / "cache") == first
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [entry.name]


def test_another_recipe_is_another_cache_entry(tmp_path: Path) -> None:
    make(tmp_path / "a", tmp_path / "cache")
    make(tmp_path / "b", tmp_path / "cache", recipe=replace(SHORT, max_steps=4))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write the demo model"):
        make(tmp_path / "a", tmp_path / "file" / "cache")


def test_any_hugging_face_tool_loads_it(tmp_path: Path) -> None:
    make(tmp_path / "m", tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert model.config.model_type == "qwen3"
    ids = tokenizer("rabc=", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "rabc="
    policy = load_policy(tmp_path / "m")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, policy.logits(policy.hidden(ids)))
    assert tokenizer.eos_token_id == EOS_ID == model.config.eos_token_id


def test_one_character_is_one_token(tmp_path: Path) -> None:
    make(tmp_path / "m", tmp_path / "cache")
    codec = Codec(tmp_path / "m", ENVIRONMENT)
    prompt = reverse_prompt("hello")
    tokens = codec.encode_prompt(prompt)
    assert [VOCABULARY[token] for token in tokens] == list(prompt)
    assert codec.decode([*tokens, EOS_ID]) == prompt
    assert codec.vocabulary == len(VOCABULARY)
    assert codec.eos_token == EOS_ID


def test_the_model_has_about_0_8_million_parameters(tmp_path: Path) -> None:
    make(tmp_path / "m", tmp_path / "cache", recipe=replace(Recipe(), max_steps=1))
    assert 700_000 < load_policy(tmp_path / "m").parameters < 1_000_000


def test_no_example_of_the_warm_up_is_held_out() -> None:
    import random

    rows = demo_model._examples(random.Random(0), replace(Recipe(), batch=512), 0.5)
    answers = 0
    for row in rows.tolist():
        text = "".join(VOCABULARY[token] for token in row[:-1])
        letters, answer = text[1:6], text[7:]
        assert not is_held_out(letters)
        assert answer in (letters, letters[::-1])
        answers += answer == letters[::-1]
    assert 200 < answers < 320


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    create_demo_model(
        tmp_path / "m", 0, lambda text, fraction: seen.append((text, fraction)), tmp_path / "cache", SHORT
    )
    assert [fraction for _, fraction in seen] == sorted(fraction for _, fraction in seen)
    assert seen[-1] == ("demo model ready", 1.0)
