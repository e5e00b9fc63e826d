"""Carries out what the core decided: fetch, load, ask, upload, give back; see also ``generate``, ``train``.

Every function ends in exactly one event, whatever happens inside it; only the
cancellation of the whole daemon ends one without.
"""

from __future__ import annotations

import logging

import trio

from barnraise.node import overlay
from barnraise.node.clock import duration
from barnraise.node.context import Context
from barnraise.node.decisions import Ask, Fetch, FreeEngine, GiveBack, Load, Upload
from barnraise.node.engine import OutOfMemory
from barnraise.node.events import (
    AlreadyAnswered,
    AskFailed,
    EngineFailed,
    EngineLoaded,
    EngineStopped,
    FetchDone,
    FetchFailed,
    FetchStopped,
    Granted,
    NoLease,
    Returned,
    Unit,
    Uploaded,
    UploadFailed,
    VersionDamaged,
)
from barnraise.node.fetching import in_words
from barnraise.node.link import cause, open_lease
from barnraise.node.state import Transfer
from barnraise.protocol.errors import (
    BarnraiseError,
    ChildError,
    DamagedVersionError,
    MalformedError,
    PeerError,
    RefusedError,
    SignatureError,
)
from barnraise.protocol.messages import (
    MAX_SHARD,
    Acknowledged,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    RolloutLease,
    SubmitRequest,
)
from barnraise.protocol.pretrain import BlockLease, PretrainSpec, last_block_version, other_blocks
from barnraise.protocol.unit_context import about, unit_log
from barnraise.protocol.wire import printable

story = unit_log(__name__)

FIRST_LINE_S = 2.0  # what is over sooner needs no progress
PROGRESS_LINE_S = 5.0
STALL_S = 30.0  # and the time that the slowest tolerated source needs for a shard
SLOWEST_SOURCE = 16 * 1024  # bytes/s
UPLOAD_TIMEOUT_S = 120.0
# Refusals that a retry may cure; after any other the work is of no use.
BUSY_CODES = frozenset({"busy", "internal-error", "storage-full", "join-first", "duplicate-key"})
MEGABYTE = 1e6


async def fetch(ctx: Context, action: Fetch, scope: trio.CancelScope) -> None:
    """Bring the head version onto the disk."""
    assert ctx.versions is not None
    assert ctx.fetcher is not None
    assert ctx.head is not None
    head, version = ctx.head, ctx.head_version  # maybe newer than what was decided: never older
    fetcher = ctx.treecast or ctx.fetcher
    started = trio.current_time()
    speak_at = started + FIRST_LINE_S
    transfer: Transfer | None = None
    patience = STALL_S + MAX_SHARD / SLOWEST_SOURCE
    scope.deadline = started + patience

    def progress(done: int, total: int) -> None:
        nonlocal transfer, speak_at
        now = trio.current_time()
        if transfer is None or transfer.total != total:  # patches first, whole files if those fail
            transfer = ctx.facts.transfer = Transfer(version, total, now, skipped=done)
            ctx.spoken.set()
        transfer.done = done
        transfer.sources = fetcher.came_from
        scope.deadline = now + patience
        ctx.changed.set()
        if now >= speak_at:
            speak_at = now + PROGRESS_LINE_S
            shown = transfer.shown(now, ctx.coordinator)
            ctx.say(f"fetching version {version}: {in_words(shown)}", fetch=shown)

    with scope:
        try:
            await ctx.versions.ensure(head, fetcher, progress, _not_wanted(ctx, version))
        except DamagedVersionError as error:
            ctx.say(str(error), logging.ERROR)
            if ctx.damaged_version != version:
                ctx.damaged_version = version
                overlay.tell(ctx, "corrupt", ctx.coordinator, str(error))
            ctx.feed(FetchFailed(str(error), ctx.jitter()))
            return
        except BarnraiseError as error:
            ctx.say(f"version {version} could not be fetched: {error}", logging.WARNING)
            ctx.feed(FetchFailed(str(error), ctx.jitter()))
            return
        except OSError as error:
            ctx.say(f"version {version} could not be stored: {error}", logging.ERROR)
            ctx.feed(FetchFailed(cause(error), ctx.jitter()))
            return
        finally:
            ctx.fetch_scope = ctx.facts.transfer = None
    if scope.cancelled_caught:
        if trio.current_time() < scope.deadline:
            ctx.feed(FetchStopped())
            return
        reason = f"nothing arrived for {duration(patience * 1000)}"
        ctx.say(f"version {version} could not be fetched: {reason}", logging.WARNING)
        ctx.feed(FetchFailed(reason, ctx.jitter()))
        return
    overlay.settled(ctx, head)
    elapsed = trio.current_time() - started
    size = 0 if transfer is None else transfer.total
    ctx.say(
        f"fetched version {version}: {size / MEGABYTE:.1f} MB in {duration(elapsed * 1000)}",
        fetched={"version": version, "bytes": size, "seconds": round(elapsed, 3)},
    )
    ctx.feed(FetchDone(version))


def _not_wanted(ctx: Context, version: int) -> frozenset[str]:
    """In the block stage the scaffold is fetched, and the block that was trained last; others on demand."""
    spec, lease = ctx.joined().spec.pretrain, ctx.lease
    if spec is None or version > last_block_version(spec):
        return frozenset()
    return other_blocks(spec, lease.block if isinstance(lease, BlockLease) else None)


async def load(ctx: Context, action: Load, scope: trio.CancelScope) -> None:
    """Put a version into the engine."""
    assert ctx.versions is not None
    with scope:
        try:
            with ctx.versions.hold(action.version) as folder:
                if not await ctx.versions.intact(action.version):
                    ctx.say(
                        f"version {action.version} was damaged on the disk and is fetched again: {folder}",
                        logging.WARNING,
                    )
                    ctx.feed(VersionDamaged(action.version, ctx.jitter()))
                    return
                info = await ctx.engine.load(ctx.joined().spec, folder, action.version)
        except Exception as error:
            engine_failed(ctx, error, f"loading version {action.version}")
            return
        finally:
            ctx.engine_scope = None
    if scope.cancelled_caught:
        ctx.feed(EngineStopped(alive=False))
        return
    if ctx.facts.engine != info.name:
        why = f": {printable(info.why, 300)}" if info.why else ""
        ctx.say(f"engine {printable(info.name)} on {printable(info.device)}{why}")
    ctx.facts.engine, ctx.facts.engine_why = printable(info.name, 64), printable(info.why, 300)
    ctx.facts.device, ctx.facts.engine_memory = printable(info.device, 64), info.memory_bytes
    ctx.feed(EngineLoaded(action.version))


async def free_engine(ctx: Context, action: FreeEngine) -> None:
    """End the engine's process, so that the machine has its memory back."""
    freed = ctx.facts.engine_memory
    try:
        await ctx.engine.close()
    except Exception as error:
        ctx.say(f"the engine could not be ended: {printable(cause(error), 300)}", logging.WARNING)
    else:
        held = f", which held {freed / MEGABYTE:.0f} MB" if freed else ""
        ctx.say(f"ended the engine{held}: {action.reason}")
    ctx.facts.engine_memory = 0
    ctx.feed(EngineStopped(alive=False))


def engine_failed(ctx: Context, error: Exception, doing: str, *, advanced: bool = False) -> None:
    """Report a failure of the engine; the node lives (R5). ``advanced`` as in ``EngineFailed``."""
    memory = isinstance(error, OutOfMemory | MemoryError) or "out of memory" in str(error).lower()
    reason = cause(error) if isinstance(error, BarnraiseError) else f"{cause(error)}"
    if isinstance(error, OutOfMemory):
        reason = f"out of memory{': ' if str(error) else ''}{error}"
    ctx.say(f"the engine failed while {doing}: {printable(reason, 400)}", logging.WARNING)
    if not isinstance(error, ChildError | OutOfMemory):
        logging.getLogger("barnraise.node").debug("engine failure", exc_info=error)
    alive = isinstance(error, OutOfMemory)
    ctx.feed(EngineFailed(printable(reason, 400), memory, alive, ctx.jitter(), advanced))


async def ask(ctx: Context, action: Ask) -> None:
    """Ask for a unit at the version that is ready."""
    assert ctx.pending is not None
    run = ctx.joined()
    await trio.lowlevel.checkpoint()  # an upload decided in the same breath gets into the queue first
    try:
        reply = await ctx.live_session().request(
            lambda number: LeaseRequest(id=number, policy_version=action.version), LeaseReply
        )
        if reply.lease is None:
            ctx.feed(
                NoLease(printable(reply.reason, 300) or "no work", reply.retry_after_ms / 1000, ctx.jitter())
            )
            return
        key = ctx.identity.public_key
        lease = open_lease(reply.lease, run, key, action.version, ctx.clock.coordinator_ms())
    except RefusedError as error:
        ctx.say(f"the coordinator refused a lease: {error}", logging.WARNING)
        if error.code == "join-first" and ctx.session is not None:
            await ctx.session.close()  # it does not know us any more: join again
        ctx.feed(AskFailed(printable(str(error), 300), ctx.jitter()))
        return
    except (SignatureError, MalformedError) as error:
        ctx.say(f"refused a lease: {error}", logging.ERROR)
        ctx.feed(AskFailed(str(error), ctx.jitter()))
        return
    except PeerError as error:
        ctx.feed(AskFailed(str(error), ctx.jitter()))
        return
    if lease.lease_id in ctx.answered:
        ctx.feed(AlreadyAnswered())  # doing the work twice earns nothing
        return
    ctx.lease = lease
    with about(lease):
        seconds = (lease.deadline_at - ctx.clock.coordinator_ms()) / 1000
        story.info("lent to us as unit %d, for %s", lease.unit_id, duration(seconds * 1000))
        ctx.pending.keep_lease(reply.lease)
    deadline = ctx.clock.local(lease.deadline_at, trio.current_time())
    ctx.feed(Granted(unit_of(lease, run.spec.pretrain, deadline)))


def unit_of(lease: RolloutLease | BlockLease, pretrain: PretrainSpec | None, deadline: float) -> Unit:
    """A lease as the core knows it; ``deadline`` on the monotonic clock."""
    if isinstance(lease, RolloutLease):
        return Unit(lease.lease_id, lease.policy_version, lease.prompts, lease.group_size, deadline)
    assert pretrain is not None
    block, steps = lease.block, pretrain.steps
    return Unit(lease.lease_id, lease.policy_version, 0, 0, deadline, block=block, steps=steps)


async def upload(ctx: Context, action: Upload) -> None:
    """Send a submission; it stays on disk until it is acknowledged (R17)."""
    assert ctx.pending is not None
    submission = ctx.pending.get(action.submission_id)
    if submission is None:
        ctx.feed(Uploaded(action.submission_id, acknowledged=False))
        return
    story.debug("%d bytes are sent", len(submission.payload))
    try:
        reply = await ctx.live_session().request(
            lambda number: SubmitRequest(id=number, submission=submission),
            Acknowledged,
            timeout_s=UPLOAD_TIMEOUT_S,
        )
    except RefusedError as error:
        if error.code in BUSY_CODES:
            story.info("not taken now (%s): %s", printable(error.code), printable(str(error), 300))
            ctx.feed(UploadFailed(printable(str(error), 300), ctx.jitter()))
            return
        ctx.say(
            f"a submission was refused ({printable(error.code)}): {printable(str(error), 300)}",
            logging.WARNING,
        )
        _forget(ctx, action.submission_id)
        ctx.feed(Uploaded(action.submission_id, acknowledged=False))
        return
    except MalformedError as error:
        ctx.say(f"a submission cannot be sent: {error}", logging.ERROR)
        _forget(ctx, action.submission_id)
        ctx.feed(Uploaded(action.submission_id, acknowledged=False))
        return
    except PeerError as error:
        story.info("could not be sent, and will be again: %s", error)
        ctx.feed(UploadFailed(str(error), ctx.jitter()))
        return
    logging.getLogger(__name__).info("submission %s is acknowledged", action.submission_id.hex())
    ctx.pending.drop(action.submission_id, ctx.kept)
    if reply.duplicate:
        ctx.say("a submission had arrived before; it counts once")
    judged = action.submission_id in ctx.judged
    ctx.feed(Uploaded(action.submission_id, acknowledged=not judged))


def _forget(ctx: Context, submission_id: bytes) -> None:
    """Drop work that will never be taken, with what it left on the disk."""
    assert ctx.pending is not None
    lease_id = ctx.pending.lease_of(submission_id)
    ctx.pending.drop(submission_id)
    if ctx.units is not None and lease_id is not None:
        ctx.units.drop(lease_id)


async def give_back(ctx: Context, action: GiveBack) -> None:
    """Return a lease unfinished; never a penalty."""
    assert ctx.pending is not None
    try:
        await ctx.live_session().request(
            lambda number: LeaseReturn(id=number, lease_id=action.lease_id, reason=action.reason),
            Acknowledged,
        )
        ctx.say(f"gave a unit back: {action.reason}")
    except RefusedError as error:
        ctx.say(f"gave a unit back, which the coordinator had closed already: {printable(str(error), 200)}")
    except PeerError:
        ctx.feed(Returned(action.lease_id, done=False))
        return
    ctx.pending.clear_lease(action.lease_id)
    ctx.feed(Returned(action.lease_id, done=True))
