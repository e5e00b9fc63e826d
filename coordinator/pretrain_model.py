"""A pretraining run's model before it has weights: a config, the corpus's tokenizer, its size.

Parameters are counted on torch's meta device: nothing is allocated, however large the model.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn

from barnraise.coordinator.corpus_files import TOKENIZER, end_token
from barnraise.coordinator.pretrain_presets import SIZES, Counts, size_config
from barnraise.kernels.models import ModelError, build_model, read_config, read_json
from barnraise.kernels.mot import Cut, find_layers, layer_count, make_cut, scaffold_config
from barnraise.protocol.corpus import Corpus
from barnraise.protocol.errors import RunFolderError

_TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_LAYER = re.compile(r"\.(\d+)\.")


def write_model_folder(model: str, corpus_folder: Path, corpus: Corpus, target: Path) -> Any:
    """Write config.json, generation_config.json and the tokenizer into ``target``; returns the config.

    Args:
        model: a name in ``SIZES``, or a folder with the config.json of a Hugging Face decoder.

    Raises:
        RunFolderError: no such size or folder, or the model does not fit the corpus.
        ModelError: transformers cannot build the model that the config describes.
    """
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(corpus_folder / TOKENIZER))
    end = end_token(tokenizer)
    source = Path(model).expanduser()
    if model in SIZES:
        written = size_config(SIZES[model], corpus.vocabulary, end)
    elif source.is_dir():
        read_config(source)  # refuses code, quantised weights and what is no decoder
        written = read_json(source / "config.json") | {"eos_token_id": end}
        _same_tokenizer(source, tokenizer)
    else:
        raise RunFolderError(
            f"there is no model {model!r} to pretrain: name a folder with a config.json, "
            f"or one of {', '.join(SIZES)}"
        )
    (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": end}) + "\n")
    shutil.copyfile(corpus_folder / TOKENIZER, target / TOKENIZER)
    for name in _TOKENIZER_EXTRAS:
        if model not in SIZES and (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if not (target / "tokenizer_config.json").is_file():
        text = tokenizer.id_to_token(end)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": text,
            "pad_token": "<pad>" if tokenizer.token_to_id("<pad>") is not None else text,
            "clean_up_tokenization_spaces": False,
        }
        (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    config = read_config(target)
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    if vocabulary < corpus.vocabulary:
        raise RunFolderError(
            f"the corpus has {corpus.vocabulary} different tokens, the model of {source / 'config.json'} "
            f"only {vocabulary}: prepare the corpus with the model's tokenizer (--tokenizer), or with "
            f"--vocabulary {vocabulary}"
        )
    return config


def check_sequence(config: Any, sequence: int, corpus: Corpus) -> None:
    """Raises RunFolderError where model or corpus cannot take sequences of that many tokens."""
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(most, int) and sequence > most:
        raise RunFolderError(f"the model takes {most} tokens, sequences have {sequence} (--sequence)")
    if sequence > corpus.shard_tokens:
        raise RunFolderError(
            f"sequences of {sequence} tokens do not fit the corpus's shards of {corpus.shard_tokens}: lower "
            "--sequence, or prepare the corpus with --shard-tokens"
        )


def counts(config: Any, cut: Cut) -> Counts:
    """Parameters of scaffold and largest block.

    Raises:
        ModelError: the model's layers cannot be told apart, or transformers cannot build it.
    """
    whole = _planned(config)
    layers = find_layers(whole)[1]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    return Counts(
        layers=len(sizes),
        scaffold=_parameters(_planned(scaffold_config(config, cut))),
        block=max(sum(sizes[place] for place in cut.places(block)) for block in range(cut.blocks)),
    )


def model_parameters(config: Any) -> int:
    """Parameters of the whole model, tied ones once. Raises ModelError as ``counts``."""
    return _parameters(_planned(config))


def layers_of(config: Any) -> int:
    """Decoder layers of a config; raises ModelError where they are no single ModuleList."""
    find_layers(_planned(config))
    return layer_count(config)


def scaffold_file(path: Path) -> Path:
    """The scaffold that ``path`` names: a file, or the one in an earlier run's folder.

    Raises:
        RunFolderError: there is none.
    """
    if path.is_file():
        return path
    found = sorted((path / "checkpoints" / "v000000").glob("model-00001-of-*.safetensors"))
    if not found:
        raise RunFolderError(
            f"{path} holds no scaffold: name its safetensors file, or the folder of a run that trained one"
        )
    return found[0]


def scaffold_layers(path: Path) -> int:
    """How many layers the scaffold in a safetensors file has. Raises RunFolderError if it is none."""
    numbers = {int(match[1]) for name in _shapes(path) if (match := _LAYER.search(name))}
    if not numbers:
        raise RunFolderError(f"{path} has no layers, so it is no scaffold")
    return max(numbers) + 1


def check_scaffold(path: Path, config: Any, blocks: int, layers: int) -> None:
    """Compare an earlier run's scaffold with the one that this run's model needs.

    Raises:
        RunFolderError: another depth, a tensor of another shape, or one with NaN in it.
    """
    found = _shapes(path)
    cut = make_cut(layer_count(config), blocks, layers)
    plan = _planned(scaffold_config(config, cut))
    wanted = {name: list(parameter.shape) for name, parameter in plan.named_parameters()}
    odd = sorted(found.keys() ^ wanted.keys())
    if odd:
        raise RunFolderError(
            f"{path} does not hold a scaffold of {layers} layers of this model: {odd[0]} "
            f"{'is missing' if odd[0] in wanted else 'has no place'}"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise RunFolderError(f"{path}: {name} has shape {found[name]}, this run's model needs {shape}")
    with safe_open(path, framework="pt") as file:
        for name in wanted:
            if not bool(torch.isfinite(file.get_tensor(name)).all()):
                raise RunFolderError(f"{path}: {name} is not made of finite numbers: take another scaffold")


def _shapes(path: Path) -> dict[str, list[int]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{path} is no readable safetensors file: {error}") from error


def _planned(config: Any) -> nn.Module:
    try:
        with torch.device("meta"):
            return build_model(config, torch.float32)
    except ModelError:
        raise
    except Exception as error:  # a config can make a constructor fail in any way
        raise ModelError(f"transformers cannot build this model: {error}") from error


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _same_tokenizer(source: Path, tokenizer: Tokenizer) -> None:
    path = source / TOKENIZER
    if not path.is_file():
        return
    try:
        own = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise RunFolderError(f"{path} is no tokenizer: {error}") from error
    if own.get_vocab() != tokenizer.get_vocab():
        raise RunFolderError(
            f"the corpus was made with another tokenizer than {path}: prepare it with "
            f"--tokenizer {path}, or take that file out of the model's folder"
        )
