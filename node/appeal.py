"""Command ``appeal``: ask the coordinator to verify one rejected submission again."""

from __future__ import annotations

from typing import Any

from barnraise.node.context import Context
from barnraise.node.receipt_words import BLOCK_CHECKS, find_receipt, outcome
from barnraise.protocol.errors import BarnraiseError, RefusedError
from barnraise.protocol.messages import Acknowledged, AppealRequest

APPEAL_TIMEOUT_S = 120.0  # the work may have to go up with it


async def appeal(ctx: Context, arguments: dict[str, Any]) -> dict[str, Any]:
    """Send an appeal; the outcome comes as another receipt.

    ``receipt`` names it: a ledger index, or the start of a submission's id.

    Returns:
        ``ok``, ``text``, and the ``submission`` (hex) whose next receipt is the outcome.

    Raises:
        BarnraiseError: no such receipt, nothing to appeal, not connected, or refused; the text says why.
    """
    text = arguments.get("receipt")
    if not isinstance(text, str) or not 0 < len(text) <= 80:
        raise RefusedError("bad-argument", "receipt: a ledger index, or the start of a submission's id")
    if ctx.receipts is None or ctx.kept is None:
        raise BarnraiseError("the node has not joined its run yet: try again when it has")
    receipt = find_receipt(ctx.receipts.receipts(), text)
    if receipt.verdict.accepted or outcome(receipt) == "clawed back":
        raise BarnraiseError(
            "only a rejection can be appealed. Credit that was taken back because of one comes back with it"
            if outcome(receipt) == "clawed back"
            else "this submission was accepted: there is nothing to appeal"
        )
    if receipt.verdict.check in BLOCK_CHECKS and (
        ctx.units is None or receipt.lease_id not in ctx.units.kept
    ):
        raise BarnraiseError(
            "the files of this block unit are no longer here, so that it cannot be judged again: they are "
            "kept for an hour after the lease's deadline, if nothing else needs the room"
        )
    signed, work = ctx.receipts.signed(receipt), ctx.kept.get(receipt.submission_id)
    await ctx.live_session().request(
        lambda number: AppealRequest(id=number, receipt=signed, submission=work),
        Acknowledged,
        timeout_s=APPEAL_TIMEOUT_S,
    )
    name = receipt.submission_id.hex()
    ctx.say(f"appealed against the verdict on submission {name[:16]}")
    return {
        "ok": True,
        "text": f"the coordinator verifies submission {name[:16]} again; the outcome is another receipt",
        "submission": name,
        "index": receipt.ledger_index,
    }
