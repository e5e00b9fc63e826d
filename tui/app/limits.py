"""Limits: every limit of this node, changed while it works."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from barnraise.tui.app.dialogs import Ask
from barnraise.tui.app.fields import Field, for_a_while, note, shown_fields, until
from barnraise.tui.app.listing import Column, Entry, Listing
from barnraise.tui.app.screen import NodeScreen
from barnraise.tui.app.sheet import Row, Sheet, bar, words
from barnraise.tui.app.view import View, is_moment, number, text


class LimitsScreen(NodeScreen):
    """Enter edits the limit at the cursor."""

    tab = "limits"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,e", "edit", "Change", tooltip="Change the limit at the cursor: at once, and for good"),
        Binding("u", "meanwhile", "For a while", tooltip="Change the limit at the cursor for a time only"),
        Binding("U", "revert", "End it", show=False, tooltip="End now what holds for a while"),
        Binding("o", "lift", "Lift", tooltip="Take the limit at the cursor away, where that is possible"),
    ]
    DEFAULT_CSS = "LimitsScreen #about { min-height: 2; background: $surface; }"

    def body(self) -> ComposeResult:
        with Vertical(id="body"):
            yield Sheet("What holds now", id="now", label=10, most=2)
            yield Sheet("Limits", id="heading", label=0)
            yield Listing(
                Column("limit", 15),
                Column("set to", 16),
                Column("", 0),
                empty="no node, no limits",
                id="limits",
            )
            yield Sheet(id="about", classes="bare", label=10, most=1)

    def on_mount(self) -> None:
        self.query_one(Listing).focus()

    def draw(self, view: View) -> None:
        limits = view.part("limits")
        self.query_one("#now", Sheet).show(now_rows(view, max(8, min(40, self.size.width - 50))))
        self.query_one("#heading", Sheet).note(until(limits) or "Enter changes one, at once")
        self.query_one(Listing).show([_entry(field, limits) for field in shown_fields(limits)])
        self._about()

    def _about(self) -> None:
        field = self._field()
        rows: list[Row] = []
        if field is not None:
            rows.append(("for", words(field.about)))
            rows.append(("write", words(field.hint or "Enter goes to the next choice")))
        self.query_one("#about", Sheet).show(rows)

    def on_listing_moved(self) -> None:
        self._about()

    def _field(self) -> Field | None:
        key = self.query_one(Listing).current
        fields = shown_fields(self.node.view().part("limits"))
        return next((field for field in fields if field.key == key), None)

    def on_listing_chosen(self) -> None:
        self.action_edit()

    def action_edit(self) -> None:
        """Ask for a new value, or go to the next choice."""
        field = self._field()
        if field is None:
            return
        value = self.node.view().part("limits").get(field.key)
        if field.choices:
            self._send(field, field.next(value))
            return

        def done(answer: Any) -> None:
            if answer is not None:
                self._send(field, answer[0])

        title = f"{field.name}: {field.about}"
        self.app.push_screen(Ask(title, field.hint, field.show(value), field.read), done)

    def action_meanwhile(self) -> None:
        """Ask for a value and for how long it holds."""
        field = self._field()
        if field is None:
            return

        def done(answer: Any) -> None:
            if answer is not None:
                value, until_ms = answer[0]
                self.node.order("limits", **{field.key: value, "until_ms": until_ms})

        value = self.node.view().part("limits").get(field.key)
        named = " or ".join(field.show(choice).removeprefix("when ") for choice in field.choices)
        hint = f"{named or field.hint.split(',')[0].split(' or ')[0]} for 2h, or ... until 07:30"
        read = for_a_while(field, self.node.clock(), value)
        self.app.push_screen(
            Ask(f"{field.name} for a while: {field.about}", hint, field.show(value), read), done
        )

    def action_revert(self) -> None:
        """End what holds for a while."""
        if is_moment(self.node.view().part("limits").get("until_ms")):
            self.node.order("limits", until_ms=None)
        else:
            self.node.say("nothing holds for a while only: u changes a limit for a time", "warning")

    def action_lift(self) -> None:
        """Set the limit at the cursor to none."""
        field = self._field()
        if field is None:
            return
        try:
            value = field.read("none")
        except ValueError:
            self.node.say(f"{field.name}: there is always a limit; Enter changes it", "warning")
            return
        self._send(field, value)

    def _send(self, field: Field, value: Any) -> None:
        self.node.order("limits", **{field.key: value})


def now_rows(view: View, width: int) -> list[Row]:
    """Whether you are here, what suspends the work, the month's traffic."""
    rows: list[Row] = []
    if view.state and (view.lost or view.state.get("state") == "stopped"):
        rows.append(("work", words("none: the node has ended. ", ("These were its limits.", "dim"))))
        return [*rows, *_month(view, width)]
    presence = view.part("presence")
    if presence:
        rows.append(("you", words(text(presence.get("text"), "-"))))
    suspended = view.items("suspended")
    for entry in suspended[:3]:
        left = view.left(entry.get("until_ms"))
        cure = text(entry.get("cure"))
        rows.append(
            (
                "suspended",
                words(
                    (text(entry.get("reason"), "?"), "warn"),
                    f"; {cure}" if cure else "",
                    f"; ends in {left}" if left else "",
                ),
            )
        )
    if not suspended:
        mode = text(view.state.get("mode"))
        what = {"pause": "paused by command: r resumes", "finish": "finishing: r takes it back"}.get(mode)
        rows.append(("work", words(what or "nothing holds it back" if view.state else "-")))
    return [*rows, *_month(view, width)]


def _month(view: View, width: int) -> list[Row]:
    limits = view.part("limits")
    used, most = number(limits.get("monthly_used")), number(limits.get("monthly"))
    if not most:
        return []
    share = used / most
    spent = is_moment(limits.get("spent_until_ms"))
    again = f", renewed in {view.left(limits.get('spent_until_ms'))}" if spent else ""
    figures = words((f"  {share * 100:.0f} % used{again}", "warn" if spent else ""))
    return [("month", bar(share, width) + figures)]


def _entry(field: Field, limits: Any) -> Entry:
    return Entry(
        field.key,
        (
            words(field.name),
            words((field.show(limits.get(field.key)), "strong")),
            words((note(field, limits), "dim")),
        ),
    )
