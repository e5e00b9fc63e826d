"""``/log/...``: the ledger's static files (c2sp.org/tlog-tiles) and the run spec, for any auditor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from barnraise.protocol.errors import MalformedError
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.log_paths import is_spec_path
from barnraise.protocol.tlog_tiles import parse_path

_FOR_EVER: Final = "public, max-age=31536000, immutable"  # what a tile's path names never changes
_PUBLIC: Final = {"Access-Control-Allow-Origin": "*"}


def log_routes(read: Callable[[str], Awaitable[bytes | None]]) -> list[Route]:
    """The routes below ``/log/``. ``read`` gives the file at a path that was checked to be one of a log's."""

    async def file(request: Request) -> Response:
        path = request.path_params["path"]
        checkpoint = path == CHECKPOINT
        if not checkpoint and not is_spec_path(path):
            try:
                parse_path(path)  # nothing else is ever looked for on the disk
            except MalformedError as error:
                raise HTTPException(404, str(error)) from error
        data = await read(path)
        if data is None:
            raise HTTPException(404, "there is no such file in this log yet")
        kind = "text/plain; charset=utf-8" if checkpoint else "application/octet-stream"
        caching = "no-cache" if checkpoint else _FOR_EVER
        return Response(data, headers={**_PUBLIC, "Content-Type": kind, "Cache-Control": caching})

    return [Route("/log/{path:path}", file, methods=["GET"], name="log")]
