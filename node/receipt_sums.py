"""What receipts add up to, kept up with each that comes: a node may come to hold 100,000 of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from barnraise.node.receipt_words import outcome
from barnraise.protocol.messages import Receipt


class Totals(NamedTuple):
    """Counts of verdicts, and credit in millions of useful floating-point operations."""

    accepted: int
    rejected: int
    credit: int


class Sums:
    """Totals over the submissions: of each counts the receipt of the largest ledger index.

    Work whose credit was clawed back counts as accepted, and for nothing.
    """

    def __init__(self, receipts: Iterable[Receipt] = ()) -> None:
        self.totals = Totals(0, 0, 0)
        self._newest: dict[bytes, Receipt] = {}
        for receipt in receipts:
            self.add(receipt)

    def add(self, receipt: Receipt) -> None:
        """Take one receipt in, whatever its place in the ledger; each index once."""
        known = self._newest.get(receipt.submission_id)
        if known is not None and known.ledger_index > receipt.ledger_index:
            return
        self._newest[receipt.submission_id] = receipt
        self._count(receipt, 1)
        if known is not None:
            self._count(known, -1)

    def _count(self, receipt: Receipt, by: int) -> None:
        accepted, rejected, credit = self.totals
        refused = outcome(receipt) == "rejected"
        self.totals = Totals(
            accepted + by * (not refused), rejected + by * refused, credit + by * receipt.credit
        )
