"""The disk that the weights go to: room, and how fast it writes and reads."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from barnraise.node.findings import Finding, gigabytes

MIN_DISK = 2 * 10**9
SLOW = 20e6  # bytes/s: a version of 1 GB then takes most of a minute to write alone
_CHUNK = 4 * 1024 * 1024
_MOST = 64 * 1024 * 1024
_MOST_S = 2.0


class DiskSpeed(Struct, frozen=True):
    """Bytes per second, sequential. ``cached``: the system would not read past its own memory."""

    write: float
    read: float
    cached: bool


def measure_disk(folder: Path, most: int = _MOST) -> DiskSpeed | None:
    """Write ``most`` bytes beside what is in ``folder`` (or where it will be), read them, delete them.

    Ends after about two seconds each way, at most. None where that cannot be done.
    """
    place = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".barnraise-speed-") as file:
            descriptor, data, written = file.fileno(), os.urandom(_CHUNK), 0
            began = time.monotonic()
            while written < most and time.monotonic() - began < _MOST_S:
                written += os.write(descriptor, data)
            os.fsync(descriptor)
            write = written / max(1e-9, time.monotonic() - began)
            cached = True
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                cached = False
            os.lseek(descriptor, 0, os.SEEK_SET)
            have, began = 0, time.monotonic()
            while time.monotonic() - began < _MOST_S and (more := len(os.read(descriptor, _CHUNK))):
                have += more
            return DiskSpeed(write, have / max(1e-9, time.monotonic() - began), cached)
    except OSError:
        return None


def existing(folder: Path) -> Path:
    """The nearest folder at or above ``folder`` that is there."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def disk_room(folder: Path) -> tuple[int | None, bool]:
    """Free bytes and writability of the nearest folder that exists."""
    place = existing(folder)
    writable = place.is_dir() and os.access(place, os.W_OK)
    with suppress(OSError):
        return shutil.disk_usage(place).free, writable
    return None, writable


def judge_disk(folder: Path, free: int | None, writable: bool, speed: DiskSpeed | None = None) -> Finding:
    """Where the weights go. Bytes; ``free`` None if it cannot be told."""
    if not writable:
        cure = "choose another folder with --data, or make this one writable"
        return Finding("disk", "problem", f"{folder} cannot be written", cure)
    if free is None:
        return Finding("disk", "warning", f"cannot tell how much of {folder} is free")
    text = f"{gigabytes(free)} free for {folder}"
    if speed is not None:
        text += f", writes {speed.write / 1e6:,.0f} MB/s, reads {speed.read / 1e6:,.0f} MB/s"
        text += " (from memory)" if speed.cached else ""
    if free < MIN_DISK:
        return Finding("disk", "warning", text, f"free {gigabytes(MIN_DISK)} at least, or choose --data")
    if speed is not None and speed.write < SLOW:
        return Finding("disk", "warning", f"{text}: slow", "choose a faster disk with --data")
    return Finding("disk", "ok", text)
