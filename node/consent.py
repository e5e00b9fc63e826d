"""The one question before a run is joined, and whoever answers it first: a terminal or a viewer.

While it is open the state tree holds ``consent`` (the run's id and its description), and
the commands ``agree`` and ``decline`` answer it. Nothing of the model is fetched before.
"""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from barnraise.node.needs import Field
from barnraise.protocol.errors import RefusedError

Approve = Callable[[list[Field]], Awaitable[bool]]  # shown the run's description; whether to join


def forget_typed_ahead() -> None:
    """Drop what was typed at the terminal before a question was shown: it was no answer to it."""
    with contextlib.suppress(termios.error, OSError, ValueError):  # no terminal: nothing was typed
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


class Consent:
    """At most one open question.

    Attributes:
        open: None, or the state tree's ``consent``.
    """

    def __init__(self) -> None:
        self.open: dict[str, Any] | None = None
        self._answered = trio.Event()
        self._answer = False

    async def ask(self, approve: Approve, run_id: bytes, fields: list[Field]) -> bool:
        """Wait for an answer by ``approve`` or by a command, whichever comes first."""
        self._answered, self._answer = trio.Event(), False
        self.open = {"run_id": run_id.hex(), "fields": [list(field) for field in fields]}
        try:
            async with trio.open_nursery() as nursery:

                async def at_the_terminal() -> None:
                    answer = await approve(fields)
                    if not self._answered.is_set():
                        self._answer = answer
                        self._answered.set()

                nursery.start_soon(at_the_terminal)
                await self._answered.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.open = None
        return self._answer

    def answer(self, arguments: dict[str, Any], yes: bool) -> None:
        """A viewer's answer.

        Raises:
            RefusedError: nothing is asked, or about another run than the viewer saw.
        """
        if self.open is None:
            raise RefusedError("nothing-asked", "this node waits for no consent")
        if arguments.get("run_id") != self.open["run_id"]:
            raise RefusedError("bad-argument", f"the question is about run {self.open['run_id']}")
        if not self._answered.is_set():
            self._answer = yes
            self._answered.set()


async def ask_viewers(fields: list[Field]) -> bool:
    """An ``approve`` for a node without a terminal: viewers alone can answer."""
    await trio.sleep_forever()
    raise AssertionError("unreachable")
