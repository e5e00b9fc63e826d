"""Keys in order: each is looked at only when what the one before began has happened.

Over a slow line several keys come at once. Textual hands them all to the screen that is
there at that moment, so that ``off``, typed into a dialog that was about to open, would
have been the screen's own ``o``, ``f`` and ``f``: finish the node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from textual import events
from textual.app import App

HOPS = 3  # a message climbs from the list to its screen, which opens a dialog, which focuses its input
MOST_S = 0.1  # for each part on the way; one that was just closed never answers


class OrderedKeys(App[str]):
    """An app that takes one key at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: deque[events.Key] = deque()
        self._typing: asyncio.Task[None] | None = None

    async def on_event(self, event: events.Event) -> None:
        """Put keys in line; all else is Textual's."""
        if not isinstance(event, events.Key) or event.is_forwarded:  # which comes back up unused
            await super().on_event(event)
            return
        self._keys.append(event)
        if self._typing is None or self._typing.done():
            self._typing = asyncio.get_running_loop().create_task(self._type())

    async def _type(self) -> None:
        try:
            while self._keys:
                await super().on_event(self._keys.popleft())
                await self._settled()
        except Exception as error:
            self._handle_exception(error)

    async def _settled(self) -> None:
        """Follow what a key began from the widget that has it up to the app, and into what that opened."""
        for _ in range(HOPS):
            if not self.is_running or not self.screen_stack:
                return
            for part in (self.screen.focused or self.screen).ancestors_with_self:
                passed = asyncio.Event()
                if part.call_later(passed.set):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(passed.wait(), MOST_S)
