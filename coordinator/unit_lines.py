"""One unit's way through the coordinator, a line for each step, in words.

Lines are about their unit as ``barnraise.protocol.unit_context`` has it. Every function may be
called at any rate: where nobody listens it costs a look, and what it says goes to a file of its
own (``RUN/units.log``), out of which units push only older units.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import trio

from barnraise.coordinator.block_events import BlockLeased
from barnraise.coordinator.events import Event, LeaseClosed, LeaseIssued, LeaseTimedOut
from barnraise.coordinator.state import State
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.messages import RolloutLease, Verdict
from barnraise.protocol.pretrain import BlockLease
from barnraise.protocol.unit_context import about, unit_log
from barnraise.protocol.wire import printable

log = unit_log("barnraise.coordinator")

_AT_A_TIME = 256  # lines, before the event loop has its turn

Lease = RolloutLease | BlockLease


def lent(issued: LeaseIssued | BlockLeased, name: str) -> None:
    """A lease has left for the node called ``name``."""
    if log.isEnabledFor(logging.INFO):
        lease = issued.lease
        with about(lease):
            until = time.strftime("%H:%M:%S", time.gmtime(lease.deadline_at / 1000))
            log.info("lent to %s: %s; work is taken until %s UTC", name, _what(lease), until)


def lent_again(lease: Lease, name: str) -> None:
    """A node asked, and has this lease already."""
    if log.isEnabledFor(logging.DEBUG):
        with about(lease):
            log.debug("%s has it already and is told so again", name)


def received(lease: Lease, submission_id: bytes, size: int, name: str) -> None:
    """A submission is on the disk."""
    if log.isEnabledFor(logging.INFO):
        with about(lease, submission_id):
            log.info("%s handed in %d bytes, which are stored", name, size)


def refused(name: str, error: RefusedError) -> None:
    """A submission was not taken; say so inside of ``about``. The log for everybody may spare this line."""
    log.info("refused what %s handed in (%s): %s", name, error.code, error)


def overdue(events: Iterable[Event]) -> None:
    """Leases that timed out or ran out."""
    for event in events:
        if isinstance(event, LeaseTimedOut):
            with about(event.lease_id):
                log.info("timed out: it may go to somebody else as well")
        elif isinstance(event, LeaseClosed) and event.reason == "expired":
            with about(event.lease_id):
                log.info("its deadline has passed: no work is taken for it")


def judged(lease: Lease, submission_id: bytes, verdict: Verdict, tokens: int, waited_ms: int) -> None:
    """A verdict is on the disk; ``waited_ms`` since the submission was."""
    if log.isEnabledFor(logging.INFO):
        with about(lease, submission_id):
            log.info("%s, %.1f s after it came", verdict_words(verdict, tokens), waited_ms / 1000)


def known(state: State, submissions: Iterable[bytes]) -> list[tuple[bytes, Lease]]:
    """These submissions with their leases, as far as the state still has them."""
    items = ((key, state.submissions.get(key) or state.blocks.work.get(key)) for key in submissions)
    return [(key, item.lease) for key, item in items if item is not None]


async def used(leases: Sequence[tuple[bytes, Lease]], version: int) -> None:
    """A version that was made of these (by submission) is published."""
    if log.isEnabledFor(logging.INFO):
        for number, (submission_id, lease) in enumerate(leases):
            with about(lease, submission_id):
                log.info("used in version %d, which is published", version)
            if number % _AT_A_TIME == _AT_A_TIME - 1:
                await trio.lowlevel.checkpoint()


def batched(leases: Sequence[tuple[bytes, Lease]], version: int) -> None:
    """A batch, or round, was formed of these."""
    if log.isEnabledFor(logging.DEBUG):
        for submission_id, lease in leases:
            with about(lease, submission_id):
                log.debug("goes to the learner, for version %d", version)


def verdict_words(verdict: Verdict, tokens: int) -> str:
    """A verdict with its numbers."""
    if verdict.accepted:
        return f"accepted ({printable(verdict.check, 64)}), {tokens} tokens"
    where = f" at {printable(verdict.position, 200)}" if verdict.position else ""
    text = f": {printable(verdict.message, 300)}" if verdict.message else ""
    numbers = f"value {verdict.value:g}, threshold {verdict.threshold:g}"
    return f"rejected by check {printable(verdict.check, 64)}, {numbers}{where}{text}"


def _what(lease: Lease) -> str:
    if isinstance(lease, BlockLease):
        return f"block {lease.block}, place {lease.slot}, of version {lease.policy_version}"
    return f"{lease.prompts} prompts x {lease.group_size} at version {lease.policy_version}"
