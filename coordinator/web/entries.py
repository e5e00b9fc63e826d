"""The ledger's entries by number: published ones from ``RUN/log``, the newest from memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from barnraise.coordinator.log_folder import LogFolder
from barnraise.protocol.errors import MalformedError, StorageError
from barnraise.protocol.tlog_tiles import ENTRIES, FULL, Tile, tile_of, unbundle

_TRIES = 3


class Entries:
    """``get`` may be called in any thread, the rest on the event loop.

    Attributes:
        first: the number of the oldest entry that is kept in memory.
    """

    def __init__(self, folder: LogFolder, first: int) -> None:
        self.folder = folder
        self.first = first
        self._recent: dict[int, bytes] = {}

    def note(self, index: int, data: bytes) -> None:
        """Keep a durable entry until it is published."""
        self._recent[index] = data

    def forget(self, before: int) -> None:
        """Drop what is published, below ``before`` at most."""
        until = min(before, self.folder.size)
        while self.first < until:
            self._recent.pop(self.first, None)
            self.first += 1

    def get(self, indices: Iterable[int]) -> dict[int, bytes]:
        """Canonical bytes by number; those that are nowhere are left out. Blocking."""
        found: dict[int, bytes] = {}
        bundles: defaultdict[int, list[int]] = defaultdict(list)
        for index in indices:
            data = self._recent.get(index)
            if data is None:
                bundles[index // FULL].append(index)
            else:
                found[index] = data
        for number, wanted in bundles.items():
            entries = self.bundle(number)
            for index in wanted:
                if index % FULL < len(entries):
                    found[index] = entries[index % FULL]
        return found

    def bundle(self, number: int) -> list[bytes]:
        """The published entries from ``256 * number`` on, 256 at most. Blocking."""
        for _ in range(_TRIES):  # a partial bundle gives way to a longer one at any moment
            try:
                tile = tile_of(ENTRIES, number, self.folder.size)
            except IndexError:
                return []
            for each in (tile, Tile(ENTRIES, number)):
                data = self.folder.read(each.path)
                if data is not None:
                    try:
                        return unbundle(data)
                    except MalformedError:
                        return []
        return []

    def published(self, start: int, most: int) -> Iterator[bytes]:
        """Up to ``most`` published entries from number ``start`` on, in order. Blocking.

        Raises:
            StorageError: a bundle is missing or damaged; the coordinator's next start mends it.
        """
        end = min(start + most, self.folder.size)
        while start < end:
            entries = self.bundle(start // FULL)[start % FULL :][: end - start]
            if not entries:
                raise StorageError(f"{self.folder.folder}: entry {start} cannot be read")
            yield from entries
            start += len(entries)
