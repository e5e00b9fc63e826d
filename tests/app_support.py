"""The terminal application under a test: no terminal, no daemon, states given by hand."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from barnraise.tui.app.app import NodeApp
from barnraise.tui.app.clean import cleaned
from barnraise.tui.app.screenshots import RECORDING, Recording, settle

Story = Callable[[NodeApp, Pilot[str]], Awaitable[None]]


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

    def say(self, text: str, severity: Any = "information") -> None:
        self.said.append(text)
        super().say(text, severity)


def play(story: Story, app: NodeApp, size: tuple[int, int] = (80, 24)) -> None:
    """Run ``story`` with the app on a screen of ``size``; what the app raises is raised."""

    async def run() -> None:
        async with app.run_test(size=size, tooltips=False, notifications=True) as pilot:
            await story(app, pilot)

    asyncio.run(asyncio.wait_for(run(), 120))


async def press(app: NodeApp, pilot: Pilot[str], *keys: str) -> None:
    """Press keys, and wait until what they began is done and drawn."""
    await pilot.press(*keys)
    await settle(app)
    await pilot.pause()


def frame(app: NodeApp) -> list[str]:
    """The screen as lines of text."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


def text(app: NodeApp) -> str:
    """The screen as one text."""
    return "\n".join(frame(app))
