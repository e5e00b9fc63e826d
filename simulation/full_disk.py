"""A disk that is full for some folders: whatever would write there is refused with ENOSPC.

By an audit hook (PEP 578), which sees every ``open`` of this process and may refuse it: the
code under test writes as it always does. A hook cannot be taken away again; without a full
folder it does nothing.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_full: set[str] = set()
_hooked: list[bool] = []


def fill(folder: Path) -> None:
    """Let no file in ``folder``, or below, be opened for writing from now on."""
    if not _hooked:
        sys.addaudithook(_refuse)
        _hooked.append(True)
    _full.add(str(folder))


def clear(folder: Path) -> None:
    """Make room again."""
    _full.discard(str(folder))


def is_full(folder: Path) -> bool:
    """Whether ``fill`` was called for it, and ``clear`` was not."""
    return str(folder) in _full


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _full or event not in ("open", "os.mkdir"):
        return
    path = arguments[0]
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    if any(text == folder or text.startswith(folder + os.sep) for folder in _full):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), text)
