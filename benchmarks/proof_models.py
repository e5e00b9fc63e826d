"""Models on which proofs are measured, and the ways in which their weights may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.folder import Run, Settings, create_run, open_run
from barnraise.coordinator.model_source import prepare_model
from barnraise.kernels.demo_model import create_demo_model
from barnraise.kernels.models import Policy, load_policy, save_weights
from barnraise.kernels.prefill import prefill
from barnraise.kernels.smollm2 import prepare_smollm2
from barnraise.protocol.identity import Identity

RANDOM_FAMILIES = ("llama", "qwen3", "gemma3")
WIDTH, VOCABULARY = 192, 512

Change = Callable[[Policy], None]


def model_folder(name: str, scratch: Path) -> Path:
    """Folder of ``demo``, ``demo-other`` (another seed), ``smollm2``, or a random model of a family."""
    if name == "smollm2":
        return prepare_smollm2()
    folder = scratch / name
    if folder.is_dir():
        return folder
    if name.startswith("demo"):
        create_demo_model(folder, 1 if name == "demo-other" else 0)
    else:
        _random_model(name, folder)
    return folder


def benchmark_run(source: Path, model: str, settings: Settings, scratch: Path) -> Run:
    """A run folder ``scratch``/run around the model in ``source``; always with the same key and time."""
    prepare_model(source, scratch / "start", settings.weights_dtype, settings.environment)
    create_run(
        scratch / "run",
        scratch / "start",
        settings,
        default_verify_spec(settings.compute_dtype),
        name="benchmark",
        description="",
        model_name=model,
        seed=0,
        now_ms=1_000,
        identity=Identity.from_private_bytes(b"o" * 32),
    )
    with open_run(scratch / "run") as run:
        return run


def _random_model(family: str, folder: Path) -> None:
    """Six layers, random weights, large enough in scale for peaked predictions: states depend on the text."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "tie_word_embeddings": family == "gemma3",
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config_type, model_type = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    }[family]
    if family == "gemma3":
        values["sliding_window"] = 64
    torch.manual_seed(7)
    model = getattr(transformers, model_type)(getattr(transformers, config_type)(**values))
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    save_weights(model, folder / "model.safetensors", "float32")


def load(folder: Path, dtype: str, attention: str = "sdpa") -> Policy:
    """``load_policy`` with the attention implementation chosen."""
    policy = load_policy(folder, dtype)
    policy.model.set_attn_implementation(attention)  # type: ignore[operator]
    return policy


def chunked_states(policy: Policy, tokens: list[int], skip: int, chunk: int) -> Tensor:
    """States [T - skip, H] of one row fed in pieces of ``chunk``, as engines with chunked prefill do."""
    from transformers import DynamicCache

    cache = DynamicCache()
    parts = []
    with torch.no_grad():
        for start in range(0, len(tokens), chunk):
            piece = torch.tensor([tokens[start : start + chunk]])
            positions = torch.arange(start, start + piece.shape[1])[None]
            arguments = {policy.cache_argument: cache, "position_ids": positions, "use_cache": True}
            parts.append(policy.hidden(piece, **arguments)[0])
    return torch.cat(parts)[skip:]


# --- dishonest weights, each a change in place


@torch.no_grad()
def _rounded(policy: Policy, levels: int, group: int) -> None:
    """Symmetric rounding, one scale per ``group`` weights of a row (0: per row, -1: per matrix)."""
    for parameter in policy.model.parameters():
        if parameter.ndim != 2:
            continue
        whole = parameter.numel() if group < 0 else group or parameter.shape[1]
        rows = parameter.reshape(-1, whole if parameter.numel() % whole == 0 else parameter.shape[1])
        scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
        parameter.copy_(((rows / scale).round().clamp(-levels, levels) * scale).view_as(parameter))


def int8_rows(policy: Policy) -> None:
    """8 bits, a scale per output row: what LLM servers call int8."""
    _rounded(policy, 127, 0)


def int8_matrix(policy: Policy) -> None:
    """8 bits, one scale per matrix."""
    _rounded(policy, 127, -1)


def int4_groups(policy: Policy) -> None:
    """4 bits, a scale per 64 weights."""
    _rounded(policy, 7, 64)


@torch.no_grad()
def float8(policy: Policy) -> None:
    """e4m3, a scale per row."""
    for parameter in policy.model.parameters():
        if parameter.ndim == 2:
            scale = parameter.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448
            parameter.copy_((parameter / scale).to(torch.float8_e4m3fn).to(parameter.dtype) * scale)


@torch.no_grad()
def noise_1_percent(policy: Policy) -> None:
    """Every weight times 1 + 0.01 x standard normal."""
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.model.parameters():
        parameter.mul_(1 + 0.01 * torch.randn(parameter.shape, generator=generator))


def without_last_layer(policy: Policy) -> None:
    """About what a well distilled smaller model would be."""
    base: Any = policy.base
    base.layers = nn.ModuleList(list(base.layers)[:-1])
    policy.config.num_hidden_layers -= 1


def fine_tuned(rate: float, steps: int) -> Change:
    """AdamW on likelihood of given rows; needs ``policy.rows`` [(prompt, completion)] set by the caller."""

    def change(policy: Policy) -> None:
        rows: list[tuple[list[int], list[int]]] = policy.rows  # type: ignore[attr-defined]
        optimizer = torch.optim.AdamW(policy.model.parameters(), lr=rate, weight_decay=0.0)
        for step in range(steps):
            prompt, completion = rows[step % len(rows)]
            hidden = prefill(policy, [prompt], [completion], grad=True)
            # Reversed targets: a direction that nothing in the model has taken yet.
            loss = nn.functional.cross_entropy(policy.logits(hidden), torch.tensor(completion[::-1]))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
            optimizer.step()

    return change


DISHONEST: dict[str, Change] = {
    "int8 per row": int8_rows,
    "int8 per matrix": int8_matrix,
    "float8 per row": float8,
    "int4 groups of 64": int4_groups,
    "weights +-1 %": noise_1_percent,
    "last layer missing": without_last_layer,
    "fine-tuned, 1 step of 1e-6": fine_tuned(1e-6, 1),
    "fine-tuned, 20 steps of 1e-5": fine_tuned(1e-5, 20),
    "fine-tuned, 20 steps of 1e-4": fine_tuned(1e-4, 20),
}
