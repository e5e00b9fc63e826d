"""What may happen to a node: plain frozen values, a closed union. See ``barnraise.node.core``.

All times are seconds on one monotonic clock; ``jitter`` is a number in [0, 1) that the shell drew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["run", "pause", "finish", "leave"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A lease at work. ``deadline``: when a submission would be refused.

    A block unit trains ``steps`` steps on ``block``, and has no prompts; its progress lies on
    the disk, so that a pause keeps it.
    """

    lease_id: bytes
    version: int
    prompts: int
    group_size: int
    deadline: float
    attempt: int = 0
    block: int = 0
    steps: int = 0

    @property
    def is_block(self) -> bool:
        """Whether it trains a block instead of drawing rollouts."""
        return self.steps > 0


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Connecting failed, or an open session ended.

    ``replaced``: another machine with this key has taken over; coming straight
    back would only throw that one out in turn. ``wait_s``: the coordinator said that
    it is no use to come back sooner; 0: it said nothing.
    """

    reason: str
    jitter: float
    replaced: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Joined:
    """The session stands. ``final``: the version that completes the run.

    ``last_block``: the last version that is made of blocks, on which block units are trained.
    """

    head: int
    final: int
    max_lag: int
    last_block: int = -1


@dataclass(frozen=True, slots=True)
class Retargeted:
    """The operator changed which version completes the run."""

    final: int


@dataclass(frozen=True, slots=True)
class HeadSeen:
    version: int


@dataclass(frozen=True, slots=True)
class FetchDone:
    version: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    reason: str
    jitter: float


@dataclass(frozen=True, slots=True)
class FetchStopped:
    pass


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    version: int


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Loading or working failed; ``alive`` false means the engine has to be loaded again.

    ``advanced``: the unit at work got further on the disk before that than at any earlier try.
    """

    reason: str
    out_of_memory: bool
    alive: bool
    jitter: float
    advanced: bool = False


@dataclass(frozen=True, slots=True)
class VersionDamaged:
    """What the engine was to load is no longer on the disk as it was fetched; the engine was not asked."""

    version: int
    jitter: float


@dataclass(frozen=True, slots=True)
class EngineStopped:
    """The engine ended its work because we asked; ``alive`` as above."""

    alive: bool


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The unit's submission is signed and on disk."""

    submission_id: bytes


@dataclass(frozen=True, slots=True)
class UnitUnusable:
    """The engine finished, but what it made cannot be submitted; the lease goes back."""

    reason: str
    jitter: float


@dataclass(frozen=True, slots=True)
class UnitDelayed:
    """What the unit at work needs could not be had just now; it is kept, and tried again."""

    reason: str
    jitter: float


@dataclass(frozen=True, slots=True)
class Granted:
    unit: Unit


@dataclass(frozen=True, slots=True)
class NoLease:
    """The coordinator has no work for us, or refused; ``retry_after`` in seconds is obeyed."""

    reason: str
    retry_after: float
    jitter: float


@dataclass(frozen=True, slots=True)
class WorkAgain:
    """The coordinator lends work again: what it said before of when to ask for some is void."""

    jitter: float


@dataclass(frozen=True, slots=True)
class AlreadyAnswered:
    """The coordinator lent what we have submitted: the two messages crossed; ask again after the upload."""


@dataclass(frozen=True, slots=True)
class AskFailed:
    reason: str
    jitter: float


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Acknowledged, refused for good (``acknowledged`` false): either way no longer pending."""

    submission_id: bytes
    acknowledged: bool


@dataclass(frozen=True, slots=True)
class UploadFailed:
    reason: str
    jitter: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A receipt arrived."""

    submission_id: bytes


@dataclass(frozen=True, slots=True)
class Returned:
    lease_id: bytes
    done: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A person's wish. ``until``: when a pause ends by itself."""

    mode: Mode
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """No new work until ``until``, because of ``reason``; ``""``: it may go on.

    ``stop``: the engine stops at once: a unit of rollouts goes back, a block unit is kept and
    goes on afterwards; otherwise the unit at work is finished. What is finished is delivered
    in any case. ``transfers``: versions are fetched and served all the same. ``free``: the
    engine's memory is wanted back, too.
    """

    reason: str
    until: float | None = None
    stop: bool = False
    transfers: bool = False
    free: bool = False


@dataclass(frozen=True, slots=True)
class Slept:
    """The machine slept for ``seconds`` that our clock did not count: every moment has come closer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DeadlineMoved:
    """The clocks were compared again: the lease at work ends at another local moment (R26)."""

    lease_id: bytes
    deadline: float


@dataclass(frozen=True, slots=True)
class Restored:
    """What an earlier process left on disk: submissions to send, leases to give back, a unit to go on."""

    pending: tuple[bytes, ...]
    leases: tuple[bytes, ...]
    unit: Unit | None = None
    last_block: int = -1  # as in ``Joined``


@dataclass(frozen=True, slots=True)
class Fatal:
    """Nothing that a retry would cure."""

    reason: str
    code: int


Event = (
    LinkLost
    | Joined
    | Retargeted
    | HeadSeen
    | FetchDone
    | FetchFailed
    | FetchStopped
    | EngineLoaded
    | EngineFailed
    | VersionDamaged
    | EngineStopped
    | UnitDone
    | UnitUnusable
    | UnitDelayed
    | Granted
    | NoLease
    | WorkAgain
    | AlreadyAnswered
    | AskFailed
    | Uploaded
    | UploadFailed
    | Judged
    | Returned
    | Command
    | Held
    | Slept
    | DeadlineMoved
    | Restored
    | Fatal
)
