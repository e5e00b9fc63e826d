"""Where a run's journal is: ``RUN/state.sqlite``, or what ``RUN/state.postgres`` names.

::

    {"url": "postgresql://me@db.example/runs?sslmode=verify-full", "schema": "barnraise_0123456789abcdef"}

The file is the operator's alone (0600), for the URL may hold a password. It need not: without
one, ``BARNRAISE_STORE_PASSWORD`` is taken. A run has a schema of its own, so that one database
may hold many.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from barnraise.protocol.durable import sync_folder
from barnraise.protocol.errors import RunFolderError, StorageError

SQLITE = "state.sqlite"
POSTGRES = "state.postgres"
PASSWORD = "BARNRAISE_STORE_PASSWORD"
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_SCHEMES = ("postgresql", "postgres", "postgresql+pg8000", "postgresql+psycopg")
_MAX_FILE = 16 * 1024


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A PostgreSQL database and the schema in it. ``url`` may hold a password: show ``shown``."""

    url: str
    schema: str

    @property
    def shown(self) -> str:
        """For messages: no password, no options."""
        parts = urlsplit(self.url)
        user = f"{parts.username}@" if parts.username else ""
        port = f":{parts.port}" if parts.port else ""
        return f"postgresql://{user}{parts.hostname or ''}{port}{parts.path} (schema {self.schema})"

    @property
    def password(self) -> str | None:
        """From the URL, or else from the environment."""
        found = urlsplit(self.url).password
        return unquote(found) if found is not None else os.environ.get(PASSWORD)


def place_for(url: str, run_id: bytes) -> Place:
    """The place of a run in the database at ``url``.

    Raises:
        RunFolderError: that is no URL of a PostgreSQL database.
    """
    place = Place(url=url, schema=f"barnraise_{run_id.hex()[:16]}")
    _check(place, "the store's URL")
    return place


def _check(place: Place, what: str) -> None:
    try:
        parts = urlsplit(place.url)
        good = parts.scheme in _SCHEMES and len(parts.path) > 1 and "/" not in parts.path[1:]
        _ = parts.port
    except ValueError:
        good = False
    if not good or not _SCHEMA.fullmatch(place.schema):
        raise RunFolderError(f"{what} is not like postgresql://USER@HOST/DATABASE")


def journal_path(folder: Path) -> Path:
    """What a run folder's ``Journal`` is opened with; it need not exist."""
    postgres = folder / POSTGRES
    return postgres if postgres.is_file() else folder / SQLITE


def journal_begun(folder: Path) -> bool:
    """Whether a journal was ever made for the run, without asking a database."""
    path = journal_path(folder)
    return path.name == POSTGRES or (path.is_file() and path.stat().st_size > 0)


def read_place(path: Path) -> Place:
    """What ``state.postgres`` says.

    Raises:
        RunFolderError: it is damaged, or others may read it.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise RunFolderError(f"{path} may hold a password and others can read it: run `chmod 600 {path}`")
        place = msgspec.json.decode(path.read_bytes()[:_MAX_FILE], type=Place)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError:  # whose words might quote a password
        raise RunFolderError(
            f'{path} is damaged: write it again, as {{"url": "postgresql://...", "schema": "..."}}'
        ) from None
    _check(place, f"the url in {path}")
    return place


def write_place(folder: Path, place: Place) -> None:
    """Make a run's journal the one at ``place``: durable, whole or not at all, 0600.

    Raises:
        StorageError: the disk refused.
    """
    temporary = folder / f".tmp-{POSTGRES}"
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(place) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / POSTGRES)
        sync_folder(folder)
    except OSError as error:
        raise StorageError(f"cannot write {folder / POSTGRES} ({error.strerror})") from error


def without_password(url: str) -> str:
    """``url`` as a driver's URL carries it, its password apart."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    netloc = f"{user.split(':')[0]}{at}{host}"
    return urlunsplit((parts.scheme, netloc, parts.path, parts.query, ""))
