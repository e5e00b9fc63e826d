"""``/api/v1/admin/...``: steer the run. The control socket's commands, for whoever has the token.

Nothing of a request is read before ``Gate`` let it in, nothing of its body before its length is
known to be bounded, and no command sees arguments that are not of its schema.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import trio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from barnraise.coordinator.guards import GuardLimits
from barnraise.coordinator.web.admin_status import admin_status, look_at_disk
from barnraise.coordinator.web.admin_words import ACTS, LOOKS, Act, Body, Refusal
from barnraise.coordinator.web.gate import Gate
from barnraise.coordinator.web.overview import without_paths
from barnraise.coordinator.web.site import Site
from barnraise.protocol.control import Command
from barnraise.protocol.errors import BarnraiseError, RefusedError, StorageError

log = logging.getLogger(__name__)

ADMIN_PATH: Final = "/api/v1/admin"
MAX_BODY: Final = 64 * 1024
BODY_S: Final = 10.0
AT_ONCE: Final = 8
_LONGEST: Final = 4000  # characters of a refusal
_NOT_KEPT: Final = {"Cache-Control": "no-store"}
_BAD: Final = frozenset(("bad-argument", "not-amendable"))

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass
class Admin:
    """``commands``: the operator's, set once they are there; ``get_state``: the state tree without nodes."""

    site: Site
    gate: Gate
    limits: GuardLimits
    get_state: Callable[[], dict[str, Any]]
    commands: Mapping[str, Command] = field(default_factory=dict)
    _under_way: int = 0

    async def act(self, act: Act, request: Request) -> Response:
        """Have the command done that a request asks for."""
        address = await self.gate.admit(request, self.site.work)
        args = read_body(await body_of(request), act.body).args()
        return await self._do(act.command, args, address)

    async def status(self, request: Request) -> Response:
        """``GET status``."""
        await self.gate.admit(request, self.site.work)
        folder = self.site.folder
        room = await self.site.work(lambda: look_at_disk(folder))
        view, tree = self.site.glance.view(), self.get_state()
        return _answer(admin_status(view, tree, self.site.core.state, self.limits, folder, room))

    async def admitted(self, request: Request) -> Response:
        """``GET admit``."""
        address = await self.gate.admit(request, self.site.work)
        return await self._do("admitted", {}, address, quiet=True)

    async def _do(self, name: str, args: dict[str, Any], address: str, quiet: bool = False) -> Response:
        command = self.commands.get(name)
        if command is None:
            raise HTTPException(503, "the coordinator is starting: try again", {"Retry-After": "2"})
        if self._under_way >= AT_ONCE:
            raise HTTPException(503, f"{AT_ONCE} acts are under way: try again", {"Retry-After": "2"})
        self._under_way += 1
        try:
            result = await command(args)
        except StorageError as error:
            return self._refused(503, error)
        except RefusedError as error:
            status = 400 if error.code in _BAD else 404 if error.code == "unknown-node" else 409
            return self._refused(status, error)
        except BarnraiseError as error:
            return self._refused(409, error)
        except Exception:
            log.exception("command %s failed", name)
            return refusal(500, f"{name} failed; coordinator.log says more")
        finally:
            self._under_way -= 1
        if not quiet:
            log.info("admin API: %s, asked for from %s", name, address)
        return _answer(result)

    def _refused(self, status: int, error: BarnraiseError) -> Response:
        code = error.code if isinstance(error, RefusedError) else ""
        return refusal(status, without_paths(str(error), self.site.folder, _LONGEST), code)


async def body_of(request: Request) -> bytes:
    """A request's body, at most ``MAX_BODY`` bytes of JSON.

    Raises:
        HTTPException: 415, it is said to be something else; 413, too long; 408, too slow.
    """
    headers = request.headers
    kinds = headers.getlist("content-type")
    kind, _, parameter = (kinds[0] if len(kinds) == 1 else "").partition(";")
    charset = parameter.strip().lower().replace('"', "")
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise HTTPException(415, "send application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "send it as it is, without a content encoding")
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 9 or int(length) > MAX_BODY):
        raise HTTPException(413, f"a body has at most {MAX_BODY} bytes")
    data = bytearray()
    try:
        with trio.fail_after(BODY_S):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY:
                    raise HTTPException(413, f"a body has at most {MAX_BODY} bytes")
    except trio.TooSlowError:
        raise HTTPException(408, f"the body took more than {BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ended early") from None
    return bytes(data)


def read_body(data: bytes, kind: type[Body]) -> Body:
    """A body by its schema.

    Raises:
        HTTPException: 400, it is none; the text says where and why.
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise HTTPException(400, str(error)[:300] or "no JSON") from None


def refusal(status: int, text: str, code: str = "", headers: dict[str, str] | None = None) -> Response:
    """An error as JSON. No other site's script may read it, and nobody keeps it."""
    data = msgspec.json.encode(Refusal(error=text, code=code))
    return Response(data, status, {**_NOT_KEPT, **(headers or {})}, "application/json")


def admin_routes(admin: Admin) -> list[Route]:
    """The routes below ``ADMIN_PATH``."""

    def of(act: Act) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await admin.act(act, request)

        return endpoint

    looks: dict[str, Endpoint] = {"status": admin.status, "admit": admin.admitted}
    assert looks.keys() == LOOKS.keys()
    return [
        *(Route(f"{ADMIN_PATH}/{act.path}", of(act), methods=["POST"]) for act in ACTS),
        *(Route(f"{ADMIN_PATH}/{path}", endpoint, methods=["GET"]) for path, endpoint in looks.items()),
    ]


def _answer(value: Any) -> Response:
    return Response(msgspec.json.encode(value), 200, _NOT_KEPT, "application/json")
