"""Pretraining schedules that are known to work: what ``run init --phase pretrain`` starts from.

The rules are those of docs/mot.md: a scaffold about half as deep, grown first blocks,
about 20 tokens per block parameter and 25 per scaffold parameter where no size preset
says otherwise, a joint tune of 3/8 of the block steps. With several contributors the
outer optimiser is DiLoCo's (arXiv 2311.08105: Nesterov, rate 0.7, momentum 0.9); one
contributor's difference is taken as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from barnraise.coordinator import presets
from barnraise.coordinator.folder import Settings
from barnraise.protocol.corpus import Corpus, stream_shards
from barnraise.protocol.errors import MalformedError, RunFolderError
from barnraise.protocol.pretrain import (
    BlockRecipe,
    BlockTolerance,
    JointRecipe,
    PretrainSpec,
    check_pretrain,
    model_version,
    stream,
)
from barnraise.protocol.spec import Dtype

Init = Literal["grown", "random"]
Data = Literal["disjoint", "shared"]
Delta = Literal["float32", "bfloat16", "int8"]

TOKENS_PER_BLOCK_PARAMETER = 20
TOKENS_PER_SCAFFOLD_PARAMETER = 25
TRIM, TRIM_FROM = 0.25, 4  # of four contributors one may lie in every weight, at no cost that was measured
SEGMENTS = 8  # of a unit: an audit does an eighth of it again
SLOW_FLOPS = 5e9  # per second, of the slowest core that a lease waits for
LEAST_TIMEOUT_S = 120.0
MOST_TIMEOUT_S = 7 * 86_400.0


@dataclass(frozen=True)
class Size:
    """A model that two processor cores can pretrain, and how much of it."""

    width: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    sequence: int
    batch: int
    scaffold_steps: int
    steps: int  # of one unit
    rounds: int
    rate: float
    scaffold_rate: float = 0.0  # 0: the same


DEMO = "demo"  # the demo's model and text, made on the spot
SIZES: dict[str, Size] = {
    DEMO: Size(128, 4, 4, 2, 384, 13, 64, 1000, 60, 2, 1e-3, scaffold_rate=2e-3),
    # 1.4 M parameters in layers (as benchmarks/mot.py trains), 1.9 M with 4,096 tokens
    "tiny": Size(128, 8, 4, 2, 384, 128, 16, 200, 128, 2, 2e-3),
    # 9 M in layers, 10 M with 4,096 tokens
    "small": Size(256, 12, 8, 4, 704, 256, 16, 600, 256, 4, 1e-3),
}
FOLDER_SIZE = Size(0, 0, 0, 0, 0, 1024, 8, 0, 500, 0, 5e-4)  # of a config of one's own: steps by the rules


@dataclass(frozen=True)
class Choices:
    """What an operator asked for; None leaves it to the size and the rules."""

    blocks: int = 2
    scaffold_layers: int | None = None
    scaffold: bytes | None = None
    scaffold_steps: int | None = None
    rounds: int | None = None
    steps: int | None = None
    contributors: int | None = None
    quorum: int | None = None
    round_s: float | None = None
    init: Init = "grown"
    data: Data = "disjoint"
    delta: Delta = "float32"
    adapt_steps: int | None = None
    sequence: int | None = None
    batch: int | None = None
    rate: float | None = None
    outer_rate: float | None = None
    outer_momentum: float | None = None
    trim: float | None = None
    then_posttrain: bool = False


@dataclass(frozen=True)
class Counts:
    """Sizes that the schedule depends on, read off the model's config."""

    layers: int
    scaffold: int  # parameters of the scaffold, embedding included
    block: int  # parameters of the largest block


def scaffold_depth(layers: int, blocks: int, asked: int | None) -> int:
    """Layers of the scaffold: what was asked for, or about half the model's, at least one per block.

    Raises:
        RunFolderError: model, blocks and scaffold do not fit each other; the text says what does.
    """
    if not 1 <= blocks <= layers:
        raise RunFolderError(
            f"a model of {layers} layers cannot be cut into {blocks} blocks: ask for 1 to {layers} (--blocks)"
        )
    chosen = max(blocks, layers // 2) if asked is None else asked
    if not blocks <= chosen <= layers:
        raise RunFolderError(
            f"the scaffold of {blocks} blocks of a model of {layers} layers has {blocks} to {layers} layers, "
            f"not {chosen} (--scaffold-layers)"
        )
    return chosen


def size_config(size: Size, vocabulary: int, end_token: int) -> dict[str, Any]:
    """``config.json`` of a size: Qwen3's architecture with tied embeddings."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": size.width,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "head_dim": size.width // size.heads,
        "max_position_embeddings": max(512, 4 * size.sequence),
        "tie_word_embeddings": True,
        "eos_token_id": end_token,
        "bos_token_id": None,
        "dtype": "float32",
    }


def schedule(
    size: Size, counts: Counts, corpus: bytes, choices: Choices, compute_dtype: Dtype
) -> PretrainSpec:
    """The run's block stage: the operator's choices, and the rules for the rest.

    Raises:
        RunFolderError: the choices contradict each other.
    """
    sequence, batch = choices.sequence or size.sequence, choices.batch or size.batch
    per_step = sequence * batch
    steps = choices.steps or size.steps
    contributors = choices.contributors or 1
    rounds = choices.rounds or size.rounds
    if not rounds:
        per_round = steps * per_step * contributors
        rounds = max(1, min(65_536, round(TOKENS_PER_BLOCK_PARAMETER * counts.block / per_round)))
    scaffold_steps = choices.scaffold_steps or size.scaffold_steps
    if not scaffold_steps:
        scaffold_steps = max(1, round(TOKENS_PER_SCAFFOLD_PARAMETER * counts.scaffold / per_step))
    adapt_steps = 3 * steps * rounds // 8 if choices.adapt_steps is None else choices.adapt_steps
    alone = contributors == 1
    rate = choices.rate or size.rate
    # forward through everything, backward through at most everything: 6 FLOPs per parameter and token
    timeout = 6.0 * (counts.scaffold + counts.block) * steps * per_step / SLOW_FLOPS
    timeout = min(max(timeout, LEAST_TIMEOUT_S), MOST_TIMEOUT_S / 3)
    spec = PretrainSpec(
        blocks=choices.blocks,
        scaffold_layers=scaffold_depth(counts.layers, choices.blocks, choices.scaffold_layers),
        scaffold=choices.scaffold,
        scaffold_recipe=_joint(
            scaffold_steps if choices.scaffold is None else 0,
            choices.rate or size.scaffold_rate or size.rate,
            batch,
        ),
        corpus=corpus,
        sequence=sequence,
        init=choices.init,
        data=choices.data,
        rounds=rounds,
        steps=steps,
        commit_every=-(-steps // SEGMENTS),
        contributors=contributors,
        quorum=choices.quorum or max(1, (contributors + 1) // 2),
        round_s=choices.round_s or 2 * timeout,
        recipe=BlockRecipe(
            learning_rate=rate,
            warmup_steps=max(1, steps * rounds // 10),
            settle_steps=min(10, max(1, steps // 10)),
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.01,
            clip=1.0,
            batch=batch,
        ),
        delta=choices.delta,
        outer_rate=choices.outer_rate or (1.0 if alone else 0.7),
        outer_momentum=(
            choices.outer_momentum if choices.outer_momentum is not None else (0.0 if alone else 0.9)
        ),
        trim=(TRIM if contributors >= TRIM_FROM else 0.0) if choices.trim is None else choices.trim,
        tolerance=tolerance(compute_dtype),
        adapt=_joint(adapt_steps, rate, batch),
        held_out=64,
        timeout_s=timeout,
        deadline_s=3 * timeout,
        then_posttrain=choices.then_posttrain,
    )
    try:
        check_pretrain(spec, model_version(spec) + (1 if spec.then_posttrain else 0))
    except MalformedError as error:
        raise RunFolderError(f"these settings make no valid run: {error}") from None
    return spec


def tolerance(compute_dtype: Dtype) -> BlockTolerance:
    """How far an honest volunteer's segment may lie from ours, by what volunteers compute in.

    Measured on segments of 8 steps (docs/mot.md): honest bfloat16 0.022 at most (one tensor 0.041),
    honest float32 3e-6; a rate 20 % higher 0.27, one matrix shifted by 0.001 0.36 in that tensor.
    """
    if compute_dtype == "bfloat16":
        return BlockTolerance(update=0.2, first=0.2, second=0.2, worst_tensor=0.3, loss_increase=0.1)
    return BlockTolerance(update=0.05, first=0.05, second=0.05, worst_tensor=0.15, loss_increase=0.1)


def _joint(steps: int, rate: float, batch: int) -> JointRecipe:
    return JointRecipe(
        steps=steps,
        learning_rate=rate,
        warmup_fraction=0.1,
        floor=0.1,
        weight_decay=0.01,
        clip=1.0,
        batch=batch,
    )


def check_text(spec: PretrainSpec, corpus: Corpus) -> list[str]:
    """Whether the text is enough; returns what an operator should know about it, if anything.

    Raises:
        RunFolderError: there are fewer shards than disjoint streams.
    """
    try:
        shards = min(len(stream_shards(corpus, *stream(spec, block))) for block in range(spec.blocks))
    except MalformedError as error:
        raise RunFolderError(f"the corpus is too small: {error} (--shard-tokens, or --data shared)") from None
    there = shards * (corpus.shard_tokens // spec.sequence)
    read = spec.rounds * spec.contributors * spec.steps * spec.recipe.batch
    if read <= there:
        return []
    return [
        f"note: each block reads its {there * spec.sequence:,} tokens of text {read / there:.1f} times: "
        "more text, or fewer rounds, would serve it better"
    ]


def demo_choices(choices: Choices) -> Choices:
    """The demo's schedule where nothing else was asked for. Two rounds are too few for outer momentum."""
    return replace(
        choices,
        outer_rate=choices.outer_rate or 1.0,
        outer_momentum=0.0 if choices.outer_momentum is None else choices.outer_momentum,
        adapt_steps=200 if choices.adapt_steps is None else choices.adapt_steps,
        contributors=choices.contributors or 2,
        round_s=choices.round_s or 60.0,
    )


def demo_settings() -> Settings:
    """The demo's, with fewer versions: a model pretrained so far starts ahead of the ready-made one."""
    settings = presets.demo()
    return replace(settings, rollout=msgspec.structs.replace(settings.rollout, versions=25))


def small_settings() -> Settings:
    """Post-training of a model that two cores have pretrained: the demo's, on a task of one's own text."""
    return plain(presets.demo())


def plain(settings: Settings) -> Settings:
    """``settings`` without a chat template, which a fresh tokenizer has none of."""
    return replace(settings, environment=msgspec.structs.replace(settings.environment, prompt_format="plain"))
