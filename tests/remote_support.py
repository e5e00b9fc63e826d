"""Another machine, as far as a worker can tell: a process that knows no folder of ours."""

from __future__ import annotations

import sys
from pathlib import Path


def worker_command(cache: Path) -> tuple[str, ...]:
    """What ``ssh gpu-box barnraise worker`` would start there, with its files in ``cache``."""
    start = "from barnraise.tui.main import main; main()"
    worker = ("worker", "--cache", str(cache), "--threads", "1")
    return ("env", "-C", "/", sys.executable, "-P", "-c", start, *worker)
