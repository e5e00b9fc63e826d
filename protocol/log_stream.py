"""The run's log over a stream: ask for its files by path, as a browser would; hand in what witnesses say.

Whoever asks believes nothing of what comes: a checkpoint is signed, and tiles are
checked against one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.log_messages import (
    CHECKPOINT,
    LOG_PROTOCOL,
    MAX_FILE,
    Cosigned,
    LogReply,
    LogRequest,
    SplitView,
)
from barnraise.protocol.messages import Message
from barnraise.protocol.network import Handler, Network, Stream
from barnraise.protocol.notes import MAX_NOTE
from barnraise.protocol.stream_slots import with_slots
from barnraise.protocol.tlog_tiles import ENTRIES, Tile, parse_path
from barnraise.protocol.wire import MessageReader, send_message

STREAMS = 64  # at once, and of one peer:
STREAMS_PER_PEER = 2
REQUESTS = 4096  # on one stream
IDLE_S = 30.0
REPLY_S = 20.0  # for 64 KiB or less
_SLOWEST = 16 * 1024  # bytes/s

Read = Callable[[str], Awaitable[bytes | None]]
"""Gives the file at a path that was checked to be one of a log; None: there is none."""
Take = Callable[[str, str], bool]
"""Given a peer id and a signature line: whether the line was taken."""
Convict = Callable[[str, bytes], bool]
"""Given a peer id and evidence: whether it is believed, now or before. May raise as ``Accusations.hear``."""


def serve_log(
    read: Read,
    take: Take = lambda peer_id, line: False,
    convict: Convict = lambda peer_id, evidence: False,
) -> Handler:
    """A handler for ``LOG_PROTOCOL``. Whoever sends anything else, or too much, loses the stream."""

    async def serve(stream: Stream) -> None:
        reader = MessageReader(stream, (LogRequest, Cosigned, SplitView))
        for _ in range(REQUESTS):
            with trio.fail_after(IDLE_S):
                request = await reader.receive()
            if request is None:
                break
            data: bytes | None = None
            if isinstance(request, Cosigned):
                data = b"" if take(stream.peer_id, request.line) else None
            elif isinstance(request, SplitView):
                data = b"" if convict(stream.peer_id, request.evidence) else None
            else:
                assert isinstance(request, LogRequest)
                limit_of(request.path)
                data = await read(request.path)
            with trio.fail_after(_patience(len(data or b""))):
                await send_message(stream, LogReply(size=-1 if data is None else len(data)))
                if data:
                    await stream.write(data)
        await stream.close()

    return with_slots(serve, STREAMS, STREAMS_PER_PEER)


def limit_of(path: str) -> int:
    """The most bytes that the file at a log's path can have.

    Raises:
        MalformedError: it is no path of a log.
    """
    return MAX_NOTE if path == CHECKPOINT else min(parse_path(path).limit, MAX_FILE)


async def fetch_files(network: Network, peer_id: str, paths: Sequence[str]) -> list[bytes | None]:
    """Ask a connected peer for files of its log, in order; None for each that it has not.

    Raises:
        PeerError: it does not speak of logs, went away, or is too slow.
        MalformedError: its replies are none, or larger than such files can be.
    """
    found: list[bytes | None] = []
    async with _Asking(network, peer_id) as asking:
        for path in paths:
            found.append(await asking.ask(LogRequest(path=path), limit_of(path)))
    return found


async def fetch_tiles(network: Network, peer_id: str, tiles: Sequence[Tile]) -> dict[Tile, bytes] | None:
    """Ask a connected peer for tiles; where a partial one is gone the whole one stands for it.

    None: it has not all of them.

    Raises:
        PeerError, MalformedError: as ``fetch_files``.
    """
    found: dict[Tile, bytes] = {}
    async with _Asking(network, peer_id) as asking:
        for tile in tiles:
            assert tile.level != ENTRIES
            data = await asking.ask(LogRequest(path=tile.path), tile.limit)
            if data is None and tile != tile.whole:
                data = await asking.ask(LogRequest(path=tile.whole.path), tile.whole.limit)
            if data is None:
                return None
            found[tile] = data
    return found


async def hand_in(network: Network, peer_id: str, line: str) -> bool:
    """Hand a cosignature (a note's signature line) to a connected peer; whether it took it.

    Raises:
        PeerError, MalformedError: as ``fetch_files``.
    """
    async with _Asking(network, peer_id) as asking:
        return await asking.ask(Cosigned(line=line), 0) is not None


async def accuse(network: Network, peer_id: str, evidence: bytes) -> bool:
    """Hand evidence of a split view to a connected peer; whether it believes it.

    Raises:
        PeerError, MalformedError: as ``fetch_files``.
    """
    async with _Asking(network, peer_id) as asking:
        return await asking.ask(SplitView(evidence=evidence), 0) is not None


class _Asking:
    """One stream for questions; reset unless everything went well."""

    def __init__(self, network: Network, peer_id: str) -> None:
        self._network = network
        self._peer_id = peer_id

    async def __aenter__(self) -> _Asking:
        with trio.move_on_after(REPLY_S):
            self._stream = await self._network.open_stream(self._peer_id, LOG_PROTOCOL)
            self._reader = MessageReader(self._stream, (LogReply,))
            return self
        raise PeerError(f"{self._peer_id} opened no stream for its log within {REPLY_S:g} s")

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            await self._stream.close()
        else:
            with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                await self._stream.reset()

    async def ask(self, message: Message, limit: int) -> bytes | None:
        try:
            with trio.fail_after(REPLY_S):
                await send_message(self._stream, message)
                reply = await self._reader.receive()
            if reply is None:
                raise PeerError(f"{self._peer_id} closed the stream instead of answering about its log")
            assert isinstance(reply, LogReply)
            if reply.size > limit:
                raise MalformedError(f"a file of the log claims {reply.size} bytes; it can have {limit}")
            if reply.size < 0:
                return None
            with trio.fail_after(_patience(reply.size)):
                return await self._reader.read_exactly(reply.size)
        except trio.TooSlowError:
            raise PeerError(f"{self._peer_id} was too slow to answer about its log") from None


def _patience(size: int) -> float:
    return REPLY_S + size / _SLOWEST
