"""A child process over pipes, the parent's side: how a daemon talks to its engine, verifier or learner.

The parent (trio, torch-free) owns a ``Child``; the child's main thread calls
``barnraise.protocol.child_serve.serve``. Bodies are msgspec structs of a closed union that
both sides import; ``barnraise.protocol.child_frames`` has the frames.

Why a process: an out-of-memory or a crash in a model must never take the daemon
along (R5), and the daemon's event loop must never wait for torch. A child that hangs is
killed where the request has a ``Patience`` (``barnraise.protocol.child_watch``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import msgspec
import trio

from barnraise.protocol.child_frames import BEAT_BODY, MAX_PIPE_FRAME, PIPE_BYTES, PIPE_HEADER, PipeFrame
from barnraise.protocol.child_log import bound_log
from barnraise.protocol.child_watch import ChildHungError, Patience, Watch, vitals
from barnraise.protocol.errors import ChildError
from barnraise.protocol.log_lines import said
from barnraise.protocol.oom import oom_kills

Reply = TypeVar("Reply", bound=msgspec.Struct)

_END_BYTES = 128 * 1024  # of a log, in which its last line is whole
_BOUND_EVERY_S = 5.0  # between two looks at how long the log is
_WRITE_TIMEOUT_S = 60.0  # the child's reader thread always reads; longer means that it is stopped
_SECRET = re.compile(r"BARNRAISE_\w*PASSWORD")  # no child of ours needs one, and some run others' programs
_KILL_S = 10.0  # what is stuck in a driver outlives SIGKILL; nobody waits for it longer


class ChildOutOfMemoryError(ChildError):
    """The child ran out of memory and is gone."""


class Child:
    """A child process that answers one request at a time. Make one with ``Child.start``.

    Attributes:
        name: what messages call it, such as ``"engine"``.
        pid: its process id.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, log: Path | None) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self.pid = process.pid
        self._process = process
        self._log = log
        self._stdin = trio.lowlevel.FdStream(os.dup(process.stdin.fileno()))
        self._stdout = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
        process.stdin.close()
        process.stdout.close()
        self._turn = trio.Lock()
        self._sending = trio.Lock()
        self._number = 0
        self._header = bytearray()
        self._body: bytearray | None = None
        self._have = 0
        self._death = ""
        self._no_memory = False
        self._oom_kills = oom_kills()
        self._bounded_at = -_BOUND_EVERY_S

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        name: str = "child",
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start ``argv``, whose main thread is to call ``serve``.

        Args:
            name: for messages.
            log: file to which the child's stderr (and whatever prints to its
                stdout) is appended; bounded (``child_log``) at the start, with every request and
                while one is at work and says something. None shares ours.
            env: additions to our environment, of which no password of ours goes on.

        Raises:
            ChildError: the program could not be started.
        """
        environment = {name: value for name, value in os.environ.items() if not _SECRET.fullmatch(name)}
        environment |= env or {}
        if log is not None:
            bound_log(log)
        await trio.lowlevel.checkpoint()
        try:
            with contextlib.ExitStack() as stack:
                stderr = stack.enter_context(log.open("ab")) if log is not None else None
                # Started from this very thread, not by trio.lowlevel.open_process: that one
                # forks from a worker thread, and PR_SET_PDEATHSIG fires when the forking
                # *thread* ends, which an idle trio worker does after ten seconds.
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    bufsize=0,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise ChildError(f"cannot start {name} ({argv[0]}): {error}") from error
        for pipe in (process.stdin, process.stdout):
            _widen(pipe.fileno() if pipe is not None else -1)
        return cls(process, name, log)

    @property
    def alive(self) -> bool:
        """Whether the process runs, as far as is known without waiting."""
        return not self._death and self._process.poll() is None

    @overload
    async def request(
        self,
        message: msgspec.Struct,
        reply: type[Reply],
        on_event: Callable[[Any], None] | None = None,
        *,
        events: Any = None,
        patience: Patience | None = None,
    ) -> Reply: ...
    @overload
    async def request(
        self,
        message: msgspec.Struct,
        reply: Any,
        on_event: Callable[[Any], None] | None = None,
        *,
        events: Any = None,
        patience: Patience | None = None,
    ) -> Any: ...
    async def request(
        self,
        message: msgspec.Struct,
        reply: Any,
        on_event: Callable[[Any], None] | None = None,
        *,
        events: Any = None,
        patience: Patience | None = None,
    ) -> Any:
        """Send ``message`` and return the child's reply, after any number of events.

        Cancelling is passed on: the child's handler sees ``send.cancelled()`` turn
        true, and what it still says about this request is dropped.

        Args:
            reply: the expected struct type, or a union of tagged ones.
            on_event: called with every event, in this task; events are dropped if None.
            events: the type (or union) of events; default: ``reply``.
            patience: kill a child that hangs over this request; None waits for ever. The child has to
                beat (``serve``).

        Raises:
            ChildOutOfMemoryError: the child ran out of memory; it is gone.
            ChildHungError: it hung, and was killed; the text says how that showed.
            ChildError: the child refused (it lives: see ``alive``), or died; the text says why.
        """
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_PIPE_FRAME:
            raise ChildError(f"a request of {len(body)} bytes to {self.name} exceeds {MAX_PIPE_FRAME}")
        reply_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reply)
        event_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            reply if events is None else events
        )
        async with self._turn:
            self._number += 1
            number = self._number
            self._bound_log()
            await self._send(PipeFrame.REQUEST, number, body)
            del body
            watch = None if patience is None else Watch(patience, trio.current_time())
            try:
                while True:
                    kind, about, data = await self._watched(patience, watch)
                    self._bound_log()
                    if kind == PipeFrame.BEAT:
                        continue
                    if kind in (PipeFrame.FATAL, PipeFrame.MEMORY):
                        self._no_memory = kind == PipeFrame.MEMORY
                        await self._bury(_text(data))
                    if about != number:
                        continue  # about a request that was cancelled
                    try:
                        if kind == PipeFrame.EVENT:
                            if on_event is not None:
                                on_event(event_decoder.decode(data))
                            continue
                        if kind == PipeFrame.REPLY:
                            return reply_decoder.decode(data)
                    except (msgspec.MsgspecError, UnicodeError) as error:
                        await self.kill()
                        raise ChildError(f"{self.name} sent something unexpected: {error}") from error
                    if kind == PipeFrame.ERROR:
                        raise ChildError(_text(data))
                    await self.kill()
                    raise ChildError(f"{self.name} sent a frame of unknown kind {kind}")
            except trio.Cancelled:
                with trio.CancelScope(shield=True), contextlib.suppress(ChildError):
                    await self._send(PipeFrame.CANCEL, number, b"")
                raise

    async def tell(self, message: msgspec.Struct) -> None:
        """Send ``message`` beside whatever is at work; nothing comes back (``serve``'s ``on_note``).

        Raises:
            ChildError: the child is gone.
        """
        await self._send(PipeFrame.NOTE, 0, msgspec.msgpack.encode(message))

    async def wait(self) -> str:
        """Wait until the process has ended and return the reason as text."""
        await self._reap()
        return self._death

    async def close(self, grace_s: float = 2.0) -> None:
        """Ask the child to end (end-of-file), kill it after ``grace_s`` seconds. Safe to call twice."""
        with trio.CancelScope(shield=True):
            await self._stdin.aclose()
            with trio.move_on_after(grace_s):
                await self._reap()
            await self.kill()

    async def kill(self) -> None:
        """End the process at once (SIGKILL) and reap it. Safe to call twice, never raises."""
        with trio.CancelScope(shield=True):
            if self._process.poll() is None:
                self._death = self._death or f"{self.name} was stopped"
                self._process.kill()
            with trio.move_on_after(_KILL_S):
                await self._reap()
            await self._stdin.aclose()
            await self._stdout.aclose()

    async def _send(self, kind: int, number: int, body: bytes) -> None:
        if self._death:
            raise self._error()
        # Shielded: half a frame would be worse than a late cancellation, and the child always reads.
        with trio.CancelScope(shield=True), trio.move_on_after(_WRITE_TIMEOUT_S) as scope:
            try:
                async with self._sending:
                    await self._stdin.send_all(PIPE_HEADER.pack(kind, number, len(body)))
                    await self._stdin.send_all(body)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # dead: its last words, or end-of-file, are found by reading
        if scope.cancelled_caught:
            await self.kill()
            raise ChildError(f"{self.name} read nothing for {_WRITE_TIMEOUT_S:.0f} s and was stopped")

    async def _watched(self, patience: Patience | None, watch: Watch | None) -> tuple[int, int, memoryview]:
        """The next frame, unless the child hangs."""
        while patience is not None and watch is not None:
            with trio.move_on_after(patience.look_s):
                kind, about, data = await self._receive()  # cancelled, it loses nothing
                if kind != PipeFrame.BEAT:
                    watch.heard(trio.current_time())
                elif len(data) == BEAT_BODY.size:
                    watch.beat(BEAT_BODY.unpack(data)[0], trio.current_time())
                if not watch.due(trio.current_time()) or kind != PipeFrame.BEAT:
                    return kind, about, data
            hung = watch.look(vitals(self.pid), trio.current_time())
            if hung:
                self._death = f"{self.name} hung and was ended: {hung}"
                await self.kill()
                raise ChildHungError(self._death)
        return await self._receive()

    async def _receive(self) -> tuple[int, int, memoryview]:
        # All state is in self: a cancelled read loses nothing.
        while True:
            if self._body is None:
                missing = PIPE_HEADER.size - len(self._header)
                if missing:
                    self._header += await self._read(missing)
                    continue
                kind, number, length = PIPE_HEADER.unpack(self._header)
                if length > MAX_PIPE_FRAME:
                    await self.kill()
                    raise ChildError(f"{self.name} sent a frame of {length} bytes, over {MAX_PIPE_FRAME}")
                self._body = bytearray(length)
                self._have = 0
            if self._have < len(self._body):
                data = await self._read(min(len(self._body) - self._have, PIPE_BYTES))
                self._body[self._have : self._have + len(data)] = data
                self._have += len(data)
                continue
            kind, number, _ = PIPE_HEADER.unpack(self._header)
            body, self._body = self._body, None
            self._header.clear()
            return kind, number, memoryview(body)

    async def _read(self, limit: int) -> bytes:
        try:
            data = await self._stdout.receive_some(limit)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        if not data:
            await self._bury("")
        return bytes(data)

    async def _bury(self, last_words: str) -> NoReturn:
        with trio.CancelScope(shield=True):
            with trio.move_on_after(2.0):
                await self._reap()
            if last_words:
                self._death = f"{self.name} failed: {last_words}"
            await self.kill()
        raise self._error()

    async def _reap(self) -> None:
        if self._process.poll() is None:
            await _wait_for(self._process)
        if not self._death:
            self._death = self._obituary()

    def _obituary(self) -> str:
        status = self._process.returncode
        if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            if oom_kills() > self._oom_kills:
                self._no_memory = True
                return f"{self.name} ran out of memory: the system killed it"
            return f"{self.name} was killed by signal 9 (often the system running out of memory)"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"{self.name} crashed: {signal.Signals(-status).name}{self._last_line()}"
            return f"{self.name} crashed: signal {-status}{self._last_line()}"
        return f"{self.name} ended with exit code {status}{self._last_line()}"

    def _bound_log(self) -> None:
        now = time.monotonic()
        if self._log is not None and now - self._bounded_at >= _BOUND_EVERY_S:
            self._bounded_at = now
            bound_log(self._log)

    def _last_line(self) -> str:
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _END_BYTES))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        last = said(next((line.strip() for line in reversed(lines) if line.strip()), ""))
        return f"; {self._log} ends: {last[:200]}" if last else ""

    def _error(self) -> ChildError:
        kind = ChildOutOfMemoryError if self._no_memory else ChildError
        return kind(self._death)


async def _wait_for(process: subprocess.Popen[bytes]) -> None:
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or too many open files
        while process.poll() is None:
            await trio.sleep(0.05)
        return
    try:
        while process.poll() is None:
            await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


def _text(data: memoryview) -> str:
    return bytes(data).decode(errors="replace")


def _widen(descriptor: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
