"""yamux with its limits enforced: what py-libp2p's own implementation leaves open.

A subclass of libp2p's ``Yamux``, as ``barnraise.protocol.yamux_stream`` has one of its
``YamuxStream``: together they replace everything that runs per frame. Specification:
github.com/hashicorp/yamux, spec.md. The differences:

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
from collections import deque
from typing import Any

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux import yamux as base

from barnraise.protocol.network import Way
from barnraise.protocol.yamux_stream import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    MAX_WINDOW,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    GuardedStream,
)

log = logging.getLogger(__name__)

INITIAL_WINDOW = 256 * 1024  # fixed by the specification
MAX_INBOUND_STREAMS = 128
MAX_OUTBOUND_STREAMS = 256
MAX_CONTROL_FRAMES = 1024
WRITE_TIMEOUT_S = 20.0  # for one frame to enter the socket's buffer
PING_EVERY_S = 15.0
DEAD_AFTER_S = 45.0
UNUSED_S = 30.0  # a connection on which no stream was ever opened
IDLE_S = 300.0  # a connection whose streams are all closed


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
                while len(inbox) < HEADER.size:
                    inbox += await self._receive()
                version, kind, flags, stream_id, length = HEADER.unpack_from(inbox)
                del inbox[: HEADER.size]
                if version != 0 or kind > GO_AWAY:
                    self.fail(f"not a yamux frame (version {version}, type {kind})")
                elif kind == PING:
                    self._on_ping(flags, length)
                elif kind == GO_AWAY:
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
        if flags & SYN:
            if stream is not None or stream_id == 0 or stream_id % 2 == self.next_stream_id % 2:
                self.fail(f"stream {stream_id} cannot be opened by the peer")
            stream = self._accept(stream_id, length if kind == DATA else 0)
        if kind == DATA:
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
        if flags & RST:
            stream.fail("the peer reset the stream")
            stream.inbox.clear()
            self.forget(stream)
        elif flags & FIN:
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
            self.send_control(WINDOW_UPDATE, RST, stream_id, 0)
            return None
        try:
            self.new_stream_send_channel.send_nowait(stream)
        except trio.WouldBlock:
            self._stray = min(self._stray + INITIAL_WINDOW, 64 * MAX_WINDOW)
            self.send_control(WINDOW_UPDATE, RST, stream_id, 0)
            return None
        self.streams[stream_id] = stream
        self._used = True
        self._last_used = trio.current_time()
        self.send_control(WINDOW_UPDATE, ACK, stream_id, 0)
        return stream

    def _on_ping(self, flags: int, value: int) -> None:
        if flags & SYN:
            self.send_control(PING, ACK, 0, value)
        elif flags & ACK and value == self._ping_id and self._ping_sent_time:
            sample = trio.current_time() - self._ping_sent_time
            self._rtt = sample if self._rtt == 0 else (self._rtt + sample) / 2
            self._ping_sent_time = 0.0

    async def _keep_alive(self) -> None:
        await trio.sleep(0.5)
        while True:
            self._ping_id = (self._ping_id + 1) % 2**32
            self._ping_sent_time = trio.current_time()
            self.send_control(PING, SYN, 0, self._ping_id)
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
        self._control.append(HEADER.pack(0, kind, flags, stream_id, value))
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
            await self.write_frame(frames)

    async def write_frame(self, data: bytes) -> None:
        """Send whole frames; other writers wait. Whoever cancels does not cut them short.

        Raises:
            MuxedStreamError: the connection is closed, or the peer took nothing for 20 s.
        """
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
            await self.write_frame(HEADER.pack(0, WINDOW_UPDATE, SYN, stream_id, 0))
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
                await self.write_frame(HEADER.pack(0, GO_AWAY, 0, 0, error_code))
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
