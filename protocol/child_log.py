"""Bounds the file that a child process writes its stderr to.

The child holds the file open for appending, so it cannot be moved away: its end is copied
aside and the file emptied in place. What is written between the two is lost.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LOG_BYTES = 5_000_000
KEPT = 2  # older files, as .1 and .2


def bound_log(path: Path, most: int = LOG_BYTES) -> None:
    """Empty ``path`` if it is longer than ``most`` bytes, keeping that much of its end as ``.1``.

    Never raises: where the disk refuses the copy, nothing is kept, but the file is emptied all the same.
    """
    with suppress(OSError):
        if path.stat().st_size <= most:
            return
        with suppress(OSError):
            _keep(path, most)
        os.truncate(path, 0)


def _keep(path: Path, most: int) -> None:
    with path.open("rb") as file:
        file.seek(-most, os.SEEK_END)
        data = file.read(most)
    for number in range(KEPT, 1, -1):
        with suppress(FileNotFoundError):
            os.replace(f"{path}.{number - 1}", f"{path}.{number}")
    Path(f"{path}.1").write_bytes(data)
