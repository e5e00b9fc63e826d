"""Reading what the block stage works on: config, corpus, and the parts of published versions.

Shared by the learner, which makes the versions, and the verifier, which does a node's
steps again. Synchronous; nothing here writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from barnraise.coordinator.block_workers import corpus_folder
from barnraise.coordinator.corpus_files import open_corpus, shard_path
from barnraise.coordinator.workers import WorkerSetup, checkpoint_folder
from barnraise.kernels.joint_training import evaluate
from barnraise.kernels.models import DTYPES, build_model, read_config
from barnraise.kernels.mot import (
    Scaffold,
    Tensors,
    layer_count,
    make_cut,
    scaffold_config,
    scaffolded,
    split_scaffold,
)
from barnraise.kernels.token_shards import held_out
from barnraise.protocol.corpus import corpus_digest
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.pretrain import PretrainSpec, part_name


class BlockReader:
    """Config, cut and corpus of a pretraining run, and its versions' parts."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Read config and corpus.

        Raises:
            RunFolderError: the run has no block stage, or its corpus is not the one that the spec names.
            ModelError, CorpusError: the model's config or the corpus cannot be used.
        """
        if setup.spec.pretrain is None:
            raise RunFolderError("this run does not pretrain")
        self.spec: PretrainSpec = setup.spec.pretrain
        self.folder = Path(setup.folder)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.compute_dtype = DTYPES[setup.spec.model.compute_dtype]
        self.config: Any = read_config(checkpoint_folder(self.folder, 0))
        self.cut = make_cut(layer_count(self.config), self.spec.blocks, self.spec.scaffold_layers)
        self.corpus = open_corpus(corpus_folder(self.folder))
        if corpus_digest(self.corpus) != self.spec.corpus:
            raise RunFolderError(f"{corpus_folder(self.folder)} is not the corpus that the run spec names")

    def scaffold(self, version: int) -> Scaffold:
        """The scaffold as a version's first part holds it. Raises RunFolderError if it is damaged."""
        path = checkpoint_folder(self.folder, version) / part_name(self.spec, 0)
        model = filled(scaffold_config(self.config, self.cut), load_part(path), path)
        return split_scaffold(model, self.cut)

    def block(self, version: int, block: int) -> Tensors:
        """A block's weights at a version. Raises RunFolderError if they are damaged."""
        return load_part(checkpoint_folder(self.folder, version) / part_name(self.spec, block + 1))

    def blocks(self, version: int) -> tuple[Tensors, ...]:
        """Every block's weights at a version. Raises RunFolderError if one is damaged."""
        return tuple(self.block(version, block) for block in range(self.spec.blocks))

    def block_loss(
        self, frame: Scaffold, block: int, state: Tensors, text: list[Tensor] | None = None
    ) -> float:
        """Loss (nats per token) of a block inside the scaffold, on held-out text or on ``text``."""
        return self.held_out_loss(scaffolded(self.config, self.cut, frame, block, state), text)

    def held_out_loss(self, model: nn.Module, text: list[Tensor] | None = None) -> float:
        """Loss (nats per token) of a whole model, on held-out text or on ``text``."""
        chosen = self.held_out() if text is None else text
        return evaluate(model.to(self.device), chosen, self.compute_dtype)

    def held_out(self) -> list[Tensor]:
        """The held-out sequences that every evaluation of this run reads, int64 [<= 16, sequence] each."""
        return held_out(self.corpus, self.spec.sequence, self.spec.held_out, self.shard)

    def shard(self, digest: bytes) -> bytes:
        """A corpus shard's bytes. Raises RunFolderError if they cannot be read."""
        try:
            return shard_path(corpus_folder(self.folder), digest).read_bytes()
        except OSError as error:
            raise RunFolderError(f"a shard of the corpus cannot be read: {error}; restore it") from error


def filled(config: Any, tensors: Tensors, where: Path) -> nn.Module:
    """A model of ``config`` with weights ``tensors``. Raises RunFolderError if they are not its own."""
    model = build_model(config, torch.float32)
    own = dict(model.named_parameters())
    if own.keys() != tensors.keys() or any(own[key].shape != tensors[key].shape for key in own):
        raise RunFolderError(f"{where} does not hold the scaffold of this run's model")
    for name, value in tensors.items():
        if not value.is_floating_point() or not bool(torch.isfinite(value).all()):
            raise RunFolderError(f"{name} in {where} is not made of finite numbers: take another scaffold")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    return model


def load_part(path: Path) -> Tensors:
    """The tensors of one of a version's files. Raises RunFolderError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}; restore it from a backup") from error
