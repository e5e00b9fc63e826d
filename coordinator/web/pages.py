"""The pages for people: plain HTML that works without JavaScript, on a phone and in a screen reader."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from barnraise.coordinator.web import charts, words
from barnraise.coordinator.web.answers import (
    asked_for,
    distinct,
    ledger_page,
    node_fields,
    node_story,
    ranking,
    unit_story,
    whole,
)
from barnraise.coordinator.web.live import live_values
from barnraise.coordinator.web.site import Site
from barnraise.coordinator.web.versions import version_page
from barnraise.protocol.ledger_lines import short_id
from barnraise.protocol.ledger_places import KINDS

ROWS: Final = 50
TOP: Final = 8
_STATIC: Final = {
    "style.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


class Pages:
    """Templates, and the context that all of them share."""

    def __init__(self, site: Site) -> None:
        self._site = site
        files = resources.files("barnraise.coordinator.web") / "static"
        self.static = {name: (files / name).read_bytes() for name in _STATIC}
        self.stamp = {name: hashlib.sha256(data).hexdigest()[:12] for name, data in self.static.items()}
        self._env = Environment(
            loader=PackageLoader("barnraise.coordinator.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._env.globals.update(
            words=words,
            short_id=short_id,
            kinds=KINDS,
            urlencode=lambda values: urlencode(values, doseq=True),
            stamp=self.stamp,
            coded=coded,
        )

    def prepare(self) -> None:
        """Compile the templates, so that no reader waits for it. Blocking."""
        for name in self._env.list_templates(filter_func=lambda name: not name.startswith("_")):
            self._env.get_template(name)

    async def show(self, template: str, answer: Callable[[], dict[str, Any]], status: int = 200) -> Response:
        """Render a template with what ``answer`` finds, both in a worker thread."""
        view = self._site.glance.view()
        catching_up = view["ledger"]["indexed"] < self._site.index.known - 5000

        def work() -> str:
            page = self._env.get_template(template)
            return page.render(view=view, live=live_values(view), catching_up=catching_up, **answer())

        text = await self._site.work(work)
        return HTMLResponse(text, status_code=status, headers={"Cache-Control": "no-cache"})

    async def error(self, request: Request, error: HTTPException) -> Response:
        """An error in words."""
        return await self.show(
            "error.html", lambda: {"status": error.status_code, "text": error.detail}, error.status_code
        )


def coded(text: str) -> Markup:
    """A text of ours, with what it writes between backticks as code."""
    pieces = enumerate(text.split("`"))
    parts = [Markup("<code>%s</code>") % part if at % 2 else escape(part) for at, part in pieces]
    return Markup("<bdi>%s</bdi>") % Markup("").join(parts)


def page_routes(site: Site, pages: Pages) -> list[Route]:
    """The routes of every page and of what they load."""

    async def home(request: Request) -> Response:
        view, now = site.glance.view(), site.core.now_ms()

        def answer() -> dict[str, Any]:
            minutes = 10
            return {
                "reward": charts.curve("Reward", view["curves"]["reward"]),
                "held_out": charts.curve("Held-out accuracy", view["curves"]["held_out"]),
                "recent": charts.bars("Verdicts", view["recent"], minutes),
                "top": ranking(site, "recent", 1, TOP, now)["nodes"],
            }

        return await pages.show("overview.html", answer)

    async def nodes(request: Request) -> Response:
        query, now = distinct(request.query_params.multi_items()), site.core.now_ms()
        text = query.get("q", [""])[-1]

        def answer() -> dict[str, Any]:
            if text:
                found = site.reader.find_nodes(text[:200], now, 20)
                if len(found) != 1:
                    return {"found": [node_fields(site, node, now) for node in found], "q": text[:200]}
                return {"go": node_fields(site, found[0], now)["node"]}
            page = max(1, whole(query, "page", 100_000) or 1)
            return {"q": "", **ranking(site, query.get("by", ["credit"])[-1], page, ROWS, now)}

        if text:
            told = await site.work(answer)
            if "go" in told:
                return RedirectResponse(f"/nodes/{told['go']}", 303)
            return await pages.show("nodes_found.html", lambda: told)
        return await pages.show("nodes.html", answer)

    async def node(request: Request) -> Response:
        text, now = request.path_params["node"], site.core.now_ms()
        return await pages.show("node.html", lambda: {"node": node_story(site, text, now, 25)})

    async def unit(request: Request) -> Response:
        text = request.path_params.get("unit") or request.query_params.get("id", "").strip()
        if "unit" not in request.path_params and text:
            return RedirectResponse(f"/units/{text[:64].replace('/', '')}", 303)
        return await pages.show("unit.html", lambda: {"story": unit_story(site, text)})

    async def ledger(request: Request) -> Response:
        query, now = distinct(request.query_params.multi_items()), site.core.now_ms()

        def answer() -> dict[str, Any]:
            asked = asked_for(site, query, now, ROWS)
            page, entries = ledger_page(site, asked)
            return {"asked": asked, "page": page, "entries": entries}

        return await pages.show("ledger.html", answer)

    async def versions(request: Request) -> Response:
        query = distinct(request.query_params.multi_items())
        found = version_page(site.core.state, max(1, whole(query, "page", 100_000) or 1), ROWS)
        return await pages.show("versions.html", lambda: found)

    async def about(request: Request) -> Response:
        return await pages.show("about.html", dict)

    async def static(name: str, request: Request) -> Response:
        fresh = request.query_params.get("v") == pages.stamp[name]
        caching = "public, max-age=31536000, immutable" if fresh else "no-cache"
        return Response(pages.static[name], headers={"Content-Type": _STATIC[name], "Cache-Control": caching})

    return [
        Route("/", home),
        Route("/nodes", nodes),
        Route("/nodes/{node}", node),
        Route("/units", unit),
        Route("/units/{unit}", unit),
        Route("/ledger", ledger),
        Route("/versions", versions),
        Route("/about", about),
        *(Route(f"/static/{name}", partial(static, name)) for name in _STATIC),
    ]
