"""The seams to the coordinator's heavy workers: verifier and learner.

Both run torch in a child process (``verifier_child``, ``learner_child``); tests and
the simulator put in-process ones behind the same seams. Structs here are the
closed set that crosses those pipes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob, RecombineJob, RoundJob
from barnraise.protocol.messages import RolloutLease, Verdict
from barnraise.protocol.pretrain import model_version
from barnraise.protocol.spec import RunSpec

Report = Callable[[str, float], None]  # subject, share done


class VerifyJob(Struct, frozen=True, kw_only=True, tag=True):
    """One stored submission: the payload bytes as signed, and the lease that it answers."""

    submission_id: bytes
    lease: RolloutLease
    payload: bytes
    model_check: bool = True  # false: only the checks that need no model, and the rewards


class Judged(Struct, frozen=True, kw_only=True, tag=True):
    """The verdict, and what the learner needs if it is accepted.

    ``rewards``: one per rollout, ordered by prompt, then sample; empty if rejected.
    ``tokens``: completion tokens verified (credit is 2 x parameters x tokens / 1e6).
    """

    submission_id: bytes
    verdict: Verdict
    rewards: tuple[float, ...]
    tokens: int


class Group(Struct, frozen=True, kw_only=True):
    """One prompt's samples, as trained on. Arrays are little-endian bytes as in ``Rollout``."""

    policy_version: int
    prompt_tokens: tuple[int, ...]
    completions: tuple[bytes, ...]  # uint32
    logprobs: tuple[bytes, ...]  # float32, proven behaviour log-probabilities
    rewards: tuple[float, ...]


class BatchPart(Struct, frozen=True, kw_only=True):
    """One accepted submission inside a batch: enough to derive its groups again after a crash."""

    lease: RolloutLease
    payload: bytes
    rewards: tuple[float, ...]


class TrainJob(Struct, frozen=True, kw_only=True, tag=True):
    """Make policy version ``version`` from checkpoint ``version - 1`` and these submissions.

    Deterministic given the checkpoint: a job cut short by a crash is simply sent again.
    ``settings``: the run spec as amended so far; None: as it was signed.
    """

    version: int
    parts: tuple[BatchPart, ...]
    settings: RunSpec | None = None


class TrainStats(Struct, frozen=True, kw_only=True):
    """What one version's training looked like. NaN-free; fractions in [0, 1]."""

    reward_mean: float  # over all rollouts of the batch, zero-advantage groups included
    groups: int  # verified groups in the batch
    groups_used: int  # those with a non-zero advantage
    loss: float
    grad_norm: float
    clip_fraction: float
    ratio_max: float
    entropy: float
    kl: float  # mean behaviour-to-new log-ratio (k3 estimate), nats per token
    lag_mean: float  # versions
    seconds: float
    skipped_steps: int = 0  # optimiser steps left out because loss or gradient was not finite


class Trained(Struct, frozen=True, kw_only=True, tag=True):
    """A finished version: a complete checkpoint folder, already synced and renamed.

    ``weights`` is a safetensors file in the run's published dtype. ``accuracy`` is the
    held-out accuracy of the greedy policy where this version was evaluated, else -1.
    """

    version: int
    weights: str
    stats: TrainStats | None  # None for version 0 and the block stage
    accuracy: float


class Verifier(Protocol):
    """Judges submissions against the weights of the version that their lease names."""

    @property
    def slots(self) -> int:
        """How many batches it judges side by side; further calls of ``verify`` wait their turn."""

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        """Judge ``jobs`` (any versions still kept) in one batch; one result per job, same order.

        A job that makes the verifier itself fail is judged again alone, so that one
        malformed file never delays another's verdict.

        Raises:
            ChildError: the verifier died and could not be restarted.
        """

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        """Judge one block unit, against the version that its lease names; takes a slot as ``verify`` does.

        Raises:
            ChildError: the verifier died and could not be restarted, or could not read that version.
        """

    async def close(self) -> None: ...


class Learner(Protocol):
    """Turns accepted work into the next policy version.

    Attributes:
        on_progress: told, in words and as a share, how far a long job is; set by whoever runs it.
    """

    on_progress: Report

    async def initial(self) -> Trained:
        """Make, or evaluate and export, version 0 (or report it again after a restart)."""

    async def train(self, job: TrainJob | RoundJob | RecombineJob) -> Trained:
        """Run one job to a durable checkpoint; repeats safely (same version -> same result).

        Raises:
            ChildError: the learner died and could not be restarted.
        """

    async def close(self) -> None: ...


class WorkerSetup(Struct, frozen=True, kw_only=True, tag=True):
    """First frame to either child: which run, where its folder is, how many threads."""

    spec: RunSpec
    run_id: bytes
    folder: str
    threads: int


class LearnerScale(Struct, frozen=True, kw_only=True):
    """How the learner is spread out. None of it changes what is learnt, but for rounding.

    ``recompute``: keep no activations inside of decoder layers (less memory, a forward pass more).
    ``devices``: the CUDA devices that it may use, empty for all. ``torchrun``: options with which
    torchrun starts the processes, here and on other machines; empty: all are started here.
    """

    processes: int = 1
    recompute: bool = False
    devices: str = ""
    torchrun: tuple[str, ...] = ()


def first_policy(spec: RunSpec) -> int:
    """The version that post-training begins with: 0, or the model that the block stage ends in."""
    return 0 if spec.pretrain is None else model_version(spec.pretrain)


def checkpoint_folder(run_folder: Path, version: int) -> Path:
    """``RUN/checkpoints/v000012``: config, tokenizer, weights, optimizer state, state.json."""
    return run_folder / "checkpoints" / f"v{version:06d}"
