"""A block stage small enough for tests: a corpus, a tiny decoder, a version 0 with scaffold and blocks."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import torch
from spec_support import pretrain_spec, run_spec
from transformers import LlamaConfig

from barnraise.coordinator.checks import default_verify_spec
from barnraise.coordinator.corpus_files import open_corpus, prepare, shard_path
from barnraise.coordinator.folder import create_pretrain_run
from barnraise.coordinator.presets import demo
from barnraise.kernels.models import build_model, save_tensors, save_weights
from barnraise.kernels.mot import first_block, make_cut, scaffold_config, split_scaffold
from barnraise.protocol.corpus import Corpus, corpus_bytes, corpus_digest, sequences
from barnraise.protocol.identity import Identity
from barnraise.protocol.pretrain import (
    PretrainSpec,
    model_version,
    part_name,
    segments,
    stream,
    unit_start,
)
from barnraise.protocol.spec import (
    RunSpec,
)

torch.set_num_threads(1)

CONFIG: Any = LlamaConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
OPERATOR = Identity.from_private_bytes(b"p" * 32)


def make_corpus(folder: Path) -> Path:
    """A corpus folder of made-up text: shards of 64 tokens of a vocabulary of 300."""
    texts = folder.with_name(f"{folder.name}-texts")
    texts.mkdir(parents=True)
    for number in range(40):
        text = f"Document {number}: " + f"the {number} barns were raised by {number * 7} people. " * 8
        (texts / f"{number:03d}.txt").write_text(text)
    prepare(
        [texts],
        folder,
        name="test",
        licence="CC0",
        source="made up",
        vocabulary=300,
        shard_tokens=64,
    )
    return folder


def make_version(folder: Path, spec: PretrainSpec) -> Path:
    """Version 0 as the learner writes it, weights random: config, scaffold and first blocks."""
    folder.mkdir(parents=True)
    CONFIG.architectures = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(CONFIG.to_json_string(use_diff=False))
    cut = make_cut(4, spec.blocks, spec.scaffold_layers)
    scaffold = build_model(scaffold_config(CONFIG, cut), torch.float32, seed=1)
    save_weights(scaffold, folder / part_name(spec, 0), "float32")
    frame = split_scaffold(scaffold, cut)
    for block in range(spec.blocks):
        state = first_block(CONFIG, cut, frame, block, spec.init, seed=block)
        save_tensors(state, folder / part_name(spec, block + 1))
    return folder


def block_run(folder: Path, corpus: Path, versions: int = 3, **pretrain: Any) -> RunSpec:
    """A run spec of the block stage whose version 0 lies in ``folder``."""
    spec = pretrain_spec(corpus=corpus_digest(open_corpus(corpus)), sequence=16, **pretrain)
    if not folder.is_dir():
        make_version(folder, spec)
    return run_spec(
        name="barn",
        operator=OPERATOR.public_key,
        phase="pretrain",
        model__vocabulary=300,
        model__assets={"config.json": sha256((folder / "config.json").read_bytes()).digest()},
        rollout__versions=versions,
        pretrain=spec,
    )


def unit_shards(
    spec: PretrainSpec, corpus: Corpus, run_id: bytes, version: int, block: int, slot: int
) -> set[bytes]:
    """The digests of the corpus shards that a unit reads."""
    which, streams = stream(spec, block)
    start = unit_start(spec, version, slot)
    count = sum(segments(spec)) * spec.recipe.batch
    places = sequences(corpus, spec.sequence, run_id, which, streams, start, count)
    return {corpus.train[shard] for shard, _ in places}


def corpus_shards(folder: Path) -> dict[bytes, bytes]:
    """Everything of a corpus that a node may ask for, by digest: the description and the training shards."""
    corpus = open_corpus(folder)
    found = {digest: shard_path(folder, digest).read_bytes() for digest in corpus.train}
    return found | {corpus_digest(corpus): corpus_bytes(corpus)}


def with_pretrain(run: RunSpec, **changes: Any) -> RunSpec:
    """The run with other settings of its block stage."""
    assert run.pretrain is not None
    return msgspec.structs.replace(run, pretrain=msgspec.structs.replace(run.pretrain, **changes))


@cache
def shared_corpus() -> Path:
    """One corpus for all tests of a process."""
    return make_corpus(Path(mkdtemp()) / "corpus")


def make_pretrain_run(folder: Path, now_ms: int, versions: int | None = None, **pretrain: Any) -> Path:
    """A run folder of the block stage as ``run init`` makes it; ``versions`` beyond the model: posttrain."""
    corpus = shared_corpus()
    model = folder.with_name(f"{folder.name}-model")
    model.mkdir(parents=True)
    config = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"], "eos_token_id": 0}
    (model / "config.json").write_text(json.dumps(config))
    shutil.copy(corpus / "tokenizer.json", model / "tokenizer.json")
    spec = pretrain_spec(corpus=corpus_digest(open_corpus(corpus)), **pretrain)
    base = demo()
    create_pretrain_run(
        folder,
        model,
        sum(p.numel() for p in build_model(CONFIG, torch.float32).parameters()),
        corpus,
        spec,
        dataclasses.replace(
            base,
            environment=msgspec.structs.replace(
                base.environment, settings='{"letters":3,"alphabet":3,"partial":true}'
            ),
            sampling=msgspec.structs.replace(base.sampling, max_new_tokens=5),
            rollout=msgspec.structs.replace(
                base.rollout,
                prompts_per_unit=2,
                group_size=4,
                groups_per_version=2,
                max_groups_per_version=2,
                versions=model_version(spec) if versions is None else versions,
            ),
            evaluation=msgspec.structs.replace(base.evaluation, tasks=4, every=100),
            weights_dtype="float32",
        ),
        default_verify_spec("float32"),
        name="blocks",
        description="",
        model_name="tiny",
        seed=0,
        now_ms=now_ms,
        identity=OPERATOR,
    )
    return folder
