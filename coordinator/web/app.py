"""The ASGI application: pages, JSON, the log's files, health and metrics, with the headers that all share."""

from __future__ import annotations

import time
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from barnraise.coordinator.web.admin import ADMIN_PATH, Admin, admin_routes, refusal
from barnraise.coordinator.web.api import api_routes, json_response
from barnraise.coordinator.web.flow import Flow
from barnraise.coordinator.web.live import live_routes
from barnraise.coordinator.web.log_files import log_routes
from barnraise.coordinator.web.metrics import CONTENT_TYPE
from barnraise.coordinator.web.pages import Pages, page_routes
from barnraise.coordinator.web.site import Site

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]
MAX_QUERY: Final = 4096  # bytes


def make_app(site: Site, pages: Pages, admin: Admin) -> ASGIApp:
    """The whole site as one ASGI application."""

    async def read_log(path: str) -> bytes | None:
        return await site.work(lambda: site.index.entries.folder.read(path))

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if path.startswith(ADMIN_PATH):
            return refusal(error.status_code, error.detail, headers=dict(error.headers or {}))
        if path.startswith("/api/"):
            return json_response({"error": error.detail}, error.status_code, dict(error.headers or {}))
        if path.startswith("/log/") or error.status_code in (405, 503):
            return PlainTextResponse(f"{error.detail}\n", error.status_code, dict(error.headers or {}))
        return await pages.error(request, error)

    app = Starlette(
        routes=[
            *page_routes(site, pages),
            *api_routes(site),
            *admin_routes(admin),
            *log_routes(read_log),
            *live_routes(site),
            *_watch_routes(site),
        ],
        exception_handlers={HTTPException: failed},
    )
    app.router.redirect_slashes = False
    return _Around(app, site.flow)


def _watch_routes(site: Site) -> list[Route]:
    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n", headers={"Cache-Control": "no-store"})

    async def readyz(request: Request) -> Response:
        alarms = site.glance.view()["alarms"]
        reasons = [alarm["what"] for alarm in alarms if alarm["part"] != "page"]
        if site.core.state.head < 0:
            reasons.append("no version is published yet")
        status = 503 if reasons else 200
        return json_response(
            {"ready": not reasons, "reasons": reasons}, status, {"Cache-Control": "no-store"}
        )

    async def metrics(request: Request) -> Response:
        view = site.glance.view()
        data = await site.work(lambda: site.metrics.text(view))
        return Response(data, headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})

    return [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]


class _Around:
    """Headers for every reply, a bound on queries, and how long the first byte took."""

    def __init__(self, app: ASGIApp, flow: Flow) -> None:
        self._app = app
        self._flow = flow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.perf_counter()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers: list[Any] = list(message.get("headers", ()))
                message["headers"] = headers + _HEADERS
                self._flow.http.note(time.perf_counter() - began)
            await send(message)

        if len(scope["query_string"]) > MAX_QUERY:
            refusal = PlainTextResponse(f"a query has at most {MAX_QUERY} bytes\n", 414)
            await refusal(scope, receive, sending)
            return
        await self._app(scope, receive, sending)
