"""Fetching ahead: the shards of a version that is still being published.

Only a node that will need whole files, and has nothing else to fetch, does so: one
that holds a version from which a patch is expected waits for the patch, 50 to 100
times smaller; one that is fetching an older version finishes that first. What was
fetched ahead lies in the store, pinned, under the same quota as everything. When the
manifest comes, what it names counts as present and the rest is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from barnraise.node.versions import Versions
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.gossip_lists import Watch
from barnraise.protocol.manifest import manifest_shards
from barnraise.protocol.messages import Manifest
from barnraise.protocol.opening import Opening, opened_bytes, opened_shards, opening_list

log = logging.getLogger(__name__)

_PINS = "opening"


class Prefetch:
    """Listens to ``gossiper``'s openings from now on. ``say`` is told of what a person should know.

    ``idle()`` says whether a whole version may be fetched ahead now (no other download,
    no pause, quota left). ``last_block``: versions up to it are made of blocks, of which this
    node needs one, and are not fetched ahead. ``pulling``: the list being fetched, if any.
    """

    def __init__(
        self,
        gossiper: Gossiper,
        versions: Versions,
        idle: Callable[[], bool] = lambda: True,
        say: Callable[[str], None] = log.info,
        last_block: int = -1,
    ) -> None:
        self.gossiper = gossiper
        self.pulling: int | None = None
        self._versions, self._idle, self._say = versions, idle, say
        self._last_block = last_block
        self._refused: int | None = None  # the list that there is no room for
        gossiper.openings.on_opening = self._opened
        gossiper.openings.on_close = self._closed

    def wants(self, opening: Opening) -> bool:
        """Whether its shards are worth fetching for this node."""
        if opening.version <= self._last_block or self._versions.busy or not self._idle():
            return False
        return not set(opening.bases) & set(self._versions.on_disk())

    def settled(self) -> None:
        """A version is whole on disk: what was fetched ahead for nothing goes."""
        if self.pulling is None:
            self.gossiper.store.unpin(_PINS)
            if not self._versions.busy:
                self.gossiper.store.sweep()

    def stop(self) -> None:
        """The node is paused: fetch nothing ahead. What came stays until the version is known."""
        if self.pulling is not None:
            self.gossiper.lists.close(self.pulling)
            self._refused, self.pulling = self.pulling, None

    def _opened(self, opening: Opening) -> None:
        number = opening_list(opening)
        if number == self._refused:
            return
        store = self.gossiper.store
        if self.pulling != number:
            if not self.wants(opening):
                return
            try:
                size = opened_bytes(opening)
                store.ensure_room(size, scratch=size)
            except StorageError as error:
                self._refused = number
                self._say(f"version {opening.version} is not fetched ahead: {error}")
                return
        self.pulling = number
        store.pin(_PINS, (digest for digest, _ in opened_shards(opening)))
        self.gossiper.lists.open(opening, Watch(lambda digest, size, peer: None, self._failed))

    def _failed(self, error: BarnraiseError) -> None:
        """The disk refused a shard: the download proper will say so where it matters."""
        log.info("fetching ahead has ended: %s", error)
        self._refused, self.pulling = self.pulling, None
        self.gossiper.store.unpin(_PINS)

    def _closed(self, opening: Opening, manifest: Manifest, agrees: bool) -> None:
        if self.pulling is None:
            return
        self.pulling = None
        store = self.gossiper.store
        ahead = dict(opened_shards(opening))
        if agrees and manifest.version == opening.version:
            store.pin(_PINS, ahead)  # until the version is whole, and the store has them pinned itself
            return
        store.unpin(_PINS)
        kept = dict(manifest_shards(manifest))
        store.discard(digest for digest in ahead if digest not in kept)
