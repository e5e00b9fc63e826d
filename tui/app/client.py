"""The app's connection to the daemon: states come in, commands go out, a lost daemon is looked for again.

``protocol.control`` speaks trio and Textual speaks asyncio, so the connection lives in a
thread of its own. States are coalesced there: however often the daemon pushes, the app is
called once per ``interval_s`` with the newest, and at once with what matters (``pace``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import trio

from barnraise.protocol.control_client import ControlClient, connect_control
from barnraise.protocol.errors import BarnraiseError, PeerError
from barnraise.tui.app.clean import cleaned
from barnraise.tui.app.pace import Pace

INTERVAL_S = 1.0
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 10.0

State = dict[str, Any]
Arguments = dict[str, Any]


class Link:
    """Watches the daemon behind ``socket`` from ``start`` to ``stop``.

    Args:
        on_state: called in the link's thread with each state, its strings safe for a terminal.
        on_lost: called in the link's thread with why there is no daemon, and the seconds (Unix)
            at which it is looked for again. First retry after 0.5 s, then twice as long up to 10 s.
    """

    def __init__(
        self,
        socket: Path,
        on_state: Callable[[State], None],
        on_lost: Callable[[str, float], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._socket = socket
        self._on_state = on_state
        self._on_lost = on_lost
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._run, name="barnraise-link", daemon=True)
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope: trio.CancelScope | None = None
        self._stopped = False
        self._commands: trio.MemorySendChannel[_Wish] | None = None  # None: no daemon
        self._again: trio.Event | None = None
        self._waits = trio.CancelScope()

    def start(self) -> None:
        """Begin to look for the daemon."""
        self._thread.start()

    def stop(self) -> None:
        """End the connection; callbacks may still come until the thread has ended, within moments."""
        self._stopped = True
        self._soon(self._cancel)

    def retry(self) -> None:
        """Look for the daemon now instead of after the pause."""
        self._soon(lambda: None if self._again is None else self._again.set())

    def command(self, name: str, arguments: Arguments) -> Future[dict[str, Any]]:
        """Have the daemon do ``name``: its answer, or ``BarnraiseError`` (``PeerError`` where it is gone)."""
        wish = _Wish(name, arguments)

        def put() -> None:
            try:
                if self._commands is None:
                    raise PeerError("no node is running here")
                self._commands.send_nowait(wish)
            except trio.WouldBlock:
                wish.fail(BarnraiseError("too many commands at once: wait for the answers"))
            except (PeerError, trio.BrokenResourceError, trio.ClosedResourceError):
                wish.fail(PeerError("no node is running here"))

        if not self._soon(put):
            wish.fail(PeerError("no node is running here"))
        return wish.answer

    def _soon(self, function: Callable[[], object]) -> bool:
        with self._lock:
            token = self._token
        if token is None:
            return False
        try:
            token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    def _run(self) -> None:
        trio.run(self._main)

    async def _main(self) -> None:
        with trio.CancelScope() as self._scope:
            with self._lock:
                self._token = trio.lowlevel.current_trio_token()
            if self._stopped:
                return
            pause = FIRST_RETRY_S
            while True:
                seen = False
                try:
                    async with connect_control(self._socket) as client:
                        seen = True
                        await self._watch(client)
                except (BarnraiseError, OSError) as error:
                    reason = cleaned(str(error) or type(error).__name__)
                if seen:
                    pause = FIRST_RETRY_S
                self._on_lost(reason, time.time() + pause)
                self._again = trio.Event()
                with trio.move_on_after(pause) as waited:
                    await self._again.wait()
                pause = min(pause * 2, LAST_RETRY_S) if waited.cancelled_caught else FIRST_RETRY_S

    async def _watch(self, client: ControlClient) -> None:
        """Pass states on until the daemon is gone, which raises ``PeerError``."""
        send, receive = trio.open_memory_channel[_Wish](16)
        self._commands = send
        gone: BarnraiseError | None = None
        pace = Pace(self._interval_s)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, client, receive, nursery, pace)
                try:
                    await self._pass_on(client, pace)
                except BarnraiseError as error:
                    gone = error
                nursery.cancel_scope.cancel()
        finally:
            self._commands = None
            while True:  # whoever still waits is told
                try:
                    receive.receive_nowait().fail(PeerError("the node is gone"))
                except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                    break
        raise gone or PeerError("the node is gone")

    async def _pass_on(self, client: ControlClient, pace: Pace) -> None:
        state = client.state
        while True:
            due = pace.due(state, trio.current_time())
            while due > trio.current_time():  # a newer one takes its place
                with trio.move_on_at(due) as self._waits:
                    state = await client.wait_change()
                due = min(due, pace.due(state, trio.current_time()))
            pace.show(state, trio.current_time())
            self._on_state(cleaned(state))
            state = await client.wait_change()

    async def _obey(
        self,
        client: ControlClient,
        wishes: trio.MemoryReceiveChannel[_Wish],
        nursery: trio.Nursery,
        pace: Pace,
    ) -> None:
        async def one(wish: _Wish) -> None:
            pace.hurry(trio.current_time())
            try:
                answer = await client.command(wish.name, **wish.arguments)
                pace.hurry(trio.current_time())
                self._waits.cancel()  # what came of it may be here already, and wait for its second
                wish.answer.set_result(cleaned(answer))
            except BarnraiseError as error:
                wish.fail(error)
            finally:
                wish.fail(PeerError("the node is gone"))

        while True:
            nursery.start_soon(one, await wishes.receive())


class _Wish:
    def __init__(self, name: str, arguments: Arguments) -> None:
        self.name = name
        self.arguments = arguments
        self.answer: Future[dict[str, Any]] = Future()

    def fail(self, error: BarnraiseError) -> None:
        """Answer with an error, unless there is an answer."""
        if not self.answer.done():
            self.answer.set_exception(error)
