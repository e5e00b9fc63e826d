"""What the person last wished (pause, finish), kept across crashes: a paused machine stays paused.

``mode.json`` in the data folder is written with every such command and goes when the node
ends in an orderly way; so only a start after a crash or a reboot finds one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import StorageError

_MOST_FILE = 4096


class Wish(msgspec.Struct, frozen=True):
    """A pause, until ``until_ms`` (ms since the epoch) or for good; or that this unit be the last."""

    mode: Literal["pause", "finish"]
    until_ms: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None


def load_wish(path: Path, wall_ms: int) -> Wish | None:
    """The wish that still holds at ``wall_ms``; an unreadable one pauses, to be on the safe side."""
    try:
        with path.open("rb") as file:
            wish = msgspec.json.decode(file.read(_MOST_FILE), type=Wish)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return Wish("pause")
    return None if wish.until_ms is not None and wish.until_ms <= wall_ms else wish


def save_wish(path: Path, wish: Wish | None) -> None:
    """Keep it, or forget it (None).

    Raises:
        StorageError: the disk refused.
    """
    if wish is not None:
        write_durably(path, msgspec.json.encode(wish) + b"\n")
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot delete {path}: {error.strerror or error}") from error
