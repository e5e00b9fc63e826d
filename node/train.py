"""Carries out the core's ``Train``: corpus, room, engine, and a signed submission of what came out."""

from __future__ import annotations

import logging
from pathlib import Path

import trio

from barnraise.node.actions import FIRST_LINE_S, PROGRESS_LINE_S, engine_failed
from barnraise.node.asking import Source
from barnraise.node.block_engine import (
    SHARDS_FOLDER,
    BlockEngine,
    BlockProgress,
    BlockTrained,
    BlockWork,
)
from barnraise.node.context import Context
from barnraise.node.corpus import fetch_description, lay_out, missing_shards, unit_shards
from barnraise.node.decisions import Train
from barnraise.node.events import EngineStopped, UnitDelayed, UnitDone, UnitUnusable
from barnraise.node.fetching import in_words
from barnraise.node.link import cause
from barnraise.node.state import BlockUnitProgress, Transfer
from barnraise.node.units import file_entry, unit_bytes
from barnraise.protocol.corpus import read_corpus, shard_bytes
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import MalformedError, PeerError, StorageError
from barnraise.protocol.messages import MAX_SUBMISSION, FileEntry
from barnraise.protocol.pretrain import (
    BlockLease,
    BlockSubmission,
    PretrainSpec,
    other_blocks,
    part_name,
    segments,
)
from barnraise.protocol.shards import off_loop
from barnraise.protocol.wire import printable

_PEERS_ASKED = 2  # for the description, before the coordinator
_DELTA_SHARE = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25 + 2.0}  # of a block; int8 keeps a residual, too
_SPARE = 64 * 1024  # bytes of headers in each file


async def train(ctx: Context, action: Train, scope: trio.CancelScope) -> None:
    """Train a unit, or what is left of it, sign it and keep its files for the coordinator."""
    lease, unit = ctx.lease, action.unit
    assert isinstance(lease, BlockLease)
    assert lease.lease_id == unit.lease_id
    assert ctx.versions is not None
    started = trio.current_time()
    shown = ctx.facts.unit = BlockUnitProgress(
        lease.unit_id, unit.version, lease.block, lease.slot, unit.steps, started
    )
    done: tuple[BlockTrained, tuple[FileEntry, ...], FileEntry] | None = None
    with scope:
        try:
            with ctx.versions.hold(unit.version) as version_folder:
                if not await _ensure_block(ctx, lease):
                    _without_version(ctx, unit.version)
                    return
                work = await _prepare(ctx, lease, version_folder, action.shrink)
                trained = await _run_engine(ctx, lease, work, shown)
            folder = Path(work.folder)
            entries = [await _entry(folder / name) for name in (*trained.states, trained.delta)]
            done = trained, tuple(entries[:-1]), entries[-1]
        except StorageError as error:
            ctx.say(f"unit {lease.unit_id} goes back: {error}", logging.ERROR)
            ctx.feed(UnitUnusable(str(error), ctx.jitter()))
            return
        except PeerError as error:
            ctx.say(f"unit {lease.unit_id} waits: {error}", logging.WARNING)
            ctx.feed(UnitDelayed(printable(str(error), 400), ctx.jitter()))
            return
        except MalformedError as error:
            ctx.say(f"unit {lease.unit_id} cannot be done: {error}", logging.ERROR)
            ctx.feed(UnitUnusable(str(error), ctx.jitter()))
            return
        except OSError as error:
            ctx.feed(UnitUnusable(cause(error), ctx.jitter()))
            return
        except Exception as error:
            advanced = shown.saved > shown.saved_before
            engine_failed(ctx, error, f"training unit {lease.unit_id}", advanced=advanced)
            return
        finally:
            ctx.engine_scope = ctx.facts.unit = ctx.facts.transfer = None
    if done is None or ctx.state.engine == "stopping":
        ctx.feed(EngineStopped(alive=True))
        return
    _finish(ctx, lease, *done)


async def _ensure_block(ctx: Context, lease: BlockLease) -> bool:
    """Whether the version is on the disk; its block is fetched if only that is missing.

    Raises:
        PeerError, StorageError, MalformedError: it cannot be had.
    """
    assert ctx.versions is not None
    versions, version = ctx.versions, lease.policy_version
    signed, fetcher = versions.saved(version), ctx.treecast or ctx.fetcher
    if signed is None or fetcher is None:
        return False
    without = other_blocks(_spec(ctx), lease.block)
    if not await versions.recheck(version, other_blocks(_spec(ctx), None)):
        return False
    if versions.is_ready(version, without):
        return True
    started = trio.current_time()
    transfer: Transfer | None = None

    def progress(done: int, total: int) -> None:
        nonlocal transfer
        if transfer is None:
            what = f"block {lease.block} of version {version}"
            transfer = ctx.facts.transfer = Transfer(version, total, started, skipped=done, what=what)
            ctx.spoken.set()
        transfer.done = done
        transfer.sources = fetcher.came_from
        ctx.changed.set()

    try:
        await versions.ensure(signed, fetcher, progress, without)
    finally:
        ctx.facts.transfer = None
    return True


def _without_version(ctx: Context, version: int) -> None:
    if version > ctx.state.fetched >= 0 or ctx.state.head in (-1, version):
        ctx.feed(UnitDelayed(f"version {version} is not on the disk yet", ctx.jitter()))
    else:
        ctx.feed(UnitUnusable(f"version {version} is not on the disk any more", ctx.jitter()))


async def _run_engine(
    ctx: Context, lease: BlockLease, work: BlockWork, shown: BlockUnitProgress
) -> BlockTrained:
    engine, spec = ctx.engine, _spec(ctx)
    if not isinstance(engine, BlockEngine):
        raise MalformedError("this engine trains no blocks")
    ctx.say(
        f"unit {lease.unit_id}: training block {lease.block}, {spec.steps} steps "
        f"from version {lease.policy_version}"
    )
    spoken = trio.current_time()
    first = True

    def progress(made: BlockProgress) -> None:
        nonlocal spoken, first
        if first:
            first = False
            shown.saved_before = made.saved
            if made.steps:
                ctx.say(f"unit {lease.unit_id}: going on after step {made.steps} of {spec.steps}")
        shown.step, shown.tokens, shown.loss, shown.saved = made.steps, made.tokens, made.loss, made.saved
        if made.sized is not None:
            ctx.facts.sized = made.sized
        if made.engine:
            ctx.facts.engine, ctx.facts.device = printable(made.engine, 64), printable(made.device, 64)
            ctx.facts.engine_memory = made.memory_bytes
        ctx.changed.set()
        if trio.current_time() - spoken >= 2 * PROGRESS_LINE_S:
            spoken = trio.current_time()
            ctx.say(f"unit {lease.unit_id}: {shown.in_words()}", unit=shown.tree())

    trained = await engine.train(ctx.joined().spec, work, progress)
    wanted = len(segments(spec))
    if len(trained.states) != wanted or len(trained.losses) != wanted:
        raise MalformedError(f"the engine returned {len(trained.states)} states instead of {wanted}")
    return trained


async def _entry(path: Path) -> FileEntry:
    return await off_loop(path.stat().st_size, lambda: file_entry(path))


def _finish(
    ctx: Context, lease: BlockLease, trained: BlockTrained, states: tuple[FileEntry, ...], delta: FileEntry
) -> None:
    assert ctx.pending is not None
    assert ctx.units is not None
    submission = BlockSubmission(
        run_id=lease.run_id,
        lease_id=lease.lease_id,
        policy_version=lease.policy_version,
        engine=printable(trained.engine, 64) or "engine",
        train_ms=min(2**31, max(0, round(trained.seconds * 1000))),
        losses=trained.losses,
        states=states,
        delta=delta,
    )
    signed = sign(submission, ctx.identity)
    try:
        if len(signed.payload) > MAX_SUBMISSION:
            raise MalformedError(
                f"the unit's submission has {len(signed.payload)} bytes, {MAX_SUBMISSION} are allowed: "
                "the operator has to commit less often"
            )
        ctx.units.finish(lease, signed, submission)
        submission_id = ctx.pending.add(signed, lease.lease_id)
        ctx.answered.append(lease.lease_id)
    except (MalformedError, StorageError) as error:
        ctx.say(f"unit {lease.unit_id} cannot be submitted: {error}", logging.ERROR)
        ctx.feed(UnitUnusable(str(error), ctx.jitter()))
        return
    ctx.facts.units_done += 1
    if trained.seconds > 0:
        ctx.facts.tokens_per_s = trained.tokens / trained.seconds
    size = sum(entry.size for entry in (*states, delta))
    ctx.say(
        f"unit {lease.unit_id}: block {lease.block} trained on {trained.tokens:,} tokens in "
        f"{trained.seconds:.1f} s, loss {trained.losses[0]:.3f} to {trained.losses[-1]:.3f} "
        f"({size / 1e6:.1f} MB kept for the verdict)"
    )
    ctx.feed(UnitDone(submission_id))


# --- what a unit needs


async def _prepare(ctx: Context, lease: BlockLease, version_folder: Path, shrink: int) -> BlockWork:
    """Bring everything onto the disk that the engine reads, having made sure that it all fits.

    Raises:
        PeerError: the corpus is nowhere to be had at the moment.
        StorageError: too little disk; says how much is needed for what.
        MalformedError: the corpus does not fit this run.
    """
    assert ctx.units is not None
    assert ctx.pending is not None
    spec, store, units = _spec(ctx), ctx.store, ctx.units
    owner = f"unit {lease.lease_id.hex()}"
    store.pin(owner, [spec.corpus])
    try:
        description = await fetch_description(ctx.network, store, spec.corpus, _description_sources(ctx))
        corpus = read_corpus(description)
        # walked turn by turn: seconds for the largest of corpora
        wanted = await off_loop(512 * len(corpus.train), lambda: unit_shards(spec, corpus, lease))
        store.pin(owner, [spec.corpus, *wanted])
        folder = units.folder(lease.lease_id)
        shards = folder / SHARDS_FOLDER
        size = shard_bytes(corpus)
        await off_loop(units.dropped_bytes(), units.empty)
        missing = await off_loop(size * len(wanted), lambda: missing_shards(store, shards, wanted, size))
        block = (version_folder / part_name(spec, lease.block + 1)).stat().st_size
        try:
            _ensure_room(ctx, lease, block, sum(missing.values()))
        except StorageError:
            if not units.drop_rejected():
                raise
            await off_loop(units.dropped_bytes(), units.empty)
            _ensure_room(ctx, lease, block, sum(missing.values()))
        signed = ctx.pending.left_signed()
        assert signed is not None
        units.begin(signed, lease.lease_id)
        await _fetch_shards(ctx, missing)
        await off_loop(size * len(wanted), lambda: lay_out(store, shards, wanted))
        store.spare(wanted)
    finally:
        store.unpin(owner)
    return BlockWork(
        run_id=lease.run_id,
        lease_id=lease.lease_id,
        policy_version=lease.policy_version,
        block=lease.block,
        slot=lease.slot,
        version_folder=str(version_folder),
        corpus=description,
        shards=str(shards),
        folder=str(folder),
        residual=str(units.residual(lease.block)) if spec.delta == "int8" else "",
        shrink=shrink,
    )


def needed_bytes(spec: PretrainSpec, block: int) -> int:
    """What a unit's states and difference take on the disk, for a block of so many bytes."""
    count = len(segments(spec))
    return round((3 * count + _DELTA_SHARE[spec.delta]) * block) + (count + 1) * _SPARE


def _ensure_room(ctx: Context, lease: BlockLease, block: int, shards: int) -> None:
    assert ctx.units is not None
    spec = _spec(ctx)
    need, kept = needed_bytes(spec, block), ctx.units.used_bytes(lease.lease_id)
    there = unit_bytes(ctx.units.folder(lease.lease_id))
    what = (
        f"a unit of this run needs {need / 1e6:.1f} MB for {len(segments(spec))} states and their difference"
        + (f", and {shards / 1e6:.1f} MB for its part of the corpus" if shards else "")
    )
    limit = ctx.limits.disk
    if kept + need + shards > limit:
        waiting = f", beside {kept / 1e6:.1f} MB of units that wait for their verdict" if kept else ""
        raise StorageError(
            f"{what}{waiting}; this node may use {limit / 1e6:.1f} MB: raise the limit "
            "(barnraise limits set --disk)"
        )
    try:
        ctx.store.ensure_room(shards, scratch=max(0, need - there))
    except StorageError as error:
        raise StorageError(f"{what}: {error}") from error


async def _fetch_shards(ctx: Context, missing: dict[bytes, int]) -> None:
    if not missing:
        return
    assert ctx.corpus_fetcher is not None
    fetcher, started = ctx.corpus_fetcher, trio.current_time()
    total = sum(missing.values())
    transfer = ctx.facts.transfer = Transfer(-1, total, started, what="the corpus")
    ctx.spoken.set()
    speak_at = started + FIRST_LINE_S

    def received(more: int) -> None:
        nonlocal speak_at
        now = trio.current_time()
        transfer.done += more
        transfer.sources = fetcher.came_from
        ctx.changed.set()
        if now >= speak_at:
            speak_at = now + PROGRESS_LINE_S
            shown = transfer.shown(now, ctx.coordinator)
            ctx.say(f"fetching the corpus: {in_words(shown)}", fetch=shown)

    try:
        await fetcher.fetch_shards("the corpus", missing, received)
    finally:
        ctx.facts.transfer = None
    ctx.say(f"fetched {len(missing)} shard(s) of the corpus, {total / 1e6:.1f} MB")


def _description_sources(ctx: Context) -> list[Source]:
    peers = [Source(peer.peer_id, peer.addresses) for peer in ctx.peers]
    chosen = ctx.rng.sample(peers, min(_PEERS_ASKED, len(peers)))
    return (
        [*chosen, Source(ctx.coordinator, ctx.config.addresses, origin=True)] if ctx.coordinator else chosen
    )


def _spec(ctx: Context) -> PretrainSpec:
    spec = ctx.joined().spec.pretrain
    assert spec is not None
    return spec
