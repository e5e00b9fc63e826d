"""The viewer's end of a control socket: watch a daemon's state, and have it do things.

``read_state`` and ``send_command`` block and are for command lines; an app that stays
connected takes ``connect_control``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from barnraise.protocol.control import Changed
from barnraise.protocol.control_frames import (
    MAX_COMMAND,
    MAX_STATE,
    CommandFrame,
    ReplyFrame,
    State,
    StateFrame,
    decode_answer,
    encode,
    read_blocking,
    receive,
    result_of,
)
from barnraise.protocol.control_place import open_blocking, open_socket
from barnraise.protocol.errors import BarnraiseError, PeerError

ANSWER_TIMEOUT_S = 10.0  # for the first state
COMMAND_TIMEOUT_S = 30.0


class ControlClient:
    """A viewer's connection. Make one with ``connect_control``.

    Attributes:
        state: the latest state received.
    """

    def __init__(self, stream: trio.SocketStream, state: State) -> None:
        self._stream = stream
        self.state = state
        self._changes = Changed()
        self._seen = 0
        self._next_id = 0
        self._waiting: dict[int, trio.MemorySendChannel[ReplyFrame]] = {}
        self._lost = ""
        self._sending = trio.Lock()

    async def wait_change(self) -> State:
        """Wait for a newer state than the one this last returned, and return it.

        Raises:
            PeerError: the daemon is gone.
        """
        self._seen = await self._changes.wait(self._seen)
        if self._lost:
            raise PeerError(self._lost)
        return self.state

    async def command(self, name: str, **args: Any) -> dict[str, Any]:
        """Have the daemon do ``name`` and return its answer.

        Raises:
            BarnraiseError: the daemon refused; its text.
            PeerError: the daemon is gone or did not answer within 30 s.
        """
        if self._lost:
            raise PeerError(self._lost)
        self._next_id += 1
        send, receive = trio.open_memory_channel[ReplyFrame](1)
        self._waiting[self._next_id] = send
        number = self._next_id
        try:
            with trio.move_on_after(COMMAND_TIMEOUT_S):
                frame = encode(CommandFrame(number, name, args), MAX_COMMAND)
                try:
                    async with self._sending:
                        with trio.CancelScope(shield=True):  # never half a frame; it fits the buffer
                            await self._stream.send_all(frame)
                    reply = await receive.receive()
                except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
                    raise PeerError(self._lost or "the daemon is gone") from None
                return result_of(reply)
            raise PeerError(f"the daemon did not answer {name} within {COMMAND_TIMEOUT_S:.0f} s")
        finally:
            self._waiting.pop(number, None)

    async def _read(self) -> None:
        try:
            while (body := await receive(self._stream, MAX_STATE)) is not None:
                answer = decode_answer(body)
                if isinstance(answer, StateFrame):
                    self.state = answer.state
                    self._changes.set()
                elif (waiting := self._waiting.get(answer.id)) is not None:
                    with contextlib.suppress(trio.WouldBlock, trio.BrokenResourceError):
                        waiting.send_nowait(answer)
            self._lost = "the daemon has ended"
        except (BarnraiseError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._lost = f"the daemon is gone: {error}"
        self._changes.set()
        for waiting in self._waiting.values():
            waiting.close()


@asynccontextmanager
async def connect_control(path: Path) -> AsyncIterator[ControlClient]:
    """Watch the daemon that serves ``path``; its state is there on entry.

    Raises:
        PeerError: nothing serves ``path``, or it does not answer.
    """
    with trio.move_on_after(ANSWER_TIMEOUT_S) as scope:
        stream = await open_socket(path)
        body = await receive(stream, MAX_STATE)
    if scope.cancelled_caught or body is None:
        raise PeerError(f"the process behind {path} does not show its state")
    failure: Exception | None = None
    async with stream, trio.open_nursery() as nursery:
        first = decode_answer(body)
        client = ControlClient(stream, first.state if isinstance(first, StateFrame) else {})
        nursery.start_soon(client._read)
        try:
            yield client
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure  # the body's own, not wrapped in a group


def read_state(path: Path, timeout_s: float = 5.0) -> State:
    """Return the state of the daemon that serves ``path``. Blocking; for command lines.

    Raises:
        PeerError: nothing serves ``path``, or it does not answer within ``timeout_s``.
    """
    with open_blocking(path, timeout_s) as sock:
        return _first_state(sock, path)


def send_command(path: Path, name: str, timeout_s: float = COMMAND_TIMEOUT_S, **args: Any) -> dict[str, Any]:
    """Have the daemon that serves ``path`` do ``name``; return its answer. Blocking.

    Raises:
        BarnraiseError: the daemon refused; its text.
        PeerError: nothing serves ``path``, or it does not answer within ``timeout_s``.
    """
    with open_blocking(path, timeout_s) as sock:
        try:
            sock.sendall(encode(CommandFrame(1, name, args), MAX_COMMAND))
            while True:
                answer = decode_answer(read_blocking(sock))
                if isinstance(answer, ReplyFrame):
                    return result_of(answer)
        except OSError as error:
            raise PeerError(f"the process behind {path} did not answer {name}: {error}") from error


def _first_state(sock: socket.socket, path: Path) -> State:
    try:
        while True:
            answer = decode_answer(read_blocking(sock))
            if isinstance(answer, StateFrame):
                return answer.state
    except OSError as error:
        raise PeerError(f"the process behind {path} does not show its state: {error}") from error
