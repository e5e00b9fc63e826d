"""Who may steer the run over HTTP: whoever has the token, from where the operator said, and no browser.

A token is wanted in every case, from this machine too (docs/decisions/0015-admin-over-http.md).
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request

from barnraise.coordinator.web.shell import counted_as
from barnraise.coordinator.web.tokens import TOKEN_FILE, Guesses, is_right, read_token
from barnraise.protocol.errors import KeyFileError

log = logging.getLogger(__name__)

Access = Literal["local", "proxy", "clear", "off"]
"""From where the admin API may be asked.

``local``: from this machine, straight. ``proxy``: also through a reverse proxy on this machine that
ends TLS and says so. ``clear``: from anywhere the page is served, the token unencrypted on its way.
"""

_PASSED_ON: Final = (
    *(b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip"),
    *(b"cf-connecting-ip", b"fastly-client-ip", b"x-original-host", b"x-envoy-external-address"),
)
_BROWSER: Final = (b"origin", b"cookie", b"sec-fetch-site", b"access-control-request-method")
_LONGEST: Final = 512  # bytes of an Authorization header


@dataclass
class Gate:
    """``local``: whether the page is served to this machine alone. ``folder``: the run's."""

    access: Access
    folder: Path
    local: bool = True
    guesses: Guesses = field(default_factory=Guesses)

    def bound_to(self, hosts: Sequence[str]) -> None:
        """Told once where the page is served."""
        self.local = all(_is_loopback(host) for host in hosts)
        if self.access == "local" and not self.local:
            log.info("the admin API is off, because the page is not served at loopback alone ([serve] admin)")
        elif self.access == "clear" and not self.local:
            log.warning(
                "the admin API is served over plain HTTP: whoever sees the traffic has the token and the run"
            )

    def is_open(self) -> bool:
        """Whether there is an admin API at all."""
        return self.access in ("proxy", "clear") or (self.access == "local" and self.local)

    async def admit(self, request: Request, read: Callable[[Callable[[], str]], object]) -> str:
        """Let a request in; returns where it comes from, for the log.

        Args:
            read: runs a blocking function elsewhere (``Site.work``).

        Raises:
            HTTPException: 404, there is no admin API; 403, not from there; 429, too many wrong tokens;
                401, no token or a wrong one.
        """
        if not self.is_open():
            raise HTTPException(404, "Not Found")
        address = self._comes_from(request)
        if request.scope["query_string"]:
            raise HTTPException(400, "the admin API takes no query: whatever is in one ends up in logs")
        now = trio.current_time()
        wait = self.guesses.wait_s(counted_as(address), now)
        if wait:
            raise HTTPException(429, "too many wrong tokens", {"Retry-After": str(int(wait) + 1)})
        given = _bearer(request)
        if given is None:
            raise _unauthorized()
        token = await self._token(read)
        if token is None:
            raise _unauthorized()
        if not is_right(given, token):
            count = self.guesses.wrong(counted_as(address), trio.current_time())
            if count & (count - 1) == 0:
                log.warning("admin API: %d wrong tokens from %s lately", count, address)
            raise _unauthorized()
        self.guesses.right(counted_as(address))
        return address

    async def _token(self, read: Callable[[Callable[[], str]], object]) -> str | None:
        """Read with every request: a new token counts, and one that others can read does not, at once."""
        work = read(lambda: read_token(self.folder / TOKEN_FILE))
        try:
            return await work  # type: ignore[misc,no-any-return]
        except KeyFileError as error:
            log.warning("admin API: %s", error)
            return None

    def _comes_from(self, request: Request) -> str:
        """The client's address. Raises HTTPException, 403 with the reason."""
        headers = request.scope["headers"]
        names = {name.lower() for name, _ in headers}
        if names.intersection(_BROWSER):
            raise HTTPException(403, "the admin API is for programs: no page in a browser may ask it")
        client = request.client.host if request.client is not None else ""
        if self.access == "clear":
            return client
        if not _is_loopback(client):
            raise HTTPException(403, "the admin API answers this machine alone ([serve] admin)")
        passed_on = [name for name in names if name in _PASSED_ON or name.startswith(b"x-forwarded")]
        if not passed_on:
            if not _names_this_machine(request.headers.get("host", "")):
                raise HTTPException(
                    403,
                    "the admin API is asked at 127.0.0.1 or localhost; a reverse proxy must send "
                    "X-Forwarded-For and X-Forwarded-Proto ([serve] admin)",
                )
            return client
        if self.access == "local":
            raise HTTPException(403, "the admin API takes nothing that a proxy passed on ([serve] admin)")
        schemes = {text.strip() for text in request.headers.get("x-forwarded-proto", "").split(",")}
        if schemes != {"https"}:
            raise HTTPException(
                403, "the proxy does not say X-Forwarded-Proto: https: the token came in clear"
            )
        through = request.headers.getlist("x-forwarded-for")
        return through[-1].rpartition(",")[2].strip()[:64] if through else client


def _bearer(request: Request) -> str | None:
    given = request.headers.getlist("authorization")
    if len(given) != 1 or len(given[0]) > _LONGEST:
        return None
    scheme, _, token = given[0].strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _unauthorized() -> HTTPException:
    return HTTPException(401, "unauthorized", {"WWW-Authenticate": "Bearer"})


def _is_loopback(host: str) -> bool:
    return counted_as(host) == ""


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is loopback by number, or ``localhost``: no name that was made to point here."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
