"""Any network under bandwidth caps: what every stream carries, in both directions, passes two pacers (R12).

Bulk transfers wait for small messages, so that a cap never delays heartbeats and
receipts by more than a piece; large messages share with bulk, whose receivers would
take a long silence for a stall. Written bytes are held back before they are sent.
Received ones are held back after they have arrived, and the sender feels it when its
window is full. It begins with a whole window at once (256 KiB on libp2p), for which
the next reads wait, each for ``MOST_PAUSE_S`` at most: whoever fetches also bounds what it
asks for (``Pacer.allows_more``), and asks for the next while one is read.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from barnraise.protocol.bandwidth import WINDOW, Pacer
from barnraise.protocol.messages import SHARD_PROTOCOL
from barnraise.protocol.network import Detours, Handler, Network, Stream, Way
from barnraise.protocol.tree_messages import BULK_PROTOCOL

BULK = frozenset({SHARD_PROTOCOL, BULK_PROTOCOL})
MOST_PAUSE_S = 2.0
_SMALL = 16 * 1024  # bytes: larger messages are no more urgent than bulk
_RESET_S = 2.0


class PacedStream:
    """A stream whose bytes wait for their turn; see ``barnraise.protocol.network.Stream``.

    Attributes:
        foreseen: what is read here was counted for the cap when it arrived, or could not be held
            back any more (``Pacer.foresee``), and is not counted again.
        waits: for what was asked of others and has not arrived, too.
    """

    def __init__(
        self,
        stream: Stream,
        up: Pacer,
        down: Pacer,
        *,
        urgent: bool,
    ) -> None:
        self._stream = stream
        self._up = up
        self._down = down
        self._urgent = urgent
        self.foreseen = False
        self.waits = True
        self._held = b""  # arrived, and not yet handed on

    @property
    def peer_id(self) -> str:
        """The peer's id."""
        return self._stream.peer_id

    @property
    def waiting(self) -> int:
        """Bytes that have arrived and were not read yet, as far as the network below tells."""
        return len(self._held) + int(getattr(self._stream, "waiting", 0))

    @property
    def room(self) -> int:
        """Bytes that may still arrive before something is read, as far as the network below tells."""
        return int(getattr(self._stream, "room", WINDOW))

    async def read(self, limit: int) -> bytes:
        """1 to ``limit`` bytes once they may pass, or ``b""`` at the end. Cancelling loses nothing."""
        if not self._held:
            if not self._urgent:  # reading asks for more
                debt = self._down.debt() if self.waits else self._down.arrears()
                if debt > 0:
                    await self._down.pause(min(debt, MOST_PAUSE_S))
            most = limit if self._down.rate is None else min(limit, self._down.piece)
            self._held = await self._stream.read(most)
            if self.foreseen:
                self._down.note(len(self._held))
            else:
                await self._down.take(len(self._held), urgent=self._urgent)
        data, self._held = self._held[:limit], self._held[limit:]
        return data

    async def write(self, data: bytes) -> None:
        """Send all of ``data``, piece by piece. Cancelled in the middle, the stream is reset."""
        urgent = self._urgent and len(data) <= _SMALL
        if self._up.rate is None and len(data) <= self._up.piece:
            await self._up.take(len(data), urgent=urgent)
            await self._stream.write(data)
            return
        view = memoryview(data)
        sent = 0
        try:
            while sent < len(data):
                part = bytes(view[sent : sent + self._up.piece])
                await self._up.take(len(part), urgent=urgent)
                await self._stream.write(part)
                sent += len(part)
        except trio.Cancelled:
            if sent:  # half a message is no message
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _RESET_S):
                    await self._stream.reset()
            raise

    def write_now(self, data: bytes) -> bool:
        """Send ``data`` without waiting, where no cap holds it back and the network below can; else false."""
        write_now: Callable[[bytes], bool] | None = getattr(self._stream, "write_now", None)
        if write_now is None or self._up.rate is not None or not write_now(data):
            return False
        self._up.note(len(data))
        return True

    async def close(self) -> None:
        """Close our side."""
        await self._stream.close()

    async def reset(self) -> None:
        """Abandon both directions."""
        await self._stream.reset()


class PacedNetwork:
    """``network`` under two caps; see ``barnraise.protocol.network.Network``.

    Attributes:
        up, down: the pacers; other transports of the same machine take from them, too.
    """

    def __init__(self, network: Network, up: Pacer, down: Pacer) -> None:
        self._network = network
        self.up = up
        self.down = down
        self._beside = 0
        down.watch(lambda: self.bytes_in)

    @property
    def peer_id(self) -> str:
        """Our own id."""
        return self._network.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others may reach us."""
        return self._network.addresses

    @property
    def bytes_in(self) -> int:
        """Bytes received since the start, over all connections."""
        return self._network.bytes_in + self._beside

    @property
    def bytes_out(self) -> int:
        """Bytes sent since the start, over all connections."""
        return self._network.bytes_out

    def received_beside(self, size: int) -> None:
        """Count bytes that another transport has received into ``bytes_in``."""
        self._beside += size

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """Serve ``protocol`` with streams under the caps."""

        async def paced(stream: Stream) -> None:
            await handler(self._paced(stream, protocol))

        self._network.set_handler(protocol, paced)

    async def connect(self, address: str) -> str:
        """Connect to ``address`` and return the peer id there."""
        return await self._network.connect(address)

    async def open_stream(self, peer_id: str, protocol: str) -> PacedStream:
        """Open a stream under the caps."""
        return self._paced(await self._network.open_stream(peer_id, protocol), protocol)

    def connected(self, peer_id: str) -> bool:
        """Whether a connection to ``peer_id`` is open."""
        return self._network.connected(peer_id)

    def way(self, peer_id: str) -> Way | None:
        """How the connection to ``peer_id`` goes."""
        return self._network.way(peer_id)

    def observed(self, peer_id: str) -> str:
        """Where the connection to ``peer_id`` comes from or goes to."""
        return self._network.observed(peer_id)

    async def dial_back(self, peer_id: str, port: int) -> str:
        """Dial a connected peer anew at this port, and hang up."""
        return await self._network.dial_back(peer_id, port)

    @property
    def detours(self) -> Detours | None:
        """Relays and hole punching, where the network below has them."""
        found: Detours | None = getattr(self._network, "circuits", None)
        return found

    def _paced(self, stream: Stream, protocol: str) -> PacedStream:
        return PacedStream(stream, self.up, self.down, urgent=protocol not in BULK)
