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
from barnraise.tui.app.proofs import Head, Proofs, head_of, status
from barnraise.tui.app.screen import NodeScreen
from barnraise.tui.app.sheet import Piece, Row, Sheet, Words, words
from barnraise.tui.app.view import View, clock, credit, told
from barnraise.tui.app.work import TONES
from barnraise.tui.status import standing

SHOWN = 2000


class Ledger(NodeScreen):
    """Entries, balance, proof."""

    tab = "ledger"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "v",
            "prove",
            "Prove",
            tooltip="Follow the entry at the cursor, and its neighbours, in the run's log",
        ),
        Binding(
            "c", "check", "Check again", tooltip="Read the receipts anew and check every signature again"
        ),
    ]
    DEFAULT_CSS = "Ledger #balance { margin-bottom: 1; }"

    def __init__(self) -> None:
        super().__init__()
        self._listed: tuple[Book, int, Proofs] | None = None

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
                Column("proof", 8),
                Column("submission", 16, from_width=100),
                empty="no entry yet: the first comes with the first verdict",
                newest_first=True,
                id="entries",
            )

    def on_mount(self) -> None:
        self.query_one(Listing).focus()

    def draw(self, view: View) -> None:
        book, proofs, head = self.node.book, self.node.proofs, head_of(view)
        if proofs.run_id != book.run_id:
            proofs = Proofs()
        self.query_one("#balance", Sheet).show(balance_rows(view, book, proofs))
        if (book, head.size, proofs) != self._listed:
            self._listed = (book, head.size, proofs)
            self.query_one("#heading", Sheet).note(f"{len(book.verdicts):,}, newest first")
            signed = book.proven == len(book.receipts)
            entries = [_entry(v, status(v.index, signed, head.size, proofs)) for v in _newest(book)]
            self.query_one(Listing).show(entries, book.problem)

    def action_check(self) -> None:
        """Check every signature again."""
        self.node.read_book(anew=True)

    def action_prove(self) -> None:
        """Have the node look the entry up in the log."""
        key = self.query_one(Listing).current
        if key is None:
            self.node.say("there is no entry to prove yet", "warning")
        else:
            self.node.order("prove", index=int(key))


def _newest(book: Book) -> tuple[Verdict, ...]:
    return book.verdicts[: -SHOWN - 1 : -1]


def balance_rows(view: View, book: Book, proofs: Proofs = Proofs()) -> Iterator[Row]:
    """Credit, outcomes, signatures, the log, the coordinator's opinion."""
    tally = book.tally()
    yield "balance", words((credit(book.balance), "strong"), (f"  ({book.balance:,} Mflop)", "dim"))
    yield "entries", words(", ".join(f"{n:,} {name}" for name, n in sorted(tally.items())) or ("none", "dim"))
    total = len(book.receipts)
    if book.problem:
        yield "signatures", words((book.problem, "bad"))
    elif not total:
        yield "signatures", words(("nothing to prove yet", "dim"))
    elif book.proven == total:
        yield (
            "signatures",
            words(
                (f"all {total:,} signatures hold", "good"),
                (f", by the run's key {fingerprint(book.operator)}", "dim"),
            ),
        )
    else:
        yield (
            "signatures",
            words(
                (f"{book.proven:,} of {total:,} signatures checked", "warn"), ": the run's key is not here"
            ),
        )
    yield "log", _log(view, book, head_of(view), proofs)
    yield "in full", words(("barnraise ledger verify FILE --receipts ", "dim"), (view.folder, "dim"))
    opinion = told(standing, view.state.get("standing"), view.now)
    if opinion:
        yield "standing", words((opinion, "bad" if opinion.startswith("banned") else ""))


def _log(view: View, book: Book, head: Head, proofs: Proofs) -> Words:
    """The head that the node cosigned last, and how many own entries were followed up to one."""
    if not view.state:
        return words(("not known while no node runs", "dim"))
    if not head.size:
        return words(("no head seen yet: the node asks once a minute", "dim"))
    if proofs.wrong:
        index, why = next(iter(proofs.wrong.items()))
        return words((f"#{index}: {why}", "bad"))
    seen = view.ago(head.at_ms)
    below = sum(verdict.index < head.size for verdict in book.verdicts)
    return words(
        (f"{head.size:,} entries" + (f", cosigned {seen} ago" if seen else ""), ""),
        (f", root {head.root[:8]}; ", "dim"),
        (f"{len(proofs.proven):,} of your {below:,} found in it", "good" if proofs.proven else ""),
        ("; v looks one up" if len(proofs.proven) < below else "", "dim"),
    )


def _entry(verdict: Verdict, proof: Piece) -> Entry:
    tone = TONES.get(verdict.outcome, "") if verdict.counts else "dim"
    return Entry(
        str(verdict.index),
        (
            words(f"#{verdict.index}"),
            words((clock(verdict.at, "%Y-%m-%d %H:%M"), "dim")),
            words((verdict.outcome, tone)),
            words(f"+{verdict.credit:,}" if verdict.credit else ("0", "dim")),
            words(f"{verdict.balance:,}"),
            words(proof),
            words((verdict.submission[:16], "dim")),
        ),
    )
