"""Consent: what the run is, by its signed description, and the one question before anything is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen

from barnraise.tui.app.keys import Keys
from barnraise.tui.app.sheet import Row, Sheet, words


class Consent(ModalScreen[bool | None]):
    """True: agreed; False: declined; None: decided elsewhere, or later. The node waits meanwhile."""

    DEFAULT_CSS = """
    Consent {
        align: center middle;
        background: $background;
        & > VerticalScroll {
            width: 100; max-width: 98%; height: auto; max-height: 92%;
            background: $surface; border: solid $border; padding: 0 1;
            scrollbar-size-vertical: 1;
        }
        & Sheet { padding: 0; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Join this run", tooltip="Agree: fetch the model and begin to work"),
        Binding("n", "dismiss(False)", "Do not join", tooltip="Decline: the node ends, nothing was fetched"),
        Binding(
            "q", "app.detach", "Decide later", tooltip="Close this; the node goes on waiting for your answer"
        ),
        Binding("down,j,pagedown", "scroll(3)", "Down", show=False),
        Binding("up,k,pageup", "scroll(-3)", "Up", show=False),
    ]

    def __init__(self, asked: Mapping[str, Any]) -> None:
        super().__init__()
        self.run_id = str(asked.get("run_id", ""))
        self._rows = consent_rows(asked)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Sheet(id="fields", classes="bare", label=16, most=8)
        yield Keys()

    def on_mount(self) -> None:
        self.query_one(Sheet).show(self._rows)

    def action_scroll(self, by: int) -> None:
        """Scroll the description."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


def consent_rows(asked: Mapping[str, Any]) -> list[Row]:
    """The description as rows, the question around it."""
    rows: list[Row] = [("", words(("Lend this machine to this run?", "strong"))), ("", words(" "))]
    fields = asked.get("fields")
    for field in fields[:64] if isinstance(fields, list) else []:
        if isinstance(field, list) and len(field) == 2:
            rows.append((str(field[0])[:40], words(str(field[1]))))
    rows.append(("", words(" ")))
    rows.append(
        (
            "",
            words(
                "Nothing was fetched yet. ",
                ("y", "accent"),
                " joins, ",
                ("n", "accent"),
                " does not; you are asked once per run.",
            ),
        )
    )
    return rows
