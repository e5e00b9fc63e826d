"""One long-lived stream per node: requests, their replies, and unasked pushes.

``Session`` is the node's end, ``ServerSession`` the coordinator's. Requests carry
an id that their reply repeats, so that several may be under way at once and be
answered in any order. Both ends write through a bounded queue and never stop
reading: a peer that does not read is cut off, and nobody else notices.

A frame that is malformed, or that this side never accepts, ends the one session
with a logged reason.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, cast

import trio

from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError, RefusedError
from barnraise.protocol.frames import FRAME_BY_TYPE, FRAMES
from barnraise.protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Message, Refusal
from barnraise.protocol.network import Stream
from barnraise.protocol.wire import MessageReader, frame

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)

REQUESTS: frozenset[type[Message]] = frozenset(f.type for f in FRAMES if f.kind == "request")
REPLIES: frozenset[type[Message]] = frozenset(f.type for f in FRAMES if f.kind == "reply")
PUSHES: frozenset[type[Message]] = frozenset(f.type for f in FRAMES if f.kind == "push")

REQUEST_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 60.0  # heartbeats come every few seconds
MESSAGE_TIMEOUT_S = 900.0  # 16 MiB at 150 kbit/s; a frame that drips longer is not a slow link
MAX_OUTBOX = 256
MAX_OUTBOX_BYTES = 32 * 1024 * 1024
MAX_IN_FLIGHT = 32
MAX_WAITING_PUSHES = 1024
MAX_INTAKE = 1024 * 1024 * 1024  # bytes, all sessions of a coordinator together
_LARGE = 64 * 1024


def _id(message: Message) -> int:
    return cast(int, message.id)  # type: ignore[attr-defined]  # every request and reply has one


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


async def _finish(stream: Stream, clean: bool) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
        if clean:
            await stream.close()
        else:
            await stream.reset()


class _Outbox:
    """Frames waiting to be written by one task, bounded in number and in bytes.

    One writer means that a cancelled caller never leaves half a frame behind. Where the stream
    can take a frame without waiting (``write_now``; the in-memory network's can), it gets it at once.
    """

    def __init__(self, stream: Stream, frames: int) -> None:
        self._stream = stream
        self._frames = frames
        self._bytes = 0
        self._waiting: deque[tuple[bytes, Callable[[], None] | None]] = deque()
        self._filled = trio.Event()
        self._write_now: Callable[[bytes], bool] | None = getattr(stream, "write_now", None)

    def put(self, message: Message, left: Callable[[], None] | None = None) -> bool:
        """Queue ``message``; ``left`` is called once it has left. False: the box is full.

        Raises:
            MalformedError: our own message is larger than its type's limit.
        """
        data = frame(message)
        if len(self._waiting) >= self._frames or self._bytes > MAX_OUTBOX_BYTES:
            return False
        if self._write_now is not None and not self._waiting and self._write_now(data):
            if left is not None:
                left()
            return True
        self._waiting.append((data, left))
        self._bytes += len(data)
        self._filled.set()
        return True

    async def write(self) -> None:
        """Write what is queued, for ever, until the stream breaks."""
        while True:
            while self._waiting:
                data, left = self._waiting[0]
                await self._stream.write(data)
                self._waiting.popleft()
                self._bytes -= len(data)
                if left is not None:
                    left()
            self._filled = trio.Event()
            await self._filled.wait()


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
        self._outbox = _Outbox(stream, MAX_OUTBOX)
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
            self._end(str(_first(errors)))
            log.info("session with %s ended: %s", self.peer_id, self.reason)
        finally:
            self._end("the session was cancelled")
            await _finish(self._stream, clean)

    async def close(self, reason: str = "the session was closed") -> None:
        """End the session; requests under way fail with ``PeerError``."""
        self._end(reason)
        self._closing = True  # else ``run``, ending first, would reset the stream that we close
        self._scope.cancel()
        await _finish(self._stream, True)

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
            request_id = _id(message)
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
        self._outbox = _Outbox(self._stream, outbox)
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
            error = _first(errors)
            self.reason = self.reason or str(error)
            level = logging.WARNING if isinstance(error, MalformedError) else logging.INFO
            log.log(level, "session with %s ended: %s", self.peer_id, error)
        finally:
            self._intake.ended(self)
            self.reason = self.reason or "ended here"
            await _finish(self._stream, clean)

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
                self.push(Refusal(id=_id(message), code="busy", message=text))
                continue
            self._in_flight += 1
            nursery.start_soon(self._answer, message, size)

    async def _answer(self, message: Message, size: int) -> None:
        try:
            reply = await self._handle(message)
        except RefusedError as error:
            reply = Refusal(id=_id(message), code=error.wire_code, message=str(error)[:500])
        except Exception:
            log.exception("answering %s of %s failed", type(message).__name__, self.peer_id)
            text = "the coordinator failed while answering; its log says more"
            reply = Refusal(id=_id(message), code="internal-error", message=text)
        finally:
            self._in_flight -= 1
            self._intake.answered(size)
        try:
            self.push(reply)
        except MalformedError as error:
            log.error("cannot answer %s of %s: %s", type(message).__name__, self.peer_id, error)
            self.push(Refusal(id=_id(message), code="internal-error", message=str(error)[:500]))


def _limit(seconds: float, scope: trio.CancelScope) -> None:
    scope.deadline = min(scope.deadline, trio.current_time() + seconds)


def _first(errors: BaseExceptionGroup[BarnraiseError]) -> BarnraiseError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BarnraiseError)
    return error
