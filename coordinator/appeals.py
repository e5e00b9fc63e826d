"""Appeals: one rejected submission, verified again alone, because its node asked for it.

``check_appeal`` decides whether an appeal is heard; ``AppealBelt`` hears those that are
open, one at a time and beside the ordinary verdicts (those of block units, whose files
have to be fetched again, are heard by ``barnraise.coordinator.block_belt``). Filing and
outcome are in the ledger, so that an appeal which is never answered shows.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

import trio

from barnraise.coordinator.audit import review_events
from barnraise.coordinator.audit_fold import APPEAL_EVERY_MS
from barnraise.coordinator.block_fold import BlockWork
from barnraise.coordinator.core import Core
from barnraise.coordinator.patience import WorkerAwayError
from barnraise.coordinator.state import REMEMBERED_VERSIONS, Node, State, Submission
from barnraise.coordinator.state_parts import CLOCK_BACK_MS
from barnraise.coordinator.verify_belt import FIRST_RETRY_S, LAST_RETRY_S, MAX_ATTEMPTS, unverifiable
from barnraise.coordinator.workers import Judged, Verifier, VerifyJob
from barnraise.protocol.envelope import content_id, open_signed
from barnraise.protocol.errors import BarnraiseError, ChildError, MalformedError, RefusedError, SignatureError
from barnraise.protocol.messages import Receipt, RolloutSubmission, Signed
from barnraise.protocol.pretrain import BlockSubmission
from barnraise.protocol.unit_context import about

log = logging.getLogger(__name__)


def open_receipt(signed: Signed, operator: bytes, run_id: bytes, node: bytes) -> Receipt:
    """The receipt that an appeal names: ours, of this run, and the asking node's own.

    Raises:
        RefusedError: ``not-our-receipt`` or ``not-your-receipt``.
    """
    try:
        receipt = open_signed(signed, Receipt, operator)
    except (SignatureError, MalformedError) as error:
        raise RefusedError(
            "not-our-receipt", f"this run never signed such a receipt: {error}"[:400]
        ) from None
    if receipt.run_id != run_id:
        raise RefusedError("not-our-receipt", "the receipt is of another run: ask that run's coordinator")
    if receipt.node != node:
        raise RefusedError("not-your-receipt", "the receipt belongs to another node: appeal with its key")
    return receipt


def check_submission(signed: Signed, receipt: Receipt) -> None:
    """The work that came along is what the receipt was about.

    Raises:
        RefusedError: ``wrong-submission``.
    """
    if content_id(signed) != receipt.submission_id or signed.signer != receipt.node:
        raise RefusedError("wrong-submission", "the work sent along is not what the receipt was given for")
    try:
        with suppress(SignatureError):
            open_signed(signed, BlockSubmission, receipt.node)
            return
        open_signed(signed, RolloutSubmission, receipt.node)
    except (SignatureError, MalformedError) as error:
        raise RefusedError("wrong-submission", f"the work sent along: {error}"[:400]) from None


def check_appeal(state: State, node: Node, receipt: Receipt, now_ms: int) -> Submission | BlockWork:
    """The rejected submission, or block unit, to hear again.

    Raises:
        RefusedError: ``too-old``, ``not-rejected``, ``appealed-before`` or ``appeal-later``.
    """
    item: Submission | BlockWork | None = state.submissions.get(receipt.submission_id)
    oldest = state.head - state.max_lag - REMEMBERED_VERSIONS
    if receipt.submission_id in state.blocks.work:
        item = state.blocks.work[receipt.submission_id]
        oldest = state.head - state.max_lag - 1  # versions of blocks are large: no more are kept for this
    if item is None or item.lease.policy_version < oldest:
        raise RefusedError(
            "too-old",
            f"the submission is no longer known, or its weights (of version {max(0, oldest)} and later) are "
            "no longer kept: appeal sooner",
        )
    if item.appealed:
        raise RefusedError("appealed-before", "one appeal is heard for each submission")
    if item.status != "rejected":
        raise RefusedError("not-rejected", "the submission was not rejected: there is nothing to appeal")
    if wait := appeal_wait_ms(node, now_ms):
        raise RefusedError("appeal-later", f"one appeal in ten minutes: the next in {wait / 1000:.0f} s")
    return item


def appeal_wait_ms(node: Node, now_ms: int) -> int:
    """ms until a node may appeal again. If it is longer than the rule says, the clock went back."""
    wait = node.next_appeal_at - now_ms
    return wait if 0 < wait <= APPEAL_EVERY_MS + CLOCK_BACK_MS else 0


@dataclass
class AppealBelt:
    """Hears what is open, oldest first; see ``run``."""

    core: Core
    verifier: Verifier

    async def run(self) -> None:
        """Hear appeals for ever. Rebuilt from the state alone after a restart."""
        while True:
            changed = self.core.changed
            submission_id = next(iter(self.core.state.appeals), None)
            if submission_id is None:
                await changed.wait()
                continue
            try:
                await self._hear(submission_id)
            except BarnraiseError as error:
                log.error("appeal of %s: %s", submission_id.hex()[:16], error)
                await trio.sleep(FIRST_RETRY_S)

    async def _hear(self, submission_id: bytes) -> None:
        core = self.core
        await core.record([])  # durable before it is heard
        payloads = await core.offload(lambda: core.journal.payloads([submission_id]))
        item = core.state.submissions[submission_id]
        job = VerifyJob(
            submission_id=submission_id, lease=item.lease, payload=payloads.get(submission_id, b"")
        )
        if submission_id in payloads:
            result = await self._verify(job)
        else:
            result = unverifiable(job, "its payload is no longer stored")
        parameters = core.spec.model.parameters
        events = review_events(core.state, submission_id, result, parameters, core.now_ms())
        outcome = "overturned" if result.verdict.accepted else f"upheld by check {result.verdict.check}"
        with about(item.lease, submission_id):
            log.info("appeal of %s: %s", submission_id.hex()[:16], outcome)
        await core.record(events)

    async def _verify(self, job: VerifyJob) -> Judged:
        attempts = 0
        while True:
            try:
                return (await self.verifier.verify((job,)))[0]
            except WorkerAwayError as error:
                log.warning("an appeal waits: %s", error)
                await trio.sleep(LAST_RETRY_S)
            except ChildError as error:
                attempts += 1
                if attempts >= MAX_ATTEMPTS:
                    return unverifiable(job, str(error))
                await trio.sleep(FIRST_RETRY_S * (2**attempts - 1))
