"""Sessions with a PostgreSQL server by either driver, and what their errors mean."""

from __future__ import annotations

import os
import socket
import ssl
import struct
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from barnraise.coordinator.journal_place import Place, without_password
from barnraise.protocol.errors import BarnraiseError, RunFolderError, StorageError

_CONNECT_S = 10
_AWAY = ("08", "57P01", "57P02", "57P03")  # SQLSTATEs: no connection, shutting down, crashed, starting
LOST = (OSError, EOFError, struct.error)  # what a driver lets through when the other side is gone


def engine(place: Place, **settings: Any) -> sa.Engine:
    """By pg8000 unless the URL names psycopg. A socket's folder is ``?host=/run/postgresql``, as for psql."""
    parts = urlsplit(without_password(place.url))
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    name = f"barnraise coordinator on {socket.gethostname()}, process {os.getpid()}"[:63]
    psycopg = parts.scheme.endswith("+psycopg")
    arguments: dict[str, Any] = {"application_name": name}
    if psycopg:
        arguments |= {"client_encoding": "utf8", "connect_timeout": _CONNECT_S}
        arguments |= {"keepalives_idle": 30, "keepalives_count": 3, **options}
    else:
        arguments |= {"timeout": _CONNECT_S, "tcp_keepalive": True}
        folder, mode = options.get("host", ""), options.get("sslmode", "prefer")
        if folder.startswith("/"):
            arguments["unix_sock"] = f"{folder}/.s.PGSQL.{parts.port or 5432}"
        elif mode in ("require", "verify-ca", "verify-full"):
            context = ssl.create_default_context(cafile=options.get("sslrootcert"))
            context.check_hostname = mode == "verify-full"
            if mode == "require":
                context.verify_mode = ssl.CERT_NONE  # as libpq: encrypted, whoever it is
            arguments["ssl_context"] = context
        elif folder and not parts.hostname:
            arguments["host"] = folder
    password = place.password
    if password is not None:
        arguments["password"] = password
    scheme = "postgresql+psycopg" if psycopg else "postgresql+pg8000"
    url = urlunsplit((scheme, parts.netloc, parts.path, "", ""))
    return sa.create_engine(url, poolclass=NullPool, connect_args=arguments, hide_parameters=True, **settings)


def let_go(db: sa.Connection | None) -> sa.Connection | None:
    """Let go of a session; gives None, to be put in its place."""
    if db is not None:
        with suppress(SQLAlchemyError, *LOST):
            db.invalidate()  # not rolled back over a connection that may be gone
        with suppress(SQLAlchemyError, *LOST):
            db.close()
    return None


def _code(error: BaseException) -> str:
    """The server's SQLSTATE; ``""``: these are not the server's words."""
    cause = getattr(error, "orig", None) or error
    found = getattr(cause, "sqlstate", None)
    if found is None and cause.args and isinstance(cause.args[0], dict):  # pg8000
        found = cause.args[0].get("C")
    return str(found or "")


def words(error: BaseException) -> str:
    """The server's own words, or the driver's, in one line."""
    cause = getattr(error, "orig", None) or error
    if cause.args and isinstance(cause.args[0], dict):
        return str(cause.args[0].get("M", "no reason given"))
    return " ".join(str(cause).split())[:300] or type(cause).__name__


def is_lost(error: BaseException) -> bool:
    """The connection is gone or never was, as opposed to a statement that was refused."""
    if isinstance(error, LOST):
        return True
    code = _code(error)
    if code:
        return code.startswith(_AWAY[0]) or code in _AWAY
    if not isinstance(error, DBAPIError):
        return False
    names = {kind.__name__ for kind in type(error.orig).__mro__}
    return error.connection_invalidated or bool(names & {"InterfaceError", "OperationalError"})


def refusal(place: str, error: BaseException) -> BarnraiseError:
    """What an operator is told of an error at ``place``; what is damaged or locked is a RunFolderError."""
    code, text = _code(error), words(error)
    if is_lost(error):
        return StorageError(
            f"{place} cannot be reached ({text}): start the database again, or check the network"
        )
    if code.startswith("XX") or code == "23505":  # a page's checksum; a number that is taken
        return RunFolderError(f"{place} is damaged ({text}): restore it from a backup")
    if code.startswith("28") or code == "3D000":
        return RunFolderError(
            f"{place} lets nobody in ({text}): check user, database and password "
            "(in RUN/state.postgres, or in BARNRAISE_STORE_PASSWORD)"
        )
    return StorageError(f"cannot write {place} ({text}): check the server's disk and permissions")
