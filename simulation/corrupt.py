"""A node whose shards are wrong: the last byte of whatever is large enough is flipped as it leaves."""

from __future__ import annotations

from typing import Any

from barnraise.protocol.messages import SHARD_PROTOCOL
from barnraise.protocol.network import Handler, Network, Stream
from barnraise.protocol.tree_messages import BULK_PROTOCOL

SMALLEST = 256  # bytes: shards, not headers
_SPOILED = frozenset({SHARD_PROTOCOL, BULK_PROTOCOL})


class _Spoiled:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def write(self, data: bytes) -> None:
        if len(data) >= SMALLEST:
            data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        await self._stream.write(data)


class CorruptingNetwork:
    """A ``Network`` that spoils what it sends on the protocols that carry shards."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """As the real one; what the handler sends is spoiled."""

        async def spoiled(stream: Stream) -> None:
            wrapped: Any = _Spoiled(stream)
            await handler(wrapped)

        self._network.set_handler(protocol, spoiled if protocol in _SPOILED else handler)

    async def open_stream(self, peer_id: str, protocol: str) -> Stream:
        """As the real one; what is sent on it is spoiled."""
        stream = await self._network.open_stream(peer_id, protocol)
        wrapped: Any = _Spoiled(stream)
        return wrapped if protocol in _SPOILED else stream
