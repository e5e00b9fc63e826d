"""The footer: the keys that work now, each with a tooltip, in one line that is drawn at once.

Textual's own footer is a widget per key and makes them anew on every change of screen or
focus; over ssh, and on a machine that is busy, that is felt.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from textual.binding import ActiveBinding
from textual.content import Content
from textual.events import Click, MouseMove
from textual.screen import Screen
from textual.widget import Widget

from barnraise.tui.app.sheet import Line, content


@dataclass(frozen=True)
class _Shown:
    key: str
    display: str
    label: str
    tooltip: str
    start: int  # cells from the left

    @property
    def end(self) -> int:
        return self.start + cell_len(self.display) + 1 + cell_len(self.label)


class Keys(Widget):
    """One line at the bottom of a screen. What does not fit is left out, but never the last key."""

    DEFAULT_CSS = """
    Keys { dock: bottom; height: 1; padding: 0 1; background: $panel; color: $foreground 80%; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[_Shown, ...] = ()

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)
        self._changed(self.screen)

    def on_resize(self) -> None:
        self._changed(self.screen)

    def _changed(self, screen: Screen[object]) -> None:
        if not self.is_attached or screen is not self.screen:
            return
        new = self._laid_out(list(screen.active_bindings.values()))
        if new != self._shown:
            self._shown = new
            self.refresh()

    def _laid_out(self, bindings: list[ActiveBinding]) -> tuple[_Shown, ...]:
        chosen: list[tuple[str, str, str, str]] = []
        actions: set[str] = set()
        for active in bindings:
            binding = active.binding
            if not binding.show or not active.enabled or binding.action in actions:
                continue
            actions.add(binding.action)
            display = self.app.get_key_display(binding)
            chosen.append((binding.key, display, binding.description, active.tooltip or binding.tooltip))
        room = self.size.width
        while len(chosen) > 1 and _width(chosen) > room:
            del chosen[-2]
        shown: list[_Shown] = []
        start = 0
        for key, display, label, tooltip in chosen:
            shown.append(_Shown(key, display, label, tooltip, start))
            start = shown[-1].end + 2
        return tuple(shown)

    def render(self) -> Content:
        line: Line = []
        for number, one in enumerate(self._shown):
            line += [("  " if number else "", ""), (one.display, "key"), (f" {one.label}", "")]
        return content(line)

    def _at(self, x: int) -> _Shown | None:
        return next((one for one in self._shown if one.start <= x < one.end), None)

    def on_mouse_move(self, event: MouseMove) -> None:
        one = self._at(event.x - 1)
        tooltip = Content(one.tooltip or one.label) if one else None
        if self.tooltip != tooltip:
            self.tooltip = tooltip

    def on_click(self, event: Click) -> None:
        one = self._at(event.x - 1)
        if one is not None:
            self.app.simulate_key(one.key)


def _width(chosen: list[tuple[str, str, str, str]]) -> int:
    return sum(cell_len(display) + 1 + cell_len(label) for _, display, label, _ in chosen) + 2 * (
        len(chosen) - 1
    )
