"""The application: keys and commands on one side, the daemon's states on the other.

It is a viewer: closing it stops nothing. Commands go to the daemon as any other viewer's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.filter import NoColor
from textual.screen import Screen

from barnraise.protocol.errors import BarnraiseError
from barnraise.tui.app.ascii import AsciiFilter, needs_ascii
from barnraise.tui.app.clean import clean_text
from barnraise.tui.app.client import Link
from barnraise.tui.app.consent import Consent
from barnraise.tui.app.dialogs import Confirm, PauseFor
from barnraise.tui.app.feed import Book, read_book
from barnraise.tui.app.help import Help
from barnraise.tui.app.ledger import Ledger
from barnraise.tui.app.limits import LimitsScreen
from barnraise.tui.app.log import Log
from barnraise.tui.app.ordered import OrderedKeys
from barnraise.tui.app.overview import Overview
from barnraise.tui.app.palette import commands
from barnraise.tui.app.proofs import Proofs
from barnraise.tui.app.screen import TABS, NodeScreen
from barnraise.tui.app.settings import is_light, remember_light, settings_path
from barnraise.tui.app.swarm import Swarm
from barnraise.tui.app.tail import Tail
from barnraise.tui.app.theme import DARK, LIGHT
from barnraise.tui.app.view import History, View
from barnraise.tui.app.work import Work
from barnraise.tui.background import waiting_in

TICK_S = 1.0
BOOK_EVERY_S = 2.0

Severity = Literal["information", "warning", "error"]


class NodeApp(OrderedKeys):
    """Shows the node whose data lies in ``folder``; the result is a sentence for after it closed.

    Args:
        folder: the node's data folder; nothing has to run there yet.
        light: begin with the light theme; None: with the one that was chosen last.
        ascii: draw with ASCII only; None: as the terminal and the locale say.
        clock: Unix time in seconds.
        watch: look for the daemon; without it, states are given by ``take_state``.
        settings: the file in which the theme is remembered; None: it is not.
    """

    TITLE = "Barnraise"
    ENABLE_COMMAND_PALETTE = True
    NOTIFICATION_TIMEOUT = 6
    MODES: ClassVar[dict[str, Any]] = {
        "overview": Overview,
        "work": Work,
        "swarm": Swarm,
        "ledger": Ledger,
        "limits": LimitsScreen,
        "log": Log,
    }
    DEFAULT_MODE = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"switch_mode('{name}')", name.capitalize(), show=False)
            for number, name in enumerate(TABS, 1)
        ),
        Binding("p", "pause", "Pause", tooltip="Stop the work within two seconds, until r"),
        Binding("P", "pause_for", "Pause for ...", show=False, key_display="P"),
        Binding("r", "resume", "Resume", tooltip="Go on working; takes a finish back, too"),
        Binding("f", "finish", "Finish", show=False),
        Binding("l", "leave", "Leave", show=False),
        Binding("question_mark", "help", "Help", key_display="?", tooltip="All keys, what the words mean"),
        Binding("q", "detach", "Quit", tooltip="Close this; the node goes on"),
        Binding("ctrl+q,ctrl+c", "detach", "Quit", show=False, system=True),
        Binding("t", "shade", "Dark or light", show=False),
        Binding("ctrl+r", "retry", "Look for the node", show=False),
    ]
    CSS = """
    NodeScreen { background: $background; }
    ToastRack { margin-bottom: 1; }
    Toast { border-left: none; padding: 0 1; background: $panel; max-width: 72; width: auto; }
    Tooltip { background: $panel; padding: 0 1; }
    CommandPalette { SearchIcon { display: none; } }
    """

    def __init__(
        self,
        folder: Path,
        *,
        light: bool | None = None,
        ascii: bool | None = None,
        clock: Callable[[], float] = time.time,
        watch: bool = True,
        settings: Path | None = None,
    ) -> None:
        no_color = bool(os.environ.get("NO_COLOR"))
        super().__init__()
        self.folder = folder
        self.tail = Tail(folder / "node.log")
        self.book = Book()
        self.proofs = Proofs()
        self.history = History()
        self.clock = clock
        self._link = Link(folder / "control.sock", self._state_came, self._node_lost)
        self._state: dict[str, Any] = {}
        self._lost = ""
        self._retry_at = self._seen_at = 0.0
        self._came_at = float("-inf")
        self._news: deque[tuple[dict[str, Any] | None, str, float]] = deque()
        self._watches = watch
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = ""
        self._reading = False
        self._book_due = 0.0
        self._orders: set[asyncio.Task[None]] = set()
        self.animation_level = "none"
        if no_color:
            self._filters.append(NoColor())
        if needs_ascii() if ascii is None else ascii:
            self._filters.append(AsciiFilter())
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = LIGHT.name if (is_light(settings) if light is None else light) else DARK.name

    # --- from the daemon

    def on_mount(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._watches:
            self._link.start()
        self.set_interval(TICK_S, self._tick)

    def on_unmount(self) -> None:
        self._link.stop()

    def _state_came(self, state: dict[str, Any]) -> None:
        self._tell((state, "", 0.0))

    def _node_lost(self, reason: str, retry_at: float) -> None:
        self._tell((None, reason, retry_at))

    def _tell(self, news: tuple[dict[str, Any] | None, str, float]) -> None:
        """From the link's thread: have the app's own take it."""
        self._news.append(news)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(self.call_later, self._take_news)

    def _take_news(self) -> None:
        state, reason, retry_at = self._news.popleft()
        if state is None:
            self.take_loss(reason, retry_at)
        else:
            self.take_state(state)

    def take_state(self, state: dict[str, Any]) -> None:
        """The node is so from now on."""
        now = self.clock()
        self._state, self._lost, self._seen_at = state, "", now
        self._came_at = time.monotonic()
        self.history.add(state, now)
        self.draw()
        self._ask_consent(state.get("consent"))

    def take_loss(self, reason: str, retry_at: float) -> None:
        """There is no node; it is looked for again at ``retry_at`` (Unix, s)."""
        self._lost, self._retry_at = reason, retry_at
        self.draw()

    def _tick(self) -> None:
        if self._state and not self._lost:
            self.history.add(self._state, self.clock())
        if time.monotonic() > self._came_at + 1.1 * TICK_S:  # else one was drawn just now, and more come
            self.draw()

    def view(self) -> View:
        """What there is to see now."""
        return View(
            state=self._state,
            now=self.clock(),
            history=self.history,
            lost=self._lost,
            retry_at=self._retry_at,
            seen_at=self._seen_at,
            folder=clean_text(str(self.folder)),
            restarts=self._restarts(),
        )

    def _restarts(self) -> str:
        return clean_text(waiting_in(self.folder)) if self._lost else ""

    def draw(self) -> None:
        """Bring the screen in sight up to date."""
        if not self.is_running:
            return
        screen = next((s for s in reversed(self.screen_stack) if isinstance(s, NodeScreen)), None)
        if screen is None:
            return
        if screen.tab in ("work", "ledger"):
            self.read_book()
        elif screen.tab == "log" or (screen.tab == "overview" and screen.size.height >= 30):
            self.tail.read()
        screen.redraw(self.view())

    def read_book(self, *, anew: bool = False) -> None:
        """Read the receipts in a thread if it is time; ``anew``: and check every signature again."""
        now = time.monotonic()
        if self._reading or (now < self._book_due and not anew):
            return
        self._reading, self._book_due = True, now + BOOK_EVERY_S
        run = str(self._state.get("run_id") or "")
        before = Book() if anew else self.book

        async def read() -> None:
            try:
                book = await asyncio.to_thread(read_book, self.folder, run, before)
            finally:
                self._reading = False
            if anew:
                self.say(f"checked {book.proven:,} of {len(book.receipts):,} signatures")
            if book is not self.book:
                self.book = book
                self.draw()

        self._start(read())

    @property
    def busy(self) -> bool:
        """Whether a command or a look at the receipts is under way."""
        return bool(self._orders)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    # --- to the daemon

    def say(self, text: str, severity: Severity = "information") -> None:
        """Show a line for a few seconds; nothing in it is markup."""
        self.notify(clean_text(text), severity=severity, markup=False)

    def order(self, name: str, **arguments: Any) -> None:
        """Send a command, and show its answer."""

        async def obey() -> None:
            try:
                answer = await asyncio.wrap_future(self._link.command(name, arguments))
            except BarnraiseError as error:
                self.say(f"{name}: {error}", "error")
            else:
                if name == "prove":
                    self.take_proof(answer)
                text = str(answer.get("text") or f"{name}: done")
                self.say(text, "information" if answer.get("ok", True) else "warning")

        self._start(obey())

    def take_proof(self, answer: dict[str, Any]) -> None:
        """Note what a node found out about receipts and the log (``barnraise.node.prove``)."""
        self.proofs = self.proofs.with_answer(self.book.run_id, answer)
        self.draw()

    def action_pause(self) -> None:
        """Pause until resumed."""
        self.order("pause")

    def action_pause_for(self) -> None:
        """Pause for a time."""

        def done(answer: Any) -> None:
            if answer is not None:
                self.order("pause", seconds=answer[0])

        self.push_screen(PauseFor(), done)

    def action_resume(self) -> None:
        """Go on."""
        self.order("resume")

    def action_finish(self) -> None:
        """Complete the unit, then end."""
        self.order("finish")

    def action_leave(self) -> None:
        """End the node, after a question."""

        def done(yes: bool | None) -> None:
            if yes:
                self.order("leave")

        self.push_screen(
            Confirm(
                "Leave the run and end this node?",
                "The unit at work goes back to the coordinator and earns nothing. What was judged stays "
                "yours; you can come back at any time with the same key.",
                "To only close this window, press q; to complete the unit first, f.",
            ),
            done,
        )

    def _ask_consent(self, asked: Any) -> None:
        shown = next((screen for screen in self.screen_stack if isinstance(screen, Consent)), None)
        if not isinstance(asked, dict):
            self._asked = ""
            if shown is not None:  # answered elsewhere
                shown.dismiss(None)
            return
        run_id = str(asked.get("run_id", ""))
        if run_id == self._asked or shown is not None:
            return
        self._asked = run_id

        def done(yes: bool | None) -> None:
            if yes is not None:
                self.order("agree" if yes else "decline", run_id=run_id)

        self.push_screen(Consent(asked), done)

    # --- the app itself

    def action_neighbour(self, by: int) -> None:
        """The next screen, or the one before."""
        here = TABS.index(self.current_mode) if self.current_mode in TABS else 0
        self.switch_mode(TABS[(here + by) % len(TABS)])

    def action_help(self) -> None:
        """Keys and words."""
        self.push_screen(Help())

    def action_shade(self) -> None:
        """The other theme, from now on."""
        self.theme = LIGHT.name if self.current_theme.dark else DARK.name
        remember_light(self._settings, not self.current_theme.dark)

    def action_retry(self) -> None:
        """Look for the node now."""
        self._link.retry()

    def action_detach(self) -> None:
        """Close, and say how things go on."""
        self.exit(self.farewell())

    def farewell(self) -> str:
        """One line for the terminal after the app has closed."""
        if restarts := self._restarts():
            return restarts
        if not self._state or self._lost:
            return "no node is running here"
        if self._state.get("mode") == "leave" or self._state.get("state") == "stopped":
            return "the node is ending"
        where = "" if self._is_default() else f" {clean_text(str(self.folder))}"
        since = self.view().ago(self._state.get("started_ms"))
        return (
            f"the node goes on ({self._state.get('state', '?')}{f', for {since} now' if since else ''}); "
            f"'barnraise tui{where}' shows it again, 'barnraise leave{where}' ends it"
        )

    def _is_default(self) -> bool:
        from barnraise.node.config import default_data_path

        return self.folder == default_data_path()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The command palette."""
        return commands(self)


def run(folder: Path, *, light: bool | None = None, ascii: bool | None = None) -> int:
    """Show the node in ``folder`` until the person closes the app; the exit code.

    The terminal must be one: ``barnraise.tui.attach`` checks it.
    """
    app = NodeApp(folder, light=light, ascii=ascii, settings=settings_path())
    text = app.run()
    if text:
        print(text)
    return app.return_code or 0
