"""What a run spec says of a model, read off its Hugging Face folder. Loads no weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from barnraise.kernels.model_json import ModelError
from barnraise.kernels.special_tokens import SETTINGS, TOKENIZER, named_token, read_tokenizer
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.manifest import ADAPTER_CONFIG, ADAPTER_FILE, ASSET_ALLOWANCE, WEIGHTS_FILE
from barnraise.protocol.spec import AdapterSpec, Dtype, ModelSpec

_ASSET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_ASSET_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
_NOT_ASSETS = frozenset({"state.json", "model.safetensors.index.json", "trainer_state.json"})
_MOST_OTHER_ENDS = 16  # as many as a run spec holds
_MAX_HEADER = 100 * 1024 * 1024


def describe_model(
    folder: Path, name: str, weights_dtype: Dtype, compute_dtype: Dtype, parameters: int | None = None
) -> ModelSpec:
    """Read off a Hugging Face folder what a run spec says about its model. Loads no weights.

    ``parameters`` None: they are counted in the folder's safetensors file; a model that
    is still to be trained has none.

    Raises:
        RunFolderError: a file is missing or cannot be understood.
    """
    config = _read_json(folder / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    vocabulary = inner.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise RunFolderError(f"{folder / 'config.json'} names no vocab_size: is it a causal language model?")
    ends = _end_tokens(folder, config, inner)
    weights = folder / WEIGHTS_FILE
    if parameters is None and not weights.is_file():
        raise RunFolderError(f"{folder} has no {WEIGHTS_FILE}: save the model as one safetensors file")
    return ModelSpec(
        name=name,
        parameters=count_parameters(weights) if parameters is None else parameters,
        vocabulary=vocabulary,
        weights_dtype=weights_dtype,
        compute_dtype=compute_dtype,
        eos_token=ends[0],
        assets=_assets(folder),
        other_ends=ends[1:],
        adapter=_adapter(folder, weights_dtype),
    )


def _adapter(folder: Path, dtype: Dtype) -> AdapterSpec | None:
    """What ``adapter_config.json`` and the files beside it say; None without one."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    config = _read_json(folder / ADAPTER_CONFIG)
    try:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            base = hashlib.file_digest(file, "sha256").digest()
        return AdapterSpec(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            targets=tuple(config["target_modules"]),
            parameters=count_parameters(folder / ADAPTER_FILE),
            dtype=dtype,
            base=base,
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{folder} has no usable adapters: {error}") from None


def count_parameters(path: Path) -> int:
    """Number of values in a safetensors file, from its header alone.

    Raises:
        RunFolderError: not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        return sum(prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} is no readable safetensors file: {error}") from None


def _end_tokens(folder: Path, config: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a completion: the generation config's, else the model's; the tokenizer's besides.

    A chat model often ends a turn with one token and a text with another.
    """
    own = _tokenizers_end(folder)
    generation = folder / "generation_config.json"
    sources = [_read_json(generation)] if generation.is_file() else []
    for source in (*sources, inner, config):
        value = source.get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        tokens = [token for token in found if type(token) is int and token >= 0]
        if tokens:
            return tuple(dict.fromkeys((*tokens, *own)))[: 1 + _MOST_OTHER_ENDS]
    raise RunFolderError(f"{folder}: neither generation_config.json nor config.json names eos_token_id")


def _tokenizers_end(folder: Path) -> tuple[int, ...]:
    """The id of the ``eos_token`` that ``tokenizer_config.json`` names, where the tokenizer knows it."""
    if not (folder / SETTINGS).is_file() or not (folder / TOKENIZER).is_file():
        return ()
    try:
        known = named_token(folder, read_tokenizer(folder), "eos_token")
    except ModelError as error:
        raise RunFolderError(str(error)) from error
    return () if known is None else (known,)


def _assets(folder: Path) -> dict[str, bytes]:
    assets: dict[str, bytes] = {}
    total = 0
    for path in sorted(folder.iterdir()):
        wanted = path.suffix in _ASSET_SUFFIXES and path.name not in _NOT_ASSETS and path.is_file()
        if not wanted or not _ASSET.fullmatch(path.name):
            continue
        data = path.read_bytes()
        total += len(data)
        assets[path.name] = hashlib.sha256(data).digest()
    if total > ASSET_ALLOWANCE:
        raise RunFolderError(f"the files beside the weights in {folder} have {total} bytes: too many")
    if "tokenizer.json" not in assets:
        raise RunFolderError(f"{folder} has no tokenizer.json: save the tokenizer there (fast format)")
    return assets


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is not a JSON object")
    return value
