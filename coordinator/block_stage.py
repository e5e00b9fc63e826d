"""The learner's part of Mixture of Training: scaffold, rounds, recombination and adaptation.

Synchronous; the learner child wraps it. Every version becomes a checkpoint folder
(``barnraise.coordinator.checkpoints``) whose weight files are the manifest's parts:

    v000000 .. v<rounds>   model-00001-of-000NN (scaffold), one file per block; outer.safetensors (momentum)
    v<rounds + 1>          model.safetensors: the recombined, adapted model

Scaffold and adaptation take minutes to weeks: their training state is saved every
``SAVE_EVERY_S`` in ``RUN/scaffold`` and ``RUN/adaptation``, and taken up again.
Numbers for the report go to ``RUN/pretrain.jsonl``, one JSON object a line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from barnraise.coordinator import checkpoints
from barnraise.coordinator.block_reading import BlockReader, filled, load_part
from barnraise.coordinator.block_workers import REPORT_FILE, RecombineJob, RoundJob
from barnraise.coordinator.checkpoints import Record
from barnraise.coordinator.workers import Trained, WorkerSetup, checkpoint_folder
from barnraise.kernels.deltas import decode_delta
from barnraise.kernels.joint_training import JointSchedule, JointTrainer
from barnraise.kernels.models import build_model, save_tensors, save_weights
from barnraise.kernels.mot import (
    Scaffold,
    Tensors,
    first_block,
    join_model,
    layer_count,
    recombine,
    scaffold_config,
    split_scaffold,
)
from barnraise.kernels.mot_diagnostics import seams
from barnraise.kernels.outer import outer_step, trimmed_mean
from barnraise.kernels.token_shards import batches
from barnraise.protocol.corpus import places
from barnraise.protocol.durable import link_or_copy
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.pretrain import JointRecipe, part_name
from barnraise.protocol.unit_context import about, unit_log

log, story = logging.getLogger(__name__), unit_log(__name__)

SAVE_EVERY_S = 60.0
IMPORTED_SCAFFOLD = "scaffold.safetensors"  # in the run folder, where the run spec names one by its hash
NOT_EVALUATED = -1.0

Report = Callable[[str, float], None]  # subject, fraction done


class BlockStages(BlockReader):
    """Makes the versions of a run's block stage, each from the one before. One caller at a time."""

    def __init__(self, setup: WorkerSetup, report: Report = lambda subject, fraction: None) -> None:
        """Read config and corpus.

        Raises:
            RunFolderError: the run has no block stage, or its corpus is not the one that the spec names.
            ModelError, CorpusError: the model's config or the corpus cannot be used.
        """
        super().__init__(setup)
        self._run = setup
        self._say = report
        checkpoints.discard_leftovers(self.folder)

    # --- version 0

    def initial(self) -> Trained:
        """Train or import the scaffold, and write it with the blocks' first weights as version 0.

        Raises:
            RunFolderError: the scaffold to import is missing or another one.
            StorageError: the disk refused.
        """
        known = checkpoints.read_record(self.folder, 0)
        if known is not None:
            return known.trained
        folder = checkpoint_folder(self.folder, 0)
        scaffold = self._scaffold_model()
        save_weights(scaffold, folder / part_name(self.spec, 0), "float32")
        frame = split_scaffold(scaffold, self.cut)
        for block in range(self.spec.blocks):
            seed = int.from_bytes(self._key(f"block {block}")[:4], "big")
            state = first_block(self.config, self.cut, frame, block, self.spec.init, seed)
            save_tensors(_plain(state), folder / part_name(self.spec, block + 1))
        trained = Trained(version=0, weights="", stats=None, accuracy=NOT_EVALUATED)
        checkpoints.write_record(folder, Record(version=0, step=0, trained=trained))
        shutil.rmtree(self.folder / "scaffold", ignore_errors=True)
        return trained

    def _scaffold_model(self) -> nn.Module:
        config = scaffold_config(self.config, self.cut)
        if self.spec.scaffold is not None:
            return self._imported(config, self.spec.scaffold)
        model = build_model(config, torch.float32, int.from_bytes(self._key("scaffold")[:4], "big"))
        losses, seconds = self._joint(model, self.spec.scaffold_recipe, "scaffold")
        held = self.held_out_loss(model)
        self.note(
            stage="scaffold",
            losses=_thinned(losses),
            loss=held,
            perplexity=math.exp(min(held, 50.0)),
            seconds=seconds,
            tokens=self._tokens(self.spec.scaffold_recipe),
            parameters=sum(p.numel() for p in model.parameters()),
            layers=layer_count(config),
        )
        return model

    def _imported(self, config: Any, digest: bytes) -> nn.Module:
        path = self.folder / IMPORTED_SCAFFOLD
        try:
            with path.open("rb") as file:
                found = file_digest(file, "sha256").digest()
            if found != digest:
                raise RunFolderError(f"{path} is not the scaffold that the run spec names")
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise RunFolderError(
                f"{path}, the scaffold of an earlier run, cannot be read: {error}"
            ) from error
        model = filled(config, tensors, path)
        held = self.held_out_loss(model)
        self.note(stage="scaffold", imported=digest.hex(), loss=held, perplexity=math.exp(min(held, 50.0)))
        return model

    # --- rounds

    def round(self, job: RoundJob) -> Trained:
        """Add a round's differences up and write the next version.

        Raises:
            RunFolderError: the version before is missing or damaged.
            ModelError: a difference that was verified cannot be read any more.
            StorageError: the disk refused; the version before is intact.
        """
        known = checkpoints.read_record(self.folder, job.version)
        if known is not None:
            return known.trained
        started = time.monotonic()
        before = checkpoint_folder(self.folder, job.version - 1)
        frame = self.scaffold(job.version - 1)
        old_speed = (
            load_part(before / checkpoints.OUTER_FILE) if (before / checkpoints.OUTER_FILE).is_file() else {}
        )
        blocks: list[Tensors] = []
        speed: Tensors = {}
        losses = []
        for item in job.contributions:
            with about(item.lease_id):
                story.debug("added up into version %d", job.version)
        for block in range(self.spec.blocks):
            weights = load_part(before / part_name(self.spec, block + 1))
            deltas = [
                decode_delta(_bytes(self.folder / item.delta), self.spec.delta, weights)
                for item in job.contributions
                if item.block == block
            ]
            momentum = {name: old_speed[f"{block}.{name}"] for name in weights} if old_speed else None
            mean = trimmed_mean(deltas, self.spec.trim)
            after, moved = outer_step(weights, mean, momentum, self.spec.outer_rate, self.spec.outer_momentum)
            blocks.append(after)
            speed |= {f"{block}.{name}": value for name, value in moved.items()}
            losses.append(self.block_loss(frame, block, after))
        trained = Trained(version=job.version, weights="", stats=None, accuracy=NOT_EVALUATED)

        def write(folder: Path) -> None:
            link_or_copy(before / part_name(self.spec, 0), folder / part_name(self.spec, 0))
            for block, state in enumerate(blocks):
                save_tensors(_plain(state), folder / part_name(self.spec, block + 1))
            save_tensors(_plain(speed), folder / checkpoints.OUTER_FILE)

        checkpoints.save_checkpoint(self.folder, Record(version=job.version, step=0, trained=trained), write)
        self.note(
            stage="round",
            version=job.version,
            block_losses=losses,
            contributions=[[item.block, item.slot] for item in job.contributions],
            seconds=time.monotonic() - started,
        )
        return trained

    # --- recombination

    def recombine(self, job: RecombineJob) -> Trained:
        """Stack the blocks, measure them cold, adapt end to end, and write the model.

        Raises:
            RunFolderError: the version before is missing or damaged.
            StorageError: the disk refused; the version before is intact.
        """
        known = checkpoints.read_record(self.folder, job.version)
        if known is not None:
            return known.trained
        before = job.version - 1
        frame = self.scaffold(before)
        model = recombine(self.config, self.cut, frame.shared, list(self.blocks(before))).to(self.device)
        reference = self._scaffold_of(frame).to(self.device)
        probe = self.held_out()[:2]
        cold = self.held_out_loss(model)
        seams_cold = [asdict(seam) for seam in seams(model, reference, self.cut, probe)]
        losses, seconds = self._joint(model, self.spec.adapt, "adaptation")
        adapted = self.held_out_loss(model)
        self.note(
            stage="adaptation",
            version=job.version,
            cold=cold,
            adapted=adapted,
            cold_perplexity=math.exp(min(cold, 50.0)),
            adapted_perplexity=math.exp(min(adapted, 50.0)),
            seams_cold=seams_cold,
            seams_adapted=[asdict(seam) for seam in seams(model, reference, self.cut, probe)],
            losses=_thinned(losses),
            seconds=seconds,
            tokens=self._tokens(self.spec.adapt),
            parameters=sum(p.numel() for p in model.parameters()),
        )
        trained = Trained(
            version=job.version, weights=checkpoints.WEIGHTS_FILE, stats=None, accuracy=NOT_EVALUATED
        )
        dtype = self._run.spec.model.weights_dtype

        def write(folder: Path) -> None:
            save_weights(model, folder / checkpoints.WEIGHTS_FILE, dtype)
            if dtype != "float32":
                save_weights(model, folder / checkpoints.MASTER_FILE, "float32")

        record = Record(version=job.version, step=0, trained=trained, fresh_optimizer=True)
        checkpoints.save_checkpoint(self.folder, record, write)
        shutil.rmtree(self.folder / "adaptation", ignore_errors=True)
        weights = str(checkpoint_folder(self.folder, job.version) / checkpoints.WEIGHTS_FILE)
        return Trained(version=job.version, weights=weights, stats=None, accuracy=NOT_EVALUATED)

    # --- inside

    def _joint(self, model: nn.Module, recipe: JointRecipe, name: str) -> tuple[list[float], float]:
        """Train to the schedule's end, from the last saved state if there is one: losses, seconds."""
        if recipe.steps == 0:
            return [], 0.0
        trainer = JointTrainer(model.to(self.device), _schedule(recipe), self.compute_dtype)
        folder = self.folder / name
        losses, seconds = _resume(trainer, folder)
        text = places(
            self.corpus,
            self.spec.sequence,
            self._key(name),
            0,
            1,
            trainer.step * recipe.batch,
            (recipe.steps - trainer.step) * recipe.batch,
        )
        started = time.monotonic()
        saved = started

        def on_step(step: int, loss: float) -> None:
            nonlocal saved
            losses.append(loss)
            self._say(
                f"{name}: step {step + 1} of {recipe.steps}, loss {loss:.3f}", (step + 1) / recipe.steps
            )
            if time.monotonic() - saved >= SAVE_EVERY_S:
                due.append(step)

        due: list[int] = []
        for batch in batches(self.corpus, self.spec.sequence, text, recipe.batch, self.shard):
            trainer.train([batch], on_step)
            if due:  # between two steps, when the state is whole
                due.clear()
                saved = time.monotonic()
                _save(trainer, folder, losses, seconds + saved - started)
        return losses, seconds + time.monotonic() - started

    def _scaffold_of(self, frame: Scaffold) -> nn.Module:
        return join_model(scaffold_config(self.config, self.cut), frame.shared, list(frame.slices))

    def _tokens(self, recipe: JointRecipe) -> int:
        return recipe.steps * recipe.batch * self.spec.sequence

    def _key(self, name: str) -> bytes:
        return sha256(b"barnraise/1/stage\0" + self._run.run_id + name.encode()).digest()

    def note(self, **fields: Any) -> None:
        """Append one line for the report; a line that a full disk or a crash cut short stays alone.

        Raises:
            StorageError: the disk refused.
        """
        path = self.folder / REPORT_FILE
        try:
            with path.open("ab+") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - 1))
                torn = file.read(1) not in (b"", b"\n")
                file.write((b"\n" if torn else b"") + json.dumps(fields).encode() + b"\n")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error}; free some space there") from error


def _schedule(recipe: JointRecipe) -> JointSchedule:
    return JointSchedule(
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        warmup_fraction=recipe.warmup_fraction,
        floor=recipe.floor,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
    )


def _resume(trainer: JointTrainer, folder: Path) -> tuple[list[float], float]:
    state = folder / "state.json"
    if not state.is_file():
        return [], 0.0
    try:
        known = json.loads(state.read_text())
        trainer.restore(load_file(folder / known["tensors"]), int(known["step"]))
        return list(known["losses"]), float(known["seconds"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunFolderError(f"{folder} is damaged ({error}): remove it to train that stage anew") from error


def _save(trainer: JointTrainer, folder: Path, losses: list[float], seconds: float) -> None:
    """Tensors first under a new name, then the record that names them: a kill leaves the one before."""
    folder.mkdir(exist_ok=True)
    name = f"step-{trainer.step:08d}.safetensors"
    save_tensors(_plain(trainer.tensors()), folder / name)
    temporary = folder / ".state.json"
    with temporary.open("w") as file:
        json.dump({"step": trainer.step, "tensors": name, "losses": losses, "seconds": seconds}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "state.json")
    for path in folder.glob("step-*.safetensors"):
        if path.name != name:
            path.unlink()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error}; restore it from a backup") from error


def _plain(tensors: Tensors) -> Tensors:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _thinned(losses: list[float]) -> list[float]:
    """At most 512 of them, evenly: what a curve needs."""
    return losses[:: max(1, len(losses) // 512)]
