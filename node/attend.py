"""Keeps the session with the coordinator: connect, join, heartbeats, what it pushes.

One call of ``attend`` lives as long as one session; ending, however it ends, becomes
one event, and the core decides when the next try is due.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import trio

from barnraise.node import remembered, verdicts
from barnraise.node.context import Context
from barnraise.node.entering import enter, last_block
from barnraise.node.events import DeadlineMoved, Fatal, HeadSeen, Joined, LinkLost, Retargeted, WorkAgain
from barnraise.node.link import Run, dial, greet, join, present_invite
from barnraise.node.needs import Field, Machine, description, free_disk
from barnraise.node.receipt_words import standing_fields
from barnraise.protocol.amendments import Amendment, amended
from barnraise.protocol.envelope import open_signed
from barnraise.protocol.errors import (
    NEWCOMERS,
    BarnraiseError,
    MalformedError,
    PeerError,
    RefusedError,
    SignatureError,
    VersionError,
)
from barnraise.protocol.identity import fingerprint
from barnraise.protocol.manifest import check_manifest
from barnraise.protocol.messages import (
    RESUMED,
    AmendmentsPush,
    HeadPush,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    ManifestReply,
    ManifestRequest,
    Message,
    NoticePush,
    ReceiptPush,
    Signed,
    StandingPush,
)
from barnraise.protocol.session import Session
from barnraise.protocol.unit_context import about
from barnraise.protocol.wire import printable

EXIT_VERSION = 3
EXIT_UNTRUSTED = 4
EXIT_DECLINED = 5
EXIT_NOT_ADMITTED = 6
NOT_ADMITTED, BAD_INVITE = "not-admitted", "bad-invite"  # codes of refusals that trying again does not end
HEARTBEAT_TIMEOUT_S = 15.0
REPLACED_WITHIN_S = 10.0  # a session that ends so soon after a duplicate-key notice was taken over


async def attend(ctx: Context, attempt: int) -> None:
    """Hold one session from dialling to its end, then report why it ended."""
    wait_s = 0
    try:
        reason = await _session(ctx, attempt)
    except VersionError as error:
        ctx.say(f"the coordinator speaks another protocol version: {error}", logging.ERROR)
        ctx.feed(Fatal(str(error), EXIT_VERSION))
        return
    except BarnraiseError as error:
        reason = str(error)
        wait_s = error.retry_after_s if isinstance(error, RefusedError) else 0
    finally:
        ctx.session = None
    if ctx.state.stopped is None:
        what = (
            "lost the coordinator"
            if ctx.state.link == "up"
            else f"no session with the coordinator (try {attempt})"
        )
        _lost(ctx, what, reason)
    _go_on_alone(ctx)
    told = ctx.facts.duplicate_key_at
    just_told = told is not None and trio.current_time() - told < REPLACED_WITHIN_S
    replaced = just_told and not ctx.facts.key_kept and ctx.state.link == "up"
    if replaced:
        reason = "another machine uses this key: give each one its own (--key FILE)"
    ctx.feed(LinkLost(reason, ctx.jitter(), replaced, wait_s))


def _lost(ctx: Context, what: str, reason: str) -> None:
    """Say why there is no session; the same reason again is said once."""
    if reason == ctx.link_said:
        ctx.say(f"{what}: as before")
    else:
        ctx.link_said = reason
        ctx.say(f"{what}: {reason}", logging.WARNING)


async def _session(ctx: Context, attempt: int) -> str:
    if attempt == 1:
        ctx.say(f"connecting to {', '.join(ctx.config.addresses)}")
    peer_id, address = await dial(ctx.network, ctx.config.addresses)
    session = await greet(
        ctx.network, peer_id, ctx.config.hello, lambda text: ctx.say(f"update soon: {text}", logging.WARNING)
    )
    ctx.coordinator = ctx.facts.coordinator = peer_id
    failure: BarnraiseError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run)
        try:
            if await _join(ctx, session, peer_id, address):
                ctx.session = session
                ctx.linked.set()
                nursery.start_soon(_heartbeats, ctx, session)
                await verdicts.catch_up(ctx, session)  # before pushes are read: no gap between the two
                async for message in session.pushes:
                    _pushed(ctx, message)
        except BarnraiseError as error:
            failure = error  # raised outside of the nursery, which would wrap it in a group
        finally:
            ctx.session = None
            ctx.linked.set()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
                await session.close()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return session.reason


async def _join(ctx: Context, session: Session, peer_id: str, address: str) -> bool:
    sent = ctx.clock.wall_ms()
    try:
        run, reply = await _ask_in(ctx, session)
    except RefusedError as error:
        if error.code not in (NOT_ADMITTED, BAD_INVITE):
            raise
        ctx.say(str(error), logging.ERROR)
        ctx.feed(Fatal(str(error), EXIT_NOT_ADMITTED))
        return False
    try:
        ctx.known.check(peer_id, run.spec.operator)
    except SignatureError as error:
        ctx.say(str(error), logging.ERROR)
        ctx.feed(Fatal(str(error), EXIT_UNTRUSTED))
        return False
    ctx.known.joined(peer_id, run.run_id)
    if ctx.run is not None and ctx.run.run_id != run.run_id:
        text = f"the coordinator now serves another run ({run.spec.name}): start again to join that one"
        ctx.say(text, logging.ERROR)
        ctx.feed(Fatal(text, EXIT_UNTRUSTED))
        return False
    if not await _agreed(ctx, run):
        ctx.feed(Fatal("you chose not to join", EXIT_DECLINED))
        return False
    ctx.known.reached(peer_id, printable(run.spec.name), _leading_to(ctx, peer_id, address))
    ctx.link_said = ""
    first = not ctx.state.joined_once
    if ctx.run is None:
        enter(ctx, run, _believe_head)
    remembered.save_run(ctx.config.run_path(run.run_id), reply.run_spec)
    measure(ctx, sent, reply.now)
    _introduce(ctx, run, reply, address, first)
    head = _believe_head(ctx, reply.head)
    ctx.feed(Joined(head, ctx.joined().spec.rollout.versions, run.spec.rollout.max_lag, last_block(run)))
    return True


async def _ask_in(ctx: Context, session: Session) -> tuple[Run, JoinReply]:
    """Join; with the invite that was given, if it takes one."""
    who = ctx.config.called(ctx.identity.peer_id), ctx.facts.engine or "starting", ctx.network.addresses
    try:
        return await join(session, ctx.identity, ctx.instance, *who)
    except RefusedError as error:
        if error.code not in (NOT_ADMITTED, NEWCOMERS) or not ctx.config.invite:
            raise
        refused = error
    try:
        await present_invite(session, ctx.identity, ctx.config.invite)
    except RefusedError as error:
        if refused.code != NEWCOMERS:
            raise
        # It needs no invite, only patience: one that does not count does not end the node.
        raise RefusedError(NEWCOMERS, f"{refused}; {error}", refused.retry_after_s) from None
    return await join(session, ctx.identity, ctx.instance, *who)


def _leading_to(ctx: Context, peer_id: str, answered: str) -> list[str]:
    """The addresses given for this coordinator, the one that answered first."""
    return [answered, *(a for a in ctx.config.addresses if a.rpartition("/p2p/")[2] == peer_id)]


def _go_on_alone(ctx: Context) -> None:
    """The coordinator is away: if its run was joined before, its nodes have the weights and each other."""
    if ctx.run is not None or not ctx.config.tree:
        return
    coordinators = [address.rpartition("/p2p/")[2] for address in ctx.config.addresses]
    found = remembered.remembered_run(ctx.known, ctx.config.runs_path, coordinators)
    if found is None or (ctx.approve is not None and not ctx.known.approved(found[1].run_id)):
        return
    ctx.coordinator, run = found
    ctx.facts.coordinator = ctx.coordinator
    enter(ctx, run, _believe_head)
    ctx.say(f"looking for the nodes of run {printable(run.spec.name)} that were here before")


async def _agreed(ctx: Context, run: Run) -> bool:
    """Ask the person once per run, where there is a person to ask."""
    if ctx.approve is None or ctx.known.approved(run.run_id):
        return True
    ctx.changed.set()
    ctx.spoken.set()
    try:
        if not await ctx.consent.ask(ctx.approve, run.run_id, _description(ctx, run)):
            return False
    finally:
        ctx.changed.set()
        ctx.spoken.set()
    ctx.known.approve(run.run_id)
    return True


def _description(ctx: Context, run: Run) -> list[Field]:
    limits = ctx.limits.tree(ctx.clock.wall_ms())
    machine = Machine(
        where=ctx.config.data,
        coordinator=ctx.config.address,
        disk=limits.get("disk") or ctx.config.disk_bytes,
        free=free_disk(ctx.config.data),
        threads=limits.get("threads_idle") or ctx.config.threads,
    )
    return description(run.spec, run.run_id, machine)


def _introduce(ctx: Context, run: Run, reply: JoinReply, address: str, first: bool) -> None:
    spec = run.spec
    if not first:
        ctx.say(f"back in run {printable(spec.name)} at {address}")
        return
    pretrain = "" if spec.pretrain is None else f", pretrained in {spec.pretrain.blocks} blocks"
    ctx.say(
        f"joined run {printable(spec.name)} ({run.run_id.hex()[:16]}) at {address}: model "
        f"{printable(spec.model.name)} with {spec.model.parameters:,} parameters{pretrain}, environment "
        f"{printable(spec.environment.name)}, {spec.rollout.versions} versions, "
        f"operator key {fingerprint(spec.operator)}"
    )


async def _heartbeats(ctx: Context, session: Session) -> None:
    """Tell what we hold and do; learn the time, the head, and whom to ask for shards."""
    while True:
        sent = ctx.clock.wall_ms()
        state = ctx.state
        try:
            reply = await session.request(
                lambda number, state=state: HeartbeatRequest(  # type: ignore[misc]
                    id=number, have_version=state.fetched, state=state.activity.name
                ),
                HeartbeatReply,
                timeout_s=HEARTBEAT_TIMEOUT_S,
            )
            measure(ctx, sent, reply.now)
            ctx.peers = tuple(
                p for p in reply.peers if p.peer_id not in (ctx.network.peer_id, ctx.coordinator)
            )
            ctx.facts.peers = len(ctx.peers)
            ctx.changed.set()
            if reply.head_version > ctx.state.head:
                answer = await session.request(
                    lambda number: ManifestRequest(id=number), ManifestReply, timeout_s=HEARTBEAT_TIMEOUT_S
                )
                ctx.feed(HeadSeen(_believe_head(ctx, answer.head)))
        except RefusedError as error:
            ctx.say(f"the coordinator refused a heartbeat: {error}", logging.WARNING)
        except PeerError:
            await session.close()
            return
        await trio.sleep(ctx.config.heartbeat_s)


def _pushed(ctx: Context, message: Message) -> None:
    match message:
        case HeadPush(head=head):
            ctx.feed(HeadSeen(_believe_head(ctx, head)))
        case ReceiptPush(receipt=signed):
            if (receipt := verdicts.take(ctx, signed)) is not None:
                with about(receipt.lease_id, receipt.submission_id):
                    verdicts.tell(ctx, receipt)
        case StandingPush():
            ctx.facts.standing = standing_fields(message)
            ctx.changed.set()
        case AmendmentsPush(amendments=amendments):
            for signed in amendments:
                _amended(ctx, signed)
        case NoticePush(code=code, message=text):
            if code in ("duplicate-key", "duplicate-key-kept"):
                ctx.facts.duplicate_key_at = trio.current_time()
                ctx.facts.key_kept = code == "duplicate-key-kept"
            if code == RESUMED:
                ctx.feed(WorkAgain(ctx.jitter()))
            level = logging.INFO if code in ("run-complete", RESUMED) else logging.WARNING
            ctx.say(f"notice from the coordinator ({printable(code)}): {printable(text, 500)}", level)


def _amended(ctx: Context, signed: Signed) -> None:
    """Follow the operator's change of settings; told again after every join, from the first on."""
    run = ctx.joined()
    try:
        amendment = open_signed(signed, Amendment, run.spec.operator)
        if amendment.run_id != run.run_id:
            raise MalformedError("it is another run's")
        if amendment.number <= ctx.amended:
            return
        if amendment.number != ctx.amended + 1:
            raise MalformedError(f"number {amendment.number} after {ctx.amended}")
        spec = amended(run.spec, amendment.changes)
    except BarnraiseError as error:
        ctx.say(f"a change of the run's settings is not believed: {error}", logging.ERROR)
        return
    ctx.run, ctx.amended = replace(run, spec=spec), amendment.number
    ctx.feed(Retargeted(spec.rollout.versions))
    what = ", ".join(f"{printable(key)} = {printable(text)}" for key, text in amendment.changes.items())
    ctx.say(f"the operator changed the run's settings: {what} ({printable(amendment.reason, 500)})")


def _believe_head(ctx: Context, head: Signed | None) -> int:
    """Check a manifest; return the newest version believed so far."""
    known = ctx.state.head
    if head is None:
        return known
    run = ctx.joined()
    try:
        manifest = check_manifest(head, run.spec, run.run_id)
    except (SignatureError, MalformedError) as error:
        ctx.say(f"refused a manifest, staying at version {known}: {error}", logging.ERROR)
        return known
    if manifest.version > known or ctx.head is None:
        ctx.head, ctx.head_version = head, manifest.version
        if ctx.treecast is not None:
            ctx.treecast.gossiper.spawn(ctx.treecast.gossiper.publish_later, head, manifest)
        if manifest.version > known >= 0:
            ctx.say(f"version {manifest.version} was published")
    return max(known, manifest.version)


def measure(ctx: Context, sent_ms: int, theirs_ms: int) -> None:
    """Compare clocks, warn where a person should know, and move the lease's local deadline."""
    now = trio.current_time()
    for warning in ctx.clock.compare(sent_ms, ctx.clock.wall_ms(), theirs_ms, now):
        ctx.say(warning, logging.WARNING)
    ctx.facts.offset_ms = ctx.clock.offset_ms
    unit, lease = ctx.state.unit, ctx.lease
    if unit is not None and lease is not None and lease.lease_id == unit.lease_id:
        deadline = ctx.clock.local(lease.deadline_at, now)
        if abs(deadline - unit.deadline) > 2.0:
            ctx.feed(DeadlineMoved(unit.lease_id, deadline))
