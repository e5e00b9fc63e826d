"""Connections that we make: dialled, punched through routers, or through a relay.

Each ends in a libp2p connection whose other side has proven its key, or in a ``PeerError``
that says what was wrong, with nothing left open.
"""

from __future__ import annotations

import os
from typing import Any, cast

import trio
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from barnraise.protocol.errors import PeerError
from barnraise.protocol.libp2p_dial import open_from, open_tcp
from barnraise.protocol.libp2p_inbound import HANDSHAKE_TIMEOUT_S
from barnraise.protocol.libp2p_stream import CircuitStream, CountedStream, Counts, Libp2pStream
from barnraise.protocol.yamux import GuardedYamux

DIAL_TIMEOUT_S = 10.0
DIAL_BACK_S = 5.0
PUNCH_TRY_S = 2.5


class Outbound:
    """The outbound side of one libp2p swarm.

    Attributes:
        source: the port that connections leave from, if it is fixed.
    """

    def __init__(self, swarm: Any, counts: Counts) -> None:
        self._swarm = swarm
        self._counts = counts
        self.source: int | None = None

    async def dial(self, address: str, host: str, port: int, peer_id: str) -> None:
        """Connect to ``peer_id`` at ``host`` and ``port``; ``address`` is for the text.

        Raises:
            PeerError: unreachable, timed out, or another peer answered.
        """
        # One address by hand: Swarm.dial_peer tries a single one, waits 250 ms and blocks the peer for 60 s.
        tcp: trio.SocketStream | None = None
        try:
            with trio.fail_after(DIAL_TIMEOUT_S):
                tcp = await open_tcp(host, port, self.source)
                raw = RawConnection(CountedStream(tcp, self._counts), True)
                made = await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(peer_id))
                made.muxed_conn.local_port = int(tcp.socket.getsockname()[1])
        except trio.TooSlowError as error:
            await _drop(tcp)
            raise PeerError(f"{address} did not answer within {DIAL_TIMEOUT_S:.0f} s") from error
        except Exception as error:
            await _drop(tcp)
            reason = _reason(error)
            if "does not correspond" in reason or "mismatch" in reason.lower():
                raise PeerError(
                    f"another peer answers at {address}, with another key than the address names: "
                    "ask for the present address"
                ) from error
            raise PeerError(f"cannot connect to {address}: {reason}") from error
        except BaseException:
            await _drop(tcp)
            raise

    async def prove(self, address: str, host: str, port: int, peer_id: str) -> None:
        """Have whoever answers there prove the key of ``peer_id``, and hang up.

        Raises:
            PeerError: nobody or somebody else answers.
        """
        tcp: trio.SocketStream | None = None
        try:
            with trio.fail_after(DIAL_BACK_S):
                tcp = await trio.open_tcp_stream(host, port)
                raw = RawConnection(CountedStream(tcp, self._counts), True)
                await self._swarm.upgrader.upgrade_security(raw, True, ID.from_string(peer_id))
        except trio.TooSlowError as error:
            raise PeerError(f"{address} did not answer within {DIAL_BACK_S:.0f} s") from error
        except Exception as error:
            raise PeerError(f"cannot connect to {address}: {_reason(error)}") from error
        finally:
            await _drop(tcp)

    async def adopt(self, stream: Libp2pStream, peer_id: str, *, initiator: bool, bulk: bool) -> GuardedYamux:
        """Make a connection to ``peer_id`` out of a stream through a relay.

        Raises:
            PeerError: the handshake failed, or somebody else is at the other end.
        """
        muxed = await self._upgrade(RawConnection(cast(Any, CircuitStream(stream)), initiator), peer_id)
        muxed.way, muxed.usable = "relayed", bulk
        return muxed

    async def punch(self, source: int, peer_id: str, host: str, port: int, *, initiator: bool) -> None:
        """Connect to ``host`` from our port ``source`` while it connects to us; see the network's ``punch``.

        Raises:
            PeerError: no connection, the handshake failed, or somebody else is there.
        """
        tcp: trio.SocketStream | None = None
        try:
            with trio.fail_after(PUNCH_TRY_S):
                tcp = await open_from(source, host, port)
            muxed = await self._upgrade(RawConnection(CountedStream(tcp, self._counts), initiator), peer_id)
        except (OSError, trio.TooSlowError) as error:
            await _drop(tcp)
            raise PeerError(_reason(error) if isinstance(error, OSError) else "no answer") from error
        except BaseException:
            await _drop(tcp)
            raise
        muxed.way = "hole-punched"

    async def _upgrade(self, raw: RawConnection, peer_id: str) -> GuardedYamux:
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                if raw.is_initiator:
                    made = await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(peer_id))
                else:
                    made = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr("/tcp/0"))
        except Exception as error:
            raise PeerError(f"the handshake with {peer_id} failed: {_reason(error)}") from error
        muxed: GuardedYamux = made.muxed_conn if raw.is_initiator else made
        if str(muxed.peer_id) != peer_id:
            await muxed.close()
            raise PeerError(f"somebody else is there: {muxed.peer_id}")
        return muxed


async def _drop(tcp: trio.SocketStream | None) -> None:
    if tcp is not None:
        await trio.aclose_forcefully(tcp)


def _reason(error: BaseException) -> str:
    """The innermost text of an error and its causes."""
    text = str(error) or type(error).__name__
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BaseExceptionGroup):
            seen = seen.exceptions[0]
        if isinstance(seen, OSError) and seen.strerror:
            # trio's text repeats the address in its own notation; a resolver's numbers are negative
            return os.strerror(seen.errno) if seen.errno and seen.errno > 0 else seen.strerror
        text = str(seen) or text
        seen = seen.__cause__
    return text
