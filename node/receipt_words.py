"""Receipts for people: which one counts, which one is meant, and what it says."""

from __future__ import annotations

from collections.abc import Iterable

from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.messages import Receipt, StandingPush
from barnraise.protocol.standing import CLAWED_BACK, RESTORED, UNAUDITED, UNVERIFIABLE
from barnraise.protocol.wire import printable

SHORTEST_PREFIX = 4


def latest(receipts: Iterable[Receipt]) -> dict[bytes, Receipt]:
    """The receipt that counts for each submission: the one of the largest ledger index."""
    newest: dict[bytes, Receipt] = {}
    for receipt in receipts:
        known = newest.get(receipt.submission_id)
        if known is None or receipt.ledger_index >= known.ledger_index:
            newest[receipt.submission_id] = receipt
    return newest


def find_receipt(receipts: Iterable[Receipt], text: str) -> Receipt:
    """The newest receipt of the submission that ``text`` names: a ledger index, or the start of an id in hex.

    Raises:
        BarnraiseError: none or several are meant.
    """
    known = list(receipts)
    newest = latest(known)
    index = text.removeprefix("#")
    if index.isdecimal() and len(index) < 10:
        for receipt in known:
            if receipt.ledger_index == int(index):
                return newest[receipt.submission_id]
    prefix = text.lower()
    if len(prefix) < SHORTEST_PREFIX:
        raise BarnraiseError(
            f"no receipt {printable(text, 80)}: give its ledger index (#12), or at least "
            f"{SHORTEST_PREFIX} digits of the submission's id; `barnraise receipts` lists both"
        )
    found = [receipt for key, receipt in newest.items() if key.hex().startswith(prefix)]
    if len(found) != 1:
        what = f"{len(found)} receipts begin with" if found else "no receipt begins with"
        raise BarnraiseError(f"{what} {printable(text, 80)}; `barnraise receipts` lists them")
    return found[0]


def outcome(receipt: Receipt) -> str:
    """``accepted``, ``rejected``, ``clawed back`` or ``restored``."""
    verdict = receipt.verdict
    if verdict.check == CLAWED_BACK:
        return "clawed back"
    if verdict.check == RESTORED:
        return "restored"
    return "accepted" if verdict.accepted else "rejected"


def words(receipt: Receipt) -> str:
    """A receipt in one sentence: what was found, by which check, where, and against which threshold (R18)."""
    verdict = receipt.verdict
    message = printable(verdict.message)
    if verdict.check == CLAWED_BACK:
        return f"{verdict.value:,.0f} Mflop taken back: {message}"
    if verdict.check == RESTORED:
        return f"{receipt.credit:,} Mflop count again: {message}"
    if verdict.accepted:
        how = "without an audit, by a draw" if verdict.check == UNAUDITED else "every check passed"
        return f"accepted, {how}: +{receipt.credit:,} Mflop"
    if verdict.check == UNVERIFIABLE:
        return f"not verified, and no mark against you: {message}"
    where = f" at {printable(verdict.position)}" if verdict.position else ""
    return (
        f"rejected by check {printable(verdict.check)}{where}: {verdict.value:g}, the threshold is "
        f"{verdict.threshold:g}. {message}"
    )


def standing_fields(standing: StandingPush) -> dict[str, object]:
    """The state tree's ``standing``."""
    return {
        "verified": standing.verified,
        "needed": standing.needed,
        "strikes": standing.strikes,
        "quiet_until": standing.quiet_until,
        "banned_until": standing.banned_until,
        "reason": printable(standing.reason, 500),
    }
