"""How many events a run has acknowledged, noted beside its journal; see ``barnraise.coordinator.journal``.

``RUN/state.sqlite.mark``, whichever store the journal is in: a run that is moved from one to the
other and back must not go on from the older of the two.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from zlib import crc32

_TRIES = 3
_PAUSE_S = 0.05


def mark_path(journal: Path) -> Path:
    """Where the mark of a journal is."""
    name = "state.sqlite" if journal.suffix == ".postgres" else journal.name
    return journal.with_name(f"{name}.mark")


def read_mark(journal: Path) -> int:
    """How many events were acknowledged at least; 0 where no readable mark is."""
    try:
        data = mark_path(journal).read_bytes()
    except OSError:
        return 0
    return int.from_bytes(data[:8], "big") if _whole(data) else 0


def write_mark(journal: Path, length: int) -> None:
    """Never fails a commit, which is durable by now: without its mark only a check is lost."""
    data = length.to_bytes(8, "big")
    with suppress(OSError):
        mark_path(journal).write_bytes(data + crc32(data).to_bytes(4, "big"))


def mark_trouble(journal: Path) -> str:
    """Why the mark beside a journal is of no use, or ``""``; one that is not there is none of an old run.

    A coordinator may be writing it at this moment, so what is not whole is looked at again. Blocking.
    """
    path = mark_path(journal)
    for _ in range(_TRIES):
        try:
            data = path.read_bytes()
        except OSError:
            return ""
        if _whole(data):
            return ""
        time.sleep(_PAUSE_S)
    return (
        f"{path} is damaged (its checksum differs): check the disk. It is written anew with the next event; "
        "until then nobody would notice that the journal lost its end"
    )


def _whole(data: bytes) -> bool:
    return len(data) == 12 and crc32(data[:8]).to_bytes(4, "big") == data[8:]
