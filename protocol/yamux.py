"""yamux with its limits enforced: what py-libp2p's own implementation leaves open.

Subclasses of libp2p's ``Yamux`` and ``YamuxStream`` that replace everything that
runs per frame. Specification: github.com/hashicorp/yamux, spec.md. The differences:

- A peer that sends more than its receive window, to an open stream or to a
  forgotten one, loses the connection. The window is judged at the frame's header,
  so memory per stream is bounded by the window (256 KiB, grown to at most 4 MiB
  while the reader keeps up).
- Streams per connection are bounded in both directions; control frames waiting
  for a peer that does not read are bounded.
- The reading task never writes: two peers that both write cannot wait for each
  other. A frame, once begun, is finished or the connection ends: cancelling a
  writer never leaves half a frame on a connection that others use.
- A lost connection is an error to readers, not an end-of-file; what had arrived
  can still be read. A cancelled read loses nothing.
- A silent peer is pinged and given up; an unused connection is closed.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections import deque
from typing import Any

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux import yamux as base

from barnraise.protocol.network import Way

log = logging.getLogger(__name__)

INITIAL_WINDOW = 256 * 1024  # fixed by the specification
MAX_WINDOW = 4 * 1024 * 1024
SMALL_UPDATE = 16 * 1024  # bytes read after which a window update may be sent,
UPDATE_EVERY_S = 0.25  # so often; half a window's worth is given back at once
MAX_INBOUND_STREAMS = 128
MAX_OUTBOUND_STREAMS = 256
MAX_CONTROL_FRAMES = 1024
MAX_PAYLOAD = 65_535 - 16 - 12  # header and payload fill exactly one Noise message
WRITE_TIMEOUT_S = 20.0  # for one frame to enter the socket's buffer
WINDOW_TIMEOUT_S = 30.0  # for the reader at the other end to take something
PING_EVERY_S = 15.0
DEAD_AFTER_S = 45.0
UNUSED_S = 30.0  # a connection on which no stream was ever opened
IDLE_S = 300.0  # a connection whose streams are all closed
LINGER_S = 60.0  # a stream that we are done with and the peer does not close

_HEADER = struct.Struct(">BBHII")
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8


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
            header = _HEADER.pack(0, _DATA, 0, self.stream_id, count)
            await self.conn._write_frame(b"".join((header, view[:count])))
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
        self.conn.send_control(_WINDOW_UPDATE, _FIN, self.stream_id, 0)
        self.wake()
        if self.ended:
            self.conn.forget(self)

    def abort(self, reason: str) -> None:
        """``reset`` without waiting."""
        if self.failed:
            return
        if not (self.send_closed and self.ended):
            self.conn.send_control(_WINDOW_UPDATE, _RST, self.stream_id, 0)
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
        self.conn.send_control(_WINDOW_UPDATE, 0, self.stream_id, increment)


class GuardedYamux(base.Yamux):
    """One connection. Every fault of the peer ends it, with the reason in the log, and nothing else."""

    def __init__(self, secured_conn: Any, peer_id: Any, is_initiator: bool | None = None) -> None:
        super().__init__(secured_conn, peer_id, is_initiator=is_initiator)
        self.streams: dict[int, GuardedStream] = {}  # type: ignore[assignment]  # of our own class
        self.new_stream_send_channel, self.new_stream_receive_channel = trio.open_memory_channel(
            MAX_INBOUND_STREAMS
        )
        self.handlers = 0  # inbound streams being served, counted by the host's guard
        self.remote: tuple[str, int] | None = None  # the other end's IP address and port, if it has one
        self.local_port: int | None = None  # ours, of a connection that we dialled
        self.way: Way = "direct"
        self.usable = True  # False: through a relay, and only to arrange a hole punch
        self._control: deque[bytes] = deque()
        self._control_wakeup = trio.Event()
        self._stray = 0  # bytes that may still arrive for streams that we forgot
        self._last_heard = self._last_used = trio.current_time()
        self._used = False
        self._failure = ""
        self._cleaned = False

    # --- running

    async def start(self) -> None:
        """Run the connection until it ends; never raises but on cancellation."""
        if self.event_started.is_set():
            return
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._established = True
                self.event_started.set()
                nursery.start_soon(self._write_control)
                nursery.start_soon(self._keep_alive)
                await self.handle_incoming()
                nursery.cancel_scope.cancel()
        except* Exception as errors:
            self._failure = self._failure or repr(errors.exceptions[0])
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                await self._cleanup_on_error()

    async def handle_incoming(self) -> None:
        """Read frames until the connection ends."""
        inbox = bytearray()
        try:
            while not self.event_shutting_down.is_set():
                while len(inbox) < _HEADER.size:
                    inbox += await self._receive()
                version, kind, flags, stream_id, length = _HEADER.unpack_from(inbox)
                del inbox[: _HEADER.size]
                if version != 0 or kind > _GO_AWAY:
                    self.fail(f"not a yamux frame (version {version}, type {kind})")
                elif kind == _PING:
                    self._on_ping(flags, length)
                elif kind == _GO_AWAY:
                    self._failure = "the peer closed the connection"
                    return
                else:
                    await self._on_stream_frame(kind, flags, stream_id, length, inbox)
        except Exception as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            log.debug("connection with %s ended: %s", self.peer_id, self._failure)

    async def _receive(self) -> bytes:
        data = bytes(await self.secured_conn.read(None))
        if not data:
            raise MuxedStreamError("the peer closed the connection")
        self._last_heard = trio.current_time()
        return data

    async def _on_stream_frame(
        self, kind: int, flags: int, stream_id: int, length: int, inbox: bytearray
    ) -> None:
        stream = self.streams.get(stream_id)
        if flags & _SYN:
            if stream is not None or stream_id == 0 or stream_id % 2 == self.next_stream_id % 2:
                self.fail(f"stream {stream_id} cannot be opened by the peer")
            stream = self._accept(stream_id, length if kind == _DATA else 0)
        if kind == _DATA:
            if stream is None:
                self._stray -= length
                if self._stray < 0:
                    self.fail(f"{length} bytes for stream {stream_id}, which is not open")
            else:
                stream.recv_window -= length
                if stream.recv_window < 0:
                    self.fail(f"stream {stream_id} overran its receive window by {-stream.recv_window}")
            await self._body(stream, length, inbox)
        elif stream is not None and length:
            stream.send_window = min(stream.send_window + length, 2**32)
            stream.wake()
        if stream is None or stream.failed:
            return
        if flags & _RST:
            stream.fail("the peer reset the stream")
            stream.inbox.clear()
            self.forget(stream)
        elif flags & _FIN:
            stream.ended = stream.recv_closed = True
            stream.wake()
            if stream.send_closed:
                self.forget(stream)

    async def _body(self, stream: GuardedStream | None, length: int, inbox: bytearray) -> None:
        while length:
            if not inbox:
                inbox += await self._receive()
            piece = inbox[:length]
            del inbox[:length]
            length -= len(piece)
            if stream is not None and not stream.failed and not stream.ended:
                stream.inbox += piece
                stream.wake()

    def _accept(self, stream_id: int, data: int) -> GuardedStream | None:
        inbound = sum(1 for stream in self.streams.values() if not stream.is_initiator)
        stream = GuardedStream(stream_id, self, False)
        if inbound >= MAX_INBOUND_STREAMS:
            self._stray = min(self._stray + INITIAL_WINDOW, 64 * MAX_WINDOW)
            self.send_control(_WINDOW_UPDATE, _RST, stream_id, 0)
            return None
        try:
            self.new_stream_send_channel.send_nowait(stream)
        except trio.WouldBlock:
            self._stray = min(self._stray + INITIAL_WINDOW, 64 * MAX_WINDOW)
            self.send_control(_WINDOW_UPDATE, _RST, stream_id, 0)
            return None
        self.streams[stream_id] = stream
        self._used = True
        self._last_used = trio.current_time()
        self.send_control(_WINDOW_UPDATE, _ACK, stream_id, 0)
        return stream

    def _on_ping(self, flags: int, value: int) -> None:
        if flags & _SYN:
            self.send_control(_PING, _ACK, 0, value)
        elif flags & _ACK and value == self._ping_id and self._ping_sent_time:
            sample = trio.current_time() - self._ping_sent_time
            self._rtt = sample if self._rtt == 0 else (self._rtt + sample) / 2
            self._ping_sent_time = 0.0

    async def _keep_alive(self) -> None:
        await trio.sleep(0.5)
        while True:
            self._ping_id = (self._ping_id + 1) % 2**32
            self._ping_sent_time = trio.current_time()
            self.send_control(_PING, _SYN, 0, self._ping_id)
            await trio.sleep(PING_EVERY_S)
            now = trio.current_time()
            for stream in tuple(self.streams.values()):
                if stream.overdue():
                    stream.abort("the peer did not close its side")
            if now - self._last_heard > DEAD_AFTER_S:
                self.fail(f"no sign of life for {DEAD_AFTER_S:.0f} s")
            if not self.streams and now - self._last_used > (IDLE_S if self._used else UNUSED_S):
                self.fail("the connection was not used")

    # --- sending

    def send_control(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        """Queue a frame without payload; a peer that does not read them is cut off."""
        if self.event_shutting_down.is_set():
            return
        if len(self._control) >= MAX_CONTROL_FRAMES:
            self._failure = self._failure or "the peer does not read"
            if self._nursery is not None:
                self._nursery.cancel_scope.cancel()
            return
        self._control.append(_HEADER.pack(0, kind, flags, stream_id, value))
        self._control_wakeup.set()

    async def _write_control(self) -> None:
        while True:
            await self._control_wakeup.wait()
            self._control_wakeup = trio.Event()
            await self._flush_control()

    async def _flush_control(self) -> None:
        while self._control:
            frames = b"".join(self._control)
            self._control.clear()
            await self._write_frame(frames)

    async def _write_frame(self, data: bytes) -> None:
        async with self._write_lock:
            if self.event_shutting_down.is_set():
                raise MuxedStreamError(self._failure or "the connection is closed")
            with trio.CancelScope(shield=True), trio.move_on_after(WRITE_TIMEOUT_S) as scope:
                try:
                    await self.secured_conn.write(data)
                except Exception:
                    self._break("the connection was lost while writing")
                    raise
            if scope.cancelled_caught:
                self._break(f"the peer took nothing for {WRITE_TIMEOUT_S:.0f} s")
                raise MuxedStreamError(self._failure)

    async def open_stream(self) -> GuardedStream:
        """Open a stream.

        Raises:
            MuxedStreamError: the connection is closed, or has too many streams.
        """
        if self.event_shutting_down.is_set():
            raise MuxedStreamError(self._failure or "the connection is closed")
        if sum(1 for stream in self.streams.values() if stream.is_initiator) >= MAX_OUTBOUND_STREAMS:
            raise MuxedStreamError(f"{MAX_OUTBOUND_STREAMS} streams are open on this connection")
        stream_id = self.next_stream_id
        self.next_stream_id += 2
        stream = GuardedStream(stream_id, self, True)
        self.streams[stream_id] = stream
        self._used = True
        self._last_used = trio.current_time()
        try:
            await self._write_frame(_HEADER.pack(0, _WINDOW_UPDATE, _SYN, stream_id, 0))
        except BaseException:
            stream.abort("the stream was never opened")
            raise
        return stream

    # --- ending

    def fail(self, reason: str) -> None:
        """End the connection because of what the peer did. Always raises."""
        self._failure = reason
        log.warning("closing the connection with %s: %s", self.peer_id, reason)
        raise MuxedStreamError(reason)

    def forget(self, stream: GuardedStream) -> None:
        """Drop a stream that is over; what the peer may still send to it is allowed for."""
        if self.streams.pop(stream.stream_id, None) is not None and not stream.ended:
            self._stray = min(self._stray + max(stream.recv_window, 0), 64 * MAX_WINDOW)
        self._last_used = trio.current_time()

    def _break(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.event_shutting_down.set()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    async def close(self, error_code: int = base.GO_AWAY_NORMAL) -> None:
        """Flush, say goodbye and end the connection; bounded by a second."""
        if not self.event_shutting_down.is_set():
            with trio.CancelScope(shield=True), trio.move_on_after(1.0), contextlib.suppress(Exception):
                await self._flush_control()
                await self._write_frame(_HEADER.pack(0, _GO_AWAY, 0, 0, error_code))
        self._failure = self._failure or "the connection was closed"
        with trio.CancelScope(shield=True), trio.move_on_after(2.0):
            await self._cleanup_on_error()

    async def _cleanup_on_error(self) -> None:
        self.event_shutting_down.set()
        if self._cleaned:
            return
        self._cleaned = True
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
        for stream in tuple(self.streams.values()):
            stream.fail(self._failure or "the connection was lost")
        self.streams.clear()
        self.new_stream_send_channel.close()
        with contextlib.suppress(Exception):
            await self.secured_conn.close()
        self.event_closed.set()
        if self.on_close is not None:
            with contextlib.suppress(Exception):
                await self.on_close()
