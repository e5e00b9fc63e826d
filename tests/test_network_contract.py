"""What every ``Network`` does, run against both: in memory (virtual time) and libp2p (loopback)."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio

from barnraise.protocol.errors import PeerError
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.network import Network, NetworkContext, Stream

ECHO = "/test/1/echo"
Open = Callable[[], NetworkContext]


@pytest.fixture(params=["memory", "libp2p"])
def open_host(request: pytest.FixtureRequest) -> Open:
    """A function that opens one more host in a common space."""
    if request.param == "memory":
        swarm = MemorySwarm(latency_s=0.001)
        return lambda: swarm.network(Identity.generate().peer_id)
    return lambda: open_libp2p(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",))


@asynccontextmanager
async def two(open_host: Open) -> AsyncIterator[tuple[Network, Network]]:
    """Two hosts; the second has connected to the first, which echoes."""
    async with open_host() as server, open_host() as client:
        server.set_handler(ECHO, echo)
        with trio.fail_after(60):
            assert await client.connect(server.addresses[0]) == server.peer_id
            yield server, client


async def echo(stream: Stream) -> None:
    while data := await stream.read(65_536):
        await stream.write(data)


async def read_all(stream: Stream) -> bytes:
    data = b""
    while piece := await stream.read(1 << 20):
        data += piece
    return data


async def test_a_stream_carries_bytes_both_ways_and_ends(open_host: Open) -> None:
    async with two(open_host) as (server, client):
        stream = await client.open_stream(server.peer_id, ECHO)
        assert stream.peer_id == server.peer_id
        await stream.write(b"hello ")
        await stream.write(b"world")
        await stream.close()
        assert await read_all(stream) == b"hello world"
        assert await stream.read(1) == b""


async def test_the_server_knows_who_asks(open_host: Open) -> None:
    async with two(open_host) as (server, client):

        async def who(stream: Stream) -> None:
            await stream.write(stream.peer_id.encode())

        server.set_handler("/test/1/who", who)
        stream = await client.open_stream(server.peer_id, "/test/1/who")
        assert await read_all(stream) == client.peer_id.encode()


async def test_both_ends_may_open_streams_on_one_connection(open_host: Open) -> None:
    async with two(open_host) as (server, client):
        client.set_handler(ECHO, echo)
        await (await client.open_stream(server.peer_id, ECHO)).close()
        assert server.connected(client.peer_id)
        assert client.connected(server.peer_id)
        stream = await server.open_stream(client.peer_id, ECHO)
        await stream.write(b"back")
        assert await stream.read(100) == b"back"


async def test_megabytes_pass_unharmed_in_both_directions_at_once(open_host: Open) -> None:
    data = os.urandom(3_000_000)
    async with two(open_host) as (server, client):
        stream = await client.open_stream(server.peer_id, ECHO)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await stream.write(data)
                await stream.close()

            nursery.start_soon(send)
            assert await read_all(stream) == data
        assert client.bytes_out >= len(data)
        assert client.bytes_in >= len(data)
        assert server.bytes_in >= len(data)


async def test_many_streams_share_a_connection(open_host: Open) -> None:
    async with two(open_host) as (server, client), trio.open_nursery() as nursery:

        async def one(number: int) -> None:
            stream = await client.open_stream(server.peer_id, ECHO)
            await stream.write(str(number).encode() * 1000)
            await stream.close()
            assert await read_all(stream) == str(number).encode() * 1000

        for number in range(40):
            nursery.start_soon(one, number)


async def test_an_unknown_protocol_is_a_peer_error(open_host: Open) -> None:
    async with two(open_host) as (server, client):
        with pytest.raises(PeerError, match="does not speak /test/1/nothing"):
            await client.open_stream(server.peer_id, "/test/1/nothing")
        await client.open_stream(server.peer_id, ECHO)


async def test_whatever_a_handler_raises_ends_its_stream_alone(
    open_host: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(stream: Stream) -> None:
        await stream.read(1)
        raise ExceptionGroup("two at once", [ZeroDivisionError(), OSError()])

    async with two(open_host) as (server, client):
        server.set_handler("/test/1/fail", fail)
        bad = await client.open_stream(server.peer_id, "/test/1/fail")
        good = await client.open_stream(server.peer_id, ECHO)
        await bad.write(b"x")
        with pytest.raises(PeerError):
            await bad.read(1)
        await good.write(b"still here")
        assert await good.read(100) == b"still here"
    assert "ZeroDivisionError" in caplog.text


async def test_a_reset_is_an_error_at_the_other_end(open_host: Open) -> None:
    async def reset(stream: Stream) -> None:
        await stream.read(1)
        await stream.reset()
        await stream.reset()
        await stream.close()

    async with two(open_host) as (server, client):
        server.set_handler("/test/1/reset", reset)
        stream = await client.open_stream(server.peer_id, "/test/1/reset")
        await stream.write(b"x")
        with pytest.raises(PeerError):
            await stream.read(1)
        with pytest.raises(PeerError):
            await stream.write(b"y")
        await stream.close()
        await stream.reset()


async def test_writing_after_close_is_an_error(open_host: Open) -> None:
    async with two(open_host) as (server, client):
        stream = await client.open_stream(server.peer_id, ECHO)
        await stream.close()
        await stream.close()
        with pytest.raises(PeerError):
            await stream.write(b"x")


async def test_connecting_twice_and_at_once_is_harmless(open_host: Open) -> None:
    async with two(open_host) as (server, client), trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(client.connect, server.addresses[0])


async def test_nobody_at_an_address_is_a_peer_error(open_host: Open) -> None:
    async with open_host() as client:
        async with open_host() as gone:
            address = gone.addresses[0]
        with pytest.raises(PeerError), trio.fail_after(60):
            await client.connect(address)
        with pytest.raises(PeerError, match="not connected"):
            await client.open_stream(address.rpartition("/")[2], ECHO)


async def test_another_peer_at_the_address_is_refused(open_host: Open) -> None:
    async with two(open_host) as (server, client):
        address = server.addresses[0].replace(server.peer_id, Identity.generate().peer_id)
        with pytest.raises(PeerError, match="another peer answers"):
            await client.connect(address)


async def test_a_host_does_not_connect_to_itself(open_host: Open) -> None:
    async with open_host() as host:
        with pytest.raises(PeerError, match="this very host"):
            await host.connect(host.addresses[0])


async def test_a_host_that_leaves_breaks_its_streams(open_host: Open) -> None:
    async with open_host() as client:
        async with open_host() as server:
            server.set_handler(ECHO, echo)
            await client.connect(server.addresses[0])
            stream = await client.open_stream(server.peer_id, ECHO)
            await stream.write(b"x")
            assert await stream.read(1) == b"x"
        with trio.fail_after(30):
            with pytest.raises(PeerError):
                await stream.read(1)
            while client.connected(server.peer_id):
                await trio.sleep(0.01)
        with pytest.raises(PeerError), trio.fail_after(11):
            await client.open_stream(server.peer_id, ECHO)


async def test_a_dropped_connection_is_made_again_on_demand(open_host: Open) -> None:
    async with two(open_host) as (server, client):
        await drop(client, server.peer_id)
        assert not client.connected(server.peer_id)
        stream = await client.open_stream(server.peer_id, ECHO)
        await stream.write(b"again")
        assert await stream.read(100) == b"again"


async def drop(network: Network, peer_id: str) -> None:
    from barnraise.protocol.libp2p_network import Libp2pNetwork
    from barnraise.protocol.memory_network import MemoryNetwork

    if isinstance(network, Libp2pNetwork):
        connection = network._connection(peer_id)
        assert connection is not None
        await connection.close()
    else:
        assert isinstance(network, MemoryNetwork)
        network._connections[peer_id].break_("dropped by the test")


async def test_a_cancelled_read_loses_nothing(open_host: Open) -> None:
    async with two(open_host) as (server, client):
        stream = await client.open_stream(server.peer_id, ECHO)
        with trio.move_on_after(0.05):
            await stream.read(10)
        await stream.write(b"0123456789" * 100)
        got = b""
        while len(got) < 1000:
            with trio.move_on_after(0) as scope:
                got += await stream.read(7)
            if scope.cancelled_caught:
                got += await stream.read(7)
        assert got == b"0123456789" * 100


async def test_cancelling_a_blocked_write_breaks_one_stream_and_no_other(open_host: Open) -> None:
    async def never_read(stream: Stream) -> None:
        await trio.sleep_forever()

    async with two(open_host) as (server, client):
        server.set_handler("/test/1/deaf", never_read)
        blocked = await client.open_stream(server.peer_id, "/test/1/deaf")
        with trio.move_on_after(0.3) as scope:
            await blocked.write(bytes(8_000_000))
        assert scope.cancelled_caught
        good = await client.open_stream(server.peer_id, ECHO)
        await good.write(b"fine")
        assert await good.read(10) == b"fine"


async def test_the_bodys_own_exception_comes_out_unwrapped(open_host: Open) -> None:
    with pytest.raises(KeyError):
        async with open_host():
            raise KeyError("mine")


def test_both_satisfy_the_protocol() -> None:
    def check(host: AbstractAsyncContextManager[Network]) -> None: ...

    check(MemorySwarm().network("a"))
    check(open_libp2p(Identity.generate()))
    logging.getLogger("libp2p")
