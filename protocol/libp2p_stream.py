"""Streams and connections as libp2p's parts see them, with every byte counted and every limit kept."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import trio
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX

from barnraise.protocol.errors import PeerError
from barnraise.protocol.yamux import GuardedYamux
from barnraise.protocol.yamux_stream import GuardedStream

READ_TIMEOUT_S = 900.0  # dead connections are noticed much earlier, by pings


class Counts(Protocol):
    """Whoever keeps count of a host's bytes."""

    bytes_in: int
    bytes_out: int


class Libp2pStream:
    """A stream to an authenticated peer; see ``barnraise.protocol.network.Stream``."""

    def __init__(self, stream: GuardedStream) -> None:
        self._stream = stream
        self._peer_id = str(stream.conn.peer_id)

    @property
    def peer_id(self) -> str:
        """The peer's id, proven by the Noise handshake."""
        return self._peer_id

    @property
    def waiting(self) -> int:
        """Bytes that have arrived and were not read yet."""
        return len(self._stream.inbox)

    @property
    def room(self) -> int:
        """Bytes that may still arrive before something is read."""
        return max(0, self._stream.recv_window)

    async def read(self, limit: int) -> bytes:
        """1 to ``limit`` bytes, or ``b""`` at the end. Cancelling loses nothing.

        Raises:
            PeerError: reset, connection lost, or nothing came for 15 minutes.
        """
        with trio.move_on_after(READ_TIMEOUT_S):
            try:
                return await self._stream.read(limit)
            except MuxedStreamEOF:
                return b""
            except Exception as error:
                raise PeerError(f"lost the stream to {self._peer_id}: {error}") from error
        raise PeerError(f"{self._peer_id} sent nothing for {READ_TIMEOUT_S:.0f} s")

    async def write(self, data: bytes) -> None:
        """Send all of ``data``. A cancelled write resets the stream: half a message is no message.

        Raises:
            PeerError: reset, connection lost, or the peer read nothing for 30 s.
        """
        try:
            await self._stream.write(data)
        except Exception as error:
            self._stream.abort("writing failed")
            raise PeerError(f"lost the stream to {self._peer_id}: {error}") from error
        except BaseException:
            self._stream.abort("writing was cancelled")
            raise
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """Close our side; never raises but on cancellation."""
        await self._stream.close()

    async def reset(self) -> None:
        """Abandon the stream; never raises but on cancellation."""
        await self._stream.reset()


class CountedStream(TrioTCPStream):
    """A TCP connection whose bytes are counted by ``network``."""

    def __init__(self, stream: trio.SocketStream, network: Counts) -> None:
        super().__init__(stream)
        self._network = network

    async def write(self, data: bytes) -> None:
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the connection was lost: {error}", transport="tcp") from error
        self._network.bytes_out += len(data)

    async def read(self, n: int | None = None) -> bytes:
        data = bytes(await super().read(n))
        self._network.bytes_in += len(data)
        return data


class OnlyGuardedYamux(MuxerMultistream):
    """Negotiates yamux alone; the base class makes its own ``Yamux`` whatever class it was given."""

    def __init__(self, timeout_s: int) -> None:
        super().__init__({TProtocol(YAMUX): GuardedYamux}, timeout_s)

    async def new_conn(self, conn: Any, peer_id: Any) -> GuardedYamux:
        await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = GuardedYamux(conn, peer_id, is_initiator=conn.is_initiator)
        with suppress(AttributeError):
            muxed.remote = conn.get_remote_address()
        return muxed


class CircuitStream:
    """A stream through a relay, as the bytes below Noise; see libp2p's ``ReadWriteCloser``."""

    def __init__(self, stream: Libp2pStream) -> None:
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        """1 to ``n`` bytes, or ``b""`` at the end; IOException once the relay has given up."""
        try:
            return await self._stream.read(n if n is not None and n > 0 else 64 * 1024)
        except PeerError as error:
            raise ConnectionClosedError(str(error), transport="circuit") from error

    async def write(self, data: bytes) -> None:
        """Send all of ``data``; IOException once the relay has given up."""
        try:
            await self._stream.write(data)
        except PeerError as error:
            raise ConnectionClosedError(str(error), transport="circuit") from error

    async def close(self) -> None:
        """End both directions."""
        await self._stream.reset()

    def get_remote_address(self) -> tuple[str, int] | None:
        """None: whoever is at the other end, its address is the relay's business."""
        return None
