"""What a key is called, in a file beside it: a later start without ``--name`` keeps the name.

``node.key.name`` beside ``node.key``: a JSON object of ``peer_id`` and ``name``. It counts for
the key of that peer id alone, so a file that was left beside another key names nobody.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import StorageError
from barnraise.protocol.pseudonym import MOST

_MOST_FILE = 64 * 1024


class _Named(msgspec.Struct, frozen=True):
    peer_id: str
    name: str


def name_path(key: Path) -> Path:
    """Where the name of the key in ``key`` is kept."""
    return key.with_name(f"{key.name}.name")


def settled_name(key: Path, peer_id: str, given: str | None) -> str | None:
    """The name to use, which is remembered if it was given: ``given``, else the last one. "" forgets it.

    Raises:
        StorageError: what was given cannot be kept.
    """
    path = name_path(key)
    before = _remembered(path, peer_id)
    if given is None:
        return before
    kept = re.sub(r"[\ud800-\udfff]", "\ufffd", given[: 8 * MOST])  # no more of it counts
    if kept != (before or ""):
        if kept:
            write_durably(path, msgspec.json.encode(_Named(peer_id, kept)) + b"\n")
        else:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"cannot forget the name in {path}: {error.strerror or error}") from error
    return given


def _remembered(path: Path, peer_id: str) -> str | None:
    """None: no name is known of this key. It is a name, not worth refusing to start for."""
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(_MOST_FILE), type=_Named)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
    return found.name if found.peer_id == peer_id else None
