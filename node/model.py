"""The node's state: one frozen value. ``barnraise.node.core`` folds events into it.

All times are seconds on one monotonic clock; ``-1`` as a version means none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from barnraise.node.decisions import GiveBack, Stop
from barnraise.node.events import Held, Mode, Unit

EngineSlot = Literal["idle", "loading", "generating", "training", "stopping"]


@dataclass(frozen=True, slots=True)
class Retry:
    """When something that failed is tried again, and why it failed last."""

    failures: int = 0
    at: float = 0.0
    reason: str = ""


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
