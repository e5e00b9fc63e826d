"""What others open to us: connections and streams, so many and no more.

The limits are ours because py-libp2p's own let a remote peer hold every inbound slot. They are
per address and in all; whoever is over them is turned away before anything is read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p.network.connection.raw_connection import RawConnection
from multiaddr import Multiaddr

from barnraise.protocol.addresses import household
from barnraise.protocol.libp2p_stream import CountedStream, Counts
from barnraise.protocol.yamux_stream import GuardedStream

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0  # from the first byte to a multiplexed connection
MAX_HALF_OPEN = 256
MAX_HALF_OPEN_PER_ADDRESS = 32
MAX_PER_ADDRESS = 256
MAX_HANDLERS_PER_CONNECTION = 128


class Inbound:
    """The inbound side of one libp2p swarm; ``serve_stream`` negotiates a stream and runs its handler.

    Attributes:
        open, half_open: connections by the household they come from, and those before the handshake's end.
    """

    def __init__(self, swarm: Any, counts: Counts, serve_stream: Callable[[Any], Awaitable[None]]) -> None:
        self._swarm = swarm
        self._counts = counts
        self._serve_stream = serve_stream
        self.half_open: Counter[str] = Counter()
        self.open: Counter[str] = Counter()

    async def accept(self, tcp: trio.SocketStream) -> None:
        """Serve one inbound TCP connection to its end. Never raises but on cancellation."""
        try:
            place = household(str(tcp.socket.getpeername()[0]))
        except OSError:
            return
        if (
            self.half_open.total() >= MAX_HALF_OPEN
            or self.half_open[place] >= MAX_HALF_OPEN_PER_ADDRESS
            or self.open[place] >= MAX_PER_ADDRESS
        ):
            return
        self.open[place] += 1
        try:
            self.half_open[place] += 1
            try:
                raw = RawConnection(CountedStream(tcp, self._counts), False)
                with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                    connection = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr("/tcp/0"))
            finally:
                _decrease(self.half_open, place)
            # Swarm's own handler waits for the end of the host instead: its 250 slots never come back.
            await connection.event_closed.wait()
        except Exception as error:
            log.debug("inbound connection from %s failed: %s", place, error)
        finally:
            _decrease(self.open, place)

    async def serve(self, net_stream: Any) -> None:
        """libp2p's stream handler, such that nothing a peer sends can end the host."""
        muxed: GuardedStream = net_stream.muxed_stream
        if muxed.conn.handlers >= MAX_HANDLERS_PER_CONNECTION:
            muxed.abort("too many streams at once")
            return
        muxed.conn.handlers += 1
        try:
            await self._serve_stream(net_stream)
        except Exception as error:
            log.debug("stream from %s failed: %r", muxed.conn.peer_id, error)
            muxed.abort("the stream's negotiation failed")
        finally:
            muxed.conn.handlers -= 1


def _decrease(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
