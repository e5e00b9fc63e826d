"""Shards on the wire: per neighbour and direction one long-lived stream of pieces.

A piece is a ``Piece`` header and raw bytes, so that a transfer can stop between two
pieces without the stream. The receiver judges every header before it keeps a byte:
the list and index must exist, the size be the manifest's, the offset the next one.
What it does not want (any more) it reads and forgets: readers never pause.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.network import Stream
from barnraise.protocol.tree_messages import MAX_PIECE, Piece
from barnraise.protocol.wire import MessageReader, frame

PIECE_S = 30.0  # for a receiver to take one piece
IDLE_S = 900.0
FIRST_PIECE = 64 * 1024
LEAST_PIECE = 16 * 1024
_FAST_S, _SLOW_S = 0.25, 2.0


class Sending:
    """One shard on its way out. ``stopped`` may be set at any time."""

    __slots__ = ("index", "number", "stopped")

    def __init__(self, number: int, index: int) -> None:
        self.number, self.index, self.stopped = number, index, False

    async def run(self, stream: Stream, data: bytes, moved: Callable[[int], None]) -> bool:
        """Write the shard piece by piece; return whether it went out whole.

        Pieces grow on fast links, for the rate's sake, and shrink on slow ones, so that
        each is taken in time and a transfer can stop soon.

        Raises:
            PeerError: the stream broke, or a piece was not taken within 30 s.
        """
        view = memoryview(data)
        offset, piece = 0, FIRST_PIECE
        while offset < len(data):
            if self.stopped:
                return False
            part = view[offset : offset + piece]
            header = Piece(
                version=self.number, index=self.index, offset=offset, size=len(part), total=len(data)
            )
            began = trio.current_time()
            with trio.move_on_after(PIECE_S) as limit:
                await stream.write(frame(header) + part)
            if limit.cancelled_caught:
                raise PeerError(f"{stream.peer_id} took no piece of a shard for {PIECE_S:.0f} s")
            moved(len(part))
            offset += len(part)
            took = trio.current_time() - began
            if took < _FAST_S:
                piece = min(2 * piece, MAX_PIECE)
            elif took > _SLOW_S:
                piece = max(piece // 2, LEAST_PIECE)
        return True


class Receiving:
    """What one neighbour is sending us at the moment. ``taken`` false: it is read and forgotten."""

    __slots__ = ("data", "index", "number", "offset", "taken", "total")

    def __init__(self, piece: Piece) -> None:
        self.number, self.index, self.total = piece.version, piece.index, piece.total
        self.offset = 0
        self.taken = True
        self.data = bytearray()

    def expects(self, piece: Piece) -> bool:
        """Whether ``piece`` is the next one of this shard."""
        return (piece.version, piece.index, piece.offset, piece.total) == (
            self.number,
            self.index,
            self.offset,
            self.total,
        )

    def add(self, part: bytes) -> bool:
        """Keep a piece's bytes; return whether the shard is whole now."""
        self.offset += len(part)
        if self.taken:
            self.data += part
        return self.offset == self.total

    def drop(self) -> None:
        """Forget what came, and what will."""
        self.taken = False
        self.data = bytearray()


class PieceReader:
    """The pieces of one inbound stream; ``moved(bytes)`` is told of everything that arrives."""

    def __init__(self, stream: Stream, moved: Callable[[int], None]) -> None:
        self._stream = stream
        self._moved = moved
        self._reader = MessageReader(self, (Piece,))

    @property
    def peer_id(self) -> str:
        """The peer's id."""
        return self._stream.peer_id

    async def read(self, limit: int) -> bytes:
        """As the stream does, with a time limit."""
        with trio.move_on_after(IDLE_S):
            data = await self._stream.read(limit)
            self._moved(len(data))
            return data
        raise PeerError(f"{self.peer_id} sent nothing for {IDLE_S:.0f} s")

    async def write(self, data: bytes) -> None:
        """Never used: bulk streams go one way."""
        await self._stream.write(data)

    async def close(self) -> None:
        """As the stream does."""
        await self._stream.close()

    async def reset(self) -> None:
        """As the stream does."""
        await self._stream.reset()

    async def header(self) -> Piece | None:
        """The next piece's header, checked by itself, or None at the end.

        Raises:
            MalformedError: no such header, or it contradicts itself.
            PeerError: the stream is gone.
        """
        piece = await self._reader.receive()
        if piece is None:
            return None
        assert isinstance(piece, Piece)
        if piece.offset + piece.size > piece.total:
            raise MalformedError(f"a piece ends at {piece.offset + piece.size} of {piece.total} bytes")
        return piece

    async def body(self, piece: Piece) -> bytes:
        """The bytes that follow ``piece``; errors as in ``header``."""
        return await self._reader.read_exactly(piece.size)
