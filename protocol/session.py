"""One long-lived stream per node: requests, their replies, and unasked pushes.

``Session`` is the node's end, ``barnraise.protocol.server_session`` the coordinator's. Requests
carry an id that their reply repeats, so that several may be under way at once and be
answered in any order. Both ends write through a bounded queue and never stop
reading: a peer that does not read is cut off, and nobody else notices.

A frame that is malformed, or that this side never accepts, ends the one session
with a logged reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError, RefusedError
from barnraise.protocol.frames import FRAME_BY_TYPE, FRAMES
from barnraise.protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Message, Refusal
from barnraise.protocol.network import Stream
from barnraise.protocol.session_outbox import MAX_OUTBOX, MESSAGE_TIMEOUT_S, Outbox, finish, first_of, id_of
from barnraise.protocol.wire import MessageReader

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)

REPLIES: frozenset[type[Message]] = frozenset(f.type for f in FRAMES if f.kind == "reply")
PUSHES: frozenset[type[Message]] = frozenset(f.type for f in FRAMES if f.kind == "push")

REQUEST_TIMEOUT_S = 30.0
MAX_WAITING_PUSHES = 1024


class Session:
    """The asking end. Open a stream on ``SESSION_PROTOCOL``, then run ``run()`` in a nursery.

    Attributes:
        pushes: what the other side sends unasked; ends when the session does.
        reason: why the session ended, or ``""`` while it lives.
    """

    def __init__(
        self, stream: Stream, *, timeout_s: float = REQUEST_TIMEOUT_S, minor: int = PROTOCOL_MINOR
    ) -> None:
        """``minor``: the older of the two sides' protocol minors."""
        self._stream = stream
        self._minor = minor
        self._timeout_s = timeout_s
        self._next_id = 1
        self._waiting: dict[int, _Awaited] = {}
        self._outbox = Outbox(stream, MAX_OUTBOX)
        self._push, self.pushes = trio.open_memory_channel[Message](MAX_WAITING_PUSHES)
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        self._closing = False
        self.reason = ""

    @property
    def peer_id(self) -> str:
        """The other side, as the transport proved it."""
        return self._stream.peer_id

    async def run(self) -> None:
        """Serve the session until the peer closes it, it breaks, or ``close`` is called. Never raises."""
        clean = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._outbox.write)
                    await self._read()
                    clean = True
                    self._end(f"{self.peer_id} closed the session")
                    nursery.cancel_scope.cancel()
            if self._scope.cancelled_caught:
                clean = clean or self._closing or not self.reason
                self._end("the session was closed")
        except* BarnraiseError as errors:
            self._end(str(first_of(errors)))
            log.info("session with %s ended: %s", self.peer_id, self.reason)
        finally:
            self._end("the session was cancelled")
            await finish(self._stream, clean)

    async def close(self, reason: str = "the session was closed") -> None:
        """End the session; requests under way fail with ``PeerError``."""
        self._end(reason)
        self._closing = True  # else ``run``, ending first, would reset the stream that we close
        self._scope.cancel()
        await finish(self._stream, True)

    async def wait_ended(self) -> str:
        """Wait until the session is over and return the reason."""
        await self._ended.wait()
        return self.reason

    async def request(
        self, build: Callable[[int], Message], reply: type[R], *, timeout_s: float | None = None
    ) -> R:
        """Send ``build(id)`` and return the reply to it.

        Args:
            timeout_s: seconds to wait for the reply, counted from the moment the
                request has left (an upload may take longer); default 30.

        Raises:
            RefusedError: the other side understood and refused, or is too old to understand.
            PeerError: the session ended, or no reply came in time.
        """
        seconds = self._timeout_s if timeout_s is None else timeout_s
        request_id, self._next_id = self._next_id, self._next_id + 1
        message = build(request_id)
        what = type(message).__name__
        if (since := FRAME_BY_TYPE[type(message)].since) > self._minor:
            raise RefusedError(
                "too-old",
                f"{self.peer_id} speaks a protocol before {PROTOCOL_MAJOR}.{since}: update that side",
            )
        awaited = self._waiting[request_id] = _Awaited()
        try:
            if self._ended.is_set():
                raise PeerError(f"no session for {what}: {self.reason}")
            answer: Message | None = None
            with trio.move_on_after(MESSAGE_TIMEOUT_S) as scope:
                if not self._outbox.put(message, partial(_limit, seconds, scope)):
                    raise PeerError(f"{self.peer_id} does not read: too much waits to be sent before {what}")
                await awaited.come.wait()
                answer = awaited.answer
                if answer is None:
                    raise PeerError(
                        f"lost {self.peer_id} while waiting for the answer to {what}: {self.reason}"
                    )
            if answer is None:
                raise PeerError(f"{self.peer_id} did not answer {what} within {seconds:g} s")
            if isinstance(answer, Refusal):
                raise RefusedError(answer.code, answer.message)
            if not isinstance(answer, reply):
                text = f"{self.peer_id} answered {what} with {type(answer).__name__}, not {reply.__name__}"
                self._fail(text)
                raise PeerError(text)
            return answer
        finally:
            self._waiting.pop(request_id, None)

    async def _read(self) -> None:
        reader = MessageReader(self._stream, REPLIES | PUSHES)
        while (message := await reader.receive()) is not None:
            if type(message) in PUSHES:
                try:
                    self._push.send_nowait(message)
                except trio.WouldBlock:
                    raise PeerError(f"{MAX_WAITING_PUSHES} pushes from {self.peer_id} wait unread") from None
                except trio.BrokenResourceError:
                    pass  # nobody wants pushes
                continue
            request_id = id_of(message)
            if request_id >= self._next_id:
                raise MalformedError(f"{self.peer_id} answered request {request_id}, which was never sent")
            waiting = self._waiting.get(request_id)
            if waiting is not None:  # else it came too late: nobody waits any more
                if waiting.answer is not None:
                    raise MalformedError(f"{self.peer_id} answered request {request_id} twice")
                waiting.answer = message
                waiting.come.set()

    def _fail(self, reason: str) -> None:
        self._end(reason)
        log.warning("session with %s ended: %s", self.peer_id, reason)
        self._scope.cancel()

    def _end(self, reason: str) -> None:
        if self._ended.is_set():
            return
        self.reason = reason
        self._ended.set()
        self._push.close()
        for awaited in self._waiting.values():
            awaited.come.set()


class _Awaited:
    """An answer that somebody waits for; without one once it has come: the session is over."""

    __slots__ = ("answer", "come")

    def __init__(self) -> None:
        self.answer: Message | None = None
        self.come = trio.Event()


def _limit(seconds: float, scope: trio.CancelScope) -> None:
    scope.deadline = min(scope.deadline, trio.current_time() + seconds)
