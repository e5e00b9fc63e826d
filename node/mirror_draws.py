"""Mirrors beside the tree: each is one more neighbour that sends one shard at a time.

A mirror is a fat source that everybody may use, so a node takes no more from it than
from a neighbour. What is fetched there is taken out of what neighbours are asked for,
the rarest shards first: mirrors bring new shards into a neighbourhood, which swaps
them. Under a download cap that the tree fills by itself they are left alone, and so is
one that is slower than neighbours usually are, as long as neighbours have the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from barnraise.node.asking import Donor
from barnraise.node.weights import SwarmFetcher
from barnraise.protocol.errors import PeerError, StorageError
from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.messages import Manifest
from barnraise.protocol.shards import BadShardError, off_loop
from barnraise.protocol.tree_index import Shards

ABSENT_S = 2.0  # a shard that is not there (yet): the mirror is being filled
PAUSE_S = (1.0, 60.0)  # after a failure, growing
LATE_S = 4.0  # at the end neighbours are asked for what a mirror is still sending
STRIKES = 5
_LOOK_S = 0.5


async def draw_from_mirrors(
    gossiper: Gossiper,
    beside: SwarmFetcher,
    manifest: Manifest,
    lists: Mapping[int, Shards],
    got: Callable[[bytes, str], None],
) -> None:
    """Draw shards of ``lists`` from the manifest's mirrors until cancelled.

    ``got(digest, "")`` is told of each that is verified and stored.
    """
    async with trio.open_nursery() as nursery:
        for url in manifest.mirrors:
            donor = None if url in beside.banned else beside.mirror(url)
            if donor is not None:
                nursery.start_soon(_Draws(gossiper, beside, url, donor, lists, got).run)


class _Draws:
    def __init__(
        self,
        gossiper: Gossiper,
        beside: SwarmFetcher,
        url: str,
        donor: Donor,
        lists: Mapping[int, Shards],
        got: Callable[[bytes, str], None],
    ) -> None:
        self._gossiper, self._beside, self._url, self._donor = gossiper, beside, url, donor
        self._lists, self._got = lists, got

    async def run(self) -> None:
        failures = 0
        try:
            while failures < STRIKES:
                pause = _LOOK_S
                claimed = None if self._capped() else self._claim()
                if claimed is not None:
                    number, digest, size = claimed
                    try:
                        found = await self._fetch(number, digest, size)
                        failures, pause = 0, 0.0 if found else ABSENT_S
                    except BadShardError as error:
                        self._beside.banned[self._url] = str(error)
                        self._beside.report(self._url, str(error))
                        return
                    except StorageError:
                        return  # the tree's own next shard says so, with what to do about it
                    except PeerError:
                        failures += 1
                        pause = min(PAUSE_S[0] * 2**failures, PAUSE_S[1])
                await trio.sleep(pause)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self._donor.close()

    def _capped(self) -> bool:
        down = self._beside.down
        return down is not None and down.busy

    def _claim(self) -> tuple[int, bytes, int] | None:
        for number in self._lists:
            shard = self._gossiper.lists.claim(number)
            if shard is not None:
                return (number, *shard)
        return None

    async def _fetch(self, number: int, digest: bytes, size: int) -> bool:
        """Bring one claimed shard into the store; False if it is not there, or came another way."""
        data: bytes | None = None
        failure: PeerError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._mind, number, digest, nursery.cancel_scope)
            try:
                data = await self._donor.fetch(digest, size)
            except PeerError as error:
                failure = error
            finally:
                if data is None:
                    self._gossiper.lists.unclaim(number, digest)
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if data is None:
            return False
        kept = data
        await off_loop(size, lambda: self._gossiper.store.put(digest, kept, checked=True))
        self._beside.came_from[self._url] += size
        self._got(digest, "")
        self._gossiper.lists.stored(number, (digest,))
        return True

    async def _mind(self, number: int, digest: bytes, fetching: trio.CancelScope) -> None:
        """Let neighbours send it too if it is late at the end; stop if it is here."""
        began = trio.current_time()
        while True:
            await trio.sleep(_LOOK_S)
            if self._gossiper.store.has(digest):
                fetching.cancel()
            elif trio.current_time() - began >= LATE_S and not self._gossiper.lists.missing(number):
                self._gossiper.lists.unclaim(number, digest)
