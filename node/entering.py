"""Opens a run's folders on this machine, and takes up what an earlier process left there."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from barnraise.node import overlay
from barnraise.node.actions import unit_of
from barnraise.node.asking import Donor, Source
from barnraise.node.context import Context
from barnraise.node.corpus import spare_corpus
from barnraise.node.events import HeadSeen, Restored, Unit
from barnraise.node.kept import KeptWork
from barnraise.node.link import Run, open_lease
from barnraise.node.pending import PendingWork
from barnraise.node.receipts import ReceiptBook
from barnraise.node.state import midnight_ms
from barnraise.node.units import Units
from barnraise.node.versions import Versions
from barnraise.node.weights import SwarmFetcher
from barnraise.protocol.errors import MalformedError, SignatureError
from barnraise.protocol.log_lines import tell_run
from barnraise.protocol.messages import SHARD_PROTOCOL, Signed
from barnraise.protocol.mirrors import is_loopback
from barnraise.protocol.pretrain import BlockLease, last_block_version
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.wire import decode, printable


def enter(ctx: Context, run: Run, believe: Callable[[Context, Signed], int]) -> None:
    """Open this run's folders; what an earlier process left is taken up again.

    ``believe`` checks a manifest that came by gossip and returns the newest version believed.
    """
    tell_run(run.run_id)
    ctx.facts.run, ctx.facts.run_id = printable(run.spec.name), run.run_id.hex()
    folder = ctx.config.run_path(run.run_id)
    ctx.pending = PendingWork(folder / "pending", run.run_id, ctx.identity.public_key)
    ctx.kept = KeptWork(folder / "kept")
    ctx.receipts = ReceiptBook(
        folder / "receipts.bin", run.spec.operator, run.run_id, ctx.identity.public_key
    )
    if ctx.receipts.repaired:
        ctx.say(ctx.receipts.repaired, logging.WARNING)
    ctx.versions = Versions(folder / "versions", ctx.store, run.spec, run.run_id)
    ctx.fetcher = SwarmFetcher(
        ctx.network,
        ctx.store,
        lambda version: _sources(ctx, version),
        report=lambda peer, reason: _left(ctx, peer, reason),
        down=ctx.limits.down,
        mirror=lambda url: _mirror(ctx, url),
        rng=ctx.rng,
    )
    ctx.corpus_fetcher = SwarmFetcher(
        ctx.network,
        ctx.store,
        lambda version: [source._replace(complete=source.origin) for source in _sources(ctx, version)],
        report=lambda peer, reason: _left(ctx, peer, reason),
        down=ctx.limits.down,
        rng=ctx.rng,
    )
    if run.spec.pretrain is not None:
        ctx.units = Units(folder, ctx.store, run.spec.operator, ctx.identity.public_key)
        spare_corpus(ctx.store, run.spec.pretrain.corpus)
    serve = serve_shards(ctx.store, allow=lambda peer_id: _serves(ctx, peer_id), slots=ctx.limits.up.streams)
    ctx.network.set_handler(SHARD_PROTOCOL, serve)
    ctx.run = run
    if ctx.config.tree:
        overlay.plant(ctx, ctx.fetcher, lambda head: ctx.feed(HeadSeen(believe(ctx, head))))
    tally(ctx)
    ctx.answered.extend(ctx.pending.lease_ids)
    left = ctx.pending.left_lease()
    leases: tuple[bytes, ...] = ()
    unit = None
    if left is not None and left not in ctx.pending.lease_ids:
        unit = _unit_left(ctx, run)
        leases = () if unit is not None else (left,)
    if ctx.pending.ids:
        ctx.say(f"{len(ctx.pending.ids)} submission(s) of an earlier start will be sent again")
    ctx.feed(Restored(ctx.pending.ids, leases, unit, last_block(run)))


def last_block(run: Run) -> int:
    """The last version that is made of blocks, -1 where there is none."""
    return -1 if run.spec.pretrain is None else last_block_version(run.spec.pretrain)


def _unit_left(ctx: Context, run: Run) -> Unit | None:
    """The block unit that an earlier process was at: it goes on from its last state, if the lease lives."""
    assert ctx.pending is not None
    signed = ctx.pending.left_signed()
    if signed is None or run.spec.pretrain is None:
        return None
    try:
        version = decode(signed.payload, BlockLease).policy_version
    except MalformedError:
        return None  # a lease for rollouts
    try:
        lease = open_lease(signed, run, ctx.identity.public_key, version, ctx.clock.coordinator_ms())
    except (SignatureError, MalformedError) as error:
        ctx.say(f"the unit of an earlier start is not gone on with: {error}")
        return None
    ctx.lease = lease
    ctx.say(f"unit {lease.unit_id} of an earlier start goes on")
    return unit_of(lease, run.spec.pretrain, ctx.clock.local(lease.deadline_at, trio.current_time()))


def _left(ctx: Context, source: str, reason: str) -> None:
    ctx.say(f"{source} is left: {reason}", logging.WARNING)
    if ctx.treecast is not None and source in {peer.peer_id for peer in ctx.peers}:
        ctx.treecast.gossiper.ban(source, reason)
        overlay.tell(ctx, "corrupt", source, reason)


def _serves(ctx: Context, peer: str) -> bool:
    if peer == ctx.coordinator:
        return True  # it may ask for a finished unit's states, on which the verdict hangs
    banned = ctx.treecast is not None and peer in ctx.treecast.gossiper.banned
    return ctx.state.may_transfer and not banned


def _sources(ctx: Context, version: int) -> list[Source]:
    sources = [Source(ctx.coordinator, ctx.config.addresses, origin=True)] if ctx.coordinator else []
    for peer in ctx.peers:
        sources.append(Source(peer.peer_id, peer.addresses, complete=peer.have_version == version))
    return sources


def _mirror(ctx: Context, url: str) -> Donor | None:
    """A donor for a mirror. A stranger's manifest never makes us ask services of our own machine."""
    from barnraise.node.webseed import WebSeed  # an HTTP client is only loaded where a run has mirrors

    local = ("/ip4/127.", "/ip6/::1/", "/memory/")
    if is_loopback(url) and not any(address.startswith(local) for address in ctx.config.addresses):
        return None
    return WebSeed(url, down=ctx.limits.down, received=ctx.network.received_beside)


def tally(ctx: Context) -> None:
    """Copy the receipts' sums into the facts."""
    if ctx.receipts is not None:
        ctx.facts.accepted, ctx.facts.rejected, ctx.facts.credit = ctx.receipts.totals
        midnight = midnight_ms(ctx.clock.wall_ms())
        earned = ctx.facts.credit - ctx.receipts.credit_before(midnight)
        ctx.facts.credit_since = (midnight, earned)
