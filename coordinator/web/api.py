"""``/api/v1/...``: the same as the pages, as JSON; read-only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from barnraise.coordinator.web.answers import (
    asked_for,
    distinct,
    ledger_page,
    node_story,
    ranking,
    unit_story,
    whole,
)
from barnraise.coordinator.web.openapi import description
from barnraise.coordinator.web.overview import View
from barnraise.coordinator.web.site import Site
from barnraise.coordinator.web.versions import version_page

ROWS: Final = 100
MAX_ROWS: Final = 500
_PUBLIC: Final = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-cache"}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer that any site's script may read: all of it is public."""
    data = msgspec.json.encode(value)
    return Response(data, status, {**_PUBLIC, **(headers or {})}, "application/json")


def public_view(view: View) -> View:
    """The overview (or a version) without what only the page needs."""
    return {name: value for name, value in view.items() if name != "recent" and not name.endswith("_ms")}


def api_routes(site: Site) -> list[Route]:
    """The routes below ``/api/v1``."""

    async def run(request: Request) -> Response:
        view = site.glance.view()
        return json_response(await site.work(lambda: public_view(view)))

    async def nodes(request: Request) -> Response:
        query, now = distinct(request.query_params.multi_items()), site.core.now_ms()

        def answer() -> dict[str, Any]:
            size = _rows(query)
            page = max(1, whole(query, "page", 100_000) or 1)
            return ranking(site, query.get("by", ["credit"])[-1], page, size, now)

        return json_response(await site.work(answer))

    async def node(request: Request) -> Response:
        query, now = distinct(request.query_params.multi_items()), site.core.now_ms()
        text = request.path_params["node"]
        return json_response(await site.work(lambda: node_story(site, text, now, _rows(query))))

    async def unit(request: Request) -> Response:
        text = request.path_params["unit"]
        return json_response(await site.work(lambda: unit_story(site, text)))

    async def ledger(request: Request) -> Response:
        query, now = distinct(request.query_params.multi_items()), site.core.now_ms()

        def answer() -> dict[str, Any]:
            asked = asked_for(site, query, now, ROWS)
            page, entries = ledger_page(site, asked)
            return {
                "entries": entries,
                "searched": {"from": page.low, "to": page.high},
                "before": page.low if page.older else None,
                "after": page.high if page.newer else None,
            }

        return json_response(await site.work(answer))

    async def versions(request: Request) -> Response:
        query = distinct(request.query_params.multi_items())
        page = max(1, whole(query, "page", 100_000) or 1)
        found = version_page(site.core.state, page, _rows(query))
        return json_response({**found, "versions": [public_view(item) for item in found["versions"]]})

    async def openapi(request: Request) -> Response:
        return json_response(description())

    routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/run": run,
        "/nodes": nodes,
        "/nodes/{node}": node,
        "/units/{unit}": unit,
        "/ledger": ledger,
        "/versions": versions,
        "/openapi.json": openapi,
    }
    return [Route(f"/api/v1{path}", endpoint, methods=["GET"]) for path, endpoint in routes.items()]


def _rows(query: dict[str, list[str]]) -> int:
    return max(1, min(MAX_ROWS, whole(query, "limit") or ROWS))
