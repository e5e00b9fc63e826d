"""Work: the unit at hand, what is under way, and every verdict with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from barnraise.tui.app.feed import Book, Verdict
from barnraise.tui.app.listing import Column, Entry, Listing
from barnraise.tui.app.overview import now_rows
from barnraise.tui.app.screen import NodeScreen
from barnraise.tui.app.sheet import Row, Sheet, words
from barnraise.tui.app.view import View, clock, count, credit, number

SHOWN = 500
TONES = {"accepted": "good", "rejected": "bad", "clawed back": "bad", "restored": "good"}


class Work(NodeScreen):
    """Units and verdicts."""

    tab = "work"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "rejected", "Rejected", tooltip="List only what was rejected or taken back"),
        Binding("a", "appeal", "Appeal", tooltip="Have the rejected submission at the cursor verified again"),
    ]
    DEFAULT_CSS = "Work #detail { min-height: 3; }"

    def __init__(self) -> None:
        super().__init__()
        self._rejected = False
        self._book: Book | None = None  # what is listed

    def body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Sheet("Unit", id="unit", most=2)
            yield Sheet("Verdicts", id="heading", label=0)
            yield Listing(
                Column("ledger", 8, right=True),
                Column("time", 8),
                Column("outcome", 11),
                Column("credit", 12, right=True),
                Column("check", 14, from_width=90),
                Column("reason"),
                empty="no verdict yet: the first comes a minute or so after the first unit",
                newest_first=True,
                id="verdicts",
            )
            yield Sheet("Reason in full", id="detail", most=3)

    def draw(self, view: View) -> None:
        self.query_one("#unit", Sheet).show(_unit_rows(view, max(10, self.size.width - 14)))
        self.query_one("#heading", Sheet).show(_flow_rows(view))
        if self.node.book is not self._book:
            self._list(self.node.book)

    def _list(self, book: Book) -> None:
        self._book = book
        listing = self.query_one(Listing)
        chosen = [
            v
            for v in reversed(book.verdicts)
            if not self._rejected or v.outcome in ("rejected", "clawed back")
        ]
        empty = "nothing was rejected" if self._rejected and book.verdicts else book.problem
        listing.show([_entry(verdict) for verdict in chosen[:SHOWN]], empty)
        self.query_one("#heading", Sheet).note("rejected only" if self._rejected else "newest first")
        self._detail()

    def _current(self) -> Verdict | None:
        key = self.query_one(Listing).current
        return next((v for v in reversed(self.node.book.verdicts) if str(v.index) == key), None)

    def _detail(self) -> None:
        verdict = self._current()
        rows: list[Row] = []
        if verdict is not None:
            rows.append(("", words(verdict.text)))
            rows.append(("", words((f"submission {verdict.submission[:16]}", "dim"))))
            if not verdict.counts:
                rows.append(("", words(("a later receipt takes its place", "warn"))))
        self.query_one("#detail", Sheet).show(rows)

    def on_listing_moved(self) -> None:
        self._detail()

    def on_mount(self) -> None:
        self.query_one(Listing).focus()

    def action_rejected(self) -> None:
        """List all verdicts, or only the bad ones."""
        self._rejected = not self._rejected
        self._list(self.node.book)

    def action_appeal(self) -> None:
        """Appeal against the verdict at the cursor."""
        verdict = self._current()
        if verdict is None or verdict.outcome != "rejected":
            self.node.say("only a rejected submission can be appealed: put the cursor on one", "warning")
            return
        self.node.order("appeal", receipt=f"#{verdict.index}")


def _unit_rows(view: View, width: int) -> Iterator[Row]:
    for label, pieces in now_rows(view, width):
        if label != "version":
            yield label, pieces
        if label == "unit":
            yield "", words((" " * 10 + _unit(view.part("unit")), "dim"))


def _unit(unit: Mapping[str, Any]) -> str:
    if not unit:
        return ""
    tokens = number(unit.get("tokens"))
    made = f"{tokens:,.0f} tokens" if tokens else ""
    where = f"block {unit['block']}" if "block" in unit else f"unit {unit.get('unit_id', '?')}"
    saved = f"{number(unit.get('saved')):.0f} segments on disk" if unit.get("saved") else ""
    return ", ".join(part for part in (where, f"version {unit.get('version', '?')}", made, saved) if part)


def _flow_rows(view: View) -> Iterator[Row]:
    state = view.state
    yield (
        "",
        words(
            f"{count(state.get('units_done'))} units done",
            (" · ", "dim"),
            f"{count(state.get('pending'))} to send",
            (" · ", "dim"),
            f"{count(state.get('awaiting_verdict'))} wait for a verdict",
            (" · ", "dim"),
            f"{count(state.get('accepted'))} accepted",
            (" · ", "dim"),
            (f"{count(state.get('rejected'))} rejected", "warn" if number(state.get("rejected")) else ""),
        ),
    )


def _entry(verdict: Verdict) -> Entry:
    tone = TONES.get(verdict.outcome, "") if verdict.counts else "dim"
    return Entry(
        str(verdict.index),
        (
            words(f"#{verdict.index}"),
            words((clock(verdict.at), "dim")),
            words((verdict.outcome, tone)),
            words(f"+{credit(verdict.credit)}" if verdict.credit else ("-", "dim")),
            words(("" if verdict.check == "all" else verdict.check, "")),
            words((_reason(verdict.text), "dim")),
        ),
    )


def _reason(text: str) -> str:
    """A verdict's sentence without what the columns before it say."""
    text = text.removeprefix("accepted, ").removeprefix("rejected by ")
    return text.rpartition(": +")[0] or text
