"""A daemon's part in the broadcast tree: made when the run is known, alive across sessions."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress

import trio

from barnraise.node import reach
from barnraise.node.broadcast import LEAST_CAP, TreecastFetcher
from barnraise.node.context import Context
from barnraise.node.prefetch import Prefetch
from barnraise.node.remembered import load_contacts, save_contacts
from barnraise.node.weights import SwarmFetcher
from barnraise.protocol.errors import BarnraiseError, StorageError
from barnraise.protocol.gossip import Gossiper
from barnraise.protocol.manifest import check_manifest
from barnraise.protocol.messages import Acknowledged, PeerReport, Signed
from barnraise.protocol.opening import check_opening
from barnraise.protocol.pretrain import last_block_version
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree_messages import Contact
from barnraise.protocol.view_state import ViewConfig
from barnraise.protocol.wire import printable

_LOOK_S = 1.0
_REMEMBER_S = 300.0
_REACH_S = 8.0
_QUIET = frozenset({"starved", "timeout", "trickle", "unasked", "flood", "lied"})  # ordinary on bad links

log = logging.getLogger("barnraise.node.overlay")


def plant(ctx: Context, beside: SwarmFetcher, believe: Callable[[Signed], None]) -> None:
    """Make the fetcher that goes by the tree; ``believe`` is told of each new head that it brings."""
    run = ctx.joined()

    def report(code: str, peer: str, text: str) -> None:
        if code == "banned" and peer != ctx.coordinator:
            beside.banned.setdefault(peer, text)
        line = f"broadcast tree: {code}{f' {printable(peer, 96)}' if peer else ''}: {printable(text)}"
        if code in _QUIET:
            log.info("%s", line)
        else:
            ctx.say(line, logging.WARNING)
        if code in ("corrupt", "forged"):
            tell(ctx, code, peer, text)

    coordinator = Contact(
        peer_id=ctx.coordinator,
        addresses=tuple(address for address in ctx.config.addresses if len(address) <= 256)[:16],
    )
    gossiper = Gossiper(
        ctx.network,
        ctx.store,
        [coordinator],
        lambda head: check_manifest(head, run.spec, run.run_id),
        random.Random(ctx.rng.random()),
        on_head=lambda head, manifest: believe(head),
        check_opening=lambda opening: check_opening(opening, run.spec, run.run_id),
        on_report=report,
        on_change=ctx.changed.set,
        views=ViewConfig(shuffle_period=ctx.config.gossip_s),
        known=load_contacts(ctx.config.run_path(run.run_id)),
        down=ctx.limits.down,
    )
    ctx.treecast = TreecastFetcher(gossiper, beside)
    assert ctx.versions is not None
    blocks = -1 if run.spec.pretrain is None else last_block_version(run.spec.pretrain)
    ctx.prefetch = Prefetch(gossiper, ctx.versions, lambda: _idle(ctx), ctx.say, blocks)
    ctx.entered.set()


def tell(ctx: Context, code: str, peer: str, text: str) -> None:
    """Let the coordinator know of a peer that was caught, if there is a session now."""

    async def ask() -> None:
        with suppress(BarnraiseError):
            await ctx.live_session().request(
                lambda number: PeerReport(
                    id=number,
                    peer_id=peer[:96],
                    code="forged" if code == "forged" else "corrupt",
                    message=text[:500],
                ),
                Acknowledged,
            )

    if ctx.treecast is not None:
        ctx.treecast.gossiper.spawn(ask)


async def take_part(ctx: Context) -> None:
    """Run the tree from the first session on until cancelled; upload as caps and quota allow."""
    await ctx.entered.wait()
    assert ctx.treecast is not None
    gossiper = ctx.treecast.gossiper
    await reach.wait_known(ctx, _REACH_S)  # nobody should dial us in vain
    gossiper.announce(ctx.facts.reach.addresses if ctx.reach_known.is_set() else ctx.network.addresses)
    most = TransferConfig().max_slots
    now = most
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gossiper.run)
        nursery.start_soon(_remember, ctx, gossiper)
        while True:
            slots = 0 if not ctx.state.may_transfer else ctx.limits.up.streams(most)
            if slots != now:
                now = slots
                gossiper.serve(slots)
            if slots == 0 and ctx.prefetch is not None and not ctx.state.may_transfer:
                ctx.prefetch.stop()
            with trio.move_on_after(ctx.config.look_s):
                await ctx.allowed.wait()


def _idle(ctx: Context) -> bool:
    """Whether the node may fetch a version ahead: not held up, nothing to fetch, no narrow cap."""
    cap = ctx.limits.down.rate
    free = ctx.state.may_transfer and ctx.state.fetching is None and ctx.state.fetched >= ctx.state.head
    return free and (cap is None or cap >= LEAST_CAP)


async def _remember(ctx: Context, gossiper: Gossiper) -> None:
    """Keep on disk who is about, as it changes; the coordinator is known anyway."""
    folder = ctx.config.run_path(ctx.joined().run_id)
    kept = set(load_contacts(folder))
    pause = _LOOK_S  # a node that has just come knows more within seconds
    while True:
        await trio.sleep(pause)
        pause = min(2 * pause, _REMEMBER_S)
        found = [contact for contact in gossiper.contacts() if contact.peer_id != ctx.coordinator]
        if found and set(found) != kept:  # nobody here is no reason to forget everybody
            kept = set(found)
            with suppress(StorageError):  # a full disk is said where it matters
                save_contacts(folder, found)


def settled(ctx: Context, head: Signed) -> None:
    """A version is whole on the disk: serve it, and forget what was deleted for it."""
    if ctx.treecast is None or ctx.versions is None:
        return
    gossiper = ctx.treecast.gossiper
    manifest = gossiper.heads.manifest_of(head)
    if manifest is not None:
        gossiper.lists.hold(manifest)
    if ctx.prefetch is not None:
        ctx.prefetch.settled()
    gossiper.lists.retain(ctx.versions.on_disk())
