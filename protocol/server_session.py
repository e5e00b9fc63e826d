"""The coordinator's end of a session: requests answered several at a time, and unasked pushes.

The node's end, and what a session is, is ``barnraise.protocol.session``. Whatever a node sends,
or does not read, ends its own session alone, with a logged reason; what all of them together
may keep in memory is bounded by an ``Intake``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError, RefusedError
from barnraise.protocol.frames import FRAME_BY_TYPE, FRAMES
from barnraise.protocol.messages import PROTOCOL_MINOR, Message, Refusal
from barnraise.protocol.network import Stream
from barnraise.protocol.session_outbox import MAX_OUTBOX, MESSAGE_TIMEOUT_S, Outbox, finish, first_of, id_of
from barnraise.protocol.wire import MessageReader

log = logging.getLogger(__name__)

REQUESTS: frozenset[type[Message]] = frozenset(f.type for f in FRAMES if f.kind == "request")

IDLE_TIMEOUT_S = 60.0  # heartbeats come every few seconds
MAX_IN_FLIGHT = 32
MAX_INTAKE = 1024 * 1024 * 1024  # bytes, all sessions of a coordinator together
_LARGE = 64 * 1024


class Intake:
    """The memory that what sessions have received, and not yet answered, may take together.

    When it is full, sessions are ended whose large message has been arriving for
    longest: whoever drips makes room for whoever sends.
    """

    def __init__(self, most: int = MAX_INTAKE) -> None:
        self.held = 0
        self._most = most
        self._arriving: dict[ServerSession, int] = {}  # bytes of an unfinished message, the oldest first

    def received(self, session: ServerSession, size: int) -> None:
        """``size`` more bytes of a message have arrived."""
        self.held += size
        self._arriving[session] = self._arriving.get(session, 0) + size
        if self.held > self._most:
            self._make_room()

    def finished(self, session: ServerSession) -> int:
        """The message is whole; returns its bytes, which count until they are given to ``answered``."""
        return self._arriving.pop(session, 0)

    def answered(self, size: int) -> None:
        """A message of ``size`` bytes is of no more use."""
        self.held -= size

    def ended(self, session: ServerSession) -> None:
        """The session is over, and what it was sending gone."""
        self.held -= self._arriving.pop(session, 0)

    def _make_room(self) -> None:
        for session, size in tuple(self._arriving.items()):
            if self.held <= self._most:
                return
            if size >= _LARGE:
                self.ended(session)
                session.close("its message arrived more slowly than others', and memory for them was full")


class _Watched:
    """A stream whose every read must bring something within ``idle_s``."""

    def __init__(self, stream: Stream, idle_s: float, received: Callable[[int], None]) -> None:
        self._stream = stream
        self._idle_s = idle_s
        self.idle = trio.CancelScope()
        self._received = received

    @property
    def peer_id(self) -> str:
        return self._stream.peer_id

    async def read(self, limit: int) -> bytes:
        # One scope is around all reads, and its deadline moves: to make one for each costs more.
        self.idle.deadline = trio.current_time() + self._idle_s
        data = await self._stream.read(limit)
        self.idle.deadline = math.inf
        self._received(len(data))
        return data

    def silent(self) -> PeerError:
        """Why it ended, if ``idle`` was cancelled."""
        return PeerError(f"{self.peer_id} sent nothing for {self._idle_s:.0f} s")

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    def write_now(self, data: bytes) -> bool:
        write_now: Callable[[bytes], bool] | None = getattr(self._stream, "write_now", None)
        return write_now is not None and write_now(data)

    async def close(self) -> None:
        await self._stream.close()

    async def reset(self) -> None:
        await self._stream.reset()


Handle = Callable[[Message], Awaitable[Message]]


class ServerSession:
    """The answering end: ``handle`` turns each request into its reply, several at a time.

    ``RefusedError`` from ``handle`` becomes a ``Refusal``; any other exception is
    logged and becomes a ``Refusal`` with code ``"internal-error"``. More than
    ``MAX_IN_FLIGHT`` requests under way at once are refused with code ``"busy"``.
    Sessions that share an ``intake`` share its memory.
    """

    def __init__(
        self,
        stream: Stream,
        handle: Handle,
        *,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        outbox: int = MAX_OUTBOX,
        intake: Intake | None = None,
        minor: int = PROTOCOL_MINOR,
    ) -> None:
        """``minor``: the older of the two sides' protocol minors."""
        self._minor = minor
        self._intake = intake or Intake()
        self._stream = _Watched(stream, idle_timeout_s, partial(self._intake.received, self))
        self._handle = handle
        self._outbox = Outbox(self._stream, outbox)
        self._scope = trio.CancelScope()
        self._in_flight = 0
        self.reason = ""

    @property
    def peer_id(self) -> str:
        """The node's libp2p id, as the transport proved it."""
        return self._stream.peer_id

    async def run(self) -> None:
        """Serve until the node closes, breaks the protocol, or is silent for too long. Never raises."""
        clean = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._outbox.write)
                    await self._read(nursery)
                    clean = True
                    self.reason = self.reason or "closed by the node"
                    nursery.cancel_scope.cancel()
        except* BarnraiseError as errors:
            error = first_of(errors)
            self.reason = self.reason or str(error)
            level = logging.WARNING if isinstance(error, MalformedError) else logging.INFO
            log.log(level, "session with %s ended: %s", self.peer_id, error)
        finally:
            self._intake.ended(self)
            self.reason = self.reason or "ended here"
            await finish(self._stream, clean)

    def push(self, message: Message) -> bool:
        """Queue an unasked message; false if the session is over.

        What a minor brought that the node does not speak is left out: it would end the session.
        A full queue means that the node does not read: its session is ended.

        Raises:
            MalformedError: our own message is larger than its type's limit.
        """
        if self.reason:
            return False
        if FRAME_BY_TYPE[type(message)].since > self._minor:
            return True
        if not self._outbox.put(message):
            self.close("the node does not read what it is sent")
            return False
        return True

    def close(self, reason: str) -> None:
        """End the session from this side."""
        if not self.reason:
            self.reason = reason
            log.info("session with %s ended: %s", self.peer_id, reason)
        self._scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        with trio.CancelScope() as whole:
            with self._stream.idle:
                await self._read_all(nursery, whole)
                return
            raise self._stream.silent()
        raise PeerError(f"a message took longer than {MESSAGE_TIMEOUT_S:.0f} s to arrive")

    async def _read_all(self, nursery: trio.Nursery, whole: trio.CancelScope) -> None:
        """Read to the end; ``whole`` is given a deadline for each message."""
        reader = MessageReader(self._stream, REQUESTS)
        while True:
            whole.deadline = trio.current_time() + MESSAGE_TIMEOUT_S
            message = await reader.receive()
            whole.deadline = math.inf
            size = self._intake.finished(self)
            if message is None:
                return
            if self._in_flight >= MAX_IN_FLIGHT:
                self._intake.answered(size)
                text = f"{self._in_flight} requests of this session are under way: wait for their replies"
                self.push(Refusal(id=id_of(message), code="busy", message=text))
                continue
            self._in_flight += 1
            nursery.start_soon(self._answer, message, size)

    async def _answer(self, message: Message, size: int) -> None:
        try:
            reply = await self._handle(message)
        except RefusedError as error:
            reply = Refusal(id=id_of(message), code=error.wire_code, message=str(error)[:500])
        except Exception:
            log.exception("answering %s of %s failed", type(message).__name__, self.peer_id)
            text = "the coordinator failed while answering; its log says more"
            reply = Refusal(id=id_of(message), code="internal-error", message=text)
        finally:
            self._in_flight -= 1
            self._intake.answered(size)
        try:
            self.push(reply)
        except MalformedError as error:
            log.error("cannot answer %s of %s: %s", type(message).__name__, self.peer_id, error)
            self.push(Refusal(id=id_of(message), code="internal-error", message=str(error)[:500]))
