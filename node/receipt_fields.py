"""Receipts as plain dicts: for the command line's ``--json`` and for viewers, page by page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from barnraise.node.receipt_words import latest, outcome, words
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.messages import Receipt

MOST = 500
DEFAULT = 100


def fields(receipts: Iterable[Receipt]) -> Iterator[dict[str, Any]]:
    """One dict a receipt, in the order given. ``counts``: no later receipt has superseded it."""
    known = list(receipts)
    newest = latest(known)
    for receipt in known:
        yield _fields(receipt, newest[receipt.submission_id].ledger_index == receipt.ledger_index)


def page(receipts: list[Receipt], arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """At most ``limit`` (100, 500 at most), by ledger index: the first beyond ``after``, or the last of all.

    Raises:
        RefusedError: an argument that is no such number.
    """
    limit, after = arguments.get("limit", DEFAULT), arguments.get("after")
    if not _is_count(limit) or not 0 < limit <= MOST:
        raise RefusedError("bad-argument", f"limit must be 1 to {MOST}")
    if after is not None and not _is_count(after):
        raise RefusedError("bad-argument", "after must be a ledger index, or nothing for the newest")
    newest = latest(receipts)
    ordered = sorted(receipts, key=lambda receipt: receipt.ledger_index)
    if after is None:
        chosen = ordered[-limit:]
    else:
        chosen = [receipt for receipt in ordered if receipt.ledger_index > after][:limit]
    return [_fields(r, newest[r.submission_id].ledger_index == r.ledger_index) for r in chosen]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= 2**53


def _moment(at_ms: int) -> str:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):  # whoever signs receipts may write any number
        return f"{at_ms} ms"


def _fields(receipt: Receipt, counts: bool) -> dict[str, Any]:
    verdict = receipt.verdict
    return {
        "run": receipt.run_id.hex(),
        "ledger_index": receipt.ledger_index,
        "at": _moment(receipt.issued_at),
        "submission": receipt.submission_id.hex(),
        "lease": receipt.lease_id.hex(),
        "accepted": verdict.accepted,
        "outcome": outcome(receipt),
        "check": verdict.check,
        "threshold": verdict.threshold,
        "value": verdict.value,
        "position": verdict.position,
        "message": verdict.message,
        "credit": receipt.credit,
        "counts": counts,
        "words": words(receipt),
    }
