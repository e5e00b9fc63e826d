"""``/live``: server-sent events with the figures that change, for browsers that run the page's script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Final

import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from barnraise.coordinator.web import words
from barnraise.coordinator.web.overview import View
from barnraise.coordinator.web.site import Site

EVERY_S: Final = 1.0
BEAT_S: Final = 15.0
LASTS_S: Final = 3600.0  # then the browser comes again
VIEWERS: Final = 64


def live_values(view: View) -> dict[str, str]:
    """The figures of the overview that change, as they are shown."""
    work, nodes, ledger, rates = view["work"], view["nodes"], view["ledger"], view["rates"]
    broadcast = view["broadcast"]
    return {
        "now": words.moment(view["now_ms"]),
        "version": words.number(view["version"] if view["version"] >= 0 else None),
        "stage": view["stage"],
        "state": "paused" if view["pause"] else view["state"],
        "waiting_for": "" if view["pause"] else view["waiting_for"],  # the page says it at length
        "held_out": words.share(view["held_out"]),
        "reward": words.share(view["reward"]),
        "nodes_live": words.number(nodes["live"]),
        "nodes_known": words.number(nodes["known"]),
        "accepted": words.number(work["accepted"]),
        "rejected": words.number(work["rejected"]),
        "queue": words.number(work["queue"]),
        "leases_open": words.number(work["leases_open"]),
        "per_minute": words.rate(rates["accepted_per_min"]),
        "tokens_per_s": words.rate(rates["tokens_per_s"]),
        "flops_per_s": f"{words.flops(rates['mflop_per_s'])}/s",
        "holding": words.number(broadcast["holding"]),
        "bytes_out": words.size(broadcast["bytes_out"]),
        "bytes_in": words.size(broadcast["bytes_in"]),
        "entries": words.number(ledger["size"]),
        "published": words.number(ledger["published"]),
        "cosigned": words.number(len(ledger["cosigned"])),
        "alarms": words.number(len(view["alarms"])),
    }


class _Watching(StreamingResponse):
    """Counts its viewer for exactly as long as it lasts."""

    def __init__(self, site: Site) -> None:
        super().__init__(
            _events(site),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._site.viewers += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._site.viewers -= 1


async def _events(site: Site) -> AsyncIterator[str]:
    sent: dict[str, str] = {}
    told, ends = trio.current_time(), trio.current_time() + LASTS_S
    yield "retry: 5000\n\n"
    while trio.current_time() < ends:
        values = live_values(site.glance.view())
        changed = {name: value for name, value in values.items() if sent.get(name) != value}
        if changed.keys() - {"now"}:
            sent, told = values, trio.current_time()
            yield f"event: values\ndata: {json.dumps(changed)}\n\n"
        elif trio.current_time() - told >= BEAT_S:
            told = trio.current_time()
            yield ": still here\n\n"
        await trio.sleep(EVERY_S)


def live_routes(site: Site) -> list[Route]:
    """The one route."""

    async def live(request: Request) -> Response:
        if site.viewers >= VIEWERS:
            raise HTTPException(503, "too many watch already: reload the page instead", {"Retry-After": "60"})
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return _Watching(site)

    return [Route("/live", live, methods=["GET"], name="live")]
