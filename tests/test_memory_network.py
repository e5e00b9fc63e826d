from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from barnraise.protocol.errors import PeerError
from barnraise.protocol.memory_network import DIAL_TIMEOUT_S, MemoryNetwork, MemorySwarm
from barnraise.protocol.memory_pipe import WINDOW
from barnraise.protocol.memory_wires import DEAD_AFTER_S
from barnraise.protocol.network import Stream

ECHO = "/test/1/echo"


async def echo(stream: Stream) -> None:
    while data := await stream.read(65_536):
        await stream.write(data)


@asynccontextmanager
async def pair(swarm: MemorySwarm) -> AsyncIterator[tuple[MemoryNetwork, MemoryNetwork]]:
    async with swarm.network("a") as a, swarm.network("b") as b:
        for host in (a, b):
            host.set_handler(ECHO, echo)
        await b.connect(a.addresses[0])
        yield a, b


async def test_latency_is_paid_each_way(autojump_clock: MockClock) -> None:
    async with pair(MemorySwarm(latency_s=0.25)) as (_, b):
        stream = await b.open_stream("a", ECHO)
        began = trio.current_time()
        await stream.write(b"ping")
        assert await stream.read(10) == b"ping"
        assert trio.current_time() - began == pytest.approx(0.5)


async def test_bandwidth_is_shared_by_the_streams_of_a_link(autojump_clock: MockClock) -> None:
    done: list[float] = []

    async def sink(stream: Stream) -> None:
        while await stream.read(1 << 20):
            pass
        done.append(trio.current_time())

    swarm = MemorySwarm(bandwidth=1_000_000)
    async with pair(swarm) as (a, b), trio.open_nursery() as nursery:
        a.set_handler("/test/1/sink", sink)

        async def send() -> None:
            stream = await b.open_stream("a", "/test/1/sink")
            await stream.write(bytes(5_000_000))
            await stream.close()

        began = trio.current_time()
        nursery.start_soon(send)
        nursery.start_soon(send)
        while len(done) < 2:
            await trio.sleep(0.1)
        assert max(done) - began == pytest.approx(10, rel=0.01)
        assert min(done) - began > 9


async def test_a_hosts_own_line_limits_its_links(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm()
    async with (
        swarm.network("a", latency_s=0.1) as a,
        swarm.network("b", latency_s=0.3, bandwidth=1000.0) as b,
    ):
        a.set_handler(ECHO, echo)
        began = trio.current_time()
        await b.connect(a.addresses[0])
        assert trio.current_time() - began == pytest.approx(0.6)
        stream = await b.open_stream("a", ECHO)
        began = trio.current_time()
        await stream.write(bytes(1000))
        assert len(await stream.read(1000)) == 1000
        assert trio.current_time() - began == pytest.approx(0.6 + 2.0)


async def test_a_slow_reader_holds_its_writer_back(autojump_clock: MockClock) -> None:
    async with pair(MemorySwarm()) as (a, b):

        async def deaf(stream: Stream) -> None:
            await trio.sleep(1000)

        a.set_handler("/test/1/deaf", deaf)
        stream = await b.open_stream("a", "/test/1/deaf")
        await stream.write(bytes(WINDOW))
        began = trio.current_time()
        with pytest.raises(PeerError, match="took nothing for 30 s"):
            await stream.write(bytes(WINDOW))
        assert trio.current_time() - began == pytest.approx(30)


async def test_a_short_partition_delays_and_loses_nothing(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm(latency_s=0.01)
    async with pair(swarm) as (_, b), trio.open_nursery() as nursery:
        stream = await b.open_stream("a", ECHO)
        swarm.partition("a", "b")

        async def mend() -> None:
            await trio.sleep(20)
            swarm.heal("a", "b")

        nursery.start_soon(mend)
        began = trio.current_time()
        await stream.write(b"through")
        assert await stream.read(100) == b"through"
        assert 20 <= trio.current_time() - began < 21


async def test_a_long_partition_breaks_the_connection_and_healing_allows_a_new_one(
    autojump_clock: MockClock,
) -> None:
    swarm = MemorySwarm(latency_s=0.01)
    async with pair(swarm) as (a, b):
        stream = await b.open_stream("a", ECHO)
        swarm.partition("a", "b")
        began = trio.current_time()
        with pytest.raises(PeerError, match="no sign of life"):
            await stream.read(1)
        assert trio.current_time() - began == pytest.approx(DEAD_AFTER_S)
        assert not b.connected("a")
        began = trio.current_time()
        with pytest.raises(PeerError, match="did not answer"):
            await b.connect(a.addresses[0])
        assert trio.current_time() - began == pytest.approx(DIAL_TIMEOUT_S)
        swarm.heal("a", "b")
        stream = await b.open_stream("a", ECHO)
        await stream.write(b"again")
        assert await stream.read(10) == b"again"


async def test_healing_too_late_does_not_revive_a_connection(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm()
    async with pair(swarm) as (_, b):
        swarm.partition("a", "b")
        await trio.sleep(DEAD_AFTER_S + 1)
        swarm.heal("a", "b")
        assert not b.connected("a")


async def test_a_crash_breaks_what_it_touched_and_a_restart_answers(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm()
    async with swarm.network("b") as b, trio.open_nursery() as nursery:

        async def run_a() -> None:
            async with swarm.network("a") as a:
                a.set_handler(ECHO, echo)
                await trio.sleep_forever()

        nursery.start_soon(run_a)
        await trio.testing.wait_all_tasks_blocked()
        await b.connect(swarm._hosts["a"].addresses[0])
        stream = await b.open_stream("a", ECHO)
        swarm.crash("a")
        with pytest.raises(PeerError, match="connection to a was lost"):
            await stream.read(1)
        with pytest.raises(PeerError, match="nobody answers"):
            await b.open_stream("a", ECHO)
        nursery.start_soon(run_a)
        await trio.testing.wait_all_tasks_blocked()
        stream = await b.open_stream("a", ECHO)
        await stream.write(b"back")
        assert await stream.read(10) == b"back"
        nursery.cancel_scope.cancel()


async def test_a_crashed_host_can_do_nothing_more(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm()
    ran = []
    async with swarm.network("a") as a, swarm.network("c") as c:
        swarm.crash("a")
        with pytest.raises(PeerError, match="this host has crashed"):
            await a.connect(c.addresses[0])
        ran.append(True)
    assert ran


async def test_finished_streams_are_forgotten(autojump_clock: MockClock) -> None:
    async with pair(MemorySwarm()) as (_, b):
        for _i in range(100):
            stream = await b.open_stream("a", ECHO)
            await stream.close()
            assert await stream.read(1) == b""
        assert len(b._connections["a"].pipes) < 10


async def test_islands_hear_themselves_and_nobody_else(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm()
    async with pair(swarm) as (_, b), swarm.network("c") as c:
        c.set_handler(ECHO, echo)
        await b.connect(c.addresses[0])
        for name in ("b", "c"):
            swarm.move(name, "island")
        stream = await b.open_stream("c", ECHO)
        await stream.write(b"here")
        assert await stream.read(10) == b"here"
        with pytest.raises(PeerError):
            await b.open_stream("a", ECHO)
        await trio.sleep(DEAD_AFTER_S)
        assert b.connected("c")
        assert not b.connected("a")
        swarm.move("b")
        assert (await b.open_stream("a", ECHO)).peer_id == "a"


async def test_a_dropped_connection_can_be_opened_again(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm()
    async with pair(swarm) as (a, b):
        stream = await b.open_stream("a", ECHO)
        swarm.drop("b")
        with pytest.raises(PeerError, match="was reset"):
            await stream.read(1)
        await b.connect(a.addresses[0])
        assert b.connected("a")


async def test_a_line_may_send_slower_than_it_receives_and_bytes_may_stand_for_more(
    autojump_clock: MockClock,
) -> None:
    swarm = MemorySwarm(weigh=lambda protocol, size: size * 100.0)
    async with swarm.network("a") as a, swarm.network("b", bandwidth=1000.0, upload=100.0) as b:
        a.set_handler(ECHO, echo)
        await b.connect(a.addresses[0])
        stream = await b.open_stream("a", ECHO)
        began = trio.current_time()
        await stream.write(bytes(10))
        assert len(await stream.read(100)) == 10
        assert trio.current_time() - began == pytest.approx(10.0 + 1.0)


async def test_hosts_that_begin_in_the_same_moment_have_addresses_of_their_own(
    autojump_clock: MockClock,
) -> None:
    swarm, addresses = MemorySwarm(), []

    async def live(name: str) -> None:
        async with swarm.network(name) as network:
            addresses.append(network.addresses[0].partition("/p2p/")[0])
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live, "a")
        nursery.start_soon(live, "b")
    assert sorted(addresses) == ["/memory/1", "/memory/2"]
