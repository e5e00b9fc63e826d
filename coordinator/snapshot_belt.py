"""When snapshots are made; and what the start left out is looked through, while the run goes on.

A start from a snapshot does not read the events before it. They are compared with their
checksums afterwards, little by little: a flipped bit still ends the coordinator soon after
its start, with the cure, instead of being found when somebody needs the whole journal.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from barnraise.coordinator.core import Core
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.log_belt import LogBelt
from barnraise.coordinator.snapshot import Snapshots, take_snapshot
from barnraise.protocol.errors import BarnraiseError, StorageError

log = logging.getLogger(__name__)

EVERY = 20_000  # ledger entries; with the time between tree heads, it bounds what a start replays
AT_STOP = 1_000  # new entries for which one is made at a clean stop, if they are no more than EVERY
RETRY_S = 60.0
CHECKED_AT_ONCE = 4_000  # events
CHECK_PAUSE_S = 0.05

Take = Callable[[], Awaitable[None]]


def in_child(folder: Path) -> Take:
    """Have a process make the next snapshot of the run in ``folder``."""

    async def take() -> None:
        done = await trio.run_process(
            [sys.executable, "-P", "-m", "barnraise.coordinator.snapshot_child", str(folder.resolve())],
            stdin=subprocess.DEVNULL,
            capture_stderr=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"its process ended with code {done.returncode}"
            raise StorageError(f"no snapshot was made: {why}")

    return take


@dataclass
class SnapshotBelt:
    """Makes a snapshot of what is published, every ``EVERY`` entries; see ``run``.

    ``take``: how; None makes it here and now, for virtual time.
    """

    core: Core
    public: LogBelt
    snapshots: Snapshots
    take: Take | None

    def __post_init__(self) -> None:
        self._covered = self.core.begun_size
        self._checked = 0

    async def run(self) -> None:
        """Look through what the start left out, and make snapshots for ever.

        Raises:
            RunFolderError: an event before the snapshot is damaged.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_old)
            while True:
                grown = self.public.grown
                size = self.public.folder.size
                if size - self._covered < EVERY:
                    await grown.wait()
                    continue
                try:
                    await (self._here() if self.take is None else self.take())
                    self._covered = size
                except BarnraiseError as error:  # it costs the next start some time, and nothing else
                    log.error("%s", error)
                    await trio.sleep(RETRY_S)

    def at_stop(self) -> None:
        """At a clean stop, when nothing else is to be done: a last one, if it takes little time."""
        if AT_STOP <= self.public.folder.size - self._covered <= EVERY:
            try:
                self._take()
            except BarnraiseError as error:
                log.error("%s", error)

    async def _here(self) -> None:
        await self.core.offload(self._take)

    def _take(self) -> None:
        core = self.core
        take_snapshot(core.journal, self.snapshots, self.public.folder, core.spec.rollout.max_lag)

    async def _check_old(self) -> None:
        end = self.core.begun_at
        if not end:
            return
        with closing(Journal(self.core.journal.path, reading=True)) as journal:
            for start in range(0, end, CHECKED_AT_ONCE):
                most = min(start + CHECKED_AT_ONCE, end)
                await self.core.offload(partial(journal.check_events, start, most))
                await trio.sleep(CHECK_PAUSE_S)
        log.info("the %d events before the snapshot are whole", end)
