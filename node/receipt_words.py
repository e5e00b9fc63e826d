"""Receipts for people: which one counts, which one is meant, and what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from barnraise.protocol.credit_words import credit_words
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.messages import Receipt, StandingPush
from barnraise.protocol.standing import CLAWED_BACK, RESTORED, UNAUDITED, UNVERIFIABLE
from barnraise.protocol.wire import printable

SHORTEST_PREFIX = 4

# What the checks of block units look at; those of rollouts say it in their messages.
BLOCK_CHECKS = {
    "block-files": "are the files those that were signed?",
    "block-format": "can the files be read as a block's?",
    "block-delta": "is the difference end minus start?",
    "block-bound": "did no weight move further than the steps allow?",
    "block-replay": "does a segment, done again, end in the same state?",
    "block-loss": "is the block no worse on text, and were the losses those of the training?",
    "block-withheld": "were the files served in time?",
    "block-hidden": "were the files served when they told which segments were drawn?",
}


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
    asks = f" ({BLOCK_CHECKS[verdict.check]})" if verdict.check in BLOCK_CHECKS else ""
    return (
        f"rejected by check {printable(verdict.check)}{asks}{where}: {verdict.value:g}, the threshold is "
        f"{verdict.threshold:g}. {message}"
    )


def summary(receipts: Sequence[Receipt]) -> str:
    """Verdicts given while the node was away, in one sentence."""
    counts = Counter(map(outcome, receipts))
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    earned = credit_words(sum(receipt.credit for receipt in receipts if outcome(receipt) == "accepted"))
    return (
        f"{len(receipts):,} verdicts came meanwhile: {kinds}, {earned} earned; "
        "'barnraise receipts' lists them"
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
