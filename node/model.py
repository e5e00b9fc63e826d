"""The node's state, what may happen to it, and what it may decide: plain frozen values.

All times are seconds on one monotonic clock; ``jitter`` is a number in [0, 1) that
the shell drew; ``-1`` as a version means none. See ``barnraise.node.core``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["run", "pause", "finish", "leave"]
EngineSlot = Literal["idle", "loading", "generating", "training", "stopping"]


@dataclass(frozen=True, slots=True)
class Retry:
    """When something that failed is tried again, and why it failed last."""

    failures: int = 0
    at: float = 0.0
    reason: str = ""


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
class Activity:
    """What the node is doing or waiting for, since when, and what ends the wait (R3)."""

    name: str
    reason: str
    since: float = 0.0
    until: float | None = None
    then: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What makes it another activity: the name and the reason up to its changing detail."""
        return self.name, self.reason.partition(":")[0]


# --- events


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


# --- actions


@dataclass(frozen=True, slots=True)
class Connect:
    attempt: int


@dataclass(frozen=True, slots=True)
class Fetch:
    version: int


@dataclass(frozen=True, slots=True)
class StopFetch:
    pass


@dataclass(frozen=True, slots=True)
class Load:
    version: int


@dataclass(frozen=True, slots=True)
class Ask:
    version: int


@dataclass(frozen=True, slots=True)
class Generate:
    unit: Unit
    shrink: int


@dataclass(frozen=True, slots=True)
class Train:
    unit: Unit
    shrink: int = 0


@dataclass(frozen=True, slots=True)
class StopEngine:
    reason: str


@dataclass(frozen=True, slots=True)
class FreeEngine:
    """End the engine's process, which is idle; answered like ``StopEngine``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Upload:
    submission_id: bytes


@dataclass(frozen=True, slots=True)
class GiveBack:
    lease_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    code: int
    reason: str


Action = (
    Connect
    | Fetch
    | StopFetch
    | Load
    | Ask
    | Generate
    | Train
    | StopEngine
    | FreeEngine
    | Upload
    | GiveBack
    | Stop
)


@dataclass(frozen=True, slots=True)
class State:
    """Everything the decisions depend on. ``-1`` as a version means none."""

    exit_when_complete: bool = False
    link: Literal["down", "trying", "up"] = "down"
    link_retry: Retry = Retry()
    link_since: float = 0.0  # when the session was joined
    joined_once: bool = False
    head: int = -1
    final: int = 2**31
    max_lag: int = 2**31
    last_block: int = -1
    fetched: int = -1
    fetching: int | None = None
    fetch_stopping: bool = False
    fetch_renew: bool = False  # the coordinator is back: begin again, it may have been given up as a source
    fetch_retry: Retry = Retry()
    engine: EngineSlot = "idle"
    engine_target: int = -1
    engine_retry: Retry = Retry()
    loaded: int = -1
    shrink: int = 0
    unit: Unit | None = None
    asking: bool = False
    ask_retry: Retry = Retry()
    ask_after_upload: bool = False
    pending: tuple[bytes, ...] = ()
    uploading: bytes | None = None
    upload_retry: Retry = Retry()
    unjudged: frozenset[bytes] = frozenset()
    returns: tuple[GiveBack, ...] = ()
    returning: bool = False
    mode: Mode = "run"
    pause_until: float | None = None
    held: Held | None = None
    engine_used: bool = False  # since it was freed last
    stop_by: float | None = None
    stopped: Stop | None = None
    activity: Activity = Activity("starting", "starting")

    @property
    def complete(self) -> bool:
        """Whether the run's last version is published."""
        return self.head >= self.final

    @property
    def in_blocks(self) -> bool:
        """Whether the newest version is one of blocks: the work is training them."""
        return self.head <= self.last_block

    @property
    def ready(self) -> int:
        """The version that work can be done at: blocks lie on the disk, a policy in the engine."""
        return self.fetched if self.fetched <= self.last_block else self.loaded

    @property
    def behind(self) -> bool:
        """Whether ``ready`` is too old for work to be asked for at it."""
        crossed = self.ready <= self.last_block < self.head
        return crossed or self.head - self.ready > (0 if self.in_blocks else self.max_lag)

    @property
    def suspended(self) -> Held | None:
        """The hold under which the engine must not work."""
        return self.held if self.held is not None and self.held.stop else None

    @property
    def may_transfer(self) -> bool:
        """Whether versions may be fetched and served."""
        return self.held is None or self.held.transfers

    @property
    def wants_work(self) -> bool:
        """Whether another unit may be taken."""
        return self.mode == "run" and self.held is None and not self.complete and self.stopped is None
