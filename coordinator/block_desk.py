"""Lending block units and taking them in: the part of a session that the block stage needs.

The decisions are pure (``barnraise.coordinator.block_scheduler``); here they are
recorded before anything is answered, as for rollouts (``barnraise.coordinator.sessions``).
"""

from __future__ import annotations

import logging
import random
from pathlib import Path

from barnraise.coordinator import block_scheduler
from barnraise.coordinator.block_events import BlockLeased, BlockSubmitted
from barnraise.coordinator.block_fold import BlockHold
from barnraise.coordinator.block_shapes import BlockShape, check_files, read_shape
from barnraise.coordinator.core import Core
from barnraise.coordinator.desk import later, lend, make_room, take_in
from barnraise.coordinator.hub import Live
from barnraise.coordinator.scheduler import Resend, Wait
from barnraise.coordinator.standing import check_not_banned
from barnraise.coordinator.state import Node
from barnraise.coordinator.submissions import TurnedAway, check_lease
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.errors import RefusedError, RunFolderError
from barnraise.protocol.messages import Acknowledged, LeaseReply, LeaseRequest, SubmitRequest
from barnraise.protocol.pretrain import BlockLease, BlockSubmission, PretrainSpec, model_version, part_name

log = logging.getLogger(__name__)


class BlockDesk:
    """Answers the lease and submit requests of a pretraining run."""

    def __init__(
        self, core: Core, spec: PretrainSpec, run_folder: Path, rng: random.Random, turned_away: TurnedAway
    ) -> None:
        self._core = core
        self._spec = spec
        self._folder = run_folder
        self._rng = rng
        self._turned_away = turned_away
        self._shapes: dict[int, BlockShape] = {}

    def in_blocks(self) -> bool:
        """Whether leases are for block units now."""
        return block_scheduler.in_blocks(self._core.state, self._spec)

    def too_early(self, message: LeaseRequest) -> LeaseReply | None:
        """The answer to whoever would generate from a version that is no model yet."""
        first = model_version(self._spec)
        if message.policy_version >= first:
            return None
        text = f"version {message.policy_version} is no model yet, {first} is the first: load the head"
        return LeaseReply(id=message.id, lease=None, reason=text, retry_after_ms=500)

    async def lease(self, live: Live, node: Node, message: LeaseRequest) -> LeaseReply:
        """Lend a place of the round, or say why not."""
        core, now = self._core, self._core.now_ms()
        decision = block_scheduler.decide_block_lease(
            core.state, self._spec, node, message.policy_version, now
        )
        if isinstance(decision, Wait):
            return later(message, decision)
        if isinstance(decision, Resend):
            terms = core.state.blocks.leases[decision.lease_id].terms
            return await lend(core, message, terms, None, live.name)
        terms = BlockLease(
            run_id=core.run_id,
            lease_id=self._rng.randbytes(16),
            unit_id=decision.unit_id,
            node=live.key,
            policy_version=message.policy_version,
            block=decision.block,
            slot=decision.slot,
            issued_at=now,
            timeout_at=decision.timeout_at,
            deadline_at=decision.deadline_at,
        )
        issued = BlockLeased(lease=terms, instance=live.instance)
        return await lend(core, message, terms, issued, live.name, decision.release)

    async def submit(
        self,
        live: Live,
        node: Node,
        message: SubmitRequest,
        submission: BlockSubmission,
        submission_id: bytes,
    ) -> Acknowledged:
        """Store a unit that may be what it should; its files are fetched later (``block_belt``).

        Raises:
            RefusedError: banned, no such lease, too late, no room, or files that cannot be a block's.
        """
        # No checkpoint until record(): nobody can use the lease in between.
        core, now = self._core, self._core.now_ms()
        check_not_banned(node, now)
        lease = check_lease(core.state, core.run_id, live.key, submission, now, self._turned_away)
        assert isinstance(lease, BlockHold)
        check_files(self._spec, self._shape(lease.terms.block), submission)
        blocks = core.state.blocks
        size = sum(blocks.work[key].size for key in blocks.waiting)
        make_room(self._turned_away, lease.terms.lease_id, len(blocks.waiting), size, now)
        submitted = BlockSubmitted(
            submission_id=submission_id,
            lease_id=lease.terms.lease_id,
            size=len(message.submission.payload),
            at_ms=now,
        )
        acknowledged = await take_in(core, message, lease.terms, submitted, live.name)
        log.info("%s handed in block %d of round %d", live.name, lease.terms.block, submission.policy_version)
        return acknowledged

    def _shape(self, block: int) -> BlockShape:
        """Of version 0, which is kept for ever; a few KB are read once."""
        if block not in self._shapes:
            path = checkpoint_folder(self._folder, 0) / part_name(self._spec, block + 1)
            try:
                self._shapes[block] = read_shape(path)
            except RunFolderError as error:
                log.error("%s", error)
                raise RefusedError("busy", "the coordinator's checkpoint is damaged: try later") from None
        return self._shapes[block]
