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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from barnraise.coordinator import checkpoints
from barnraise.coordinator.batches import Row, read_batch
from barnraise.coordinator.checkpoints import Record
from barnraise.coordinator.scoring import Scorer
from barnraise.coordinator.workers import (
    Trained,
    TrainJob,
    TrainStats,
    WorkerSetup,
    checkpoint_folder,
    first_policy,
)
from barnraise.kernels.generate import greedy
from barnraise.kernels.grpo import LossStats, policy_loss, token_weights
from barnraise.kernels.logprobs import token_logprobs
from barnraise.kernels.models import Policy, load_policy, save_tensors, save_weights, swap_weights
from barnraise.kernels.prefill import prefill
from barnraise.kernels.tokens import Codec
from barnraise.protocol.environments import build_environment
from barnraise.protocol.errors import RunFolderError
from barnraise.protocol.seeds import held_out_seed

log = logging.getLogger(__name__)

NOT_EVALUATED = -1.0
MICRO_BATCH_BYTES = 2 * 1024**3
"""Activations kept for one backward pass, by estimate; the default of ``Trainer``."""
_ACTIVATIONS_PER_UNIT = 40  # floats kept per token, layer and unit of width; an estimate, meant to be high


class Trainer:
    """Holds policy and optimiser between jobs. Synchronous; ``barnraise.coordinator.workshop`` wraps it."""

    def __init__(self, setup: WorkerSetup, micro_batch_bytes: int = MICRO_BATCH_BYTES) -> None:
        """Read tokenizer and environment; weights are loaded when first needed.

        Raises:
            ModelError, TaskError: the run's model folder or environment cannot be used here.
        """
        self.spec = setup.spec
        self.run_id = setup.run_id
        self.folder = Path(setup.folder)
        self._bytes = micro_batch_bytes
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._environment = build_environment(self.spec.environment)
        self._codec = Codec(checkpoint_folder(self.folder, 0), self.spec.environment)
        self._policy: Policy | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._reference: Policy | None = None
        self._step = 0
        self._version: int | None = None  # what policy and optimiser are in memory, if sound
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
            self._load(0)
            trained = Trained(
                version=0, weights=checkpoints.WEIGHTS_FILE, stats=None, accuracy=self._evaluate()
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
        self._version = None  # until the checkpoint is durable, memory is ahead of it
        stats = self._improve(job)
        accuracy = self._evaluate() if self._evaluation_due(job.version) else NOT_EVALUATED
        stats = msgspec.structs.replace(stats, seconds=time.monotonic() - started)
        trained = Trained(
            version=job.version, weights=checkpoints.WEIGHTS_FILE, stats=stats, accuracy=accuracy
        )
        record = Record(version=job.version, step=self._step, trained=trained)
        checkpoints.save_checkpoint(self.folder, record, self._write_tensors)
        self._version = job.version
        weights = str(checkpoint_folder(self.folder, job.version) / checkpoints.WEIGHTS_FILE)
        return msgspec.structs.replace(trained, weights=weights)

    def accuracy(self, version: int) -> float:
        """Held-out accuracy of the greedy policy of a version that this class did not make.

        Raises:
            RunFolderError: its checkpoint is missing or damaged.
        """
        self._load(version)
        return self._evaluate()

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
        assert self._policy is not None
        assert self._optimizer is not None
        spec = self.spec.grpo
        micro = _micro_batches(rows, self._tokens_at_once(self._policy))
        ordered = [row for part in micro for row in part]
        lengths = [len(row.tokens) for row in ordered]
        weights = token_weights(torch.tensor(lengths), spec.loss_aggregation)
        self._optimizer.zero_grad(set_to_none=True)
        total, stats, place = 0.0, LossStats(), 0
        for part in micro:
            count = sum(len(row.tokens) for row in part)
            loss, sums = self._loss(self._policy, part, weights[place : place + count])
            place += count
            total += float(loss.detach())
            if not math.isfinite(total):
                return total, math.nan, stats
            loss.backward()  # type: ignore[no-untyped-call]
            stats += sums
        norm = float(torch.nn.utils.clip_grad_norm_(self._policy.model.parameters(), spec.grad_clip))
        if math.isfinite(norm):
            rate = spec.learning_rate * min(1.0, (self._step + 1) / max(spec.warmup_steps, 1))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._step += 1
        return total, norm, stats

    def _loss(self, policy: Policy, rows: Sequence[Row], weights: Tensor) -> tuple[Tensor, LossStats]:
        device = policy.device
        targets = torch.tensor([token for row in rows for token in row.tokens], device=device)
        old = torch.tensor(
            [value for row in rows for value in row.logprobs], dtype=torch.float32, device=device
        )
        advantages = torch.tensor(
            [row.advantage for row in rows for _ in row.tokens], dtype=torch.float32, device=device
        )
        new, entropy = self._logprobs(policy, rows, targets)
        reference = None
        if self.spec.grpo.kl_coefficient:
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference_policy(), rows, targets)
        return policy_loss(new, old, advantages, entropy, weights.to(device), self.spec.grpo, reference)

    def _logprobs(self, policy: Policy, rows: Sequence[Row], targets: Tensor) -> tuple[Tensor, Tensor]:
        sampling = self.spec.sampling
        reduced = self.spec.model.compute_dtype == "bfloat16"
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=reduced):
            prompts, tokens = [row.prompt for row in rows], [row.tokens for row in rows]
            hidden = prefill(policy, prompts, tokens, max_tokens=2**40, grad=True)
            return token_logprobs(
                hidden,
                policy.head_weight,
                targets,
                sampling.temperature,
                policy.head_bias,
                policy.softcap,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )

    def _tokens_at_once(self, policy: Policy) -> int:
        config = policy.config.get_text_config(decoder=True)
        layers = int(getattr(config, "num_hidden_layers", 1))
        return max(1, self._bytes // (4 * _ACTIVATIONS_PER_UNIT * layers * policy.hidden_size))

    # --- evaluation

    def _evaluation_due(self, version: int) -> bool:
        return version % self.spec.evaluation.every == 0 or version >= self.spec.rollout.versions

    def _evaluate(self) -> float:
        """Share of held-out tasks that the greedy policy solves (full reward)."""
        assert self._policy is not None
        tasks = [
            self._environment.task(held_out_seed(self.run_id, index), held_out=True)
            for index in range(self.spec.evaluation.tasks)
        ]
        prompts = [self._codec.encode_prompt(task.prompt) for task in tasks]
        limit = self.spec.sampling.max_new_tokens
        answers = greedy(self._policy, prompts, limit, self.spec.model.eos_token, max_batch=64)
        scorer = Scorer(self.spec.environment)  # a policy's answers are as untrusted as a stranger's
        try:
            texts = [self._codec.decode(answer) for answer in answers]
            scores = scorer.score(self._environment, tasks, texts).rewards
        finally:
            scorer.close()
        return sum(score > 1 - 1e-9 for score in scores) / len(scores)

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
        self._version = self._policy = self._optimizer = None  # free the old ones before reading
        policy = load_policy(folder, "float32", self._device)
        if (folder / checkpoints.MASTER_FILE).is_file():
            swap_weights(policy, folder / checkpoints.MASTER_FILE)
        policy.model.requires_grad_(True)
        optimizer = _optimizer(policy, self.spec.grpo)
        if (folder / checkpoints.OPTIMIZER_FILE).is_file():
            _restore_optimizer(policy, optimizer, folder / checkpoints.OPTIMIZER_FILE)
        elif record is not None and version > 0 and not record.fresh_optimizer:
            raise RunFolderError(
                f"{folder} has no {checkpoints.OPTIMIZER_FILE}: remove the folder to train it again"
            )
        self._policy, self._optimizer = policy, optimizer
        self._step = record.step if record is not None else 0
        self._version = version

    def _reference_policy(self) -> Policy:
        if self._reference is None:
            first = first_policy(self.spec)
            self._reference = load_policy(checkpoint_folder(self.folder, first), "float32", self._device)
            self._reference.model.requires_grad_(False)
        return self._reference

    def _write_tensors(self, folder: Path) -> None:
        assert self._policy is not None
        assert self._optimizer is not None
        dtype = self.spec.model.weights_dtype
        save_weights(self._policy.model, folder / checkpoints.WEIGHTS_FILE, dtype)
        if dtype != "float32":
            save_weights(self._policy.model, folder / checkpoints.MASTER_FILE, "float32")
        save_tensors(_optimizer_tensors(self._policy, self._optimizer), folder / checkpoints.OPTIMIZER_FILE)


def _micro_batches(rows: Sequence[Row], tokens: int) -> list[list[Row]]:
    """Rows of similar length together, at most ``tokens`` padded tokens each (a longer row alone)."""
    parts: list[list[Row]] = []
    width = 0
    for row in sorted(rows, key=lambda row: -(len(row.prompt) + len(row.tokens))):
        if not parts or (len(parts[-1]) + 1) * width > tokens:
            parts.append([])
            width = len(row.prompt) + len(row.tokens)
        parts[-1].append(row)
    return parts


def _optimizer(policy: Policy, spec: Any) -> torch.optim.AdamW:
    """AdamW; norms and biases (fewer than two dimensions) are not decayed."""
    parameters = list(policy.model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=spec.learning_rate, betas=(spec.beta1, spec.beta2)
    )


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return tensors


def _restore_optimizer(policy: Policy, optimizer: torch.optim.AdamW, path: Path) -> None:
    try:
        tensors = load_file(path)
    except Exception as error:  # SafetensorError, OSError
        raise RunFolderError(
            f"{path} is damaged ({error}): remove its folder to have it trained again"
        ) from error
    parameters = dict(policy.model.named_parameters())
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (kind != "step" and value.shape != parameter.shape):
            raise RunFolderError(f"{path} does not fit the model ({key}): it is another run's")
        device = value.device if kind == "step" else parameter.device
        optimizer.state[parameter][kind] = value.to(device)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
