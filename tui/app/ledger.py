"""Ledger: this node's own entries in the run's ledger, the balance they make, and whether they are proven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from barnraise.protocol.identity import fingerprint
from barnraise.tui.app.feed import Book, Verdict
from barnraise.tui.app.listing import Column, Entry, Listing
from barnraise.tui.app.screen import NodeScreen
from barnraise.tui.app.sheet import Row, Sheet, words
from barnraise.tui.app.view import View, clock, credit, told
from barnraise.tui.app.work import TONES
from barnraise.tui.status import standing

SHOWN = 2000


class Ledger(NodeScreen):
    """Entries, balance, proof."""

    tab = "ledger"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "c", "check", "Check again", tooltip="Read the receipts anew and check every signature again"
        ),
    ]
    DEFAULT_CSS = "Ledger #balance { margin-bottom: 1; }"

    def __init__(self) -> None:
        super().__init__()
        self._book: Book | None = None  # what is listed

    def body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Sheet("Balance", id="balance", label=11, most=2)
            yield Sheet("Own entries", id="heading", label=0)
            yield Listing(
                Column("ledger", 8, right=True),
                Column("date", 16),
                Column("entry", 11),
                Column("Mflop", 9, right=True),
                Column("balance", 12, right=True),
                Column("submission"),
                empty="no entry yet: the first comes with the first verdict",
                id="entries",
            )

    def on_mount(self) -> None:
        self.query_one(Listing).focus()

    def draw(self, view: View) -> None:
        book = self.node.book
        self.query_one("#balance", Sheet).show(balance_rows(view, book))
        if book is not self._book:
            self._book = book
            self.query_one("#heading", Sheet).note(f"{len(book.verdicts):,}, newest first")
            self.query_one(Listing).show([_entry(v) for v in book.verdicts[: -SHOWN - 1 : -1]], book.problem)

    def action_check(self) -> None:
        """Check every signature again."""
        self.node.read_book(anew=True)


def balance_rows(view: View, book: Book) -> Iterator[Row]:
    """Credit, outcomes, signatures, the coordinator's opinion."""
    tally = book.tally()
    yield "balance", words((credit(book.balance), "strong"), (f"  ({book.balance:,} Mflop)", "dim"))
    yield "entries", words(", ".join(f"{n:,} {name}" for name, n in sorted(tally.items())) or ("none", "dim"))
    total = len(book.receipts)
    if book.problem:
        yield "proof", words((book.problem, "bad"))
    elif not total:
        yield "proof", words(("nothing to prove yet", "dim"))
    elif book.proven == total:
        yield (
            "proof",
            words(
                (f"all {total:,} signatures hold", "good"),
                (f", by the run's key {fingerprint(book.operator)}", "dim"),
            ),
        )
    else:
        yield (
            "proof",
            words(
                (f"{book.proven:,} of {total:,} signatures checked", "warn"), ": the run's key is not here"
            ),
        )
    yield "in full", words(("barnraise ledger verify FILE --receipts ", "dim"), (view.folder, "dim"))
    opinion = told(standing, view.state.get("standing"), view.now)
    if opinion:
        yield "standing", words((opinion, "bad" if opinion.startswith("banned") else ""))


def _entry(verdict: Verdict) -> Entry:
    tone = TONES.get(verdict.outcome, "") if verdict.counts else "dim"
    return Entry(
        str(verdict.index),
        (
            words(f"#{verdict.index}"),
            words((clock(verdict.at, "%Y-%m-%d %H:%M"), "dim")),
            words((verdict.outcome, tone)),
            words(f"+{verdict.credit:,}" if verdict.credit else ("0", "dim")),
            words(f"{verdict.balance:,}"),
            words((verdict.submission[:16], "dim")),
        ),
    )
