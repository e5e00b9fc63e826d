"""Block units on the disk until their verdict: the coordinator may want to see any of their states.

::

    runs/<run id>/units/<lease id>/     see barnraise.node.block_trainer, and
        lease.bin                       the signed lease
        submission.bin                  the signed submission, once the unit is finished
        shards/                         what it reads of the corpus
    runs/<run id>/residuals/            what rounding lost, by block

The store adopts a finished unit's files, so that the node's shard server serves them.
They stay until the receipt, or some time after the lease's deadline; those of a rejected
unit as long, for an appeal, but they go first when something else needs the room.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from barnraise.node.block_engine import unit_folder
from barnraise.protocol import wire
from barnraise.protocol.durable import write_durably
from barnraise.protocol.envelope import content_id, open_signed
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.manifest import cut, entry_shards
from barnraise.protocol.messages import MAX_SHARD, MAX_SUBMISSION, FileEntry, Signed
from barnraise.protocol.pretrain import BlockLease, BlockSubmission
from barnraise.protocol.store import DiskStore

log = logging.getLogger("barnraise.node")

GRACE_MS = 3_600_000  # the coordinator may be behind with its verdicts
SLOWEST = 32 * 1024  # bytes/s: time for the files to go there, besides
_LEASE, _SUBMISSION = "lease.bin", "submission.bin"
_TRASH = ".trash-"


@dataclass(frozen=True, slots=True)
class Kept:
    """A finished unit without a verdict. ``deadline_ms``: its lease's, on the coordinator's clock."""

    submission_id: bytes
    deadline_ms: int
    submission: BlockSubmission


class Units:
    """The block units of one run and one key under ``home``, the run's folder.

    Opening adopts the files of finished units into ``store`` again; nothing is hashed yet.
    """

    def __init__(self, home: Path, store: DiskStore, operator: bytes, public_key: bytes) -> None:
        self._home = home
        self._store = store
        self._operator = operator
        self._key = public_key
        self.kept: dict[bytes, Kept] = {}  # by lease
        self.rejected: set[bytes] = set()  # of those, what an appeal may still need
        for folder in self._folders():
            kept = self._restored(folder)
            if kept is not None:
                self.kept[bytes.fromhex(folder.name)] = kept
        self._adopt_all()

    def folder(self, lease_id: bytes) -> Path:
        """A unit's own folder, there or not."""
        return unit_folder(self._home, lease_id)

    def residual(self, block: int) -> Path:
        """What rounding lost of this block's units so far."""
        return self._home / "residuals" / f"block-{block}.safetensors"

    def begin(self, signed: Signed, lease_id: bytes) -> Path:
        """Make the unit's folder, with its lease. A second time does nothing.

        Raises:
            StorageError: the disk refused.
        """
        folder = self.folder(lease_id)
        if not (folder / _LEASE).is_file():
            write_durably(folder / _LEASE, wire.encode(signed))
        return folder

    def finish(self, lease: BlockLease, signed: Signed, submission: BlockSubmission) -> None:
        """Keep the finished unit's files and serve them from now on.

        Raises:
            StorageError: the disk refused.
        """
        folder = self.folder(lease.lease_id)
        write_durably(folder / _SUBMISSION, wire.encode(signed))
        shutil.rmtree(folder / "shards", ignore_errors=True)
        self.kept[lease.lease_id] = Kept(content_id(signed), lease.deadline_at, submission)
        self._adopt(lease.lease_id)

    def drop(self, lease_id: bytes) -> None:
        """Serve a unit's files no more; ``empty`` deletes them. Unknown ones are fine."""
        folder = self.folder(lease_id)
        self.kept.pop(lease_id, None)
        self.rejected.discard(lease_id)
        if folder.is_dir():
            self._store.disown(folder)
            with suppress(OSError):  # else the next tidying finds it
                folder.rename(folder.with_name(f"{_TRASH}{folder.name}"))
            self._adopt_all()  # in case that two units shared a shard

    def tidy(self, keep: Container[bytes], now_ms: int | None) -> None:
        """Drop what nobody will ask for: of no lease in ``keep``, and either too old or unfinished.

        ``now_ms``: the coordinator's time, None if it is not known.
        """
        for folder in self._folders():
            lease_id = bytes.fromhex(folder.name)
            kept = self.kept.get(lease_id)
            if lease_id in keep:
                continue
            late = kept is not None and now_ms is not None and now_ms > _kept_until(kept)
            if kept is None or late:
                self.drop(lease_id)

    def judged(self, verdicts: Mapping[bytes, Sequence[bool]]) -> None:
        """Drop what is settled by its verdicts, oldest first, by lease: accepted, or rejected twice."""
        for lease_id, found in verdicts.items():
            if lease_id not in self.kept or not found:
                continue
            if found[-1] or len(found) > 1:
                self.drop(lease_id)
            else:
                self.rejected.add(lease_id)

    def drop_rejected(self) -> bool:
        """Drop what is kept for appeals alone; whether there was any."""
        found = list(self.rejected)
        for lease_id in found:
            self.drop(lease_id)
        return bool(found)

    def empty(self) -> None:
        """Delete what was dropped. Blocking."""
        for path in self._dropped():
            shutil.rmtree(path, ignore_errors=True)

    def dropped_bytes(self) -> int:
        """What ``empty`` would delete."""
        return sum(map(unit_bytes, self._dropped()))

    def used_bytes(self, besides: bytes) -> int:
        """What the units but this one take on the disk."""
        return sum(unit_bytes(folder) for folder in self._folders() if folder.name != besides.hex())

    def _dropped(self) -> list[Path]:
        root = self._home / "units"
        return list(root.glob(f"{_TRASH}*")) if root.is_dir() else []

    def _folders(self) -> list[Path]:
        root = self._home / "units"
        if not root.is_dir():
            return []
        return sorted(path for path in root.iterdir() if _is_lease(path.name) and path.is_dir())

    def _restored(self, folder: Path) -> Kept | None:
        """The finished unit in a folder, if there is one and it is ours."""
        try:
            lease = open_signed(_read(folder / _LEASE), BlockLease, self._operator)
            signed = _read(folder / _SUBMISSION)
            submission = open_signed(signed, BlockSubmission, self._key)
        except FileNotFoundError:
            return None
        except (OSError, BarnraiseError) as error:
            log.warning("%s holds no unit of ours and goes: %s", folder, error)
            return None
        if submission.lease_id != lease.lease_id or lease.lease_id.hex() != folder.name:
            return None
        return Kept(content_id(signed), lease.deadline_at, submission)

    def _adopt_all(self) -> None:
        for lease_id in self.kept:
            self._adopt(lease_id)

    def _adopt(self, lease_id: bytes) -> None:
        submission, folder = self.kept[lease_id].submission, self.folder(lease_id)
        for entry in (*submission.states, submission.delta):
            wanted = [shard for shard in entry_shards(entry, MAX_SHARD) if not self._store.has(shard[0])]
            self._store.adopt(folder / entry.path, wanted)


def _kept_until(kept: Kept) -> int:
    size = sum(entry.size for entry in (*kept.submission.states, kept.submission.delta))
    return kept.deadline_ms + GRACE_MS + size * 1000 // SLOWEST


def unit_bytes(folder: Path) -> int:
    """What the states and the difference in a unit's folder take, in bytes; 0 if there is none."""
    total = 0
    for path in folder.glob("*.safetensors") if folder.is_dir() else ():
        with suppress(OSError):
            total += path.stat().st_size
    return total


def file_entry(path: Path) -> FileEntry:
    """Name, size, SHA-256 and shards of a file. Blocking.

    Raises:
        StorageError: it cannot be read.
    """
    whole, size, shards = sha256(), 0, []
    try:
        for piece in cut(path, MAX_SHARD):
            whole.update(piece)
            size += len(piece)
            shards.append(sha256(piece).digest())
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    return FileEntry(path=path.name, size=size, sha256=whole.digest(), shards=tuple(shards))


def _is_lease(name: str) -> bool:
    return len(name) == 32 and all(c in "0123456789abcdef" for c in name)


def _read(path: Path) -> Signed:
    if path.stat().st_size > MAX_SUBMISSION + 1024:
        raise StorageError(f"{path} is too large")
    return wire.decode(path.read_bytes(), Signed)
