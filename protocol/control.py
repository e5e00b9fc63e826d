"""The control socket: a daemon shows its whole state to viewers and takes their commands.

A Unix domain socket that only its owner may open (``barnraise.protocol.control_place``). The
daemon sends ``state`` (the whole tree, on every change, at most five times a second) and
``reply``; a viewer (``barnraise.protocol.control_client``) sends ``command``. A viewer that
sends rubbish or does not read is dropped; the daemon and other viewers never notice.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from barnraise.protocol.control_frames import (
    MAX_COMMAND,
    MAX_STATE,
    CommandFrame,
    ReplyFrame,
    State,
    StateFrame,
    decode_command,
    encode,
    receive,
)
from barnraise.protocol.control_place import listen_at, socket_path
from barnraise.protocol.errors import BarnraiseError, PeerError

log = logging.getLogger(__name__)

Command = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

MAX_VIEWERS = 64
MAX_COMMANDS_UNDER_WAY = 8
PUSH_INTERVAL_S = 0.2
WRITE_TIMEOUT_S = 10.0


class Changed:
    """Says that the state has changed; any number of tasks wait for it, none misses the last change."""

    def __init__(self) -> None:
        self._count = 0
        self._event = trio.Event()

    def set(self) -> None:
        """Note a change. Cheap: call it on every one."""
        self._count += 1
        self._event.set()
        self._event = trio.Event()

    async def wait(self, seen: int) -> int:
        """Wait until there were more than ``seen`` changes, and return how many (start with -1)."""
        while self._count <= seen:
            await self._event.wait()
        return self._count


async def serve_control(
    path: Path,
    get_state: Callable[[], State],
    commands: Mapping[str, Command],
    changed: Changed,
    *,
    task_status: Any = trio.TASK_STATUS_IGNORED,  # trio.TaskStatus[Path]; older stubs of trio lack it
) -> None:
    """Serve until cancelled; reports the socket's real path by ``nursery.start``.

    Args:
        path: the socket file; one that a dead process left is replaced.
        get_state: the whole state as a dict of plain values (it is encoded at once).
        commands: name -> ``async (args) -> result``. A ``BarnraiseError`` that one
            raises reaches the viewer as text; any other is logged.
        changed: ``set()`` whenever ``get_state`` would answer differently.

    Raises:
        BarnraiseError: another living process serves ``path``, or it cannot be made.
    """
    place = socket_path(path)
    listener = await listen_at(place)
    mine = place.stat().st_ino
    viewers = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal viewers
        if viewers >= MAX_VIEWERS:
            return
        viewers += 1
        try:
            await _Viewer(stream, get_state, commands, changed).run()
        except Exception:
            log.exception("a viewer's connection failed")
        finally:
            viewers -= 1

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            task_status.started(place)
    finally:
        with contextlib.suppress(OSError):
            if place.stat().st_ino == mine:
                place.unlink()


class _Viewer:
    def __init__(
        self,
        stream: trio.SocketStream,
        get_state: Callable[[], State],
        commands: Mapping[str, Command],
        changed: Changed,
    ) -> None:
        self._stream = stream
        self._get_state = get_state
        self._commands = commands
        self._changed = changed
        self._sending = trio.Lock()
        self._under_way = 0

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._push_states)
                await self._obey(nursery)
                nursery.cancel_scope.cancel()
        except* (BarnraiseError, trio.BrokenResourceError, trio.ClosedResourceError) as errors:
            log.info("dropped a viewer: %s", _innermost(errors))

    async def _push_states(self) -> None:
        seen = -1
        while True:
            seen = await self._changed.wait(seen)
            try:
                frame = encode(StateFrame(self._get_state()), MAX_STATE)
            except Exception:
                log.exception("the state could not be shown")
            else:
                await self._send(frame)
            await trio.sleep(PUSH_INTERVAL_S)

    async def _obey(self, nursery: trio.Nursery) -> None:
        while (body := await receive(self._stream, MAX_COMMAND)) is not None:
            command = decode_command(body)
            if self._under_way >= MAX_COMMANDS_UNDER_WAY:
                raise PeerError(f"more than {MAX_COMMANDS_UNDER_WAY} commands at once")
            self._under_way += 1
            nursery.start_soon(self._execute, command)

    async def _execute(self, command: CommandFrame) -> None:
        handler = self._commands.get(command.name)
        try:
            if handler is None:
                known = ", ".join(sorted(self._commands)) or "none"
                reply = ReplyFrame(command.id, None, f"no command {command.name!r}; there are: {known}")
            else:
                reply = ReplyFrame(command.id, await handler(command.args), "")
            frame = encode(reply, MAX_STATE)
        except BarnraiseError as error:
            frame = encode(ReplyFrame(command.id, None, str(error) or type(error).__name__), MAX_STATE)
        except Exception as error:
            log.exception("command %s failed", command.name)
            text = f"{command.name} failed ({type(error).__name__}); the log says more"
            frame = encode(ReplyFrame(command.id, None, text), MAX_STATE)
        finally:
            self._under_way -= 1
        await self._send(frame)

    async def _send(self, frame: bytes) -> None:
        with trio.move_on_after(WRITE_TIMEOUT_S):
            async with self._sending:
                await self._stream.send_all(frame)
            return
        raise PeerError(f"it read nothing for {WRITE_TIMEOUT_S:.0f} s")


def _innermost(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors
