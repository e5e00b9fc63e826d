"""Verdicts as they come in: signed receipts into the book, and what they mean to the node and its person."""

from __future__ import annotations

import logging

from barnraise.node.context import Context
from barnraise.node.entering import tally
from barnraise.node.events import Judged
from barnraise.node.receipt_words import outcome, summary, words
from barnraise.protocol.credit_words import credit_words
from barnraise.protocol.errors import BarnraiseError, PeerError, RefusedError, StorageError
from barnraise.protocol.messages import Receipt, ReceiptsReply, ReceiptsRequest, Signed
from barnraise.protocol.session import Session
from barnraise.protocol.wire import printable

TOLD_ONE_BY_ONE = 2  # verdicts given while the node was away; more are summed up


async def catch_up(ctx: Context, session: Session) -> None:
    """Fetch the verdicts that we missed (R16), page by page."""
    assert ctx.receipts is not None
    ctx.receipts_refused = ""
    missed: list[Receipt] = []
    try:
        while True:
            start = ctx.receipts.next_index
            reply = await session.request(
                lambda number, start=start: ReceiptsRequest(id=number, from_index=start),  # type: ignore[misc]
                ReceiptsReply,
            )
            for signed in reply.receipts:
                if (receipt := take(ctx, signed)) is not None:
                    missed.append(receipt)
            if not reply.receipts or ctx.receipts.next_index <= start:
                return
    except RefusedError as error:
        ctx.say(f"the coordinator refused to send our receipts: {error}", logging.WARNING)
    except PeerError:
        return  # the session is ending; the next one asks again
    finally:
        if len(missed) > TOLD_ONE_BY_ONE:
            ctx.say(summary(missed))
        else:
            for receipt in missed:
                tell(ctx, receipt)


def take(ctx: Context, signed: Signed) -> Receipt | None:
    """Take a receipt into the book and act on it; None: it was there already, or could not be kept."""
    assert ctx.receipts is not None
    assert ctx.pending is not None
    if ctx.receipts_refused:
        return None  # they are asked for again, all of them, once there is room
    try:
        receipt = ctx.receipts.add(signed)
    except StorageError as error:
        ctx.receipts_refused = str(error)
        ctx.say(f"a receipt was not kept, it will be asked for again: {error}", logging.ERROR)
        return None
    except BarnraiseError as error:
        ctx.say(f"a receipt was not kept: {error}", logging.ERROR)
        return None
    if receipt is None:
        return None  # it was here already
    if ctx.state.uploading != receipt.submission_id:
        ctx.pending.drop(receipt.submission_id, ctx.kept)
    if receipt.verdict.accepted and ctx.kept is not None:
        ctx.kept.drop(receipt.submission_id)
    if ctx.units is not None and receipt.lease_id in ctx.units.kept:
        ctx.units.judged({receipt.lease_id: ctx.receipts.verdicts(receipt.lease_id)})
    ctx.judged.append(receipt.submission_id)
    ctx.feed(Judged(receipt.submission_id))
    tally(ctx)
    verdict = receipt.verdict
    ctx.facts.last_verdict = {
        "accepted": verdict.accepted,
        "check": verdict.check,
        "threshold": verdict.threshold,
        "value": verdict.value,
        "position": printable(verdict.position),
        "message": printable(verdict.message),
        "credit": receipt.credit,
        "at_ms": receipt.issued_at,
    }
    return receipt


def tell(ctx: Context, receipt: Receipt) -> None:
    """Say what became of a unit."""
    if outcome(receipt) == "accepted":
        earned, total = credit_words(receipt.credit), credit_words(ctx.facts.credit)
        ctx.say(f"unit accepted: {earned} of credit earned, {total} in all")
        return
    level = logging.INFO if receipt.verdict.accepted else logging.WARNING
    ctx.say(f"unit {words(receipt)} (receipt #{receipt.ledger_index})", level)
