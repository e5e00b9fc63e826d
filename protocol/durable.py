"""What makes a write whole and a rename last (R6)."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from barnraise.protocol.errors import StorageError


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


def replace_file(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path``, whole or not at all. Its folder is not flushed.

    One writer of a path at a time: what a killed one left is overwritten by the next.

    Raises:
        OSError: the disk refused; what was there before still is.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_durably(path: Path, data: bytes) -> None:
    """Replace ``path`` with ``data``, whole or not at all, surviving a power cut. Makes its folder.

    Raises:
        StorageError: the disk refused; says where and why.
    """
    try:
        try:
            replace_file(path, data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)
        sync_folder(path.parent)
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageError(f"cannot write {path} ({len(data)} bytes): {why}") from error


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
