"""How often the kernel ended a process because memory had run out: evidence for why a child died (R5).

No log is read, which takes rights that a volunteer's node has not: only counters. A child
that died by SIGKILL while one of them grew ran out of memory.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_MOST = 64 * 1024
_DEPTH = 32


def oom_kills(root: Path = Path("/")) -> int:
    """The sum of the machine's counter and those of our control groups; only its growth means anything.

    Reads ``/proc/vmstat``, and of the control group that we are in and those around it
    ``memory.events`` (version 2) or ``memory.oom_control`` (version 1). 0 where there is none of it.
    """
    files = [root / "proc/vmstat"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2, also beside version 1
            files += _upwards(root / "sys/fs/cgroup", path, "memory.events")
        elif "memory" in controllers.split(","):
            files += _upwards(root / "sys/fs/cgroup/memory", path, "memory.oom_control")
    total = 0
    for file in dict.fromkeys(files):
        for line in _read(file).splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                with contextlib.suppress(ValueError):
                    total += int(number)
    return total


def _upwards(mount: Path, path: str, name: str) -> list[Path]:
    """The file in the group of ``path`` and every group around it.

    Inside of a container ``path`` may be that of the host, whose groups are not there.
    """
    parts = [part for part in path.split("/") if part not in ("", ".", "..")][:_DEPTH]
    return [mount.joinpath(*parts[:length], name) for length in range(len(parts), -1, -1)]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST).decode(errors="replace")
    except OSError:
        return ""
