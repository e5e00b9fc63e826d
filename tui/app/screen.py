"""What the six screens share: the top line, the tabs, the banner, the footer, and when they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Click
from textual.screen import Screen
from textual.widget import Widget

from barnraise.node.config import default_data_path
from barnraise.tui.app.keys import Keys
from barnraise.tui.app.sheet import Piece, Row, Sheet, content, cut, words
from barnraise.tui.app.view import View, clock, text
from barnraise.tui.console import duration

if TYPE_CHECKING:
    from barnraise.tui.app.app import NodeApp

TABS = ("overview", "work", "swarm", "ledger", "limits", "log")

GOOD = ("generating", "training")
STILL = ("paused", "complete", "finishing", "leaving", "stopping", "stopped", "suspended")


class Top(Widget):
    """Whose node, in which run, and what it does: one line on every screen."""

    DEFAULT_CSS = "Top { height: 1; padding: 0 1; background: $panel; }"

    def __init__(self) -> None:
        super().__init__()
        self._pieces: tuple[list[Piece], list[Piece]] = ([], [])

    def show(self, view: View) -> None:
        """Draw it if it changed."""
        new = (_whose(view), _doing(view))
        if new != self._pieces:
            self._pieces = new
            self.refresh()

    def render(self) -> Content:
        left, right = self._pieces
        room = self.size.width - sum(len(piece) for piece, _ in right) - 1
        plain = "".join(piece for piece, _ in left)
        if len(plain) > room and left:
            head = left[0]
            left = [head, (cut(plain[len(head[0]) :], room - len(head[0])), left[-1][1])]
        gap = max(1, room + 1 - content(left).cell_length)
        return content([*left, (" " * gap, ""), *right])


def _whose(view: View) -> list[Piece]:
    name, run = text(view.state.get("name")), text(view.state.get("run"))
    pieces: list[Piece] = [("Barnraise", "accent")]
    if name:
        pieces.append((f"  {name}", "strong"))
    if run:
        pieces.append((f"  in {run}", "dim"))
    return pieces


def _doing(view: View) -> list[Piece]:
    if view.lost:
        return [("○ no node", "bad")]
    if not view.state:
        return [("○ looking for the node", "dim")]
    state = text(view.state.get("state"), "?")
    return [mark(state), (state[:24], "strong")]


def mark(state: str) -> Piece:
    """A dot whose shape and tone say how a state stands."""
    if state in GOOD:
        return ("● ", "good")
    if state in STILL:
        return ("○ ", "warn")
    return ("● ", "bad") if state == "offline" else ("● ", "dim")


class Tab(Widget):
    """One screen's number and name."""

    DEFAULT_CSS = """
    Tab {
        width: auto; height: 1; padding: 0 1; color: $foreground 70%;
        &.-now { color: $foreground; text-style: bold underline; }
        &:hover { color: $foreground; }
        &:nocolor.-now { text-style: bold reverse; }
    }
    """

    def __init__(self, number: int, name: str, now: bool) -> None:
        super().__init__(classes="-now" if now else "")
        self._number = number
        self._to = name
        self.tooltip = Content(f"{name.capitalize()} (key {number})")

    def render(self) -> Content:
        return Content.assemble((str(self._number), "$accent"), f" {self._to.capitalize()}")

    def on_click(self, event: Click) -> None:
        self.app.switch_mode(self._to)


class Tabs(Widget):
    """The row of tabs."""

    DEFAULT_CSS = "Tabs { layout: horizontal; height: 1; background: $panel; }"

    def __init__(self, now: str) -> None:
        super().__init__()
        self._now = now

    def compose(self) -> ComposeResult:
        for number, name in enumerate(TABS, 1):
            yield Tab(number, name, name == self._now)


class NodeScreen(Screen[None]):
    """A screen about the node. Subclasses name themselves, compose ``body`` and draw in ``draw``."""

    tab: ClassVar[str] = ""
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,tab", "app.neighbour(1)", "Next screen", show=False),
        Binding("left,shift+tab", "app.neighbour(-1)", "Previous screen", show=False),
    ]

    DEFAULT_CSS = """
    NodeScreen {
        & > #body { height: 1fr; }
        & > #banner { background: $error 15%; padding: 0 1; display: none; }
        & > #banner.-shown { display: block; }
    }
    """

    @property
    def node(self) -> NodeApp:
        """The app."""
        return cast("NodeApp", self.app)

    def compose(self) -> ComposeResult:
        yield Top()
        yield Tabs(self.tab)
        yield Sheet(id="banner", classes="bare", label=0, most=3)
        yield from self.body()
        yield Keys()

    def body(self) -> ComposeResult:
        """The widgets between tabs and footer, under one with the id ``body``."""
        raise NotImplementedError

    def draw(self, view: View) -> None:
        """Bring the body up to date; called at most twice a second, and only while this screen is seen."""
        raise NotImplementedError

    def on_screen_resume(self) -> None:
        self.node.draw()

    def redraw(self, view: View) -> None:
        """Bring everything up to date."""
        if not self.is_mounted:
            return
        self.query_one(Top).show(view)
        banner = self.query_one("#banner", Sheet)
        rows = list(banner_rows(view))
        banner.set_class(bool(rows), "-shown")
        banner.show(rows)
        self.draw(view)


def _sentence(clause: str) -> str:
    return clause[:1].upper() + clause[1:]


def banner_rows(view: View) -> Iterator[Row]:
    """What is wrong and what cures it, above every screen; nothing while all is well."""
    if alarm := text(view.part("witness").get("alarm")):
        yield "", words(("Ledger alarm: ", "bad"), (alarm, "bad"))
    if view.lost:
        wait = max(0.0, view.retry_at - view.now)
        again = f"Looking again in {duration(wait)}" if wait >= 1 else "Looking again"
        if view.restarts:
            yield "", words((f"{_sentence(view.restarts)}. ", "bad"), f"{again}; ^r at once.")
            return
        if view.state:
            yield (
                "",
                words(
                    ("The node has ended. ", "bad"),
                    f"This is what was last seen of it, at {clock(view.seen_at)}.",
                ),
            )
        else:
            yield "", words(("No node is running here. ", "bad"), f"{_sentence(view.lost)}.")
        where = "" if view.folder == str(default_data_path()) else f" --data {view.folder}"
        yield "", words(f"Start it with 'barnraise join MULTIADDR{where}'. {again}; ^r at once.")
        return
    if view.state.get("duplicate_key"):
        yield (
            "",
            words(
                ("Another node uses the same key. ", "bad"),
                "Only one of them earns: give the other a key of its own (--key).",
            ),
        )
    for entry in view.items("suspended")[:2]:
        cure = text(entry.get("cure"))
        yield "", words(("Suspended: ", "warn"), text(entry.get("reason")), f"; {cure}" if cure else "")
