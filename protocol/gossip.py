"""Treecast on a real network: carries out what ``barnraise.protocol.treecast`` decides.

The same code runs over libp2p and in memory. Links are control streams
(``gossip_control``), shards travel on bulk streams (``gossip_shards``), heads are
believed only after ``check_head``. Whatever a neighbour sends, the worst that
happens is the end of its own link.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import trio
from msgspec.structs import replace

from barnraise.protocol.bandwidth import Pacer
from barnraise.protocol.gossip_control import ControlTraffic
from barnraise.protocol.gossip_heads import Heads
from barnraise.protocol.gossip_link import Link, part
from barnraise.protocol.gossip_lists import LISTS, Lists
from barnraise.protocol.gossip_openings import CheckOpening, OpeningTraffic
from barnraise.protocol.gossip_shards import ShardTraffic
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.network import Network
from barnraise.protocol.store import DiskStore
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree import TreeConfig
from barnraise.protocol.tree_effects import (
    Ban,
    Complete,
    Connect,
    Deliver,
    Disconnect,
    Effects,
    Report,
    Send,
    StartSend,
    StopReceive,
    StopSend,
)
from barnraise.protocol.tree_messages import (
    BULK_PROTOCOL,
    TREE_PROTOCOL,
    Contact,
)
from barnraise.protocol.treecast import Treecast
from barnraise.protocol.view_state import ViewConfig

MAX_BANNED = 4096
STRANGER_S = 20.0  # how long a link that is no neighbour's may stay
SWEEP_S = 5.0
CAP_S = 1.0
LEAVE_S = 1.0
PATIENCE_S = 5.0  # for the tree to bring a head that is known already
HEADS = 8


class Gossiper:
    """One node's part in the broadcast. ``run`` it; everything else may be called before and meanwhile.

    Args:
        bootstrap: contacts to begin with (a node's coordinator).
        check_head: gives the manifest inside a head that may be believed, and raises
            SignatureError or MalformedError for any other. Called in a worker thread if large.
        check_opening: the same for openings; without it none is heeded.
        on_head: told of heads seen for the first time, checked.
        on_report: told of ``Report`` effects and of bans: code, peer, text.
        on_change: told when what ``state`` shows may have changed.
        known: contacts remembered from an earlier start.
        down: the cap that ``network`` is under: it bounds how many neighbours send at a time.
    """

    def __init__(
        self,
        network: Network,
        store: DiskStore,
        bootstrap: Iterable[Contact],
        check_head: Callable[[Signed], Manifest],
        rng: random.Random,
        *,
        on_head: Callable[[Signed, Manifest], None] = lambda signed, manifest: None,
        on_report: Callable[[str, str, str], None] = lambda code, peer, text: None,
        on_change: Callable[[], None] = lambda: None,
        views: ViewConfig | None = None,
        transfer: TransferConfig | None = None,
        known: Iterable[Contact] = (),
        down: Pacer | None = None,
        check_opening: CheckOpening | None = None,
    ) -> None:
        addresses = tuple(address for address in network.addresses if 0 < len(address) <= 256)[:16]
        me = Contact(peer_id=network.peer_id, addresses=addresses)
        bootstrap = tuple(bootstrap)
        self.core = Treecast(
            me,
            bootstrap,
            rng,
            views=views,
            tree=TreeConfig(heads=HEADS),
            transfer=transfer or TransferConfig(versions=LISTS),
        )
        self.network = network
        self.store = store
        self.banned: dict[str, str] = {}
        self.defects = 0  # exceptions that should never have been raised
        self.links: dict[str, Link] = {}
        self.lists = Lists(self.core, store, self.do)
        self.openings = OpeningTraffic(self, check_opening)
        self._on_head, self._on_report, self._on_change = on_head, on_report, on_change
        self.heads = Heads(check_head, 2 * HEADS)
        self.control = ControlTraffic(self, network, (contact.peer_id for contact in bootstrap))
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[Callable[..., Any], tuple[object, ...]]] = []  # tasks for when ``run`` begins
        self._over = False
        self._wake, self._stirred = trio.Event(), trio.Event()
        self._planned = math.inf
        self.shards = ShardTraffic(self)
        self._known = tuple(known)
        self._down = down

    # --- life

    async def run(self) -> None:
        """Take part until cancelled, then say goodbye (within a second)."""
        self.network.set_handler(TREE_PROTOCOL, self.control.serve)
        self.network.set_handler(BULK_PROTOCOL, self.shards.serve)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    self.do(self.core.start(trio.current_time(), self._known))
                    nursery.start_soon(self._keep_time)
                    nursery.start_soon(self._sweep)
                    if self._down is not None:
                        nursery.start_soon(self._keep_to_cap, self._down)
                    for task, arguments in self._early:
                        nursery.start_soon(task, *arguments)
                    self._early.clear()
                    await trio.sleep_forever()
                finally:
                    # before the nursery closes: others still call us while its tasks end
                    self._nursery, self._over = None, True
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + LEAVE_S):
                await self._leave()

    @property
    def running(self) -> bool:
        """Whether links are taken: ``run`` has begun and is not ending."""
        return self._nursery is not None

    @property
    def alone(self) -> bool:
        """Whether there is no neighbour, and none is being asked."""
        views = self.core.views
        return not self.running or not (views.active or views.pending or self.control.dialling)

    def contacts(self) -> list[Contact]:
        """Neighbours, then others that were heard of: what to remember for the next start."""
        views = self.core.views
        return [*views.active.values(), *views.passive.values()]

    def announce(self, addresses: Iterable[str]) -> None:
        """Tell whoever is met from now on to dial us there (nowhere: we only dial out)."""
        fit = tuple(address for address in addresses if 0 < len(address) <= 256)[:16]
        self.core.views.state.me = Contact(peer_id=self.network.peer_id, addresses=fit)

    def sent_beside(self, peer: str, size: int) -> None:
        """Bytes of shards that ``peer`` got of us beside the tree: the upload limit counts them too."""
        self.core.transfer.sent_beside(size)

    def serve(self, slots: int) -> None:
        """Upload at most ``slots`` shards at a time from now on (0: none)."""
        config = replace(self.core.transfer.config, slots=slots, max_slots=slots)
        self.do(self.core.reconfigure(config, trio.current_time()))

    # --- versions

    def publish(self, signed: Signed, manifest: Manifest) -> None:
        """Send a checked head down the tree (ours, or one that came another way). Repeats do nothing."""
        self.heads.remember(signed, manifest)
        self.openings.published(manifest)
        self.do(self.core.publish(manifest.version, signed, trio.current_time()))

    async def publish_later(self, signed: Signed, manifest: Manifest) -> None:
        """For a head that came another way: the tree is left the time to bring it, too.

        Were every node to pass on what all have heard at once, each link would see it
        twice, and none would stay eager.
        """
        self.heads.remember(signed, manifest)
        self.openings.published(manifest)
        await trio.sleep(PATIENCE_S)
        self.publish(signed, manifest)

    def ban(self, peer: str, reason: str) -> None:
        """Refuse ``peer`` from now on: it was caught elsewhere."""
        if peer not in self.banned:
            self._ban(peer, reason)
            self.do(self.core.ban(peer, trio.current_time()))

    # --- effects

    def do(self, effects: Effects) -> None:
        """Carry out what the machine wants; never waits."""
        for effect in effects:
            match effect:
                case Send(peer=peer, message=message):
                    link = self.links.get(peer)
                    if link is not None and not link.post(message):
                        self.control.end(link, "it does not read what it is sent")
                case StartSend(peer=peer, version=number, index=index):
                    self.shards.start(peer, number, index)
                case StopSend(peer=peer, version=number, index=index):
                    self.shards.stop(peer, number, index)
                case StopReceive(peer=peer, version=number, index=index):
                    self.shards.drop(peer, number, index)
                case Connect(contact=contact):
                    self.control.connect(contact)
                case Disconnect(peer=peer):
                    self.spawn(self.control.part_later, peer)
                case Deliver(peer=peer, head=head):
                    self._delivered(peer, head)
                case Ban(peer=peer, reason=reason):
                    self._ban(peer, reason)
                case Report(code=code, peer=peer, text=text):
                    self.report(code, peer, text)
                case Complete(version=number):
                    self._on_change()
        self.openings.offer()
        wake = self.core.wake_at
        if wake is not None and wake < self._planned:
            self._wake.set()

    def spawn(self, task: Callable[..., Any], *arguments: object) -> None:
        """Start a task that ends with ``run``, now or when that begins."""
        if self._nursery is not None:
            self._nursery.start_soon(task, *arguments)
        elif not self._over:
            self._early.append((task, arguments))

    def stir(self) -> None:
        """What a viewer is shown has changed: say so within a sweep."""
        self._stirred.set()

    def report(self, code: str, peer: str, text: str) -> None:
        """Tell the owner of something noteworthy; ``peer`` empty: nobody's doing but the run's own."""
        self._on_report(code, peer, text)

    def _delivered(self, peer: str, head: Signed) -> None:
        manifest = self.heads.manifest_of(head)
        if peer and manifest is not None:  # it is news to us
            self.openings.published(manifest)
            self._on_head(head, manifest)

    def _ban(self, peer: str, reason: str) -> None:
        if peer not in self.banned:
            self.banned[peer] = reason
            self._on_report("banned", peer, reason)
            self.banned = dict(list(self.banned.items())[-MAX_BANNED:])
        self.spawn(self.control.end_banned, peer, reason)  # not now: the machine is in the middle of it

    # --- time

    async def _keep_time(self) -> None:
        while True:
            wake = self.core.wake_at
            self._planned = math.inf if wake is None else wake
            self._wake = trio.Event()
            with trio.move_on_at(self._planned):
                await self._wake.wait()
                continue
            self.do(self.core.on_time(trio.current_time()))
            again = self.core.wake_at
            if again is not None and again <= trio.current_time():
                await trio.sleep(0.05)  # whatever is due stays due: no reason to spin

    async def _keep_to_cap(self, down: Pacer) -> None:
        while True:
            transfer = self.core.transfer
            inbound = down.senders(transfer.asked)
            if inbound != transfer.config.inbound:
                config = replace(transfer.config, inbound=inbound)
                self.do(self.core.reconfigure(config, trio.current_time()))
            if down.rate is None:
                await down.pause(math.inf)
            else:
                await trio.sleep(CAP_S)

    async def _sweep(self) -> None:
        """End links that are nobody's: strangers who say nothing, leftovers of a hang-up.

        Asleep while no link comes or goes and no shard moves.
        """
        while True:
            await self._stirred.wait()
            self._stirred = trio.Event()
            await trio.sleep(max(SWEEP_S, self.core.views.state.config.shuffle_period / 2))
            now = trio.current_time()
            nobodys = [link for link in self.links.values() if not self.control.needed(link.peer_id)]
            for link in nobodys:
                if now - link.since > STRANGER_S:
                    self.control.end(link, "no neighbour", abruptly=False)
            self._on_change()
            transfer = self.core.transfer
            if nobodys or transfer.sending() or transfer.receiving():
                self.stir()

    async def _leave(self) -> None:
        links = list(self.links.values())
        self.do(self.core.leave(trio.current_time()))
        await part(links)
