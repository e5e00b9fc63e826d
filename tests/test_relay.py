"""The relay and circuits through it, on loopback; holes through real routers are tests/test_nat.py's."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from multiaddr import Multiaddr

from barnraise.protocol import circuit
from barnraise.protocol.addresses import parse_address, parse_circuit
from barnraise.protocol.circuit import BULK_LEAST, Circuits
from barnraise.protocol.errors import MalformedError, PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import Libp2pNetwork, open_libp2p
from barnraise.protocol.network import Stream
from barnraise.protocol.relay import LimitSpec, Relay, bulk
from barnraise.protocol.relay_wire import (
    HOP_PROTOCOL,
    MALFORMED,
    MAX_MESSAGE,
    STOP_PROTOCOL,
    peer_bytes,
    places,
    read_message,
    write_message,
)

ECHO = "/test/1/echo"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def echo(stream: Stream) -> None:
    while data := await stream.read(65_536):
        await stream.write(data)


@asynccontextmanager
async def three(limits: LimitSpec) -> AsyncIterator[tuple[Relay, Libp2pNetwork, Libp2pNetwork]]:
    """A relay, a node with a place there, which listens nowhere and echoes, and a third one."""
    async with (
        open_libp2p(Identity.generate(), LOOPBACK) as middle,
        open_libp2p(Identity.generate(), (), circuits=True) as called,
        open_libp2p(Identity.generate(), (), circuits=True) as caller,
    ):
        relay = Relay(middle, limits)
        middle.set_handler(HOP_PROTOCOL, relay.serve)
        called.set_handler(ECHO, echo)
        for node in (called, caller):
            await node.connect(middle.addresses[0])
        assert called.circuits is not None
        seconds, carries = await called.circuits.reserve(middle.peer_id)
        assert seconds > 3000
        assert carries == (limits.data == 0 or limits.data >= BULK_LEAST)
        with trio.fail_after(60):
            yield relay, called, caller


def way_to(relay: Relay, called: Libp2pNetwork) -> str:
    return f"{relay.network.addresses[0]}/p2p-circuit/p2p/{called.peer_id}"


async def back_and_forth(caller: Libp2pNetwork, peer: str, size: int) -> None:
    stream = await caller.open_stream(peer, ECHO)
    for _ in range(size // 50_000):
        await stream.write(b"x" * 50_000)
        left = 50_000
        while left:
            data = await stream.read(left)
            if not data:
                raise PeerError("the stream ended")
            left -= len(data)


async def test_a_node_that_listens_nowhere_is_reached_through_a_relay_that_carries_shards() -> None:
    async with three(bulk(50e6)) as (relay, called, caller):
        assert await caller.connect(way_to(relay, called)) == called.peer_id
        assert caller.way(called.peer_id) == "relayed"
        await back_and_forth(caller, called.peer_id, 500_000)
        assert relay.carried > 1_000_000
        assert caller.circuits is not None
        assert caller.circuits.relayed == 1


async def test_a_relay_that_only_arranges_punches_is_no_way_for_anything_else() -> None:
    async with three(LimitSpec()) as (relay, called, caller):
        with pytest.raises(PeerError, match="the relay carries nothing else"):
            await caller.connect(way_to(relay, called))
        assert not caller.connected(called.peer_id)
        assert relay.carried < 64 * 1024


@pytest.mark.parametrize("first", ["smaller", "larger", "nobody"])
async def test_two_that_call_each_other_punch_once_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Two at a time would punch from the same port to the same port, and each spoil the other's."""
    monkeypatch.setattr(circuit, "CROSSED_S", 0.1)  # far less than what follows takes
    punches = 0
    async with (
        open_libp2p(Identity.generate(), LOOPBACK) as middle,
        open_libp2p(Identity.generate(), LOOPBACK, circuits=True) as one,
        open_libp2p(Identity.generate(), LOOPBACK, circuits=True) as two,
    ):
        relay = Relay(middle, LimitSpec())
        middle.set_handler(HOP_PROTOCOL, relay.serve)
        nodes = smaller, larger = sorted((one, two), key=lambda node: node.peer_id)
        for node in nodes:
            await node.connect(middle.addresses[0])
            assert node.circuits is not None
            await node.circuits.reserve(middle.peer_id)

        async def punch(self: Circuits, muxed: object, peer: str, witnessed: object) -> bool:
            """A hole, where there is no router: the callee dials, after a while."""
            nonlocal punches
            punches += 1
            await trio.sleep(0.4)
            caller = larger if peer == larger.peer_id else smaller
            await self._network.outbound.dial(caller.addresses[0], *parse_address(caller.addresses[0]))
            assert caller.circuits is not None
            caller.circuits._settled[self._network.peer_id].set()
            return True

        monkeypatch.setattr(Circuits, "_punch", punch)

        async def call(caller: Libp2pNetwork, called: Libp2pNetwork, waits: bool) -> None:
            await trio.sleep(0.2 if waits else 0)  # in the middle of the other's call
            assert await caller.connect(way_to(relay, called)) == called.peer_id

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, smaller, larger, first == "larger")
                nursery.start_soon(call, larger, smaller, first == "smaller")
        assert punches == 1


async def test_a_circuit_ends_at_its_limit_of_bytes() -> None:
    limits = LimitSpec(data=17 * 1024 * 1024, rate=1e9, seconds=60)
    async with three(limits) as (relay, called, caller):
        assert await caller.connect(way_to(relay, called)) == called.peer_id
        with pytest.raises(PeerError):
            await back_and_forth(caller, called.peer_id, 40_000_000)
        assert relay.carried <= 2 * limits.data
        while relay.open:
            await trio.sleep(0.01)


async def test_nobody_is_called_who_took_no_place_and_a_full_relay_says_so() -> None:
    async with three(LimitSpec(per_host=1)) as (relay, _, caller):
        assert caller.circuits is not None
        with pytest.raises(PeerError, match="that node has no reservation"):
            await caller.connect(
                f"{relay.network.addresses[0]}/p2p-circuit/p2p/{Identity.generate().peer_id}"
            )
        with pytest.raises(PeerError, match="takes no more reservations"):
            await caller.circuits.reserve(relay.network.peer_id)


async def test_a_place_is_gone_with_its_connection() -> None:
    async with three(LimitSpec()) as (relay, called, caller):
        await called._close()
        while relay.network.connected(called.peer_id):
            await trio.sleep(0.01)
        with pytest.raises(PeerError, match="no reservation"):
            await caller.connect(way_to(relay, called))


async def test_only_the_relay_that_a_node_has_a_place_at_may_call_it() -> None:
    async with (
        three(LimitSpec()) as (_, called, caller),
        open_libp2p(Identity.generate(), LOOPBACK) as stranger,
    ):
        await called.connect(stranger.addresses[0])
        while not stranger.connected(called.peer_id):
            await trio.sleep(0.01)
        stream = await stranger.open_stream(called.peer_id, STOP_PROTOCOL)
        offer = StopMessage(type=StopMessage.CONNECT)
        offer.peer.id = peer_bytes(caller.peer_id)
        await write_message(stream, offer)
        assert (await read_message(stream, StopMessage)).status != 100


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (HopMessage(type=HopMessage.CONNECT), MALFORMED),
        (HopMessage(type=HopMessage.STATUS), MALFORMED),
    ],
    ids=["connect-to-nobody", "status-unasked"],
)
async def test_a_relay_answers_nonsense_with_a_status(message: HopMessage, status: int) -> None:
    async with three(LimitSpec()) as (relay, _, caller):
        stream = await caller.open_stream(relay.network.peer_id, HOP_PROTOCOL)
        await write_message(stream, message)
        assert (await read_message(stream, HopMessage)).status == status


class Canned:
    """A stream that says what it was given."""

    peer_id = "peer"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked = 0

    async def read(self, limit: int) -> bytes:
        self.asked = max(self.asked, limit)
        found, self.data = self.data[:limit], self.data[limit:]
        return found

    async def write(self, data: bytes) -> None:
        self.data += data

    async def close(self) -> None: ...

    async def reset(self) -> None: ...


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed_and_bounded(data: bytes) -> None:
    stream = Canned(data)

    async def read() -> None:
        try:
            await read_message(stream, HopMessage)
        except MalformedError:
            return

    trio.run(read)
    assert stream.asked <= MAX_MESSAGE


def test_strangers_words_never_lead_to_this_machine_or_to_a_crowd() -> None:
    said = [
        "/ip4/127.0.0.1/tcp/22",
        "/ip4/224.0.0.1/tcp/22",
        "/ip4/0.0.0.0/tcp/22",
        "/ip6/::1/tcp/22",
        "/ip4/198.51.100.7/udp/22",
        "/ip4/198.51.100.7/tcp/4001",
    ]
    assert places([Multiaddr(address).to_bytes() for address in said] + [b"\xff" * 9]) == [
        ("198.51.100.7", 4001)
    ]


def test_a_circuit_address_names_relay_and_node() -> None:
    relay, node = Identity.generate().peer_id, Identity.generate().peer_id
    address = f"/ip4/198.51.100.7/tcp/4001/p2p/{relay}"
    assert parse_circuit(f"{address}/p2p-circuit/p2p/{node}") == (address, node)
    assert parse_circuit(address) is None
    for wrong in (f"{address}/p2p-circuit/p2p/nobody", f"/p2p-circuit/p2p/{node}"):
        with pytest.raises(PeerError):
            parse_circuit(wrong)
