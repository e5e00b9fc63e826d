"""A model's ``config.json``, believed as far as one from a stranger can be.

Nothing in it is run or fetched by name, and its numbers are bounded before anything is
unrolled from them. What this project cannot train exactly is refused here, with the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from barnraise.kernels.model_json import ModelError, read_json
from barnraise.protocol.limits import bounded

# A config comes with the run, and each number in it may ask for more than there is.
MAX_LAYERS = 4096
MAX_NUMBER = 2**40
MAX_LISTED = 2**24
MAX_DERIVED_BYTES = 2 * 1024**3  # tables that a model computes for itself, beside its weights
SUPPORTED = (
    "Supported are dense decoder-only text models that transformers knows, such as Llama, Mistral, Qwen2, "
    "Qwen3, Gemma 2, Gemma 3 (text) and SmolLM, as safetensors"
)
_OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "image_token_id", "audio_token_id")
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"),
    *("moe_k", "num_experts_per_tok", "top_k_experts"),
)
_UNSTEADY_ROPE = frozenset({"dynamic", "longrope"})
PLAN_SECONDS = 120.0
PLAN_BYTES = 2 * 1024**3


def read_config(folder: Path) -> Any:
    """The transformers config of ``folder``'s ``config.json``, with nothing in it that names code.

    Raises:
        ModelError: missing, not JSON, unknown ``model_type``, remote code, quantised, or ``unsupported``.
    """
    from transformers import CONFIG_MAPPING

    data = read_json(folder / "config.json")
    model_type = data.get("model_type")
    if "auto_map" in data:
        raise ModelError(
            f"{folder / 'config.json'} asks for code of its own (auto_map), which is never run; "
            "use a model whose architecture transformers itself knows"
        )
    if data.get("quantization_config") is not None:
        raise ModelError(f"{folder / 'config.json'} describes quantised weights; use the float version")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{folder / 'config.json'} has model_type {model_type!r}, unknown to the installed transformers; "
            "update transformers, or use another model"
        )
    _check_numbers(data, folder / "config.json")
    try:
        with bounded("it", seconds=PLAN_SECONDS, memory=PLAN_BYTES):
            config = CONFIG_MAPPING[model_type].from_dict(_plain(data))
    except Exception as error:
        raise ModelError(
            f"{folder / 'config.json'} does not describe a {model_type} model: {error}"
        ) from error
    reason = unsupported(config)
    if reason:
        raise ModelError(f"{folder} holds a {model_type} model, {reason}. {SUPPORTED}")
    return config


def unsupported(config: Any) -> str:
    """Why a model of ``config`` cannot be trained here; empty if it can, as far as the config says.

    What only the built model shows (an output head that scales its logits) is refused by
    ``barnraise.kernels.models.load_policy``.
    """
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder"
    other = [name for name in _OTHER_INPUTS if getattr(config, name, None) is not None]
    if other:
        return f"which takes more than text ({other[0]}); use the text model of that family"
    text = config.get_text_config(decoder=True)
    parts = (text, getattr(text, "ffn_config", None))  # DBRX keeps them apart
    experts = [name for name in _EXPERTS for part in parts if _above_one(getattr(part, name, None))]
    if experts:
        return (
            f"a mixture of experts ({experts[0]}): rounding decides which experts see a token, "
            "so honest proofs would differ like false ones"
        )
    kinds = sorted(_rope_kinds(getattr(text, "rope_parameters", None)) & _UNSTEADY_ROPE)
    if kinds:
        return (
            f"whose rotary embedding is '{kinds[0]}': its angles depend on the longest sequence of a batch, "
            "so a token's state would not be the same in generation and verification"
        )
    return ""


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _rope_kinds(value: Any) -> set[str]:
    """Every ``rope_type`` in a config's rotary settings, which may be one per kind of layer."""
    if not isinstance(value, dict):
        return set()
    kinds = {str(value["rope_type"])} if value.get("rope_type") else set()
    return kinds.union(*(_rope_kinds(item) for item in value.values()))


@contextmanager
def few_modules(tensors: int, folder: Path) -> Iterator[None]:
    """Stop the building of a model that has far more modules than its files have tensors."""
    most = 1000 + 50 * tensors
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ModelError(
                f"config.json in {folder} describes a model of more than {most} modules, "
                f"but the weights beside it hold {tensors} tensors: the two do not fit each other"
            )

    hook = register_module_module_registration_hook(count)
    try:
        with bounded(f"the model in {folder}", seconds=PLAN_SECONDS, memory=PLAN_BYTES):
            yield
    finally:
        hook.remove()


def check_derived(plan: nn.Module, shapes: dict[str, list[int]], where: Path) -> None:
    """Refuse tables that no file holds (masks, rotary angles) when they are out of all proportion."""
    derived = sum(
        buffer.numel() * buffer.element_size() for name, buffer in plan.named_buffers() if name not in shapes
    )
    if derived > MAX_DERIVED_BYTES:
        raise ModelError(
            f"the model in {where} needs {derived / 1e9:.1f} GB for tables that it computes itself, "
            f"at most {MAX_DERIVED_BYTES / 1e9:.1f} GB are allowed; see max_position_embeddings"
        )


def _plain(value: Any) -> Any:
    """``value`` without the keys that choose an implementation or a dtype, or belong to classifiers."""
    if isinstance(value, dict):
        banned = (
            *("attn_implementation", "experts_implementation", "dtype", "torch_dtype"),
            *("num_labels", "id2label", "label2id"),
        )
        return {k: _plain(v) for k, v in value.items() if not k.startswith("_") and k not in banned}
    return value


def _check_numbers(value: Any, where: Path, key: str = "", listed: bool = False) -> None:
    """Refuse counts that would be unrolled into lists and modules without end."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_numbers(item, where, name)
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item, where, key, listed=True)
    elif isinstance(value, int):
        layers = "layer" in key.lower() and not listed
        most = MAX_LAYERS if layers else MAX_LISTED if listed else MAX_NUMBER
        if abs(value) > most:
            raise ModelError(f"{where} asks for {key} {value:.6g}; at most {most} are allowed")
