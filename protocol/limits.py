"""Time and memory for work on files and settings that a stranger wrote.

A config of ten billion layers, a template that loops, settings of an environment
that draw for ever: each is small on the wire and huge when it is looked at. Inside
``bounded`` such work ends with ``LimitError`` and the process goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from barnraise.protocol.errors import BarnraiseError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_AGAIN = 0.25  # of the limit: until the next interrupt, in case one was swallowed


class LimitError(BarnraiseError):
    """Bounded work took too long or too much memory; the text says what and how much."""


class TooSlow(BaseException):
    """Not an ``Exception``: the work inside may catch those and would go on."""


@contextlib.contextmanager
def bounded(what: str, *, seconds: float, memory: int = 0) -> Iterator[None]:
    """Interrupt Python code after ``seconds``; on Linux let it allocate about ``memory`` bytes at most.

    ``what`` begins the error's text, as in "the chat template of ...". Works in the
    main thread of a process, which is where child processes work; elsewhere (and
    time, where there is no SIGALRM) nothing is bounded, because signals and limits
    would hit other threads. 0 bytes means that memory is not bounded. Compiled code
    that neither allocates nor returns is not interrupted.

    Raises:
        LimitError: a bound was hit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.ExitStack() as stack:
        if hasattr(signal, "setitimer"):
            stack.enter_context(_alarm(seconds))
        if memory and resource is not None and sys.platform == "linux":
            stack.enter_context(_ceiling(memory))
        try:
            yield
        except TooSlow:
            text = f"{what} takes longer than {seconds:g} s here"
        except (MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            text = f"{what} takes more than {memory / 1e9:.1f} GB of memory" if memory else str(error)
        else:
            return
    raise LimitError(text)


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, expire)
    outer = signal.setitimer(signal.ITIMER_REAL, seconds, max(0.05, seconds * _AGAIN))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
        if outer[0] > 0:
            signal.setitimer(signal.ITIMER_REAL, *outer)


@contextlib.contextmanager
def _ceiling(memory: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + memory
    for limit in (soft, hard):
        if limit != resource.RLIM_INFINITY:
            wanted = min(wanted, limit)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
