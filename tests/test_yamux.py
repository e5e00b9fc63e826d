"""One end of a connection against a peer that speaks raw frames, in virtual time."""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from trio.testing import MemoryReceiveStream, MemorySendStream, MockClock, memory_stream_one_way_pair

from barnraise.protocol import yamux
from barnraise.protocol.yamux import (
    DEAD_AFTER_S,
    INITIAL_WINDOW,
    MAX_CONTROL_FRAMES,
    MAX_INBOUND_STREAMS,
    MAX_OUTBOUND_STREAMS,
    UNUSED_S,
    GuardedYamux,
)
from barnraise.protocol.yamux_stream import MAX_WINDOW, GuardedStream

DATA, UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
HEADER = struct.Struct(">BBHII")


class Peer:
    """The other end: frames in and out by hand. It stands in for the encrypted connection, too."""

    def __init__(self) -> None:
        self.is_initiator = False
        self._to_us: MemorySendStream
        self._to_us, self._incoming = memory_stream_one_way_pair()
        self._outgoing: MemorySendStream
        self._from_us: MemoryReceiveStream
        self._outgoing, self._from_us = memory_stream_one_way_pair()
        self.stuck = trio.Event()
        self.stuck.set()
        self.sent: list[tuple[int, int, int, int]] = []

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._incoming.receive_some(65_519))

    async def write(self, data: bytes) -> None:
        await self.stuck.wait()
        await self._outgoing.send_all(data)

    async def close(self) -> None:
        await self._outgoing.aclose()
        await self._incoming.aclose()

    async def send(self, kind: int, flags: int, stream_id: int, length: int, body: bytes = b"") -> None:
        await self._to_us.send_all(HEADER.pack(0, kind, flags, stream_id, length) + body)

    async def data(self, stream_id: int, body: bytes, flags: int = 0) -> None:
        await self.send(DATA, flags, stream_id, len(body), body)

    async def raw(self, data: bytes) -> None:
        await self._to_us.send_all(data)

    async def leave(self) -> None:
        await self._to_us.aclose()

    async def frame(self) -> tuple[int, int, int, int, bytes]:
        """The next frame from the end under test, pings skipped."""
        while True:
            _, kind, flags, stream_id, length = HEADER.unpack(await self._exactly(HEADER.size))
            body = await self._exactly(length) if kind == DATA else b""
            if kind != PING:
                return kind, flags, stream_id, length, body

    async def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = await self._from_us.receive_some(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[GuardedYamux, Peer]]:
    peer = Peer()
    conn = GuardedYamux(peer, "peer", is_initiator=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(conn.start)
        yield conn, peer
        nursery.cancel_scope.cancel()


async def accept(conn: GuardedYamux) -> GuardedStream:
    stream = await conn.accept_stream()
    assert isinstance(stream, GuardedStream)
    return stream


async def ended(conn: GuardedYamux) -> str:
    with trio.fail_after(1):
        await conn.event_closed.wait()
    return conn._failure


async def test_an_unasked_flood_ends_the_connection_at_the_windows_edge(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with connection() as (conn, peer):
        await peer.send(UPDATE, SYN, 1, 0)
        stream = await accept(conn)
        sent = 0
        with suppress(trio.BrokenResourceError):
            while sent < 400 * 1024 * 1024:
                await peer.data(1, bytes(65_000))
                sent += 65_000
                await trio.testing.wait_all_tasks_blocked()
        assert sent <= INITIAL_WINDOW + 65_000
        assert len(stream.inbox) <= INITIAL_WINDOW
        assert "overran its receive window" in await ended(conn)
        assert "overran its receive window" in caplog.text


async def test_one_huge_frame_is_refused_by_its_header(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        await peer.send(DATA, SYN, 1, INITIAL_WINDOW + 1)
        assert "overran" in await ended(conn)


@pytest.mark.parametrize("length", [1, 2**32 - 1])
async def test_data_for_a_stream_that_was_never_open_ends_the_connection(
    autojump_clock: MockClock, length: int
) -> None:
    async with connection() as (conn, peer):
        await peer.send(DATA, 0, 7, length)
        assert "not open" in await ended(conn)


async def test_what_was_under_way_to_a_reset_stream_is_allowed_and_no_more(
    autojump_clock: MockClock,
) -> None:
    async with connection() as (conn, peer):
        await peer.send(UPDATE, SYN, 1, 0)
        stream = await accept(conn)
        await stream.reset()
        for _ in range(4):
            await peer.data(1, bytes(INITIAL_WINDOW // 4))
        await trio.testing.wait_all_tasks_blocked()
        assert not conn.event_closed.is_set()
        await peer.data(1, b"x")
        assert "not open" in await ended(conn)


async def test_the_window_is_given_back_as_the_reader_reads_and_grows_to_its_limit(
    autojump_clock: MockClock,
) -> None:
    async with connection() as (conn, peer):
        await peer.send(UPDATE, SYN, 1, 0)
        stream = await accept(conn)
        window = INITIAL_WINDOW
        total = 0
        assert (await peer.frame())[:3] == (UPDATE, ACK, 1)
        while total < 64 * 1024 * 1024:
            size = min(window, 65_000)
            await peer.data(1, bytes(size))
            window -= size
            total += size
            got = 0
            while got < size:
                got += len(await stream.read(1 << 20))
            if window < INITIAL_WINDOW // 2:
                kind, _flags, _id, increment, _ = await peer.frame()
                assert kind == UPDATE
                window += increment
            assert window <= 2 * MAX_WINDOW
        assert stream.target_recv_window == MAX_WINDOW
        assert not conn.event_closed.is_set()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (HEADER.pack(1, DATA, 0, 1, 0), "not a yamux frame"),
        (HEADER.pack(0, 9, 0, 1, 0), "not a yamux frame"),
        (HEADER.pack(0, UPDATE, SYN, 2, 0), "cannot be opened"),  # our own numbers are even
        (HEADER.pack(0, UPDATE, SYN, 0, 0), "cannot be opened"),
        (HEADER.pack(0, UPDATE, SYN, 1, 0) * 2, "cannot be opened"),
        (HEADER.pack(0, GO_AWAY, 0, 0, 0), "the peer closed"),
    ],
)
async def test_a_breach_of_the_protocol_ends_the_connection(
    autojump_clock: MockClock, frame: bytes, reason: str
) -> None:
    async with connection() as (conn, peer):
        await peer.raw(frame)
        assert reason in await ended(conn)


async def test_streams_beyond_the_limit_are_reset_and_the_others_live(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        for number in range(MAX_INBOUND_STREAMS + 5):
            await peer.send(UPDATE, SYN, 2 * number + 1, 0)
        frames = [await peer.frame() for _ in range(MAX_INBOUND_STREAMS + 5)]
        assert sum(flags == ACK for _, flags, *_ in frames) == MAX_INBOUND_STREAMS
        assert sum(flags == RST for _, flags, *_ in frames) == 5
        stream = await accept(conn)
        await peer.data(stream.stream_id, b"hello")
        assert await stream.read(10) == b"hello"


async def test_opening_too_many_streams_is_an_error_not_a_wait(autojump_clock: MockClock) -> None:
    async with connection() as (conn, _peer):
        streams = [await conn.open_stream() for _ in range(MAX_OUTBOUND_STREAMS)]
        with pytest.raises(MuxedStreamError, match="streams are open"):
            await conn.open_stream()
        await streams[0].reset()
        await conn.open_stream()


async def test_a_peer_that_pings_and_does_not_read_is_cut_off(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        peer.stuck = trio.Event()
        await peer.raw(HEADER.pack(0, PING, SYN, 0, 1) * (MAX_CONTROL_FRAMES + 10_000))
        with trio.fail_after(DEAD_AFTER_S):
            await conn.event_closed.wait()
        assert len(conn._control) <= MAX_CONTROL_FRAMES


async def test_a_silent_peer_is_given_up(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        await peer.send(UPDATE, SYN, 1, 0)
        stream = await accept(conn)
        began = trio.current_time()
        with pytest.raises(MuxedStreamReset, match="no sign of life"):
            await stream.read(1)
        assert DEAD_AFTER_S <= trio.current_time() - began <= DEAD_AFTER_S + 20
        await ended(conn)


async def test_an_unused_connection_is_closed(autojump_clock: MockClock) -> None:
    async with connection() as (conn, _peer):
        began = trio.current_time()
        await conn.event_closed.wait()
        assert UNUSED_S <= trio.current_time() - began <= UNUSED_S + 20
        assert "not used" in conn._failure


async def test_a_writer_whose_peer_never_reads_gives_up(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        stream = await conn.open_stream()

        async def live() -> None:  # alive, but it never grants more window
            while True:
                await peer.send(PING, SYN, 0, 1)
                await trio.sleep(5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            with pytest.raises(MuxedStreamError, match="read nothing for 30 s"):
                await stream.write(bytes(INITIAL_WINDOW + 1))
            nursery.cancel_scope.cancel()


async def test_a_stuck_socket_ends_the_connection_and_frees_its_writers(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        stream = await conn.open_stream()
        peer.stuck = trio.Event()
        with pytest.raises(MuxedStreamError, match="took nothing for 20 s"):
            await stream.write(b"x")
        assert "took nothing" in await ended(conn)


async def test_a_cancelled_writer_leaves_whole_frames_behind(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        stream = await conn.open_stream()
        peer.stuck = trio.Event()

        async def unstick() -> None:
            await trio.sleep(5)
            peer.stuck.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(unstick)
            with trio.move_on_after(1) as scope:
                await stream.write(bytes(200_000))
            assert scope.cancelled_caught
        other = await conn.open_stream()
        await other.write(b"whole")
        frames = []
        while not frames or frames[-1][2] != other.stream_id or frames[-1][0] != DATA:
            frames.append(await peer.frame())
        assert frames[-1][4] == b"whole"


async def test_what_arrived_before_a_loss_can_be_read_then_it_is_an_error(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        await peer.data(1, b"last words", SYN)
        stream = await accept(conn)
        await peer.leave()
        await ended(conn)
        assert await stream.read(4) == b"last"
        assert await stream.read(100) == b" words"
        with pytest.raises(MuxedStreamReset):
            await stream.read(1)


async def test_an_end_that_arrived_before_a_loss_stays_an_end(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        await peer.data(1, b"all", SYN | FIN)
        stream = await accept(conn)
        await peer.leave()
        await ended(conn)
        assert await stream.read(100) == b"all"
        with pytest.raises(MuxedStreamEOF):
            await stream.read(1)


async def test_an_abandoned_stream_is_reset_after_a_while(autojump_clock: MockClock) -> None:
    async with connection() as (conn, peer):
        await peer.send(UPDATE, SYN, 1, 0)
        stream = await accept(conn)
        stream.abandon()
        flags = [(await peer.frame())[1] for _ in range(2)]
        assert flags == [ACK, FIN]

        async def live() -> None:
            while True:
                await peer.send(PING, SYN, 0, 1)
                await trio.sleep(5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            assert (await peer.frame())[1] == RST
            nursery.cancel_scope.cancel()
        assert not conn.streams


FRAMES = st.builds(
    lambda version, kind, flags, stream_id, length, body: (
        HEADER.pack(version, kind, flags, stream_id, len(body) if length is None else length) + body
    ),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 4),
    st.integers(0, 15),
    st.integers(0, 9),
    st.none() | st.integers(0, 2**32 - 1),
    st.binary(max_size=50),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FRAMES | st.binary(max_size=40), max_size=20))
def test_no_bytes_make_a_connection_raise(pieces: list[bytes]) -> None:
    async def main() -> None:
        peer = Peer()
        conn = GuardedYamux(peer, "peer", is_initiator=False)
        async with trio.open_nursery() as nursery:

            async def serve() -> None:
                with suppress(MuxedConnUnavailable):
                    while True:
                        nursery.start_soon(drain, await accept(conn))

            async def drain(stream: GuardedStream) -> None:
                try:
                    while await stream.read(100):
                        pass
                except MuxedStreamError:
                    stream.abandon()

            async def attack() -> None:
                try:
                    for piece in pieces:
                        await peer.raw(piece)
                    await peer.leave()
                except trio.BrokenResourceError:
                    pass

            nursery.start_soon(attack)
            nursery.start_soon(serve)
            await conn.start()
        held = sum(len(stream.inbox) for stream in conn.streams.values())
        assert held <= INITIAL_WINDOW * MAX_INBOUND_STREAMS
        assert conn.is_closed

    logging.getLogger(yamux.__name__).setLevel(logging.ERROR)
    try:
        trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        logging.getLogger(yamux.__name__).setLevel(logging.NOTSET)
