"""``RUN/log``: the ledger as static files that any web server can hand out (c2sp.org/tlog-tiles).

::

    RUN/log/checkpoint               the newest head, signed by the run's key, and cosigned
    RUN/log/tile/<level>/<index>     256 hashes each, or fewer with .p/<width>
    RUN/log/tile/entries/<index>     the entries themselves
    RUN/log/spec/<run id>            the signed run spec, which names the key (``log_paths``)

Everything that a checkpoint speaks of is on the disk before the checkpoint is; a crash at
any moment leaves the one before, with all of its files. Blocking.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from barnraise.protocol.durable import replace_file, sync_folder
from barnraise.protocol.errors import MalformedError, RunFolderError, SignatureError, StorageError
from barnraise.protocol.log_messages import CHECKPOINT
from barnraise.protocol.log_paths import spec_path
from barnraise.protocol.merkle import HASH_BYTES, MerkleLog, leaf_hash, node_hash
from barnraise.protocol.messages import Signed
from barnraise.protocol.notes import MAX_NOTE, Ed25519Key
from barnraise.protocol.runid import run_id
from barnraise.protocol.tlog_checkpoint import Head, open_checkpoint
from barnraise.protocol.tlog_tiles import (
    ENTRIES,
    FULL,
    Tile,
    TileTree,
    bundle,
    hash_tile,
    tile_of,
    tiles_for,
    unbundle,
)
from barnraise.protocol.wire import encode


class LogFolder:
    """The static files of one run's log.

    Attributes:
        head: the newest checkpoint that is out there; None: none ever was.
    """

    def __init__(self, folder: Path, key: Ed25519Key) -> None:
        self.folder = folder
        self.head = self._read_head(key)

    @property
    def size(self) -> int:
        """How many entries are out there."""
        return 0 if self.head is None else self.head.size

    def check(self, log: MerkleLog) -> None:
        """Make sure that what is out there is the beginning of ``log``.

        Raises:
            RunFolderError: it is not. Signing that log would show the world a second history.
        """
        if self.head is not None and (self.size > len(log) or log.root(self.size) != self.head.root):
            raise RunFolderError(
                f"{self.folder} was published with {self.size} entries that the journal does not have: the "
                "journal is older than it, or damaged. Restore the newest backup of the journal: to sign "
                "another history with the same key is what witnesses raise the alarm for"
            )

    def node(self, level: int, index: int) -> bytes:
        """The hash of a complete subtree (``merkle.Nodes``), from the tiles here. Blocking.

        Raises:
            RunFolderError: the tile is gone or damaged.
        """
        try:
            return TileTree(self.size, self._tile).node(level, index)
        except (OSError, MalformedError) as error:
            raise RunFolderError(f"{self.folder} is damaged ({error}); the next start mends it") from error

    def intact(self) -> bool:
        """Whether every file of the newest checkpoint is here and leads to its root. Blocking: reads all."""
        head = self.head
        if head is None:
            return True
        try:
            for tile in tiles_for(head.size):
                if tile.level == 0:
                    continue
                if tile.level == ENTRIES:
                    made = [leaf_hash(entry) for entry in unbundle(self._tile(tile))]
                else:
                    below = range(tile.index * FULL, tile.index * FULL + tile.width)
                    made = [_top(self._tile(Tile(tile.level - 1, index))) for index in below]
                if b"".join(made) != self._tile(Tile(max(0, tile.level), tile.index, tile.width)):
                    return False
            return TileTree(head.size, self._tile).root() == head.root
        except (OSError, MalformedError):
            return False

    def _tile(self, tile: Tile) -> bytes:
        data = (self.folder / tile.path).read_bytes()
        if tile.level != ENTRIES and len(data) != tile.limit:
            raise MalformedError(f"{tile.path} has {len(data)} bytes instead of {tile.limit}")
        return data

    def damaged(self, log: MerkleLog) -> list[Tile]:
        """Write again every tile that is lost or not the log's; the bundles for which that takes entries."""
        bundles = []
        for tile in tiles_for(self.size):
            data = self.read(tile.path)
            if tile.level != ENTRIES:
                if data != hash_tile(log, tile):
                    self._repair(tile.path, hash_tile(log, tile))
                continue
            try:
                hashes = [leaf_hash(entry) for entry in unbundle(data or b"")]
            except MalformedError:
                hashes = []
            if b"".join(hashes) != log.hashes(0, tile.index * FULL, tile.width):
                bundles.append(tile)
        return bundles

    def mend(self, log: MerkleLog, bundles: Iterable[Tile], entries: Iterable[bytes]) -> None:
        """Write these bundles (in order) again, from all of the log's entries.

        Raises:
            StorageError: the disk refused.
            RunFolderError: the entries are not those of the log.
        """
        rest, place = iter(entries), 0
        for tile in bundles:
            first = tile.index * FULL
            for _ in zip(range(first - place), rest, strict=False):
                pass
            self._repair(tile.path, bundle(self._next(log, tile, rest)))
            place = first + tile.width

    def missing_from(self) -> int:
        """The first entry that ``grow`` wants next: ``size``, or less where the last bundle is not here."""
        start = self.size - self.size % FULL
        try:
            self._tail()
        except (OSError, MalformedError):
            return start
        return self.size

    def grow(self, log: MerkleLog, head: Head, start: int, entries: Iterable[bytes]) -> None:
        """Put out the log as of ``head``, whose entries are those here and ``entries`` from ``start`` on.

        ``start`` is what ``missing_from`` says. Needs ``head`` to be durably noted elsewhere already.

        Raises:
            StorageError: the disk refused; the checkpoint before is still the one out there.
            RunFolderError: the entries are not those of the log.
        """
        try:
            self._grow(log, head, start, entries)
        except OSError as error:
            raise StorageError(
                f"cannot write {self.folder} ({error.strerror}): free some disk space, or check permissions"
            ) from None

    def put_checkpoint(self, note: bytes) -> None:
        """Put out the same checkpoint with other cosignatures.

        Raises:
            StorageError: the disk refused.
        """
        try:
            self._write(CHECKPOINT, note)
            sync_folder(self.folder)
        except OSError as error:
            raise StorageError(f"cannot write {self.folder / CHECKPOINT} ({error.strerror})") from None

    def put_spec(self, signed: Signed) -> None:
        """Put out the signed run spec, unless it is out there.

        Raises:
            StorageError: the disk refused.
        """
        path, data = spec_path(run_id(signed)), encode(signed)
        if self.read(path) != data:
            self._repair(path, data)

    def read(self, path: str) -> bytes | None:
        """The file at a path of the log that was checked to be one; None: there is none."""
        try:
            return (self.folder / path).read_bytes()
        except OSError:
            return None

    def _repair(self, path: str, data: bytes) -> None:
        try:
            for folder in self._write(path, data):
                sync_folder(folder)
        except OSError as error:
            raise StorageError(f"cannot write {self.folder / path} ({error.strerror})") from None

    def _grow(self, log: MerkleLog, head: Head, start: int, entries: Iterable[bytes]) -> None:
        before, size = self.size, head.size
        tail = self._tail() if start % FULL else []
        rest = iter(chain(tail, entries))
        folders = {self.folder}
        for tile in tiles_for(size, start - start % FULL):
            data = bundle(self._next(log, tile, rest)) if tile.level == ENTRIES else hash_tile(log, tile)
            folders |= self._write(tile.path, data)
        for folder in folders:
            sync_folder(folder)
        self._write(CHECKPOINT, head.note)
        sync_folder(self.folder)
        self.head = head
        self._prune(before, size)

    def _next(self, log: MerkleLog, tile: Tile, entries: Iterable[bytes]) -> list[bytes]:
        found = [entry for _, entry in zip(range(tile.width), entries, strict=False)]
        hashes = b"".join(leaf_hash(entry) for entry in found)
        if hashes != log.hashes(0, tile.index * FULL, tile.width):
            raise RunFolderError(
                f"{self.folder}: the entries from {tile.index * FULL} on are not the ledger's"
            )
        return found

    def _tail(self) -> list[bytes]:
        """The entries of the last bundle, if it is not full."""
        if not self.size % FULL:
            return []
        tile = tile_of(ENTRIES, self.size // FULL, self.size)
        found = unbundle((self.folder / tile.path).read_bytes())
        if len(found) != tile.width:
            raise MalformedError(f"{tile.path} has not {tile.width} entries")
        return found

    def _prune(self, before: int, size: int) -> None:
        """Drop the partial tiles of those that are full now."""
        for tile in tiles_for(before):
            if tile.width < FULL and tile_of(tile.level, tile.index, size).width == FULL:
                shutil.rmtree(self.folder / f"{tile.whole.path}.p", ignore_errors=True)

    def _write(self, path: str, data: bytes) -> set[Path]:
        """Write one file, whole or not at all; the folders that must be synced for it to last."""
        target = self.folder / path
        missing = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data)
        return {target.parent, *(folder.parent for folder in missing)}

    def _read_head(self, key: Ed25519Key) -> Head | None:
        path = self.folder / CHECKPOINT
        try:
            with path.open("rb") as file:
                return open_checkpoint(file.read(MAX_NOTE + 1), key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path} ({error.strerror})") from None
        except (MalformedError, SignatureError) as error:
            raise RunFolderError(
                f"{path} is damaged ({error}): restore it from a backup, or delete the folder {self.folder} "
                "if you are sure that the journal is the newest"
            ) from None


def _top(tile: bytes) -> bytes:
    """What a full tile is in the level above: the hash of the subtree over its 256 hashes."""
    hashes = [tile[at : at + HASH_BYTES] for at in range(0, len(tile), HASH_BYTES)]
    while len(hashes) > 1:
        hashes = [node_hash(*hashes[at : at + 2]) for at in range(0, len(hashes), 2)]
    return hashes[0]
