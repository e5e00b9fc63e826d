"""Reaching nodes that nobody can dial, and being such a node: circuits through a relay, and hole punching.

The client's side of circuit relay v2 and DCUtR (libp2p specs). The way to a node is
``<relay's address>/p2p-circuit/p2p/<node>``. A circuit is opened first; over it the node
that was called begins the punch: each learns where the other is seen, and both connect
at the same moment from the port that their connection to the relay comes from, for which
their routers have a translation already. Where a router uses a new port for every
connection ("symmetric" NAT) that fails, and the circuit is what is left, if the relay
lends it for more than the arrangement.

Nobody is dialled on a peer's word alone: a host must be the one the relay witnessed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import trio
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch

from barnraise.protocol.errors import BarnraiseError, MalformedError, PeerError
from barnraise.protocol.libp2p_stream import Libp2pStream
from barnraise.protocol.network import Stream
from barnraise.protocol.relay_wire import (
    DCUTR_PROTOCOL,
    FAILED,
    HOP_PROTOCOL,
    OK,
    REASONS,
    STOP_PROTOCOL,
    packed,
    peer_bytes,
    peer_in,
    places,
    read_message,
    write_message,
)

if TYPE_CHECKING:
    from barnraise.protocol.libp2p_network import Libp2pNetwork
    from barnraise.protocol.yamux import GuardedYamux

log = logging.getLogger(__name__)

STEP_S = 10.0
PUNCH_S = 6.0
RETRY_S = 0.25
CROSSED_S = 3.0
MAX_ROUND_TRIP_S = 4.0
BULK_LEAST = 16 * 1024 * 1024  # bytes: a relay that lends less is for arranging punches
MAX_CALLS = 8  # circuits that others open to us at a time
CALLS_PER_MINUTE = 30


class _NotTakenError(PeerError):
    """The relay offered a circuit to the other side, which did not take it."""


class Circuits:
    """One host's circuits.

    Attributes:
        observed: where the relay sees us (``/ip4/HOST/tcp/PORT``).
        punched, failed: hole punches since the start.
        relayed: circuits in use for more than arranging a punch, since the start.
    """

    def __init__(self, network: Libp2pNetwork) -> None:
        self._network = network
        self._relay = ""
        self.observed = ""
        self.punched = 0
        self.failed = 0
        self.relayed = 0
        self.last_failure = ""
        self._calls: deque[float] = deque(maxlen=CALLS_PER_MINUTE)
        self._under_way = 0
        self._witnessed: dict[str, tuple[tuple[str, int], ...]] = {}  # callee -> where the relay sees it
        self._settled: dict[str, trio.Event] = {}
        self._dialling: dict[str, str] = {}  # peer -> relay
        self._answering: dict[str, trio.Event] = {}  # peer whose call we took -> its punch is over
        network.set_handler(STOP_PROTOCOL, self._called)
        network.set_handler(DCUTR_PROTOCOL, self._answer_punch)

    # --- being reached

    async def reserve(self, relay: str) -> tuple[float, bool]:
        """Take or renew a place at a connected relay, which may call us from now on.

        Returns how long that lasts (s), and whether its circuits carry shards.

        Raises:
            PeerError: it refuses, or is no relay.
            MalformedError: its answer is none.
        """
        reply = await self._ask(relay, HopMessage(type=HopMessage.RESERVE))
        self._relay = relay
        seen = places(reply.peer.addrs)
        self.observed = f"/ip4/{seen[0][0]}/tcp/{seen[0][1]}" if seen else ""
        seconds = min(max(reply.reservation.expire - time.time(), 60.0), 3600.0)
        return seconds, _is_bulk(reply.limit.data)

    async def _called(self, stream: Stream) -> None:
        """A relay offers a circuit from somebody; lasts as long as the circuit."""
        with trio.move_on_after(STEP_S) as scope:
            offer = await read_message(stream, StopMessage)
        if scope.cancelled_caught or offer.type != StopMessage.CONNECT:
            raise MalformedError("no offer of a circuit")
        caller, now = peer_in(offer), trio.current_time()
        often = len(self._calls) == CALLS_PER_MINUTE and now - self._calls[0] < 60.0
        answer = StopMessage(type=StopMessage.STATUS)
        # Two punches to one peer leave from one port to one port and spoil each other: a call is enough.
        crossed = caller in self._answering or (caller in self._dialling and self._network.peer_id < caller)
        if stream.peer_id != self._relay or often or crossed or self._under_way >= MAX_CALLS:
            answer.status = 202  # type: ignore[assignment]
            await write_message(stream, answer)
            return
        self._calls.append(now)
        self._under_way += 1
        punched_or_not = self._answering[caller] = trio.Event()
        try:
            answer.status = OK  # type: ignore[assignment]
            await write_message(stream, answer)
            assert isinstance(stream, Libp2pStream)
            muxed = await self._network.outbound.adopt(
                stream, caller, initiator=False, bulk=_is_bulk(offer.limit.data)
            )
            try:
                punched = await self._punch(muxed, caller, tuple(places(offer.peer.addrs)))
                self._answered(caller, punched_or_not)
                if punched or not muxed.usable:
                    await trio.sleep(1.0)  # the caller has to see the new connection first
                    return
                self.relayed += 1
                await self._network.ended(muxed)
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
                    await muxed.close()
        finally:
            self._answered(caller, punched_or_not)
            self._under_way -= 1

    def _answered(self, caller: str, over: trio.Event) -> None:
        over.set()
        if self._answering.get(caller) is over:
            del self._answering[caller]

    async def _punch(self, muxed: GuardedYamux, peer: str, witnessed: tuple[tuple[str, int], ...]) -> bool:
        """The called side of DCUtR: leads, and is the one that speaks first on the new connection."""
        try:
            with trio.fail_after(STEP_S + PUNCH_S):
                stream = await self._network.open_on(muxed, peer, DCUTR_PROTOCOL)
                began = trio.current_time()
                await write_message(stream, self._connect_message())
                answer = await read_message(stream, HolePunch)
                round_trip = min(trio.current_time() - began, MAX_ROUND_TRIP_S)
                where = _agreed(answer, witnessed)
                await write_message(stream, HolePunch(type=HolePunch.SYNC))
                await trio.sleep(round_trip / 2)
                await self._open(peer, where, via=self._relay, initiator=True)
            self.punched += 1
            return True
        except (BarnraiseError, trio.TooSlowError) as error:
            self.failed += 1
            self.last_failure = str(error) or "too slow"
            log.info("no hole was punched to %s: %s", peer, error)
            return False

    # --- reaching others

    async def dial(self, relay: str, peer: str) -> None:
        """Open a connection to ``peer``, which has a place at the connected ``relay``.

        Raises:
            PeerError: the relay refuses; or no hole could be punched, and it lends its
                circuits for nothing else.
        """
        if await self._met_by_its_call(peer):
            return
        request = HopMessage(type=HopMessage.CONNECT)
        request.peer.id = peer_bytes(peer)
        for attempt in (1, 2):
            self._dialling[peer] = relay
            try:
                await self._dial(relay, peer, request)
                return
            except _NotTakenError:
                del self._dialling[peer]  # from here on its calls are not crossed by ours
                with trio.move_on_after(CROSSED_S):  # one may be on its way to us at this very moment
                    while peer not in self._answering and not self._network.connected(peer):
                        await trio.sleep(0.05)
                if await self._met_by_its_call(peer) or self._network.connected(peer):
                    return
                if attempt == 2:  # the first may have met a call of its that the relay then refused
                    raise
            finally:
                self._dialling.pop(peer, None)

    async def _met_by_its_call(self, peer: str) -> bool:
        """Wait out the call from ``peer`` that is under way, if any; whether it is connected after one."""
        under_way = self._answering.get(peer)
        if under_way is None:
            return False
        await under_way.wait()  # bounded: the handshake's time and the punch's
        return self._network.connected(peer)

    async def _dial(self, relay: str, peer: str, request: HopMessage) -> None:
        stream, reply = await self._request(relay, request)
        try:
            settled = self._settled[peer] = trio.Event()
            self._witnessed[peer] = tuple(places(reply.peer.addrs))
            muxed = await self._network.outbound.adopt(
                stream, peer, initiator=True, bulk=_is_bulk(reply.limit.data)
            )
            with trio.move_on_after(STEP_S + PUNCH_S):
                await settled.wait()
        except BaseException:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
                await stream.reset()
            raise
        finally:
            self._settled.pop(peer, None)
            self._witnessed.pop(peer, None)
        if self._network.way(peer) != "relayed" or not muxed.usable:
            await muxed.close()
        if not self._network.connected(peer):
            cause = self.last_failure or "it does not try"
            raise PeerError(
                f"no hole could be punched to {peer} ({cause}), and the relay carries nothing else"
            )
        self.relayed += self._network.way(peer) == "relayed"

    async def _answer_punch(self, stream: Stream) -> None:
        """The calling side of DCUtR."""
        peer = stream.peer_id
        settled, witnessed = self._settled.get(peer), self._witnessed.get(peer, ())
        if settled is None or settled.is_set():
            raise PeerError("a punch that nobody asked for")
        try:
            with trio.fail_after(STEP_S + PUNCH_S):
                offer = await read_message(stream, HolePunch)
                where = _agreed(offer, witnessed)
                await write_message(stream, self._connect_message())
                sync = await read_message(stream, HolePunch)
                if sync.type != HolePunch.SYNC:
                    raise MalformedError("no SYNC")
                await self._open(peer, where, via=self._dialling.get(peer, ""), initiator=False)
            self.punched += 1
        except (BarnraiseError, trio.TooSlowError) as error:
            self.failed += 1
            self.last_failure = str(error) or "too slow"
            log.info("no hole was punched to %s: %s", peer, error)
        finally:
            settled.set()

    # --- both

    def _connect_message(self) -> HolePunch:
        message = HolePunch(type=HolePunch.CONNECT)
        message.ObsAddrs.extend(packed(self.observed))
        return message

    async def _open(self, peer: str, where: tuple[str, int], *, via: str, initiator: bool) -> None:
        """Connect from the port that the relay sees until it works or ``PUNCH_S`` are over."""
        reason = "no answer"
        with trio.move_on_after(PUNCH_S):
            while True:
                try:
                    await self._network.punch(peer, *where, via=via, initiator=initiator)
                    return
                except PeerError as error:
                    reason = str(error)
                await trio.sleep(RETRY_S)
        raise PeerError(f"{where[0]}:{where[1]}: {reason}")

    async def _request(self, relay: str, message: HopMessage) -> tuple[Libp2pStream, HopMessage]:
        stream = await self._network.open_stream(relay, HOP_PROTOCOL)
        try:
            with trio.fail_after(2 * STEP_S):
                await write_message(stream, message)
                reply = await read_message(stream, HopMessage)
        except BaseException as error:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 2.0):
                await stream.reset()
            if isinstance(error, trio.TooSlowError):
                raise PeerError(f"the relay {relay} does not answer") from None
            raise
        if reply.type != HopMessage.STATUS or reply.status != OK:
            await stream.reset()
            raise (_NotTakenError if reply.status == FAILED else PeerError)(
                f"the relay {relay} refuses: {REASONS.get(reply.status, f'status {reply.status}')}"
            )
        return stream, reply

    async def _ask(self, relay: str, message: HopMessage) -> HopMessage:
        stream, reply = await self._request(relay, message)
        await stream.close()
        return reply


def _is_bulk(data: int) -> bool:
    return data == 0 or data >= BULK_LEAST


def _agreed(message: HolePunch, witnessed: tuple[tuple[str, int], ...]) -> tuple[str, int]:
    """Where to connect: what the relay witnessed, if the peer says the same host.

    Raises:
        PeerError: nobody witnessed a host that can be dialled, or the peer names others only.
        MalformedError: not a CONNECT.
    """
    if message.type != HolePunch.CONNECT:
        raise MalformedError("no CONNECT")
    hosts = {host for host, _ in witnessed}
    for place in places(message.ObsAddrs):
        if place[0] in hosts:
            return place
    raise PeerError("it names no address that the relay has seen it at")
