"""Signed work after it was acknowledged, for a bounded time: what an appeal may have to bring along.

Files move here from ``barnraise.node.pending`` and are named by content id. The oldest
go first when there are too many or too much; accepted work goes at once.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from barnraise.protocol import wire
from barnraise.protocol.envelope import content_id
from barnraise.protocol.errors import MalformedError
from barnraise.protocol.messages import MAX_SUBMISSION, Signed

log = logging.getLogger("barnraise.node")

MAX_FILES = 32
MAX_BYTES = 128 * 1024 * 1024


class KeptWork:
    """The kept submissions of one run and one key. Best effort: losing one costs an appeal at most."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, submission_id: bytes, path: Path) -> None:
        """Move a submission's file here; it is gone from ``path`` afterwards, whatever happens."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.replace(self._path(submission_id))
            self._prune()
        except OSError as error:
            log.warning("a submission is not kept for an appeal: %s", error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def get(self, submission_id: bytes) -> Signed | None:
        """The signed submission, or None if it is not kept (any more) or was damaged."""
        path = self._path(submission_id)
        try:
            if path.stat().st_size > MAX_SUBMISSION + 1024:
                return None
            signed = wire.decode(path.read_bytes(), Signed)
        except (OSError, MalformedError):
            return None
        return signed if content_id(signed) == submission_id else None

    def drop(self, submission_id: bytes) -> None:
        """Forget one; unknown ids are fine."""
        with contextlib.suppress(OSError):
            self._path(submission_id).unlink(missing_ok=True)

    def _path(self, submission_id: bytes) -> Path:
        return self._folder / f"{submission_id.hex()}.bin"

    def _prune(self) -> None:
        files = [(path.stat(), path) for path in self._folder.glob("*.bin")]
        files.sort(key=lambda item: item[0].st_mtime_ns, reverse=True)
        total = 0
        for number, (stat, path) in enumerate(files):
            total += stat.st_size
            if number and (number >= MAX_FILES or total > MAX_BYTES):
                path.unlink(missing_ok=True)
