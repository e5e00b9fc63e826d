"""Shards leave while the last are still being hashed: openings, written in step with the manifest.

The sizes of a version's files are known as soon as its checkpoint is durable. So
each time the number of hashed shards has doubled, what there is is signed and handed
over: at most 18 openings of a version, together no larger than twice its manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from barnraise.protocol.messages import Message, Signed
from barnraise.protocol.opening import FIRST_SHARDS, OpenedFile, Opening
from barnraise.protocol.store import DiskStore

LEAST_BYTES = 32 * 1024 * 1024  # hashed within a quarter of a second
Tell = Callable[[Signed, Opening], None]


class OpeningWriter:
    """Give ``put`` to ``build_manifest``; openings come out at ``tell``, in the thread that hashes.

    A version below ``least_bytes``, or of fewer than twice ``FIRST_SHARDS``, is not
    opened: its manifest comes as soon.

    Raises:
        OSError: a file cannot be found.
    """

    def __init__(
        self,
        run_id: bytes,
        version: int,
        files: Mapping[str, Path],
        shard_size: int,
        created_at: int,
        bases: tuple[int, ...],
        store: DiskStore,
        sign: Callable[[Message], Signed],
        tell: Tell,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        sizes = {name: path.stat().st_size for name, path in sorted(files.items())}
        self._fixed = Opening(
            run_id=run_id,
            version=version,
            created_at=created_at,
            shard_size=shard_size,
            files=tuple(OpenedFile(path=name, size=size) for name, size in sizes.items()),
            bases=bases,
            shards=(),
        )
        self._places = [
            (files[name], offset, min(shard_size, size - offset))
            for name, size in sizes.items()
            for offset in range(0, size, shard_size)
        ]
        self._digests: list[bytes] = []
        self._served = 0
        self._store, self._sign, self._tell = store, sign, tell
        worth_it = len(self._places) >= 2 * FIRST_SHARDS and sum(sizes.values()) >= least_bytes
        self._next = FIRST_SHARDS if worth_it else -1

    def put(self, digest: bytes, data: bytes) -> None:
        """The next shard, in order of file name and offset, has this digest."""
        self._digests.append(digest)
        count = len(self._digests)
        if count > len(self._places) or len(data) != self._places[count - 1][2]:
            self._next = -1  # the file changed under our hands: the manifest will tell
        if count == self._next:
            self._next *= 2
            self._announce()

    def finish(self) -> None:
        """All is hashed, and the manifest is not there yet (patches are being made)."""
        if self._served and self._next > 0 and len(self._digests) == len(self._places) > self._served:
            self._announce()

    def _announce(self) -> None:
        for place in range(self._served, len(self._digests)):
            path, offset, size = self._places[place]
            self._store.adopt(path, [(self._digests[place], offset, size)])
        self._served = len(self._digests)
        opening = Opening(
            run_id=self._fixed.run_id,
            version=self._fixed.version,
            created_at=self._fixed.created_at,
            shard_size=self._fixed.shard_size,
            files=self._fixed.files,
            bases=self._fixed.bases,
            shards=tuple(self._digests),
        )
        self._tell(self._sign(opening), opening)
