"""Limits of a node that does not run: read and written where its next start finds them."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

import trio
import typer

from barnraise.node.traffic import Limits
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.tui.background import state_in
from barnraise.tui.status import folder_or_default, read_folder


def resting(folder: Path | None, *, make: bool) -> Path | None:
    """The data folder of a node that does not run; None: something runs there.

    Args:
        make: whether this user's folder may be made, where no node has run yet.

    Raises:
        typer.BadParameter: it is no node's data folder.
        BarnraiseError: a coordinator's that does not run, or a node is just starting or hangs.
    """
    from barnraise.node.config import default_data_path

    if folder is None and not (place := default_data_path()).exists():
        if not make:
            folder_or_default(folder)  # says that no node has run here
        return place
    place = folder_or_default(folder)
    if state_in(place) is not None:
        return None
    if (place / "spec.bin").is_file():
        read_folder(place)  # says how to start the coordinator
    if folder is not None and not any(
        (place / name).is_file() for name in ("known.json", "lock", "limits.json")
    ):
        raise typer.BadParameter(f"{place} is neither a run folder nor a node's data folder")
    if _in_use(place / "lock"):
        raise BarnraiseError(f"the node in {place} does not answer: it is just starting, or hangs; try again")
    return place


def _in_use(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def limits_at_rest(place: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """What holds at the next start, after ``changes`` (``Limits.change``); options of ``join`` apart.

    Raises:
        RefusedError: an unusable value; nothing is changed.
        StorageError: it cannot be written.
    """
    from barnraise.node.config import NodeConfig

    now_ms = round(time.time() * 1000)
    limits = Limits(NodeConfig(address="", data=place, key=place / "unused"))
    if limits.warning:
        typer.echo(f"barnraise: {limits.warning}", err=True)
    if changes is not None:
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            trio.run(_change, limits, changes, now_ms)  # pacers tell time by trio's clock
        except StorageError as error:
            raise StorageError(str(error.__cause__ or error)) from error
        except OSError as error:
            raise StorageError(f"cannot use the data folder {place}: {error.strerror or error}") from error
    return limits.tree(now_ms)


async def _change(limits: Limits, changes: dict[str, Any], now_ms: int) -> None:
    limits.change(changes, now_ms)
