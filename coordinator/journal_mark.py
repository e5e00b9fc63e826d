"""Whether ``state.sqlite.mark`` still says what was written; see ``barnraise.coordinator.journal``."""

from __future__ import annotations

import time
from pathlib import Path
from zlib import crc32

_TRIES = 3
_PAUSE_S = 0.05


def mark_trouble(journal: Path) -> str:
    """Why the mark beside a journal is of no use, or ``""``; one that is not there is none of an old run.

    A coordinator may be writing it at this moment, so what is not whole is looked at again. Blocking.
    """
    path = journal.with_name(f"{journal.name}.mark")
    for _ in range(_TRIES):
        try:
            data = path.read_bytes()
        except OSError:
            return ""
        if len(data) == 12 and crc32(data[:8]).to_bytes(4, "big") == data[8:]:
            return ""
        time.sleep(_PAUSE_S)
    return (
        f"{path} is damaged (its checksum differs): check the disk. It is written anew with the next event; "
        "until then nobody would notice that the journal lost its end"
    )
