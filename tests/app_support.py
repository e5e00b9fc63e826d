"""The terminal application under a test: no terminal, no daemon, states given by hand."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.keys import _character_to_key
from textual.pilot import Pilot

from barnraise.tui.app.app import NodeApp
from barnraise.tui.app.clean import cleaned
from barnraise.tui.app.screenshots import RECORDING, Recording, settle
from barnraise.tui.app.theme import DARK

Story = Callable[["Watched", Pilot[str]], Awaitable[None]]


def use_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock times on the screen are local: have them the same everywhere."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def recorded() -> dict[str, Any]:
    """The recorded node's tree, with every key that there may be."""
    return cleaned(Recording(RECORDING).dressed())


class Watched(NodeApp):
    """An app that notes the commands it would send."""

    def __init__(self, folder: Path = RECORDING, **options: Any) -> None:
        recording = Recording(RECORDING)
        options = {"ascii": False, "clock": recording.clock, "watch": False} | options
        super().__init__(folder, **options)
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []

    def order(self, name: str, **arguments: Any) -> None:
        self.sent.append((name, arguments))

    def delay_update(self, delay: float = 0.05) -> None:
        """Textual hides the flicker of a change of screens for so long; here nobody looks."""

    def say(self, text: str, severity: Any = "information") -> None:
        self.said.append(text)
        super().say(text, severity)


def play(story: Story, app: Watched, size: tuple[int, int] = (80, 24)) -> None:
    """Run ``story`` with the app on a screen of ``size``; what the app raises is raised."""

    async def run() -> None:
        async with app.run_test(size=size, tooltips=False, notifications=True) as pilot:
            await story(app, pilot)

    asyncio.run(asyncio.wait_for(run(), 120))


class Stage:
    """One running app of 80x24 for many stories: to start one costs as much as fifty key presses.

    A story finds it on the overview, with the recorded state and nothing sent or said; what it
    leaves in lists and filters it leaves to the next.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.app = Watched()
        self._shown = self.app.run_test(size=(80, 24), tooltips=False, notifications=True)
        self._pilot = self._runner.run(self._shown.__aenter__())

    def play(self, story: Story) -> None:
        """Run ``story``; what the app raises meanwhile is raised."""

        async def run() -> None:
            await self._clear()
            await story(self.app, self._pilot)

        self._runner.run(asyncio.wait_for(run(), 120))
        if self.app._exception is not None:
            raise self.app._exception

    async def _clear(self) -> None:
        app = self.app
        app.take_state(recorded())
        while app.screen.is_modal:
            app.pop_screen()
        app.clear_notifications()
        await app.switch_mode("overview")
        app.theme = DARK.name
        await drawn(app)
        app.sent.clear()
        app.said.clear()

    def close(self) -> None:
        """End the app."""
        try:
            self._runner.run(self._shown.__aexit__(None, None, None))
        finally:
            self._runner.close()


async def press(app: NodeApp, pilot: Pilot[str], *keys: str) -> None:
    """Press keys, and wait until what they began is done and drawn.

    ``pilot.press`` waits by the clock, at least 40 ms a key; this waits until nothing is left to do.
    """
    for key in keys:
        send(app, key)
        await quiet()
        await settle(app)
    await drawn(app)


async def burst(app: NodeApp, *keys: str) -> None:
    """Have keys come all at once, as over a slow line; wait until what they began is done and drawn."""
    for key in keys:
        send(app, key)
    while app._typing is None or not app._typing.done():
        await asyncio.sleep(0.005)
    await settle(app)
    await drawn(app)


def send(app: NodeApp, key: str) -> None:
    """Post a key as a terminal does."""
    name = _character_to_key(key) if len(key) == 1 and not key.isalnum() else key
    assert app._driver is not None
    app._driver.send_message(events.Key(name, key if len(key) == 1 else None))


async def drawn(app: NodeApp) -> None:
    """Wait until all that was begun is done and on the screen."""
    for _ in range(2):  # what is drawn first may ask for more
        await quiet()
        if app.screen_stack:
            app.screen._on_timer_update()  # else up to a 60th of a second later
    await quiet()


async def quiet() -> None:
    """Wait until every task waits for the clock, for a thread or for a message: a pure question of order."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    while ready:
        await asyncio.sleep(0)


def frame(app: NodeApp) -> list[str]:
    """The screen as lines of text."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


def text(app: NodeApp) -> str:
    """The screen as one text."""
    return "\n".join(frame(app))
