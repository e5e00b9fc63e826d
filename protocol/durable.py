"""What makes a rename last (R6)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: only then does a rename inside it survive a power cut.

    Raises:
        OSError: the disk refused.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or a flushed copy where hard links do not exist.

    Raises:
        OSError: the disk refused.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())
