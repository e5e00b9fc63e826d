"""The coordinator as the root of the broadcast tree: versions enter it here.

What it uploads of each version is the operator's choice: as much as its link takes
(``copies`` 0), or about so many copies, after which it sends only what no neighbour
has or what a node cannot get elsewhere. Shards asked for beside the tree
(``SHARD_PROTOCOL``) are counted as well, but not refused: who asks so has nobody else.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import trio

from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.gossip_lists import LISTS
from barnraise.protocol.gossip_state import tree_state
from barnraise.protocol.manifest import check_manifest
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.network import Network
from barnraise.protocol.opening import Opening
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.store import DiskStore
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.wire import printable

log = logging.getLogger(__name__)

SLOTS = 8  # shards sent at a time: a server's link, not a home's
LEAST_COPIES = 1.0
MAX_REPORTS = 32


class Origin:
    """The coordinator's part in the tree; ``run`` it.

    Raises:
        ValueError: ``copies`` between 0 and 1: nobody could get a whole version.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: bytes,
        network: Network,
        store: DiskStore,
        rng: random.Random,
        copies: float = 0.0,
    ) -> None:
        if copies and copies < LEAST_COPIES:
            raise ValueError(f"{copies:g} upload copies: use 0 for no limit, or at least {LEAST_COPIES:g}")
        self.copies = copies
        self._newest = -1
        self.reports: deque[dict[str, Any]] = deque(maxlen=MAX_REPORTS)
        self.gossiper = Gossiper(
            network,
            store,
            (),
            lambda head: check_manifest(head, spec, run_id),
            rng,
            on_head=self._surprised,
            on_report=self._reported,
            transfer=TransferConfig(slots=SLOTS, max_slots=SLOTS, copies=copies or None, versions=LISTS),
        )

    async def run(self) -> None:
        """Serve the tree until cancelled."""
        await self.gossiper.run()

    def publish(self, signed: Signed, manifest: Manifest) -> None:
        """Let a version, whose shards are in the store, into the tree."""
        self._newest = max(self._newest, manifest.version)
        self.gossiper.lists.hold(manifest)
        self.gossiper.publish(signed, manifest)

    def open(self, signed: Signed, opening: Opening) -> None:
        """Let the first shards of a version, which are in the store, into the tree."""
        self.gossiper.openings.publish(signed, opening)

    def retain(self, versions: Iterable[int]) -> None:
        """Serve only these from now on."""
        self.gossiper.lists.retain(versions)

    def state(self) -> dict[str, Any]:
        """For the state tree; see ``tree_state``."""
        shown = tree_state(self.gossiper, trio.current_time())
        return {**shown, "upload_copies": self.copies, "reports": list(self.reports)}

    def _surprised(self, signed: Signed, manifest: Manifest) -> None:
        if manifest.version <= self._newest:
            return  # one of ours, older than what is still served
        log.warning(
            "a node holds version %d, signed with the run's key, of which this coordinator knows nothing: "
            "was the run folder restored from an older copy?",
            manifest.version,
        )

    def _reported(self, code: str, peer: str, text: str) -> None:
        self.reports.append({"code": code, "peer": peer, "text": printable(text)})
        level = logging.WARNING if code in ("banned", "corrupt", "forged") else logging.DEBUG
        log.log(level, "broadcast tree: %s %s: %s", code, printable(peer, 96), printable(text))
