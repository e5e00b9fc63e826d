"""One stream of a yamux connection: its windows, and how it ends.

What a connection guards against, and what it does with streams, is ``barnraise.protocol.yamux``.
Here too are the frames' header and flags. Specification: github.com/hashicorp/yamux, spec.md.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux import yamux as base

if TYPE_CHECKING:
    from barnraise.protocol.yamux import GuardedYamux

MAX_WINDOW = 4 * 1024 * 1024
SMALL_UPDATE = 16 * 1024  # bytes read after which a window update may be sent,
UPDATE_EVERY_S = 0.25  # so often; half a window's worth is given back at once
MAX_PAYLOAD = 65_535 - 16 - 12  # header and payload fill exactly one Noise message
WINDOW_TIMEOUT_S = 30.0  # for the reader at the other end to take something
LINGER_S = 60.0  # a stream that we are done with and the peer does not close

HEADER = struct.Struct(">BBHII")  # version, kind, flags, stream, length
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)  # kinds
SYN, ACK, FIN, RST = 1, 2, 4, 8  # flags


class GuardedStream(base.YamuxStream):
    """One stream. ``read`` and ``write`` raise libp2p's ``MuxedStream*`` errors."""

    def __init__(self, stream_id: int, conn: GuardedYamux, is_initiator: bool) -> None:
        super().__init__(stream_id, conn, is_initiator)
        self.conn: GuardedYamux = conn
        self.inbox = bytearray()
        self.ended = False  # the peer sent FIN
        self.failed = ""
        self._taken = 0  # read, and not yet given back to the peer's window
        self._given_at = -1.0
        self._unread_after = float("inf")
        self._wakeup = trio.Event()

    def wake(self) -> None:
        """Let waiting readers and writers look again."""
        self._wakeup.set()
        self._wakeup = trio.Event()

    async def read(self, n: int | None = None) -> bytes:
        """Return 1 to ``n`` bytes (None or -1: whatever is there).

        Raises:
            MuxedStreamEOF: the peer closed its side and everything was read.
            MuxedStreamReset: the stream was reset or the connection is gone.
        """
        await trio.lowlevel.checkpoint()
        while not self.inbox:
            if self.ended:
                raise MuxedStreamEOF("the peer closed its side")
            if self.failed:
                raise MuxedStreamReset(self.failed)
            await self._wakeup.wait()
        # From here on nothing waits: a cancelled read takes nothing.
        count = len(self.inbox) if n is None or n < 0 else min(n, len(self.inbox))
        with memoryview(self.inbox) as view:
            data = bytes(view[:count])
        del self.inbox[:count]
        if not self.ended and not self.failed:
            self._give_back(count)
        return data

    async def write(self, data: bytes) -> None:
        """Send all of ``data``. After a cancelled or failed write the stream is only good for ``reset``.

        Raises:
            MuxedStreamError: closed, reset, connection gone, or the peer read nothing for 30 s.
        """
        view = memoryview(data)
        while view:
            if self.failed:
                raise MuxedStreamReset(self.failed)
            if self.send_closed:
                raise MuxedStreamError("the stream is closed for writing")
            if self.send_window <= 0:
                with trio.move_on_after(WINDOW_TIMEOUT_S) as scope:
                    await self._wakeup.wait()
                if scope.cancelled_caught:
                    raise MuxedStreamError(f"the peer read nothing for {WINDOW_TIMEOUT_S:.0f} s")
                continue
            count = min(len(view), self.send_window, MAX_PAYLOAD)
            self.send_window -= count
            header = HEADER.pack(0, DATA, 0, self.stream_id, count)
            await self.conn.write_frame(b"".join((header, view[:count])))
            view = view[count:]

    async def close(self) -> None:
        """Close our side; the peer may go on sending."""
        self.finish()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """Abandon the stream in both directions."""
        self.abort("the stream was reset")
        await trio.lowlevel.checkpoint()

    def finish(self) -> None:
        """``close`` without waiting."""
        if self.send_closed or self.failed:
            return
        self.send_closed = True
        self.conn.send_control(WINDOW_UPDATE, FIN, self.stream_id, 0)
        self.wake()
        if self.ended:
            self.conn.forget(self)

    def abort(self, reason: str) -> None:
        """``reset`` without waiting."""
        if self.failed:
            return
        if not (self.send_closed and self.ended):
            self.conn.send_control(WINDOW_UPDATE, RST, self.stream_id, 0)
        self.fail(reason)
        self.inbox.clear()
        self.conn.forget(self)

    def abandon(self) -> None:
        """Nobody reads any more: close our side, and reset unless the peer closes its own soon."""
        self.finish()
        if not self.failed and not self.ended:
            self._unread_after = trio.current_time() + LINGER_S

    def overdue(self) -> bool:
        """Whether ``abandon`` was long ago."""
        return trio.current_time() > self._unread_after

    def fail(self, reason: str) -> None:
        """Note that nothing more will come or go."""
        self.failed = self.failed or reason
        self.closed = self.send_closed = self.recv_closed = True
        self.wake()

    def _give_back(self, count: int) -> None:
        self._taken += count
        now = trio.current_time()
        half = self._taken >= self.target_recv_window // 2
        # To a slow reader (under a bandwidth cap) bytes come evenly, not half a window at a time.
        if not half and (self._taken < SMALL_UPDATE or now - self._given_at < UPDATE_EVERY_S):
            return
        increment, self._taken = self._taken, 0
        # The window doubles when it is used up within four round trips, as in go-yamux.
        soon = now - self._given_at < 4 * max(self.conn.rtt(), 0.001)
        if half and soon and self.target_recv_window < MAX_WINDOW:
            increment += self.target_recv_window
            self.target_recv_window *= 2
        self._given_at = now
        self.recv_window += increment
        self.conn.send_control(WINDOW_UPDATE, 0, self.stream_id, increment)
