"""A version's shards from the broadcast tree, and from anybody else when the tree does not bring them.

``TreecastFetcher`` takes part in the tree's lists (``barnraise.protocol.tree_index``)
that hold what is missing. While there is no neighbour, or when nothing has come for a
while, it asks for a few shards at a time as ``SwarmFetcher`` does, and goes back to
the tree as soon as that moves again: after a partition, or for a newcomer whose
neighbours are no further, a download only becomes slower. Mirrors that the manifest
names are drawn from all the while (``barnraise.node.mirror_draws``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import trio

from barnraise.node.mirror_draws import draw_from_mirrors
from barnraise.node.weights import SwarmFetcher
from barnraise.protocol.errors import BarnraiseError, PeerError
from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.gossip_lists import Watch
from barnraise.protocol.messages import Manifest
from barnraise.protocol.tree_index import lists_of

STUCK_S = 10.0  # without a byte from the tree
TRICKLE_S = 60.0  # without a whole shard from it
CATCH_UP = 8  # shards asked for beside the tree at a time
LEAST_CAP = 1e6  # bytes/s: below it, that many neighbours sending at once would only be in each other's way
PATIENCE = 5  # attempts beside the tree in a row that find nobody
_LOOK_S = 0.5


class TreecastFetcher:
    """``barnraise.node.weights.Fetcher`` by way of the tree.

    Attributes:
        came_from: bytes of the download under way, or the last one, by peer id or mirror's URL.
    """

    def __init__(self, gossiper: Gossiper, beside: SwarmFetcher) -> None:
        self.gossiper = gossiper
        self.beside = beside
        self.came_from: Counter[str] = Counter()

    async def fetch(
        self, manifest: Manifest, missing: Mapping[bytes, int], received: Callable[[int], None]
    ) -> None:
        """See ``Fetcher.fetch``."""
        if not missing:
            return
        self.came_from = self.beside.came_from = Counter()
        download = _Download(self, manifest, missing, received)
        try:
            await download.run()
        finally:
            for number in download.lists:
                self.gossiper.lists.unwant(number)


class _Download:
    def __init__(
        self,
        owner: TreecastFetcher,
        manifest: Manifest,
        missing: Mapping[bytes, int],
        received: Callable[[int], None],
    ) -> None:
        self.gossiper, self.beside, self.came_from = owner.gossiper, owner.beside, owner.came_from
        self.manifest = manifest
        self.missing = dict(missing)
        self.received = received
        self.failure: BarnraiseError | None = None
        self.changed = trio.Event()
        self.watch = Watch(self._from_tree, self._failed)
        self.whole_at = trio.current_time()  # when the tree last brought a shard
        self.fruitless = 0
        has = self.gossiper.store.has
        self.lists = {}
        for number, shards in lists_of(manifest).items():
            lacking = {digest for digest, _ in shards if not has(digest)}
            if lacking and lacking <= self.missing.keys():  # we want the rest of it, and nothing else
                self.lists[number] = shards
        cap = owner.beside.down.rate if owner.beside.down is not None else None
        if cap is not None and cap < LEAST_CAP:
            self.lists.clear()
        in_lists = {digest for shards in self.lists.values() for digest, _ in shards}
        self.others = {digest: size for digest, size in missing.items() if digest not in in_lists}

    async def run(self) -> None:
        for number, shards in self.lists.items():
            self.gossiper.lists.want(number, shards, self.watch)
        draw = partial(draw_from_mirrors, self.gossiper, self.beside, self.manifest, self.lists, self._got)
        failure: BarnraiseError | None = None
        async with trio.open_nursery() as nursery:
            if self.manifest.mirrors and self.lists:
                nursery.start_soon(draw)
            try:
                await self._until_whole()
            except BarnraiseError as error:  # raised outside, where no group wraps it
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _until_whole(self) -> None:
        if self.others:
            await self._beside(self.others)
        while self.missing and self.failure is None:
            if self._stuck():
                await self._catch_up()
                continue
            self.changed = trio.Event()
            with trio.move_on_after(_LOOK_S):
                await self.changed.wait()
        if self.failure is not None:
            raise self.failure

    def _stuck(self) -> bool:
        now = trio.current_time()
        quiet = now - self.watch.heard_at > STUCK_S or now - self.whole_at > TRICKLE_S
        return quiet or self.gossiper.alone

    async def _catch_up(self) -> None:
        digests = list(self.missing)
        self.beside.rng.shuffle(digests)
        try:
            await self._beside({digest: self.missing[digest] for digest in digests[:CATCH_UP]})
            self.fruitless = 0
        except PeerError:
            self.fruitless += 1
            if self.gossiper.alone or self.fruitless >= PATIENCE:
                raise
            await trio.sleep(min(2.0**self.fruitless, STUCK_S))

    async def _beside(self, some: dict[bytes, int]) -> None:
        has = self.gossiper.store.has

        def arrived(_: int) -> None:
            for digest in [digest for digest in some if digest in self.missing and has(digest)]:
                self._got(digest, "")

        await self.beside.fetch_more(self.manifest, some, arrived)
        for digest in some:
            self._got(digest, "")
        for number in self.lists:
            self.gossiper.lists.stored(number, some)

    def _from_tree(self, digest: bytes, size: int, peer: str) -> None:
        self.whole_at = trio.current_time()
        self.fruitless = 0
        self._got(digest, peer)

    def _got(self, digest: bytes, peer: str) -> None:
        size = self.missing.pop(digest, None)
        if size is None:
            return
        if peer:  # what came beside the tree is counted there
            self.came_from[peer] += size
        self.received(size)
        self.changed.set()

    def _failed(self, error: BarnraiseError) -> None:
        self.failure = error
        self.changed.set()
