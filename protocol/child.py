"""Frames over a child process's pipes: how a daemon talks to its engine, verifier or learner.

The parent (trio, torch-free) owns a ``Child``; the child's main thread calls
``serve``. Bodies are msgspec structs of a closed union that both sides import; a
frame is one byte of kind, eight bytes of request number, four bytes of length (all
big-endian) and the MessagePack body.

Why a process: an out-of-memory or a crash in a model must never take the daemon
along (R5), and the daemon's event loop must never wait for torch. The child dies
with its parent: a reader thread ends it on end-of-file of stdin, and on Linux the
kernel does (PR_SET_PDEATHSIG). SIGINT is ignored by children: the parent decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import msgspec
import trio

from barnraise.protocol.errors import BarnraiseError, ChildError

Reply = TypeVar("Reply", bound=msgspec.Struct)
MAX_PIPE_FRAME = 1024 * 1024 * 1024

_HEADER = struct.Struct(">BQI")
_REQUEST, _CANCEL, _EVENT, _REPLY, _ERROR, _FATAL, _MEMORY = range(1, 8)
PIPE_HEADER = _HEADER  # for parents without an event loop, which speak the frames themselves
_PIPE_BYTES = 1024 * 1024
_WRITE_TIMEOUT_S = 60.0  # the child's reader thread always reads; longer means that it is stopped
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 800  # of 1000: before nearly everything else on the machine


class PipeFrame(enum.IntEnum):
    """Kinds of frames, as in the header's first byte."""

    REQUEST, CANCEL, EVENT = _REQUEST, _CANCEL, _EVENT
    REPLY, ERROR, FATAL, MEMORY = _REPLY, _ERROR, _FATAL, _MEMORY


class ChildOutOfMemoryError(ChildError):
    """The child ran out of memory and is gone."""


# --- the parent's side


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
        self._number = 0
        self._header = bytearray()
        self._body: bytearray | None = None
        self._have = 0
        self._death = ""
        self._no_memory = False
        self._oom_kills = _oom_kills()

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
                stdout) is appended; None shares ours.
            env: additions to our environment.

        Raises:
            ChildError: the program could not be started.
        """
        environment = {**os.environ, **(env or {})}
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
    ) -> Reply: ...
    @overload
    async def request(
        self,
        message: msgspec.Struct,
        reply: Any,
        on_event: Callable[[Any], None] | None = None,
        *,
        events: Any = None,
    ) -> Any: ...
    async def request(
        self,
        message: msgspec.Struct,
        reply: Any,
        on_event: Callable[[Any], None] | None = None,
        *,
        events: Any = None,
    ) -> Any:
        """Send ``message`` and return the child's reply, after any number of events.

        Cancelling is passed on: the child's handler sees ``send.cancelled()`` turn
        true, and what it still says about this request is dropped.

        Args:
            reply: the expected struct type, or a union of tagged ones.
            on_event: called with every event, in this task; events are dropped if None.
            events: the type (or union) of events; default: ``reply``.

        Raises:
            ChildOutOfMemoryError: the child ran out of memory; it is gone.
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
            await self._send(_REQUEST, number, body)
            del body
            try:
                while True:
                    kind, about, data = await self._receive()
                    if kind in (_FATAL, _MEMORY):
                        self._no_memory = kind == _MEMORY
                        await self._bury(_text(data))
                    if about != number:
                        continue  # about a request that was cancelled
                    try:
                        if kind == _EVENT:
                            if on_event is not None:
                                on_event(event_decoder.decode(data))
                            continue
                        if kind == _REPLY:
                            return reply_decoder.decode(data)
                    except (msgspec.MsgspecError, UnicodeError) as error:
                        await self.kill()
                        raise ChildError(f"{self.name} sent something unexpected: {error}") from error
                    if kind == _ERROR:
                        raise ChildError(_text(data))
                    await self.kill()
                    raise ChildError(f"{self.name} sent a frame of unknown kind {kind}")
            except trio.Cancelled:
                with trio.CancelScope(shield=True), contextlib.suppress(ChildError):
                    await self._send(_CANCEL, number, b"")
                raise

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
            await self._reap()
            await self._stdin.aclose()
            await self._stdout.aclose()

    async def _send(self, kind: int, number: int, body: bytes) -> None:
        if self._death:
            raise self._error()
        # Shielded: half a frame would be worse than a late cancellation, and the child always reads.
        with trio.CancelScope(shield=True), trio.move_on_after(_WRITE_TIMEOUT_S) as scope:
            try:
                await self._stdin.send_all(_HEADER.pack(kind, number, len(body)))
                await self._stdin.send_all(body)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # dead: its last words, or end-of-file, are found by reading
        if scope.cancelled_caught:
            await self.kill()
            raise ChildError(f"{self.name} read nothing for {_WRITE_TIMEOUT_S:.0f} s and was stopped")

    async def _receive(self) -> tuple[int, int, memoryview]:
        # All state is in self: a cancelled read loses nothing.
        while True:
            if self._body is None:
                missing = _HEADER.size - len(self._header)
                if missing:
                    self._header += await self._read(missing)
                    continue
                kind, number, length = _HEADER.unpack(self._header)
                if length > MAX_PIPE_FRAME:
                    await self.kill()
                    raise ChildError(f"{self.name} sent a frame of {length} bytes, over {MAX_PIPE_FRAME}")
                self._body = bytearray(length)
                self._have = 0
            if self._have < len(self._body):
                data = await self._read(min(len(self._body) - self._have, _PIPE_BYTES))
                self._body[self._have : self._have + len(data)] = data
                self._have += len(data)
                continue
            kind, number, _ = _HEADER.unpack(self._header)
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
            if _oom_kills() > self._oom_kills:
                self._no_memory = True
                return f"{self.name} ran out of memory: the system killed it"
            return f"{self.name} was killed by signal 9 (often the system running out of memory)"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"{self.name} crashed: {signal.Signals(-status).name}{self._last_line()}"
            return f"{self.name} crashed: signal {-status}{self._last_line()}"
        return f"{self.name} ended with exit code {status}{self._last_line()}"

    def _last_line(self) -> str:
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - 4096))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
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


def _oom_kills() -> int:
    """How often the kernel's out-of-memory killer struck so far, here and in our control group."""
    total = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return total


def _text(data: memoryview) -> str:
    return bytes(data).decode(errors="replace")


def _widen(descriptor: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


# --- the child's side


class Send:
    """What a handler calls with its events; ``cancelled()`` says whether anybody still waits."""

    def __init__(self, descriptor: int, number: int, cancelled: set[int]) -> None:
        self._descriptor = descriptor
        self._number = number
        self._cancelled = cancelled

    def __call__(self, event: msgspec.Struct) -> None:
        """Send an event (progress) ahead of the reply. Any thread may."""
        _write(self._descriptor, _EVENT, self._number, msgspec.msgpack.encode(event))

    def cancelled(self) -> bool:
        """Whether the parent gave this request up: return (or raise) soon, the result is dropped."""
        return self._number in self._cancelled


Handle = Callable[[Any, Send], msgspec.Struct]

_write_lock = threading.Lock()


def serve(handle: Handle, request_types: Any) -> NoReturn:
    """Answer the parent's requests until it closes the pipe or dies; never returns.

    ``handle(request, send)`` runs in this, the main, thread. A ``BarnraiseError``
    that it raises is reported and the child lives on; anything else is reported,
    logged with its traceback, and ends the process with exit code 1.

    From here on file descriptor 1 is that of stderr, so that a library that
    prints cannot corrupt the frames, and descriptor 0 reads nothing.

    Args:
        request_types: the struct type, or a union of tagged ones, of requests.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    _die_first()
    sys.stdout.flush()
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    cancelled: set[int] = set()
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(request_types)
    threading.Thread(
        target=_listen, args=(incoming, outgoing, decoder, requests, cancelled), daemon=True
    ).start()
    while True:
        number, request = requests.get()
        send = Send(outgoing, number, cancelled)
        try:
            if not send.cancelled():
                body = msgspec.msgpack.encode(handle(request, send))
                if len(body) > MAX_PIPE_FRAME:
                    raise BarnraiseError(f"a reply of {len(body)} bytes exceeds {MAX_PIPE_FRAME}")
                _write(outgoing, _REPLY, number, body)
                del body
        except BarnraiseError as error:
            _write(outgoing, _ERROR, number, str(error).encode())
        except BaseException as error:
            _last_words(outgoing, number, error)
        finally:
            del request
            for old in [n for n in tuple(cancelled) if n <= number]:
                cancelled.discard(old)


def _listen(
    incoming: int,
    outgoing: int,
    decoder: msgspec.msgpack.Decoder[Any],
    requests: queue.SimpleQueue[tuple[int, Any]],
    cancelled: set[int],
) -> None:
    """The reader thread: the only one that can notice, in the middle of work, that the parent is gone."""
    with open(incoming, "rb", buffering=0) as pipe:
        while True:
            kind, number, length = _HEADER.unpack(_read_exactly(pipe, _HEADER.size))
            body = _read_exactly(pipe, length)
            if kind == _CANCEL:
                cancelled.add(number)
                continue
            try:
                requests.put((number, decoder.decode(body)))
            except BaseException as error:
                _last_words(outgoing, number, error)
            del body


def _read_exactly(pipe: Any, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    have = 0
    while have < size:
        count = pipe.readinto(view[have:])
        if not count:
            os._exit(0)  # the parent is gone or wants us gone
        have += count
    view.release()
    return data


def _write(descriptor: int, kind: int, number: int, body: bytes) -> None:
    with _write_lock:
        for part in (_HEADER.pack(kind, number, len(body)), body):
            view = memoryview(part)
            while view:
                try:
                    view = view[os.write(descriptor, view[:_PIPE_BYTES]) :]
                except BrokenPipeError:
                    os._exit(0)


def _last_words(outgoing: int, number: int, error: BaseException) -> NoReturn:
    """Report what killed us to the log and to the parent, then go, whatever other threads do."""
    try:
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        text = str(error).strip().split("\n")[0][:300]
        if _is_out_of_memory(error):
            _write(outgoing, _MEMORY, number, f"out of memory ({text or type(error).__name__})".encode())
        else:
            _write(outgoing, _FATAL, number, f"{type(error).__name__}: {text}".encode())
    finally:
        os._exit(1)


def _is_out_of_memory(error: BaseException) -> bool:
    # By name and words: this module knows no torch, whose CPU allocator raises a bare RuntimeError.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)


def _die_with_parent() -> None:
    # A parent that died before this line is noticed by the reader thread: its pipe is closed.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _die_first() -> None:
    """Where memory runs out, let the kernel end this process, which is made anew, first of all."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < _OOM_SCORE:
            file.seek(0)
            file.write(f"{_OOM_SCORE}\n")
