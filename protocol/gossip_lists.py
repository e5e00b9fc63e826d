"""The lists of shards that a node takes part in, who waits for them, and what moved of each version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import trio

from barnraise.protocol.bitmaps import to_mask
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.messages import Manifest
from barnraise.protocol.opening import Opening, opened_shards, opening_list
from barnraise.protocol.store import DiskStore
from barnraise.protocol.tree_effects import Effects
from barnraise.protocol.tree_index import OPENING_LISTS, Shards, lists_of, version_of
from barnraise.protocol.treecast import Treecast

LISTS = 8  # transfers taken part in: two for each version that a node keeps, and some


class Watch:
    """Who waits for a list: told of each shard that came (digest, bytes, peer), or that the disk refuses."""

    def __init__(
        self, got: Callable[[bytes, int, str], None], failed: Callable[[BarnraiseError], None]
    ) -> None:
        self.got = got
        self.failed = failed
        self.heard_at = trio.current_time()  # when bytes for it last arrived


class Lists:
    """Part of a ``Gossiper``: numbers are those of ``barnraise.protocol.tree_index``.

    Attributes:
        shards: digests and sizes of each list taken part in, by number.
        watches: who waits for which list.
        sent, received: bytes of shards that moved down the tree, by version.
    """

    def __init__(self, core: Treecast, store: DiskStore, do: Callable[[Effects], None]) -> None:
        self.shards: dict[int, Shards] = {}
        self.watches: dict[int, Watch] = {}
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.opened: dict[int, int] = {}  # lists that may still grow, and whose version each is
        self._core, self._store, self._do = core, store, do

    def version(self, number: int) -> int:
        """Which version a list belongs to."""
        if number < OPENING_LISTS:
            return version_of(number)
        return self.opened.get(number, -1)

    def hold(self, manifest: Manifest) -> None:
        """Serve what the store has of a checked manifest; begins or brings up to date."""
        for number, shards in lists_of(manifest).items():
            here = [index for index, (digest, _) in enumerate(shards) if self._store.has(digest)]
            if here:
                self._take_part(number, shards, here, wanted=False)

    def want(self, number: int, shards: Shards, watch: Watch) -> None:
        """Fetch a list of a checked manifest; what the store has of it already is served."""
        self.watches[number] = watch
        here = [index for index, (digest, _) in enumerate(shards) if self._store.has(digest)]
        self._take_part(number, shards, here, wanted=True)

    def open(self, opening: Opening, watch: Watch | None) -> None:
        """Serve what the store has of a checked opening, and fetch the rest if ``watch`` is given.

        Called again as it grows. Another opening takes the place of the one before.
        """
        number, shards = opening_list(opening), opened_shards(opening)
        for other in [other for other in self.opened if other != number]:
            self.close(other)
        self.opened[number] = opening.version
        if watch is not None:
            self.watches[number] = watch
        here = [index for index, (digest, _) in enumerate(shards) if self._store.has(digest)]
        self._take_part(number, shards, here, wanted=watch is not None)

    def close(self, number: int) -> None:
        """An opening is over: its version is published, or another attempt was opened."""
        self.watches.pop(number, None)
        self.forget(number)
        self.opened.pop(number, None)

    def stored(self, number: int, digests: Iterable[bytes]) -> None:
        """Shards of a list came another way and are in the store."""
        wanted = set(digests)
        for index, (digest, _) in enumerate(self.shards.get(number, ())):
            if digest in wanted:
                self._do(self._core.verified(None, number, index, trio.current_time()))

    def claim(self, number: int) -> tuple[bytes, int] | None:
        """A shard (digest, bytes) that the caller fetches elsewhere meanwhile; see ``Transfer.claim``."""
        index, effects = self._core.transfer.arrivals.claim(number, trio.current_time())
        self._do(effects)
        return None if index is None else self.shards[number][index]

    def unclaim(self, number: int, digest: bytes) -> None:
        """Neighbours may be asked for it again."""
        for index, (other, _) in enumerate(self.shards.get(number, ())):
            if other == digest:
                self._do(self._core.transfer.arrivals.unclaim(number, index, trio.current_time()))

    def missing(self, number: int) -> int:
        """How many shards of a list are neither here nor on their way."""
        return self._core.transfer.missing(number).bit_count()

    def unwant(self, number: int) -> None:
        """Nobody waits for a list any more: it is served if it is whole, and left if not."""
        self.watches.pop(number, None)
        shards = self.shards.get(number)
        if shards is not None and self._core.transfer.bitmap(number).bit_count() < len(shards):
            self.forget(number)

    def forget(self, number: int) -> None:
        """Take no part in a list any more."""
        if self.shards.pop(number, None) is not None:
            self._do(self._core.forget(number, trio.current_time()))

    def retain(self, versions: Iterable[int]) -> None:
        """Forget lists of other versions than these, but for those that are waited for."""
        kept = set(versions)
        for number in list(self.shards):
            if self.version(number) not in kept and number not in self.watches and number not in self.opened:
                self.forget(number)

    def _take_part(self, number: int, shards: Shards, here: Sequence[int], *, wanted: bool) -> None:
        now = trio.current_time()
        fresh = number not in self.shards
        self.shards[number] = shards
        sizes = [size for _, size in shards]
        effects = self._core.want(number, sizes, now, have=to_mask(here), wanted=wanted)
        if not fresh:
            for index in here:
                effects += self._core.verified(None, number, index, now)
        self._do(effects)
        for known in [known for known in self.shards if known not in self._core.transfer.versions()]:
            del self.shards[known]  # crowded out by this one
        for counter in (self.sent, self.received):
            for version in sorted(counter)[: -2 * LISTS]:
                del counter[version]
