"""The page of one running coordinator: made before anything is recorded, then run beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from barnraise.coordinator.core import Core
from barnraise.coordinator.guards import GuardLimits
from barnraise.coordinator.hub import Hub
from barnraise.coordinator.log_folder import LogFolder
from barnraise.coordinator.web.admin import Admin
from barnraise.coordinator.web.app import make_app
from barnraise.coordinator.web.flow import Flow
from barnraise.coordinator.web.gate import Access, Gate
from barnraise.coordinator.web.index_belt import IndexBelt
from barnraise.coordinator.web.index_read import IndexReader
from barnraise.coordinator.web.metrics import Metrics
from barnraise.coordinator.web.overview import Glance, View, overview
from barnraise.coordinator.web.pages import Pages
from barnraise.coordinator.web.shell import Limits, serve_http
from barnraise.coordinator.web.site import INDEX_FILE, Site

log = logging.getLogger(__name__)


class WebService:
    """Listens to the core from when it is made; ``run`` serves."""

    def __init__(
        self,
        core: Core,
        hub: Hub,
        log_folder: LogFolder,
        folder: Path,
        get_state: Callable[[], dict[str, Any]],
        *,
        admin: Access = "local",
        guards: GuardLimits = GuardLimits(),
    ) -> None:
        """``get_state``: the state tree without its nodes. ``admin``, ``guards``: as ``run_coordinator``."""
        path = folder / INDEX_FILE
        index, flow = IndexBelt(core, log_folder, path), Flow(core)

        def make() -> View:
            return overview(core, hub, flow, index, get_state(), folder)

        self.site = Site(
            core=core,
            hub=hub,
            folder=folder,
            index=index,
            reader=IndexReader(path),
            flow=flow,
            metrics=Metrics(flow),
            glance=Glance(make, core.now_ms),
        )
        self.admin = Admin(self.site, Gate(admin, folder), guards, get_state)
        self._pages = Pages(self.site)
        self.app = make_app(self.site, self._pages, self.admin)

    async def run(self, listeners: Sequence[trio.SocketListener] = (), limits: Limits = Limits()) -> None:
        """Keep the index up to date, and serve on ``listeners``, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.site.index.run)
                await self.site.core.offload(self._pages.prepare)
                if listeners:
                    self.admin.gate.bound_to([str(item.socket.getsockname()[0]) for item in listeners])
                    nursery.start_soon(self._serve, list(listeners), limits)
        finally:
            self.site.reader.close()

    async def _serve(self, listeners: list[trio.SocketListener], limits: Limits) -> None:
        """Without a page the run goes on."""
        try:
            await serve_http(self.app, listeners, limits)
        except* OSError as group:
            log.error("the page is served no more: %s", group.exceptions[0])
