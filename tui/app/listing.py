"""A list with columns and a cursor. It draws only the lines in sight, and takes texts as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.style import Style

from barnraise.tui.app.sheet import Line, Words, cut, fit, painted

_UPRIGHT = Style(reverse=False)


@dataclass(frozen=True)
class Column:
    """``width`` in cells; 0 takes what is left over. ``right`` for figures.

    ``from_width``: shown only where the list is at least so wide.
    """

    title: str
    width: int = 0
    right: bool = False
    from_width: int = 0


@dataclass(frozen=True)
class Entry:
    """One line: ``key`` tells it from others, so that the cursor stays on it."""

    key: str
    cells: tuple[Words, ...]


class Listing(ScrollView, can_focus=True):
    """Entries under a head of titles; keys move a cursor. ``newest_first``: new ones come at the beginning.

    Posts ``Moved`` when the cursor comes to another entry, ``Chosen`` on Enter.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"listing--head", "listing--line", "listing--cursor"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(0)", "First", show=False),
        Binding("end,G", "edge(1)", "Last", show=False),
        Binding("enter", "choose", "Choose", show=False),
    ]
    DEFAULT_CSS = """
    Listing {
        height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; overflow-x: hidden;
        & > .listing--head { color: $foreground 60%; }
        & > .listing--line { color: $foreground; }
        & > .listing--cursor { background: $block-cursor-blurred-background; }
        &:focus > .listing--cursor { background: $block-cursor-background; color: $block-cursor-foreground; }
        &:nocolor > .listing--cursor { text-style: reverse; }
    }
    """

    class Moved(Message):
        """The cursor came to another entry; ``key`` is None where there is none."""

        def __init__(self, listing: Listing, key: str | None) -> None:
            super().__init__()
            self.listing = listing
            self.key = key

        @property
        def control(self) -> Listing:
            return self.listing

    class Chosen(Moved):
        """Enter on an entry."""

    def __init__(
        self,
        *columns: Column,
        empty: str = "nothing yet",
        newest_first: bool = False,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self._newest_first = newest_first
        self._columns = columns
        self._empty = empty
        self._entries: tuple[Entry, ...] = ()
        self._cursor = 0
        self.head = any(column.title for column in columns)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What is listed."""
        return self._entries

    @property
    def current(self) -> str | None:
        """The key under the cursor."""
        return self._entries[self._cursor].key if self._entries else None

    @property
    def at_end(self) -> bool:
        """Whether the cursor is on the last entry, or there is none."""
        return self._cursor >= len(self._entries) - 1

    def show(self, entries: Sequence[Entry], empty: str = "") -> None:
        """List ``entries``; the cursor stays on its entry, or near it if that is gone, and in its line.

        On the first of a list that begins with the newest, it stays on the first.
        """
        new = tuple(entries)
        if new == self._entries and (not empty or empty == self._empty):
            return
        before, was = self.current, self._cursor
        resized = len(new) != len(self._entries)
        self._entries, self._empty = new, empty or self._empty
        where = next((index for index, entry in enumerate(new) if entry.key == before), None)
        if where is None or (was == 0 and self._newest_first):
            where = min(was, max(len(new) - 1, 0))
        self._cursor = where
        if resized:
            self._measure()
        if where != was:
            self.scroll_to(y=max(0, self.scroll_offset.y + where - was), animate=False, force=True)
        self.refresh()
        if self.current != before:
            self.post_message(self.Moved(self, self.current))

    def go(self, index: int) -> None:
        """Put the cursor on an entry."""
        if not self._entries:
            return
        index = min(max(index, 0), len(self._entries) - 1)
        if index != self._cursor:
            self._cursor = index
            self.refresh()
            self.post_message(self.Moved(self, self.current))
        top = index + (1 if self.head else 0)
        self.scroll_to_region(Region(0, top, 1, 1), animate=False, force=True)
        if index == 0:
            self.scroll_to(y=0, animate=False, force=True)

    def go_to(self, key: str) -> None:
        """Put the cursor on the entry ``key``, if it is there."""
        for index, entry in enumerate(self._entries):
            if entry.key == key:
                self.go(index)

    def action_move(self, by: int) -> None:
        self.go(self._cursor + by)

    def action_page(self, by: int) -> None:
        self.go(self._cursor + by * max(1, self.scrollable_content_region.height - 2))

    def action_edge(self, last: int) -> None:
        self.go(len(self._entries) - 1 if last else 0)

    def action_choose(self) -> None:
        if self._entries:
            self.post_message(self.Chosen(self, self.current))

    def on_click(self, event: Click) -> None:
        index = event.y + self.scroll_offset.y - (1 if self.head else 0)
        if 0 <= index < len(self._entries):
            self.go(index)

    def on_resize(self) -> None:
        self._measure()

    def _measure(self) -> None:
        width = self.scrollable_content_region.width
        self.virtual_size = Size(width, len(self._entries) + (1 if self.head else 0))

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        row = y + self.scroll_offset.y
        if self.head:
            if y == 0:
                head = tuple(((column.title, ""),) for column in self._columns)
                return self._strip(self._line(head, width), width, "listing--head")
            row -= 1
        if not self._entries and row == 0:
            return self._strip([(cut(self._empty, width), "dim")], width, "listing--line")
        if not 0 <= row < len(self._entries):
            return self._strip([], width, "listing--line")
        name = "listing--cursor" if row == self._cursor else "listing--line"
        return self._strip(self._line(self._entries[row].cells, width), width, name)

    def _strip(self, line: Line, width: int, name: str) -> Strip:
        style = self.get_visual_style(name)
        return painted(line, style).adjust_cell_length(width, (style + _UPRIGHT).rich_style)

    def _line(self, cells: Sequence[Words], width: int) -> Line:
        shown = [pair for pair in zip(self._columns, cells, strict=True) if width >= pair[0].from_width]
        fixed = sum(column.width for column, _ in shown) + 2 * (len(shown) - 1)
        wide = max(1, sum(1 for column, _ in shown if not column.width))
        line: Line = []
        for number, (column, pieces) in enumerate(shown):
            room = column.width or max(4, (width - fixed) // wide)
            if number:
                line.append(("  ", ""))
            line += fit(pieces, room, column.right)
        return line
