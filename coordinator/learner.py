"""The learner: one policy version after another, by GRPO on verified rollouts.

1. Rows: every group with unequal rewards; behaviour log-probabilities are the
   proven ones, so that staleness is corrected for (``barnraise.coordinator.batches``).
2. ``inner_epochs`` times: a seeded permutation of the rows, cut into ``minibatches``;
   one AdamW step each, gradients accumulated over micro-batches that fit memory.
3. Held-out accuracy of the greedy policy, where it is due.
4. A checkpoint, atomically (``barnraise.coordinator.checkpoints``).

Weights are trained in float32, whatever they are published in. Given checkpoint and
job the result is the same to the bit on the same machine with as many threads, so a
job that a crash cut short is simply done again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from barnraise.coordinator import checkpoints
from barnraise.coordinator.batches import Row, read_batch
from barnraise.coordinator.checkpoints import Record
from barnraise.coordinator.evaluation import HeldOut
from barnraise.coordinator.learner_policy import trained_policy, write_policy
from barnraise.coordinator.learner_shards import (
    Processes,
    clip_gradients,
    gathered,
    read_shards,
    shard,
    start_writing,
)
from barnraise.coordinator.learner_step import (
    Scores,
    Share,
    follow,
    gradients,
    make_optimizer,
    recompute_layers,
    tokens_at_once,
)
from barnraise.coordinator.optimizer_file import read_optimizer, write_optimizer
from barnraise.coordinator.workers import (
    Trained,
    TrainJob,
    TrainStats,
    WorkerSetup,
    checkpoint_folder,
    first_policy,
)
from barnraise.kernels.grpo import LossStats
from barnraise.kernels.lora import adapter_off
from barnraise.kernels.models import Policy, load_policy, save_tensors
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import RunFolderError, StorageError
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.unit_context import about, unit_log

log, story = logging.getLogger(__name__), unit_log(__name__)

NOT_EVALUATED = -1.0
MICRO_BATCH_BYTES = 2 * 1024**3
"""Activations kept for one backward pass, by estimate; the default of ``Trainer``."""


class Trainer:
    """Holds policy and optimiser between jobs. Synchronous; ``barnraise.coordinator.workshop`` wraps it."""

    def __init__(
        self,
        setup: WorkerSetup,
        micro_batch_bytes: int = MICRO_BATCH_BYTES,
        recompute: bool = False,
        processes: Processes | None = None,
    ) -> None:
        """Read tokenizer and environment; weights are loaded when first needed.

        Args:
            recompute: keep no activations inside of decoder layers, but compute them twice.
            processes: over which the model is sharded; all of them make the same calls.

        Raises:
            ModelError, TaskError: the run's model folder or environment cannot be used here.
        """
        self.spec = setup.spec
        self.run_id = setup.run_id
        self.folder = Path(setup.folder)
        self._bytes = micro_batch_bytes
        self._recompute = recompute
        self._processes = processes
        if processes is not None and self.spec.model.adapter is not None:
            raise RunFolderError(
                "a run with adapters is trained by one process: its base is not sharded; "
                "start the coordinator with one learner process"
            )
        self._first = processes is None or processes.rank == 0
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._environment = build_environment(self.spec.environment)
        self._codec = Codec(checkpoint_folder(self.folder, 0), self.spec.environment)
        self._held_out = HeldOut(self.spec, self.run_id, self.folder)
        self._scores: Scores | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._reference: Scores | None = None
        self._step = 0
        self._version: int | None = None  # what policy and optimiser are in memory, if sound
        if self._first:
            checkpoints.discard_leftovers(self.folder)

    def initial(self) -> Trained:
        """Evaluate version 0 and record it; once recorded, report the same again.

        Raises:
            RunFolderError: ``run init`` has not finished, or its record is damaged.
        """
        folder = checkpoint_folder(self.folder, 0)
        if not (folder / checkpoints.WEIGHTS_FILE).is_file():
            raise RunFolderError(
                f"{folder} has no {checkpoints.WEIGHTS_FILE}: create the run with 'barnraise run init'"
            )
        known = checkpoints.read_record(self.folder, 0)
        if known is None:
            trained = Trained(
                version=0, weights=checkpoints.WEIGHTS_FILE, stats=None, accuracy=self.accuracy(0)
            )
            checkpoints.write_record(folder, Record(version=0, step=0, trained=trained))
            known = checkpoints.read_record(self.folder, 0)
            assert known is not None
        return known.trained

    def train(self, job: TrainJob) -> Trained:
        """Make ``job.version`` from ``job.version - 1``; report a version that is there already.

        Raises:
            RunFolderError: the checkpoint to start from is missing or damaged.
            StorageError: the disk refused; the previous version is intact.
        """
        known = checkpoints.read_record(self.folder, job.version)
        if known is not None:
            return known.trained
        started = time.monotonic()
        if self._version != job.version - 1:
            self._load(job.version - 1)
        if job.settings is not None:
            self._follow(job.settings)
        self._version = None  # until the checkpoint is durable, memory is ahead of it
        stats = self._improve(job)

        def record(accuracy: float) -> Record:
            seconds = time.monotonic() - started
            trained = Trained(
                version=job.version,
                weights=checkpoints.WEIGHTS_FILE,
                stats=msgspec.structs.replace(stats, seconds=seconds),
                accuracy=accuracy,
            )
            return Record(version=job.version, step=self._step, trained=trained)

        if self._processes is None:
            accuracy = NOT_EVALUATED
            if self._evaluation_due(job.version):
                accuracy = self._held_out.accuracy(self._sound.policy, self.spec)
            made = record(accuracy)
            checkpoints.save_checkpoint(self.folder, made, self._write_tensors)
        else:
            made = self._save_together(job.version, record, self._processes)
        self._version = job.version
        weights = str(checkpoint_folder(self.folder, job.version) / checkpoints.WEIGHTS_FILE)
        return msgspec.structs.replace(made.trained, weights=weights)

    def accuracy(self, version: int) -> float:
        """Held-out accuracy of the greedy policy of a version that this class did not make.

        Of several processes the first alone is asked, and reads the model whole.

        Raises:
            RunFolderError: its checkpoint is missing or damaged.
        """
        if self._processes is None:
            self._load(version)
            return self._held_out.accuracy(self._sound.policy, self.spec)
        return self._held_out.accuracy(self._whole(checkpoint_folder(self.folder, version)), self.spec)

    def _follow(self, settings: RunSpec) -> None:
        """Go by amended settings from here on; policy and optimiser's state stay."""
        self.spec = settings
        assert self._optimizer is not None
        follow(self._optimizer, settings.grpo)
        for scores in (self._scores, self._reference):
            if scores is not None:
                scores.spec = settings

    # --- one version

    def _improve(self, job: TrainJob) -> TrainStats:
        grpo = self.spec.grpo
        batch = read_batch(job, self._environment, self._codec.encode_prompt, grpo.normalise_std)
        totals = LossStats()
        losses: list[float] = []
        norms: list[float] = []
        skipped = 0
        digest = hashlib.sha256(b"barnraise/1/permutation\0" + self.run_id + job.version.to_bytes(8, "big"))
        generator = torch.Generator().manual_seed(int.from_bytes(digest.digest()[:7], "big"))
        for _ in range(grpo.inner_epochs):
            order = torch.randperm(len(batch.rows), generator=generator)
            for chosen in order.tensor_split(grpo.minibatches):
                if not len(chosen):
                    continue
                loss, norm, stats = self._optimise([batch.rows[i] for i in chosen.tolist()])
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    skipped += 1
                    log.warning(
                        "version %d: a step with loss %s, norm %s was skipped", job.version, loss, norm
                    )
                    continue
                losses.append(loss)
                norms.append(norm)
                totals += stats
        if self._first:
            for part in job.parts:
                with about(part.lease):
                    story.debug("trained on for version %d", job.version)
        tokens = max(totals.tokens, 1)
        return TrainStats(
            reward_mean=batch.reward_mean,
            groups=batch.groups,
            groups_used=batch.groups_used,
            loss=_mean(losses),
            grad_norm=_mean(norms),
            clip_fraction=totals.clipped / tokens,
            ratio_max=totals.ratio_max,
            entropy=totals.entropy / tokens,
            kl=totals.kl / tokens,
            lag_mean=batch.lag_mean,
            seconds=0.0,
            skipped_steps=skipped,
        )

    def _optimise(self, rows: Sequence[Row]) -> tuple[float, float, LossStats]:
        """One optimiser step over a minibatch: (loss, gradient norm before clipping, sums)."""
        assert self._optimizer is not None
        spec, scores = self.spec.grpo, self._sound
        self._optimizer.zero_grad(set_to_none=True)
        tokens = tokens_at_once(scores.policy, self._bytes, self._recompute)
        reference = self._reference_logprobs if spec.kl_coefficient else None
        share = Share() if self._processes is None else self._processes.share
        loss, stats = gradients(scores, rows, tokens, share, reference)
        if not math.isfinite(loss):
            return loss, math.nan, stats
        norm = clip_gradients(scores.policy, spec.grad_clip)
        if math.isfinite(norm):
            rate = spec.learning_rate * min(1.0, (self._step + 1) / max(spec.warmup_steps, 1))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._step += 1
        return loss, norm, stats

    @torch.no_grad()
    def _reference_logprobs(self, rows: Sequence[Row]) -> Tensor:
        if self.spec.model.adapter is not None:  # adapters begin as nothing: the base is the first policy
            with adapter_off(self._sound.policy.model):
                base: Tensor = self._sound(rows)[0]
            return base
        if self._reference is None:
            first = first_policy(self.spec)
            policy = load_policy(checkpoint_folder(self.folder, first), "float32", self._device)
            policy.model.requires_grad_(False)
            self._reference = Scores(policy, self.spec)
            if self._processes is not None:
                shard(self._reference, self._processes, train=False)
        logprobs: Tensor = self._reference(rows)[0]
        return logprobs

    def _evaluation_due(self, version: int) -> bool:
        return version % self.spec.evaluation.every == 0 or version >= self.spec.rollout.versions

    # --- state

    def _load(self, version: int) -> None:
        """Policy and optimiser as of ``version``, from its checkpoint."""
        folder = checkpoint_folder(self.folder, version)
        record = checkpoints.read_record(self.folder, version)
        if record is None and version > 0:
            raise RunFolderError(
                f"checkpoint {folder} is missing or incomplete; versions here: "
                f"{checkpoints.complete_versions(self.folder)}"
            )
        self._version = self._scores = self._optimizer = None  # free the old ones before reading
        policy = trained_policy(folder, self.spec, "cpu" if self._processes else self._device)
        scores = Scores(policy, self.spec)
        if self._recompute:
            recompute_layers(policy)
        if self._processes is not None:
            shard(scores, self._processes, train=True)
        optimizer = make_optimizer(policy, self.spec.grpo)
        if (folder / checkpoints.SHARDS_FOLDER).is_dir():
            read_shards(policy, optimizer, folder / checkpoints.SHARDS_FOLDER)
        elif (folder / checkpoints.OPTIMIZER_FILE).is_file():
            read_optimizer(policy, optimizer, folder / checkpoints.OPTIMIZER_FILE)
        elif record is not None and version > 0 and not record.fresh_optimizer:
            raise RunFolderError(
                f"{folder} has no {checkpoints.OPTIMIZER_FILE}: remove the folder to train it again"
            )
        self._scores, self._optimizer = scores, optimizer
        self._step = record.step if record is not None else 0
        self._version = version

    @property
    def _sound(self) -> Scores:
        assert self._scores is not None
        return self._scores

    def _whole(self, folder: Path) -> Policy:
        """A policy of its own, in what nodes compute in, from a version's published weights."""
        return load_policy(folder, self.spec.model.compute_dtype, self._device)

    def _write_tensors(self, folder: Path) -> None:
        assert self._optimizer is not None
        policy = self._sound.policy
        write_policy(policy, self.spec, folder, checkpoint_folder(self.folder, 0))
        write_optimizer(policy, self._optimizer, folder / checkpoints.OPTIMIZER_FILE)

    def _save_together(self, version: int, record: Callable[[float], Record], processes: Processes) -> Record:
        """The checkpoint of a sharded model; the shards are written while the rest is made.

        Raises:
            StorageError: some process could not write; the previous version is intact.
        """
        final = checkpoint_folder(self.folder, version)
        began = False
        made = record(NOT_EVALUATED)

        def write(folder: Path) -> Record:
            nonlocal began, made
            began = True
            processes.agree()  # the folder is there
            assert self._optimizer is not None
            policy, problem = self._sound.policy, ""
            shards = start_writing(policy, self._optimizer, folder / checkpoints.SHARDS_FOLDER, processes)
            weights = gathered(policy, self.spec.model.weights_dtype, keep=self._first)
            accuracy = NOT_EVALUATED
            try:
                if self._first:
                    save_tensors(weights, folder / checkpoints.WEIGHTS_FILE)
                    if self._evaluation_due(version):
                        accuracy = self._held_out.accuracy(self._whole(folder), self.spec)
                shards.result()
            except (StorageError, OSError) as error:
                problem = str(error) or type(error).__name__
            except Exception as error:
                if (
                    not isinstance(error.__cause__ or error, OSError)
                    and "heckpoint" not in type(error).__name__
                ):
                    raise
                problem = f"cannot write {folder / checkpoints.SHARDS_FOLDER}: {error}"
            processes.agree(problem)
            made = record(accuracy)
            return made

        if not self._first:
            write(final.with_name(checkpoints.TEMPORARY + final.name))
            return made
        try:
            checkpoints.save_checkpoint(self.folder, made, write)
        except StorageError as error:
            if not began:
                processes.agree(str(error))
            raise
        return made


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
