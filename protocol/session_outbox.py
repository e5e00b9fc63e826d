"""What both ends of a session write with: a bounded queue of frames, and an end within two seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

import trio

from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.messages import Message
from barnraise.protocol.network import Stream
from barnraise.protocol.wire import frame

MESSAGE_TIMEOUT_S = 900.0  # 16 MiB at 150 kbit/s; a frame that drips longer is not a slow link
MAX_OUTBOX = 256
MAX_OUTBOX_BYTES = 32 * 1024 * 1024


def id_of(message: Message) -> int:
    """The id of a request or a reply."""
    return cast(int, message.id)  # type: ignore[attr-defined]  # every request and reply has one


class Outbox:
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


async def finish(stream: Stream, clean: bool) -> None:
    """Close ``stream``, or unless ``clean`` reset it, within 2 s, whatever is cancelled."""
    with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
        if clean:
            await stream.close()
        else:
            await stream.reset()


def first_of(errors: BaseExceptionGroup[BarnraiseError]) -> BarnraiseError:
    """The first of the errors that a session's tasks ended with."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BarnraiseError)
    return error
