"""Questions over a screen: a value, a duration, a yes. Escape always leaves without doing anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from barnraise.tui.app.fields import parse_duration
from barnraise.tui.app.keys import Keys
from barnraise.tui.app.sheet import Row, Sheet, words

CSS = """
{name} {{
    align: center middle;
    & > Vertical {{
        width: 64; max-width: 96%; height: auto; max-height: 90%;
        background: $surface; border: solid $border; padding: 0 1;
    }}
    Sheet {{ padding: 0; }}
    Input {{ border: none; height: 1; padding: 0 1; margin: 1 0; background: $panel; }}
}}
"""


class Ask(ModalScreen[tuple[Any] | None]):
    """Ask for one value; the answer is a 1-tuple of what ``read`` made of it, or None."""

    DEFAULT_CSS = CSS.format(name="Ask")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back", tooltip="Change nothing"),
        Binding("enter", "noop", "Set", tooltip="Set this value", priority=False),
    ]

    def __init__(self, title: str, hint: str, now: str, read: Callable[[str], Any]) -> None:
        super().__init__()
        self._title = title
        self._hint = hint
        self._now = now
        self._read = read

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Sheet(id="question", classes="bare", label=9)
            yield Input(placeholder=self._hint, compact=True)
            yield Sheet(id="problem", classes="bare", label=0)
        yield Keys()

    def on_mount(self) -> None:
        self.query_one("#question", Sheet).show(self.rows())
        self.query_one(Input).focus()

    def rows(self) -> list[Row]:
        """The question."""
        title = ("", words((self._title, "strong")))
        return [title, ("now", words(self._now)), ("write", words(f"{self._hint}; then Enter"))]

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            value = self._read(event.value)
        except ValueError as error:
            self.query_one("#problem", Sheet).show([("", words((str(error), "bad")))])
            return
        self.dismiss((value,))

    def action_noop(self) -> None:
        """Enter belongs to the input."""


class PauseFor(Ask):
    """Ask for how long; the answer is a 1-tuple of seconds."""

    DEFAULT_CSS = CSS.format(name="PauseFor")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Back", tooltip="Do not pause"),
        Binding("f1", "quick(1800)", "30 min", key_display="F1", tooltip="Pause for half an hour"),
        Binding("f2", "quick(3600)", "1 h", key_display="F2", tooltip="Pause for an hour"),
        Binding("f3", "quick(7200)", "2 h", key_display="F3", tooltip="Pause for two hours"),
        Binding("f4", "quick(28800)", "8 h", key_display="F4", tooltip="Pause for eight hours"),
    ]

    def __init__(self) -> None:
        super().__init__("Pause for how long?", "30m, 2h or 1h30m", "-", parse_duration)

    def rows(self) -> list[Row]:
        """The question."""
        return [
            ("", words(("Pause for how long?", "strong"))),
            ("", words("Work stops at once and goes on by itself afterwards; r resumes sooner.")),
            ("write", words("30m, 2h or 1h30m, then Enter; or take a key below")),
        ]

    def action_quick(self, seconds: int) -> None:
        """Answer with one of the usual times."""
        self.dismiss((seconds,))


class Confirm(ModalScreen[bool]):
    """A question that ``y`` agrees to; every other way out means no."""

    DEFAULT_CSS = CSS.format(name="Confirm")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes", tooltip="Do it"),
        Binding("n,escape,q", "dismiss(False)", "No", key_display="n", tooltip="Do not do it"),
    ]

    def __init__(self, title: str, *lines: str) -> None:
        super().__init__()
        self._rows: list[Row] = [("", words((title, "strong"))), *(("", words(line)) for line in lines)]

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Sheet(id="question", classes="bare", label=0, most=6)
        yield Keys()

    def on_mount(self) -> None:
        self.query_one(Sheet).show([*self._rows, ("", words(""))])
