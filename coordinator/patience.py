"""How long a verifier may be at a batch before it counts as stuck.

Generous on purpose: killing one that works loses its work, and its submissions are then
tried alone, with three tries before they are given up. A loop without end, a
dead-locked library or a device that no longer answers must not hold a verifier for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

from barnraise.coordinator.workers import VerifyJob
from barnraise.protocol.errors import ChildError
from barnraise.protocol.pretrain import segments
from barnraise.protocol.spec import RunSpec

FLOOR_S = 600.0
SCORING_S = 60.0  # what scoring one submission may take at most (``barnraise.coordinator.scoring``)
FACTOR = 20.0  # times the usual time per token
LEAST_TOKEN_BYTES = 8  # id and log-probability; proofs come on top
FIRST_OPERATIONS_S = 1e9  # before anything was measured: a slow core
LOAD_BYTES_S = 2e7  # weights from a slow disk
_REMEMBERED = 16


class StalledError(ChildError):
    """A child took far longer than its work can, and was ended."""


class WorkerAwayError(ChildError):
    """A worker on another machine cannot be reached or started: no job's fault."""


class Patience:
    """Learns what a token usually takes, and allows a batch a multiple of that.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self._token_s: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def token_s(self) -> float:
        """Seconds a token takes: the median of recent batches, or a slow guess before the first."""
        return median(self._token_s) if self._token_s else 2 * self._parameters / FIRST_OPERATIONS_S / FACTOR

    def allowance(self, jobs: Sequence[VerifyJob]) -> float:
        """Seconds that judging ``jobs`` may take, loading their versions and scoring included."""
        versions = len({job.lease.policy_version for job in jobs})
        loading = versions * 4 * self._parameters / LOAD_BYTES_S
        return FLOOR_S + SCORING_S * len(jobs) + loading + FACTOR * self.token_s * tokens_at_most(jobs)

    def note(self, jobs: Sequence[VerifyJob], seconds: float) -> None:
        """``jobs`` took so long. What was spared the model says nothing."""
        if tokens := tokens_at_most(jobs):
            self._token_s.append(seconds / tokens)


def tokens_at_most(jobs: Sequence[VerifyJob]) -> int:
    """Completion tokens that the model has to read, by the size of the payloads."""
    return sum(len(job.payload) // LEAST_TOKEN_BYTES for job in jobs if job.model_check)


def stalled(jobs: Sequence[VerifyJob], seconds: float) -> StalledError:
    """What the operator reads."""
    many = f"{len(jobs)} submissions" if len(jobs) != 1 else "one submission"
    return StalledError(
        f"the verifier was at {many} ({sum(len(job.payload) for job in jobs):,} bytes) for "
        f"{seconds / 60:.0f} minutes, far longer than they can take, and was stopped; each is tried again "
        "alone. If it happens to every submission, the device or the disk does not answer: see verifier.log"
    )


def block_allowance(spec: RunSpec, drawn: Collection[int]) -> float:
    """Seconds that doing segments of a block unit again, and six evaluations, may take on a slow core."""
    pretrain = spec.pretrain
    assert pretrain is not None
    lengths = segments(pretrain)
    steps = sum(lengths[segment] for segment in drawn)
    sequences = steps * pretrain.recipe.batch + 6 * pretrain.held_out
    operations = 6 * spec.model.parameters * sequences * pretrain.sequence
    states = 2 * len(drawn) + 1  # of three parts, beside scaffold, start and difference
    loading = (5 + 3 * states) * 4 * spec.model.parameters / LOAD_BYTES_S
    return FLOOR_S + loading + FACTOR * operations / FIRST_OPERATIONS_S
