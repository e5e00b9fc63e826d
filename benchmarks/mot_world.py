"""What the jobs of ``benchmarks.mot`` have in common: text, model, schedules, and what they cost.

Floating-point operations count matrix products only, forward 2, activation gradient 2, weight
gradient 2 per parameter and token: a frozen layer above the trained block costs 4, one below it 2
(arXiv 2608.13277, section 3), and the output head likewise. Attention scores are left out, for
all alike. The jobs are in ``benchmarks.mot_jobs``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config

from barnraise.coordinator.corpus_files import open_corpus, shard_path
from barnraise.kernels.block_training import Recipe
from barnraise.kernels.joint_training import JointSchedule
from barnraise.kernels.models import build_model
from barnraise.kernels.mot import Cut, Scaffold, Tensors, make_cut, scaffold_config, split_model
from barnraise.kernels.token_shards import batches as token_batches
from barnraise.kernels.token_shards import held_out as held_out_batches
from barnraise.protocol.corpus import Corpus, sequences


@dataclass(frozen=True)
class World:
    """What every job of a run has in common."""

    corpus: Path
    folder: Path
    layers: int = 8
    width: int = 128
    heads: int = 4
    feed_forward: int = 384
    sequence: int = 128
    batch: int = 8
    rate: float = 2e-3
    block_rate: float = 2e-3
    held_out: int = 64  # sequences

    def config(self) -> Any:
        """The target's config."""
        return Qwen3Config(
            vocab_size=corpus_of(self.corpus).vocabulary,
            hidden_size=self.width,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=self.width // self.heads,
            max_position_embeddings=self.sequence,
            tie_word_embeddings=False,
        )

    @property
    def step_tokens(self) -> int:
        """Tokens that one step trains on."""
        return self.batch * (self.sequence - 1)


@dataclass
class Done:
    """What a job made and what it cost."""

    path: Path
    loss: float  # held-out, nats per token
    seconds: float
    train_flops: float
    tokens: int
    extra: dict[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=2)
def corpus_of(folder: Path) -> Corpus:
    """The corpus, opened once per process."""
    return open_corpus(folder)


def _get(world: World) -> Callable[[bytes], bytes]:
    return lambda digest: shard_path(world.corpus, digest).read_bytes()


def batches(world: World, seed: int, stream: tuple[int, int], start: int, steps: int) -> list[Tensor]:
    """Steps ``start`` to ``start + steps`` of a stream: int64 [batch, sequence] each."""
    corpus = corpus_of(world.corpus)
    run = hashlib.sha256(f"mot {seed}".encode()).digest()
    places = sequences(corpus, world.sequence, run, *stream, start * world.batch, steps * world.batch)
    return list(token_batches(corpus, world.sequence, places, world.batch, _get(world)))


def held_out(world: World) -> list[Tensor]:
    """The same held-out sequences for everybody."""
    return held_out_batches(corpus_of(world.corpus), world.sequence, world.held_out, _get(world))


def _layer_parameters(world: World) -> float:
    head = world.width // world.heads
    attention = world.width * head * (2 * world.heads + 2 * (world.heads // 2))
    return attention + 3 * world.width * world.feed_forward


def step_flops(
    world: World, trained: int, above: int = 0, below: int = 0, head_trained: bool = True
) -> float:
    """Operations of one step; layer counts by what is done to them."""
    head = world.width * corpus_of(world.corpus).vocabulary * (6 if head_trained else 4)
    return world.step_tokens * (_layer_parameters(world) * (6 * trained + 4 * above + 2 * below) + head)


def save(world: World, name: str, tensors: Tensors) -> Path:
    """Write them to the world's folder."""
    path = world.folder / f"{name}.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return path


def model_tensors(model: nn.Module) -> Tensors:
    """A copy of a model's parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def load_model(config: Any, path: Path) -> nn.Module:
    """A float32 model with the parameters in ``path``."""
    shared = load_file(path)
    model = build_model(config, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shared[name])
    return model


def joint_schedule(world: World, steps: int, rate: float, floor: float = 0.1) -> JointSchedule:
    """Warm-up over a tenth, then cosine."""
    return JointSchedule(
        steps=steps, learning_rate=rate, warmup_fraction=0.1, floor=floor, weight_decay=0.01, clip=1.0
    )


def scaffold_config_of(world: World, path: Path) -> Any:
    """The config of the scaffold in ``path``, which has as many layers as the file."""
    layers = 1 + max(int(name.split(".")[2]) for name in load_file(path) if ".layers." in name)
    return scaffold_config(world.config(), make_cut(world.layers, 1, layers))


def scaffold_of(world: World, cut: Cut, path: Path) -> Scaffold:
    """A trained scaffold, cut."""
    model = load_model(scaffold_config(world.config(), cut), path)
    return Scaffold(*split_model(model, cut.slice_layers))


def recipe(world: World, steps: int) -> Recipe:
    """Warm-up over a tenth, then constant, as the paper's stage 1."""
    return Recipe(
        learning_rate=world.block_rate,
        warmup_steps=steps // 10,
        settle_steps=5,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.01,
        clip=1.0,
        batch=world.batch,
    )


def perplexity(loss: float) -> float:
    """exp, bounded: what diverged is printed as a large number."""
    return math.exp(min(loss, 20.0))
