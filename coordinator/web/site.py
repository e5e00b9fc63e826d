"""What every page and every JSON answer draws from, and the rules on how much work one may cause."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import trio
from starlette.exceptions import HTTPException

from barnraise.coordinator.core import Core, in_thread
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.web.flow import Flow
from barnraise.coordinator.web.index_belt import IndexBelt
from barnraise.coordinator.web.index_read import IndexReader
from barnraise.coordinator.web.metrics import Metrics
from barnraise.coordinator.web.overview import Glance

T = TypeVar("T")

THREADS: Final = 4
MAX_WAITING: Final = 64  # requests that wait for a thread; more are sent away
INDEX_FILE: Final = "web.sqlite"


@dataclass(slots=True)
class Site:
    """One coordinator's page. ``reader`` and ``core.journal`` may be asked in any thread, the rest may not.

    Attributes:
        viewers: how many watch ``/live``.
    """

    core: Core
    hub: Hub
    folder: Path
    index: IndexBelt
    reader: IndexReader
    flow: Flow
    metrics: Metrics
    glance: Glance
    viewers: int = 0
    _threads: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(THREADS))
    _waiting: int = 0

    async def work(self, work: Callable[[], T]) -> T:
        """Run something that blocks or takes long away from the event loop.

        Raises:
            HTTPException: 503, too many wait already, or the index is not ready.
        """
        if self._waiting >= MAX_WAITING:
            raise HTTPException(503, "too many at once: try again in a moment", {"Retry-After": "2"})
        self._waiting += 1
        try:
            if self.core.offload is not in_thread:  # virtual time
                return await self.core.offload(work)
            return await trio.to_thread.run_sync(work, limiter=self._threads)
        except sqlite3.Error as error:
            raise HTTPException(
                503, "the page's index is not ready yet: try again in a moment", {"Retry-After": "2"}
            ) from error
        finally:
            self._waiting -= 1

    def live(self, key: bytes) -> dict[str, Any]:
        """What a node is doing now, as far as it says. A dictionary is looked up once: safe in any thread."""
        live = self.hub.by_key.get(key)
        if live is None:
            return {"state": "away", "reach": "", "engine": "", "have_version": None}
        return {
            "state": live.state,
            "reach": live.reach,
            "engine": live.engine,
            "have_version": live.have_version if live.have_version >= 0 else None,
        }
