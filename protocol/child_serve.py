"""The child's side of ``barnraise.protocol.child``: answers requests, and beats while it is at work.

The child dies with its parent: a reader thread ends it on end-of-file of stdin, and on
Linux the kernel does (PR_SET_PDEATHSIG). SIGINT is ignored by children: the parent decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from barnraise.protocol.child_frames import BEAT_BODY, MAX_PIPE_FRAME, PIPE_BYTES, PIPE_HEADER, PipeFrame
from barnraise.protocol.errors import BarnraiseError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 800  # of 1000: before nearly everything else on the machine


class _Pulse:
    """The request at work and the steps that it has done, for the thread that beats."""

    def __init__(self) -> None:
        self.number = 0
        self.steps = 0
        self.working = threading.Event()

    def beat(self, outgoing: int, every_s: float) -> NoReturn:
        while True:
            self.working.wait()
            time.sleep(every_s)
            if self.working.is_set():
                _write(outgoing, PipeFrame.BEAT, self.number, BEAT_BODY.pack(self.steps))


class Send:
    """What a handler calls with its events; ``cancelled()`` says whether anybody still waits."""

    def __init__(self, descriptor: int, number: int, cancelled: set[int], pulse: _Pulse) -> None:
        self._descriptor = descriptor
        self._number = number
        self._cancelled = cancelled
        self._pulse = pulse

    def __call__(self, event: msgspec.Struct) -> None:
        """Send an event (progress) ahead of the reply. Any thread may."""
        self._pulse.steps += 1
        _write(self._descriptor, PipeFrame.EVENT, self._number, msgspec.msgpack.encode(event))

    def cancelled(self) -> bool:
        """Whether the parent gave this request up: return (or raise) soon, the result is dropped.

        Asking counts as a step done: a child that neither asks nor sends is taken for hung.
        """
        self._pulse.steps += 1
        return self._number in self._cancelled


Handle = Callable[[Any, Send], msgspec.Struct]

_write_lock = threading.Lock()


def serve(
    handle: Handle,
    request_types: Any,
    beat_s: float = 0.0,
    on_note: Callable[[Any], None] | None = None,
) -> NoReturn:
    """Answer the parent's requests until it closes the pipe or dies; never returns.

    ``handle(request, send)`` runs in this, the main, thread. A ``BarnraiseError``
    that it raises is reported and the child lives on; anything else is reported,
    logged with its traceback, and ends the process with exit code 1.

    From here on file descriptor 1 is that of stderr, so that a library that
    prints cannot corrupt the frames, and descriptor 0 reads nothing.

    Args:
        request_types: the struct type, or a union of tagged ones, of requests.
        beat_s: seconds between beats while a request is at work; 0: none, for a parent that
            does not know them.
        on_note: called in the reader thread, at once, with what ``Child.tell`` sent (one of
            ``request_types``, too); it must be quick, and raise nothing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
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
        target=_listen, args=(incoming, outgoing, decoder, requests, cancelled, on_note), daemon=True
    ).start()
    pulse = _Pulse()
    if beat_s > 0:
        threading.Thread(target=pulse.beat, args=(outgoing, beat_s), daemon=True).start()
    while True:
        number, request = requests.get()
        send = Send(outgoing, number, cancelled, pulse)
        pulse.number = number
        pulse.working.set()
        try:
            if not send.cancelled():
                body = msgspec.msgpack.encode(handle(request, send))
                if len(body) > MAX_PIPE_FRAME:
                    raise BarnraiseError(f"a reply of {len(body)} bytes exceeds {MAX_PIPE_FRAME}")
                _write(outgoing, PipeFrame.REPLY, number, body)
                del body
        except BarnraiseError as error:
            _write(outgoing, PipeFrame.ERROR, number, str(error).encode())
        except BaseException as error:
            _last_words(outgoing, number, error)
        finally:
            pulse.working.clear()
            del request
            for old in [n for n in tuple(cancelled) if n <= number]:
                cancelled.discard(old)


def _listen(
    incoming: int,
    outgoing: int,
    decoder: msgspec.msgpack.Decoder[Any],
    requests: queue.SimpleQueue[tuple[int, Any]],
    cancelled: set[int],
    on_note: Callable[[Any], None] | None,
) -> None:
    """The reader thread: the only one that can notice, in the middle of work, that the parent is gone."""
    with open(incoming, "rb", buffering=0) as pipe:
        while True:
            kind, number, length = PIPE_HEADER.unpack(_read_exactly(pipe, PIPE_HEADER.size))
            body = _read_exactly(pipe, length)
            if kind == PipeFrame.CANCEL:
                cancelled.add(number)
                continue
            try:
                message = decoder.decode(body)
                if kind != PipeFrame.NOTE:
                    requests.put((number, message))
                elif on_note is not None:
                    on_note(message)
            except BaseException as error:
                _last_words(outgoing, number, error)
            del body, message


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
        for part in (PIPE_HEADER.pack(kind, number, len(body)), body):
            view = memoryview(part)
            while view:
                try:
                    view = view[os.write(descriptor, view[:PIPE_BYTES]) :]
                except BrokenPipeError:
                    os._exit(0)


def _last_words(outgoing: int, number: int, error: BaseException) -> NoReturn:
    """Report what killed us to the log and to the parent, then go, whatever other threads do."""
    try:
        log.critical("this process ends", exc_info=error)
        text = str(error).strip().split("\n")[0][:300]
        if _is_out_of_memory(error):
            _write(
                outgoing, PipeFrame.MEMORY, number, f"out of memory ({text or type(error).__name__})".encode()
            )
        else:
            _write(outgoing, PipeFrame.FATAL, number, f"{type(error).__name__}: {text}".encode())
    finally:
        os._exit(1)


def _is_out_of_memory(error: BaseException) -> bool:
    # By name and words: this module knows no torch, whose CPU allocator raises a bare RuntimeError.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)


def die_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends (Linux only)."""
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
