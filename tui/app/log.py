"""Log: the node's log file, filtered by level and text, followed."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input

from barnraise.tui.app.listing import Column, Entry, Listing
from barnraise.tui.app.screen import NodeScreen
from barnraise.tui.app.sheet import Sheet, Words, words
from barnraise.tui.app.tail import LogLine
from barnraise.tui.app.view import View

LEVELS = ("everything", "warnings", "errors")


class Log(NodeScreen):
    """The newest line is at the end; the list follows it while the cursor is there."""

    tab = "log"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "slash",
            "search",
            "Search",
            key_display="/",
            tooltip="Find text: n and N go to the next and the last",
        ),
        Binding("n", "found(1)", "Next", show=False, tooltip="The next line with the text"),
        Binding("N", "found(-1)", "Last", show=False, tooltip="The line before with the text"),
        Binding("o", "only", "Only", tooltip="List only lines with the text, or all again"),
        Binding("w", "level", "Level", tooltip="Everything, warnings and errors, or errors only"),
        Binding(
            "space,end",
            "follow",
            "Follow",
            key_display="space",
            tooltip="Go to the end and follow it, or stop",
        ),
    ]
    DEFAULT_CSS = """
    Log {
        #find { display: none; height: 1; border: none; padding: 0 1; background: $surface; }
        #find.-shown { display: block; }
        #detail { min-height: 2; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._level = 0
        self._text = ""
        self._only = False
        self._follow = True
        self._drawn = (-1, "")  # what is listed

    def body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Sheet("Log", id="heading", label=0)
            yield Listing(Column("", 8), Column("", 7), Column(""), empty="nothing is logged yet", id="lines")
            yield Input(placeholder="text to find", id="find", compact=True)
            yield Sheet("Line in full", id="detail", label=0, most=4)

    def on_mount(self) -> None:
        self.query_one(Listing).focus()

    def draw(self, view: View) -> None:
        if self._drawn != (self.node.tail.count, self.node.tail.problem):
            self._list()

    def _matches(self, line: LogLine) -> bool:
        return self._text.casefold() in line.text.casefold()

    def _list(self) -> None:
        tail = self.node.tail
        self._drawn = (tail.count, tail.problem)
        chosen = [
            line for line in tail.lines if self._level == 0 or (line.bad if self._level == 2 else line.grave)
        ]
        if self._only and self._text:
            chosen = [line for line in chosen if self._matches(line)]
        listing = self.query_one(Listing)
        follow = self._follow
        empty = tail.problem or ("no such line" if self._only or self._level else "nothing is logged yet")
        listing.show([_entry(line, self._text) for line in chosen], empty)
        if follow:
            listing.go(len(chosen) - 1)
        found = sum(map(self._matches, chosen)) if self._text else 0
        parts = [LEVELS[self._level]]
        if self._text:
            parts.append(f"'{self._text[:20]}' in {found:,}" + (", only these" if self._only else ""))
        parts.append("following" if self._follow else "standing still")
        self.query_one("#heading", Sheet).note(" · ".join(parts))
        self._detail()

    def _detail(self) -> None:
        key = self.query_one(Listing).current
        line = next((line for line in reversed(self.node.tail.lines) if str(line.number) == key), None)
        rows: list[tuple[str, Words]] = []
        if line is not None:
            rows.append(("", words(line.text)))
            rows.append(("", words((" ".join(filter(None, (line.day, line.time, line.source))), "dim"))))
        self.query_one("#detail", Sheet).show(rows)

    def on_listing_moved(self) -> None:
        if not self.query_one(Listing).at_end:
            self._follow = False
        self._detail()

    def action_follow(self) -> None:
        """Follow the end, or stop."""
        self._follow = not self._follow or not self.query_one(Listing).at_end
        self._list()

    def action_level(self) -> None:
        """The next level."""
        self._level = (self._level + 1) % len(LEVELS)
        self._list()

    def action_only(self) -> None:
        """Only lines with the text, or all."""
        if not self._text:
            self.action_search()
            return
        self._only = not self._only
        self._list()

    def action_search(self) -> None:
        """Ask for a text."""
        find = self.query_one("#find", Input)
        find.value = self._text
        find.add_class("-shown")
        find.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._text = event.value.strip()
        self._only = self._only and bool(self._text)
        self._close()
        if self._text:
            self._follow = False
            self.action_found(-1)

    def _close(self) -> None:
        self.query_one("#find", Input).remove_class("-shown")
        self.query_one(Listing).focus()
        self._list()

    def key_escape(self) -> None:
        """Leave the search, or forget it."""
        if self.query_one("#find", Input).has_class("-shown"):
            self._close()
        elif self._text:
            self._text, self._only = "", False
            self._list()

    def action_found(self, by: int) -> None:
        """Go to the next line with the text, around the end."""
        if not self._text:
            return
        listing = self.query_one(Listing)
        lines = {str(line.number): line for line in self.node.tail.lines}
        keys = [entry.key for entry in listing.entries]
        here = keys.index(listing.current) if listing.current in keys else 0
        for step in range(1, len(keys) + 1):
            key = keys[(here + by * step) % len(keys)]
            if key in lines and self._matches(lines[key]):
                self._follow = False
                listing.go_to(key)
                return
        self.node.say(f"no line holds '{self._text}'", "warning")


def _entry(line: LogLine, find: str) -> Entry:
    tone = "bad" if line.bad else "warn" if line.grave else ""
    level = {"INFO": "", "WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}.get(
        line.level, line.level.lower()
    )
    return Entry(
        str(line.number),
        (words((line.time, "dim")), words((level if line.time else "", tone)), _marked(line.text, find)),
    )


def _marked(text: str, find: str) -> Words:
    at = text.casefold().find(find.casefold()) if find else -1
    if at < 0:
        return words(text)
    return words(text[:at], (text[at : at + len(find)], "found"), text[at + len(find) :])
