"""Signed work that the coordinator has not acknowledged, and the lease at work, on disk.

Written to a temporary name, synced, renamed (R6); read back after a crash, checked,
and sent again (R17). A damaged file is deleted with a warning: it can only have
been damaged outside of this program.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from barnraise.node.kept import KeptWork
from barnraise.protocol import wire
from barnraise.protocol.durable import write_durably
from barnraise.protocol.envelope import content_id, open_signed
from barnraise.protocol.errors import BarnraiseError, SignatureError, StorageError
from barnraise.protocol.messages import MAX_SUBMISSION, RolloutLease, RolloutSubmission, Signed
from barnraise.protocol.pretrain import BlockLease, BlockSubmission

log = logging.getLogger("barnraise.node")

MAX_FILES = 64


def open_work(signed: Signed, public_key: bytes) -> RolloutSubmission | BlockSubmission:
    """A submission of either kind, which its signature tells apart.

    Raises:
        SignatureError, MalformedError: it is neither, or not by ``public_key``.
    """
    try:
        return open_signed(signed, RolloutSubmission, public_key)
    except SignatureError:
        return open_signed(signed, BlockSubmission, public_key)


class PendingWork:
    """The submissions of one run and one key that still have to be acknowledged, oldest first."""

    def __init__(self, folder: Path, run_id: bytes, public_key: bytes) -> None:
        self._folder = folder
        self._lease_path = folder.parent / "lease.bin"
        self._submissions: dict[bytes, tuple[Path, Signed, bytes]] = {}
        self._unsaved: dict[bytes, None] = {}  # oldest first
        self._next = 0
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                self._restore(path, run_id, public_key)
        if self._lease_path.is_file() and self.left_lease() is None:
            log.warning("deleted %s, which is no lease: it runs out unanswered", self._lease_path)
            _unlink(self._lease_path)

    def _restore(self, path: Path, run_id: bytes, public_key: bytes) -> None:
        if path.name.startswith(".tmp-"):
            _unlink(path)
            return
        try:
            if path.stat().st_size > MAX_SUBMISSION + 1024:
                raise StorageError("too large")
            signed = wire.decode(path.read_bytes(), Signed)
            work = open_work(signed, public_key)
            number = int(path.stem.split("-")[0])
            if work.run_id != run_id:
                raise StorageError("of another run")
        except (BarnraiseError, OSError, ValueError) as error:
            log.warning("deleted %s, which is no submission of ours: %s", path, error)
            _unlink(path)
            return
        self._next = max(self._next, number + 1)
        self._submissions[content_id(signed)] = (path, signed, work.lease_id)

    @property
    def ids(self) -> tuple[bytes, ...]:
        """Content ids, oldest first."""
        return tuple(self._submissions)

    @property
    def lease_ids(self) -> frozenset[bytes]:
        """The leases whose work is here."""
        return frozenset(lease_id for _, _, lease_id in self._submissions.values())

    def lease_of(self, submission_id: bytes) -> bytes | None:
        """The lease that a pending submission answers."""
        entry = self._submissions.get(submission_id)
        return None if entry is None else entry[2]

    def get(self, submission_id: bytes) -> Signed | None:
        """The signed submission, or None if it is not pending."""
        entry = self._submissions.get(submission_id)
        return None if entry is None else entry[1]

    def add(self, signed: Signed, lease_id: bytes) -> bytes:
        """Keep a submission until ``drop``; returns its content id.

        If the disk refuses, it is kept in memory (``unsaved``): finished work is not thrown away
        because of that, only a crash would lose it. ``save`` tries again.

        Raises:
            StorageError: too many wait already.
        """
        if len(self._submissions) >= MAX_FILES:
            raise StorageError(
                f"{MAX_FILES} submissions wait in {self._folder} already: is the coordinator gone?"
            )
        submission_id = content_id(signed)
        path = self._folder / f"{self._next:08d}-{submission_id.hex()[:16]}.bin"
        self._next += 1
        self._submissions[submission_id] = (path, signed, lease_id)
        self._unsaved[submission_id] = None
        with contextlib.suppress(StorageError):
            self.save()
        return submission_id

    @property
    def unsaved(self) -> int:
        """How many submissions are in memory alone."""
        return len(self._unsaved)

    def save(self) -> None:
        """Write what is in memory alone.

        Raises:
            StorageError: the disk refused; says how much is needed where.
        """
        for submission_id in tuple(self._unsaved):
            path, signed, lease_id = self._submissions[submission_id]
            write_durably(path, wire.encode(signed))
            del self._unsaved[submission_id]
            self.clear_lease(lease_id)

    def drop(self, submission_id: bytes, kept: KeptWork | None = None) -> None:
        """Forget an acknowledged or refused submission, or move it to ``kept``; unknown ids are fine."""
        entry = self._submissions.pop(submission_id, None)
        if entry is None:
            return
        if submission_id in self._unsaved:
            del self._unsaved[submission_id]
            self.clear_lease(entry[2])
        elif kept is not None:
            kept.take(submission_id, entry[0])
        else:
            _unlink(entry[0])

    def keep_lease(self, signed: Signed) -> None:
        """Remember the lease at work, so that a restarted node can go on or give it back. Best effort."""
        try:
            write_durably(self._lease_path, wire.encode(signed))
        except StorageError as error:
            log.warning("the lease at work is not remembered: %s", error)

    def clear_lease(self, lease_id: bytes) -> None:
        """Forget the lease at work if it is this one."""
        if self.left_lease() == lease_id:
            _unlink(self._lease_path)

    def left_lease(self) -> bytes | None:
        """The lease that is (or was, before a crash) at work."""
        signed = self.left_signed()
        for type_ in (RolloutLease, BlockLease):
            with contextlib.suppress(BarnraiseError):
                return None if signed is None else _lease_id(signed, type_)
        return None

    def left_signed(self) -> Signed | None:
        """``left_lease`` as it came, its signature unchecked."""
        try:
            return wire.decode(self._lease_path.read_bytes(), Signed)
        except (OSError, BarnraiseError):
            return None


def _unlink(path: Path) -> None:
    """Delete, if the disk lets us: what stays is sent once more, and counts once (R17)."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot delete %s: %s", path, error.strerror or error)


def _lease_id(signed: Signed, type_: type[RolloutLease] | type[BlockLease]) -> bytes:
    return wire.decode(signed.payload, type_).lease_id
