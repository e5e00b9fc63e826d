"""A node's requests, one by one: read the state, decide, record, reply.

Each reply leaves only after what it promises is durable. Whatever a node sends, the
worst that happens is a refusal or the end of its own session.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from barnraise.coordinator import scheduler, unit_lines
from barnraise.coordinator.admission import check_joins, is_admitted, take_invite, why_not
from barnraise.coordinator.amending import amendments_in_force
from barnraise.coordinator.appeals import check_appeal, check_submission, open_receipt
from barnraise.coordinator.audit import is_banned, offence_events
from barnraise.coordinator.block_desk import BlockDesk
from barnraise.coordinator.core import Core, in_place
from barnraise.coordinator.desk import later, lend, make_room, take_in
from barnraise.coordinator.door import Door
from barnraise.coordinator.events import (
    AppealFiled,
    LeaseClosed,
    LeaseIssued,
    NodeJoined,
    Submitted,
)
from barnraise.coordinator.hub import MAX_REPORTS_OF_ONE, Hub, Live
from barnraise.coordinator.journal import Payload
from barnraise.coordinator.standing import check_not_banned, tell_standing
from barnraise.coordinator.state import Lease, Node
from barnraise.coordinator.submissions import (
    TurnedAway,
    check_lease,
    is_duplicate,
    open_submission,
)
from barnraise.protocol.envelope import content_id
from barnraise.protocol.errors import RefusedError, StorageError
from barnraise.protocol.identity import fingerprint, peer_id_of
from barnraise.protocol.messages import (
    PROTOCOL_MINOR,
    Acknowledged,
    AppealRequest,
    HeartbeatReply,
    HeartbeatRequest,
    InviteRequest,
    JoinReply,
    JoinRequest,
    LeaseRequest,
    LeaseReturn,
    ManifestReply,
    ManifestRequest,
    Message,
    NoticePush,
    PeerReport,
    ReceiptsReply,
    ReceiptsRequest,
    RolloutLease,
    RolloutSubmission,
    Signed,
    SubmitRequest,
)
from barnraise.protocol.network import Stream
from barnraise.protocol.pretrain import BlockSubmission
from barnraise.protocol.pseudonym import pseudonym
from barnraise.protocol.server_session import Intake, ServerSession
from barnraise.protocol.unit_context import about
from barnraise.protocol.wire import printable

log = logging.getLogger(__name__)

JOIN_WITHIN_MS = 15_000
RENAME_AFTER_MS = 600_000
PAUSED_MS = 30_000
NOT_ADMITTED_MS = 300_000  # until a key that may not have work asks again
RECEIPTS_GIVEN = 256
THREAD_BYTES = 128 * 1024  # hashing and verifying more than this would be felt by everybody else
NOTICE_GRACE_S = 1.0


class Sessions:
    """Serves ``SESSION_PROTOCOL``. ``run`` must be running for replaced sessions to be ended."""

    def __init__(
        self,
        core: Core,
        hub: Hub,
        signed_spec: Signed,
        rng: random.Random,
        door: Door,
        *,
        leases_per_node: int = scheduler.LEASES_PER_NODE,
        run_folder: Path | None = None,
        minor_of: Callable[[str], int] = lambda peer: PROTOCOL_MINOR,
    ) -> None:
        """``run_folder``: for the block stage of a run that has one; ``minor_of``: what a peer speaks."""
        self._minor_of = minor_of
        self._core = core
        self._hub = hub
        self._signed_spec = signed_spec
        self._rng = rng
        self._door = door
        self._leases_per_node = leases_per_node
        self._intake = Intake()
        self.turned_away = TurnedAway()
        self._desk: BlockDesk | None = None
        if core.spec.pretrain is not None and run_folder is not None:
            self._desk = BlockDesk(core, core.spec.pretrain, run_folder, rng, self.turned_away)
        self._ending, self._to_end = trio.open_memory_channel[tuple[Live, str]](math.inf)

    async def serve(self, stream: Stream) -> None:
        """One node's session, from its first request to its end."""
        if not self._hub.has_room(stream.peer_id):
            log.warning("%s turned away: too many sessions are open", stream.peer_id)
            await stream.reset()
            return
        handle: Callable[[Message], Awaitable[Message]] = lambda message: self._handle(live, message)  # noqa: E731
        session = ServerSession(stream, handle, intake=self._intake, minor=self._minor_of(stream.peer_id))
        live = Live(session, stream.peer_id, self._core.now_ms())
        self._hub.add(live)
        try:
            await session.run()
        finally:
            self._hub.remove(live)
            if live.key:
                log.info("%s left: %s", live.name, session.reason)

    async def run(self) -> None:
        """End sessions that were replaced (after their notice had time to leave), for ever."""
        async with trio.open_nursery() as nursery:
            async for live, reason in self._to_end:
                nursery.start_soon(self._end_later, live, reason)

    async def _end_later(self, live: Live, reason: str) -> None:
        await trio.sleep(NOTICE_GRACE_S)
        live.session.close(reason)

    def end_silent(self) -> None:
        """End sessions that opened a stream and never joined."""
        now = self._core.now_ms()
        for live in tuple(self._hub.joining):  # oldest first
            if now - live.connected_at <= JOIN_WITHIN_MS:
                return
            live.session.close("opened a session and did not join")

    async def _handle(self, live: Live, message: Message) -> Message:
        try:
            return await self._answer(live, message)
        except StorageError as error:  # its text names our folders: for the operator, not for strangers
            log.error("refused %s: %s", type(message).__name__, error)
            raise RefusedError(
                "storage-full", "the coordinator's disk is full or broken, which its operator sees: try later"
            ) from None

    async def _answer(self, live: Live, message: Message) -> Message:
        live.seen_at = self._core.now_ms()
        if isinstance(message, JoinRequest):
            return await self._join(live, message)
        if not live.key:
            if isinstance(message, InviteRequest):
                return await self._invited(live, message)
            if isinstance(message, HeartbeatRequest):  # of somebody who wants to know the time before joining
                head = self._hub.head_version
                return HeartbeatReply(id=message.id, now=self._core.now_ms(), head_version=head, peers=())
            raise RefusedError("join-first", "the first request of a session is JoinRequest")
        if live.replaced:
            raise RefusedError("duplicate-key", "a newer session with this key has taken over")
        match message:
            case HeartbeatRequest():
                return self._heartbeat(live, message)
            case ManifestRequest():
                return ManifestReply(id=message.id, head=self._hub.head)
            case LeaseRequest():
                return await self._lease(live, message)
            case LeaseReturn():
                return await self._give_back(live, message)
            case SubmitRequest():
                return await self._submit(live, message)
            case PeerReport():
                return self._note(live, message)
            case ReceiptsRequest():
                return await self._receipts(live, message)
            case AppealRequest():
                return await self._appeal(live, message)
        raise RefusedError("unknown-request", f"{type(message).__name__} is not served here")

    async def _invited(self, live: Live, message: InviteRequest) -> Message:
        _check_key(live, message.public_key)
        key = message.public_key
        needed = self._door.wait_ms(key, live.peer_id) > 0
        await take_invite(self._core, key, message.invite, needed=needed)
        return Acknowledged(id=message.id, duplicate=False)

    async def _join(self, live: Live, message: JoinRequest) -> Message:
        _check_key(live, message.public_key)
        check_joins(self._core, message.public_key)
        self._door.check(message.public_key, live.peer_id)
        name = pseudonym(message.name, live.peer_id)
        node = self._core.state.nodes.get(message.public_key)
        if node is not None and name == pseudonym("", live.peer_id):
            name = node.name  # who names itself no more keeps the name that it has
        live.key, live.instance, live.name = message.public_key, message.instance, name
        live.engine, live.addresses = printable(message.engine, 64), message.addresses
        previous = self._hub.join(live)
        if previous is not None:
            if previous.instance != live.instance:
                log.warning("two live nodes use the key of %s: the newer one keeps it", name)
                self._hub.notify_duplicate(previous, live)
            self._ending.send_nowait((previous, "replaced by a newer session of the same key"))
        now = self._core.now_ms()
        # Names lie in the public ledger for ever: a node cannot fill it by calling itself ever new ones.
        renamed = node is not None and node.name != name and now - node.named_at >= RENAME_AFTER_MS
        if node is None or renamed:
            joined = NodeJoined(node=message.public_key, name=name, at_ms=now)
            with self._door.counting(message.public_key, live.peer_id):
                await self._core.record([joined])
        log.info("%s joined (%s, %s)", name, fingerprint(live.key), live.engine)
        tell_standing(self._core, live)
        for push in amendments_in_force(self._core):
            live.session.push(push)
        if scheduler.is_complete(self._core.state, self._core.settings.rollout):
            live.session.push(run_complete(self._core))
        return JoinReply(
            id=message.id, run_spec=self._signed_spec, head=self._hub.head, now=self._core.now_ms()
        )

    def _heartbeat(self, live: Live, message: HeartbeatRequest) -> Message:
        live.have_version = min(message.have_version, self._hub.head_version)
        live.state = printable(message.state, 64)
        return HeartbeatReply(
            id=message.id,
            now=self._core.now_ms(),
            head_version=self._hub.head_version,
            peers=self._hub.peers_for(
                live, self._hub.head_version - self._core.spec.rollout.max_lag, self._rng
            ),
        )

    def _node(self, live: Live) -> Node:
        node = self._core.state.nodes.get(live.key)
        if node is None:  # its join was lost to a full disk
            raise RefusedError("join-first", "join again: the coordinator does not know this key yet")
        return node

    async def _lease(self, live: Live, message: LeaseRequest) -> Message:
        core, desk = self._core, self._desk
        node, now, spec = self._node(live), core.now_ms(), core.settings.rollout
        paused = core.state.operations.paused
        if paused is not None:
            return later(message, scheduler.Wait(f"the run is paused: {paused.reason}", PAUSED_MS))
        if not is_admitted(core, live.key):
            return later(message, scheduler.Wait(why_not(core), NOT_ADMITTED_MS))
        if desk is not None and desk.in_blocks():
            return await desk.lease(live, node, message)
        if desk is not None and (early := desk.too_early(message)) is not None:
            return early
        decision = scheduler.decide_lease(
            core.state, spec, node, live.instance, message.policy_version, now, self._leases_per_node
        )
        if isinstance(decision, scheduler.Wait):
            return later(message, decision)
        if isinstance(decision, scheduler.Resend):
            return await lend(core, message, core.state.leases[decision.lease_id].terms, None, live.name)
        terms = RolloutLease(
            run_id=core.run_id,
            lease_id=self._rng.randbytes(16),
            unit_id=decision.unit_id,
            node=live.key,
            policy_version=message.policy_version,
            prompts=spec.prompts_per_unit,
            group_size=spec.group_size,
            issued_at=now,
            timeout_at=decision.timeout_at,
            deadline_at=decision.deadline_at,
        )
        issued = LeaseIssued(lease=terms, instance=live.instance)
        return await lend(core, message, terms, issued, live.name, decision.release)

    async def _give_back(self, live: Live, message: LeaseReturn) -> Message:
        state = self._core.state
        lease = state.leases.get(message.lease_id) or state.blocks.leases.get(message.lease_id)
        if lease is None:
            known = state.closed.get(message.lease_id) or state.blocks.closed.get(message.lease_id)
            if known is None:
                raise RefusedError("unknown-lease", "no such lease was issued (or it was long ago)")
            return Acknowledged(id=message.id, duplicate=True)
        if lease.terms.node != live.key:
            raise RefusedError("not-your-lease", "this lease was issued to another node")
        with about(lease.terms):
            log.info("%s returned unit %d: %s", live.name, lease.terms.unit_id, printable(message.reason))
        closed = LeaseClosed(lease_id=message.lease_id, reason="returned", at_ms=self._core.now_ms())
        await self._core.record([closed])
        return Acknowledged(id=message.id, duplicate=False)

    async def _submit(self, live: Live, message: SubmitRequest) -> Message:
        core, signed = self._core, message.submission
        offload = core.offload if len(signed.payload) > THREAD_BYTES else in_place
        try:
            submission, submission_id = await offload(
                lambda: (open_submission(signed, live.key, self._desk is not None), content_id(signed))
            )
        except RefusedError as error:
            log.warning("%s: submission refused (%s): %s", live.name, error.code, error)
            await self._offence(live, error)
            raise
        with about(submission.lease_id, submission_id):
            return await self._take(live, message, submission, submission_id)

    async def _take(
        self,
        live: Live,
        message: SubmitRequest,
        submission: RolloutSubmission | BlockSubmission,
        submission_id: bytes,
    ) -> Message:
        # From here to record() there is no checkpoint: nobody can use the lease in between.
        core = self._core
        if is_duplicate(core.state, submission_id):
            await core.record([])  # the first copy may still be on its way to the disk
            return Acknowledged(id=message.id, duplicate=True)
        now = core.now_ms()
        try:
            if self._desk is not None and isinstance(submission, BlockSubmission):
                return await self._desk.submit(live, self._node(live), message, submission, submission_id)
            check_not_banned(self._node(live), now)
            lease = check_lease(core.state, core.run_id, live.key, submission, now, self.turned_away)
            assert isinstance(lease, Lease)
            state, lease_id = core.state, lease.terms.lease_id
            make_room(self.turned_away, lease_id, len(state.waiting), state.waiting_bytes, now)
        except RefusedError as error:
            log.warning("%s: submission refused (%s): %s", live.name, error.code, error)
            unit_lines.refused(live.name, error)
            raise
        submitted = Submitted(
            submission_id=submission_id,
            lease_id=lease.terms.lease_id,
            size=len(message.submission.payload),
            at_ms=now,
        )
        return await take_in(core, message, lease.terms, submitted, live.name)

    def _note(self, live: Live, message: PeerReport) -> Message:
        """Hearsay about another peer: for the operator's eyes."""
        if live.reports >= MAX_REPORTS_OF_ONE:
            raise RefusedError("too-many-reports", "this session has reported enough")
        live.reports += 1
        peer, text = printable(message.peer_id, 96), printable(message.message)
        if message.peer_id == peer_id_of(self._core.spec.operator):
            log.error("%s reports a fault of this very coordinator: %s", live.name, text)
        else:
            log.warning("%s reports peer %s (%s): %s", live.name, peer, message.code, text)
        self._hub.reports.append(
            {
                "at_ms": self._core.now_ms(),
                "by": live.name,
                "peer": peer,
                "code": message.code,
                "text": text,
            }
        )
        return Acknowledged(id=message.id, duplicate=False)

    async def _appeal(self, live: Live, message: AppealRequest) -> Message:
        core, node, work = self._core, self._node(live), message.submission
        receipt = await core.offload(
            lambda: open_receipt(message.receipt, core.spec.operator, core.run_id, live.key)
        )
        check_appeal(core.state, node, receipt, core.now_ms())  # before anything large is looked at
        if work is not None:
            await core.offload(lambda: check_submission(work, receipt))
        elif not await core.offload(lambda: core.journal.payloads([receipt.submission_id])):
            raise RefusedError("payload-needed", "the work is no longer stored here: send it along")
        item = check_appeal(core.state, node, receipt, core.now_ms())
        payloads = [] if work is None else [Payload(item.submission_id, item.lease.policy_version, work)]
        filed = AppealFiled(submission_id=item.submission_id, at_ms=core.now_ms())
        await core.record([filed], payloads=payloads)
        with about(item.lease, item.submission_id):
            log.info("%s appeals against the verdict on unit %d", live.name, item.lease.unit_id)
        return Acknowledged(id=message.id, duplicate=False)

    async def _offence(self, live: Live, error: RefusedError) -> None:
        """What only a forger sends is held against the key that the session proved."""
        node = self._core.state.nodes.get(live.key)
        if node is None or is_banned(node, self._core.now_ms()):
            return
        if error.code == "bad-signature":
            await self._core.record(offence_events(node, "bad-signature", self._core.now_ms()))
        elif error.code == "wrong-signer":
            await self._core.record(offence_events(node, "wrong-signer", self._core.now_ms()))

    async def _receipts(self, live: Live, message: ReceiptsRequest) -> Message:
        journal = self._core.journal
        found = await self._core.offload(
            lambda: journal.receipts(live.key, message.from_index, RECEIPTS_GIVEN)
        )
        return ReceiptsReply(id=message.id, receipts=found)


def _check_key(live: Live, public_key: bytes) -> None:
    if peer_id_of(public_key) != live.peer_id:
        raise RefusedError(
            "wrong-key",
            f"the request names key {fingerprint(public_key)}, which is not the key "
            f"of the connection ({live.peer_id})",
        )


def run_complete(core: Core) -> NoticePush:
    """What nodes are told at the end."""
    version = core.settings.rollout.versions
    return NoticePush(
        code="run-complete",
        message=f"the run is complete: version {version} is published. Thank you! No more work is given; "
        "the coordinator goes on serving weights and receipts",
    )
