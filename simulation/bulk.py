"""The streams that carry shards: counted, and spoiled where a node is to send corrupt ones."""

from __future__ import annotations

from typing import Any

from barnraise.protocol.messages import SHARD_PROTOCOL
from barnraise.protocol.network import Handler, Network, Stream
from barnraise.protocol.tree_messages import BULK_PROTOCOL

BULK = frozenset({SHARD_PROTOCOL, BULK_PROTOCOL})
SMALLEST = 256  # bytes in one write: what is less asks or answers


class _BulkStream:
    def __init__(self, stream: Stream, network: BulkNetwork) -> None:
        self._stream, self._network = stream, network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def write(self, data: bytes) -> None:
        if len(data) >= SMALLEST:
            self._network.sent += len(data)
            if self._network.corrupt:
                data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        await self._stream.write(data)


class BulkNetwork:
    """A ``Network`` that counts the bytes of shards it sends.

    Attributes:
        sent: bytes so far. ``corrupt``: the last byte of each piece is flipped as it leaves.
    """

    def __init__(self, network: Network, *, corrupt: bool = False) -> None:
        self._network = network
        self.corrupt = corrupt
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """As the real one."""

        async def counted(stream: Stream) -> None:
            wrapped: Any = _BulkStream(stream, self)
            await handler(wrapped)

        self._network.set_handler(protocol, counted if protocol in BULK else handler)

    async def open_stream(self, peer_id: str, protocol: str) -> Stream:
        """As the real one."""
        stream = await self._network.open_stream(peer_id, protocol)
        wrapped: Any = _BulkStream(stream, self)
        return wrapped if protocol in BULK else stream
