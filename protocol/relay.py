"""A relay for nodes that nobody can dial: circuit relay v2 (libp2p specs), its serving side.

A node that cannot be dialled reserves a place over a connection of its own; whoever
wants to reach it asks the relay, which joins two streams. The two prove their keys to
each other and encrypt from end to end: a relay sees sizes and times. By default a circuit
carries just what two nodes need to arrange a hole punch (``LimitSpec.data``), so that a relay's
operator pays kilobytes and never somebody's shards. In ``peer.addrs`` of its answers the
relay witnesses where it sees the other side, so that nobody is sent to dial a stranger.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

import trio
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from msgspec import Struct

from barnraise.protocol.addresses import household_of
from barnraise.protocol.bandwidth import Pacer
from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError
from barnraise.protocol.network import Network, Stream
from barnraise.protocol.reachability import Quota
from barnraise.protocol.relay_wire import (
    DENIED,
    FAILED,
    LIMIT,
    MALFORMED,
    NO_RESERVATION,
    OK,
    REFUSED,
    STOP_PROTOCOL,
    packed,
    peer_bytes,
    peer_in,
    read_message,
    write_message,
)

log = logging.getLogger(__name__)

STEP_S = 10.0
PIECE = 64 * 1024
ASKS = 120  # questions of one peer in Quota's window: 24 a minute


class LimitSpec(Struct, frozen=True):
    """What a relay lends.

    ``per_host``: reservations from one address (IPv6: /64). Per circuit: ``seconds`` it may last, and
    ``data`` bytes each way (0: any number). ``rate``: bytes/s, all circuits together.
    """

    reservations: int = 1024
    per_host: int = 16
    reservation_s: float = 3600.0
    circuits: int = 256
    circuits_per_peer: int = 4
    seconds: float = 30.0
    data: int = 128 * 1024
    rate: float = 1e6


def bulk(rate: float) -> LimitSpec:
    """Limits of a relay that carries shards, too: ``rate`` bytes/s in all, an hour per circuit."""
    return LimitSpec(seconds=3600.0, data=0, rate=rate)


class Relay:
    """Serves ``HOP_PROTOCOL`` on ``network``.

    Attributes:
        reserved: peer id -> until when (monotonic seconds).
        open: circuits now. ``carried``: bytes since the start, both ways.
    """

    def __init__(self, network: Network, limits: LimitSpec | None = None) -> None:
        self.network = network
        self.limits = limits or LimitSpec()
        self.reserved: dict[str, float] = {}
        self.open = 0
        self.carried = 0
        self._per_peer: Counter[str] = Counter()
        self._hosts: dict[str, str] = {}  # of reservations
        self._asks = Quota(ASKS)
        self._pacer = Pacer(self.limits.rate)

    async def serve(self, stream: Stream) -> None:
        """Answer one request; for a circuit, until it ends."""
        peer, now = stream.peer_id, trio.current_time()
        try:
            with trio.fail_after(STEP_S):
                message = await read_message(stream, HopMessage)
        except trio.TooSlowError:
            raise PeerError("asked for nothing") from None
        allowed = self._asks.wait(peer, now) <= 0 and self.network.way(peer) != "relayed"
        if not allowed:
            await self._answer(stream, DENIED)
            return
        self._asks.spend(peer, now)
        if message.type == HopMessage.RESERVE:
            await self._reserve(stream, peer, now)
        elif message.type == HopMessage.CONNECT:
            await self._connect(stream, peer, message, now)
        else:
            await self._answer(stream, MALFORMED)

    # --- reservations

    async def _reserve(self, stream: Stream, peer: str, now: float) -> None:
        for other, until in list(self.reserved.items()):
            if until <= now or not self.network.connected(other):
                self._forget(other)
        host = household_of(self.network.observed(peer))
        same = sum(1 for other in self._hosts.values() if other == host)
        if peer not in self.reserved and (
            len(self.reserved) >= self.limits.reservations or same >= self.limits.per_host
        ):
            await self._answer(stream, REFUSED)
            return
        self.reserved[peer], self._hosts[peer] = now + self.limits.reservation_s, host
        reply = self._status(OK)
        reply.reservation.expire = int(time.time() + self.limits.reservation_s)
        reply.limit.duration, reply.limit.data = int(self.limits.seconds), self.limits.data
        reply.peer.id = peer_bytes(peer)
        reply.peer.addrs.extend(packed(self.network.observed(peer)))
        await self._send(stream, reply)

    def _forget(self, peer: str) -> None:
        self.reserved.pop(peer, None)
        self._hosts.pop(peer, None)

    # --- circuits

    async def _connect(self, stream: Stream, peer: str, message: HopMessage, now: float) -> None:
        try:
            target = peer_in(message)
        except MalformedError:
            await self._answer(stream, MALFORMED)
            return
        if self.reserved.get(target, now) <= now or not self.network.connected(target) or target == peer:
            await self._answer(stream, NO_RESERVATION)
            return
        most = self.limits.circuits_per_peer
        if self.open >= self.limits.circuits or max(self._per_peer[peer], self._per_peer[target]) >= most:
            await self._answer(stream, LIMIT)
            return
        self.open += 1
        self._per_peer.update((peer, target))
        try:
            other = await self._offer(peer, target)
            if other is None:
                await self._answer(stream, FAILED)
                return
            try:
                reply = self._status(OK)
                reply.limit.duration, reply.limit.data = int(self.limits.seconds), self.limits.data
                reply.peer.id = peer_bytes(target)
                reply.peer.addrs.extend(packed(self.network.observed(target)))
                await self._send(stream, reply)
                await self._join(stream, other)
            finally:
                await _reset(other)
        finally:
            self.open -= 1
            self._per_peer.subtract((peer, target))
            self._per_peer += Counter()  # forget those at nought
            await _reset(stream)

    async def _offer(self, peer: str, target: str) -> Stream | None:
        """A stream to ``target``, which has taken the circuit; None if it does not."""
        other: Stream | None = None
        try:
            with trio.fail_after(STEP_S):
                other = await self.network.open_stream(target, STOP_PROTOCOL)
                offer = StopMessage(type=StopMessage.CONNECT)
                offer.peer.id = peer_bytes(peer)
                offer.peer.addrs.extend(packed(self.network.observed(peer)))
                offer.limit.duration, offer.limit.data = int(self.limits.seconds), self.limits.data
                await write_message(other, offer)
                answer = await read_message(other, StopMessage)
                if answer.type == StopMessage.STATUS and answer.status == OK:
                    return other
        except (BarnraiseError, trio.TooSlowError) as error:
            log.info("no circuit to %s: %s", target, error)
        if other is not None:
            await _reset(other)
        return None

    async def _join(self, one: Stream, other: Stream) -> None:
        """Carry bytes both ways until either side ends or the limits are reached."""
        with trio.move_on_after(self.limits.seconds):
            async with trio.open_nursery() as nursery:

                async def carry(source: Stream, target: Stream) -> None:
                    left = self.limits.data or float("inf")
                    try:
                        while left > 0:
                            data = await source.read(int(min(PIECE, left)))
                            if not data:
                                break
                            left -= len(data)
                            await self._pacer.take(len(data))
                            await target.write(data)
                            self.carried += len(data)
                    except PeerError:
                        pass
                    nursery.cancel_scope.cancel()

                nursery.start_soon(carry, one, other)
                nursery.start_soon(carry, other, one)

    def _status(self, status: int) -> HopMessage:
        message = HopMessage(type=HopMessage.STATUS)
        message.status = status  # type: ignore[assignment]
        return message

    async def _answer(self, stream: Stream, status: int) -> None:
        await self._send(stream, self._status(status))
        await stream.close()

    async def _send(self, stream: Stream, message: HopMessage) -> None:
        with trio.move_on_after(STEP_S) as scope:
            await write_message(stream, message)
        if scope.cancelled_caught:
            raise PeerError("takes no answer")


async def _reset(stream: Stream) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
        await stream.reset()
