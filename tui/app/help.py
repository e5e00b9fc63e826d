"""Help: every key, what the words mean, and what goes on when this is closed."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen

from barnraise.tui.app.keys import Keys
from barnraise.tui.app.sheet import Row, Sheet, words

KEYS = (
    ("1 to 6", "Overview, Work, Swarm, Ledger, Limits, Log; also Tab, left and right"),
    ("p", "pause: work stops within two seconds, a block unit is kept"),
    ("P", "pause for a time, then go on"),
    ("r", "resume; takes a finish back, too"),
    ("f", "finish: complete the unit at work, take no more, then the node ends"),
    ("l", "leave: give the unit back and end the node now (asks first)"),
    ("q, ^q", "close this; the node goes on, 'barnraise tui' comes back to it"),
    ("t", "dark or light"),
    ("^p", "all commands by name"),
    ("^r", "look for the node at once"),
    ("up, down", "move in a list; also j and k, page keys, Home and End"),
)
SCREENS = (
    ("Work", "x only what was rejected, a appeals the rejection at the cursor"),
    ("Ledger", "v looks the entry at the cursor up in the run's log, c checks every signature again"),
    ("Limits", "Enter changes the limit at the cursor, u for a while only, U ends that; o takes it away"),
    ("Log", "/ finds, n and N go on, o lists only what was found, w level, space follows, Esc forgets"),
)
WORDS = (
    ("unit", "work that is lent for a while: completions to write, or steps on a block of the model"),
    ("verdict", "what the coordinator found in a unit; its receipt is signed and kept on this machine"),
    (
        "proof",
        "signed: by the run's key; in log: also found in the ledger that nodes witness; newer: not in it yet",
    ),
    ("credit", "useful operations that were verified: 1 Mflop is a million"),
    ("version", "the model as of one step; new ones come down a tree of peers"),
    ("eager, lazy", "links of that tree that carry versions, and those that only tell of them"),
)


class Help(ModalScreen[None]):
    """Closed by nearly any key."""

    DEFAULT_CSS = """
    Help {
        align: center middle;
        & > VerticalScroll {
            width: 92; max-width: 98%; height: auto; max-height: 94%;
            background: $surface; border: solid $border; padding: 0 1; scrollbar-size-vertical: 1;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "escape,question_mark,q,enter",
            "dismiss(None)",
            "Back",
            key_display="Esc",
            tooltip="Close the help",
        ),
        Binding("down,j", "scroll(2)", "Down", tooltip="Scroll down"),
        Binding("up,k", "scroll(-2)", "Up", tooltip="Scroll up"),
        Binding("pagedown", "scroll(15)", "Page down", show=False),
        Binding("pageup", "scroll(-15)", "Page up", show=False),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Sheet("Keys", id="keys", label=13)
            yield Sheet("On one screen", id="screens", label=13)
            yield Sheet("Words", id="words", label=13)
        yield Keys()

    def on_mount(self) -> None:
        for name, pairs in (("keys", KEYS), ("screens", SCREENS), ("words", WORDS)):
            rows: list[Row] = [(label, words(text)) for label, text in pairs]
            self.query_one(f"#{name}", Sheet).show(rows)

    def action_scroll(self, by: int) -> None:
        """Scroll."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)
