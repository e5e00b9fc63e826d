"""Caps hold over every 5 s, are used while there is demand, and change under waiters' feet."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.protocol import memory_pipe
from barnraise.protocol.bandwidth import MIN_RATE, Bucket, Pacer, checked_rate
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import SESSION_PROTOCOL, SHARD_PROTOCOL
from barnraise.protocol.network import Network, Stream
from barnraise.protocol.paced_network import PacedNetwork, PacedStream

WINDOW_S = 5.0
Passed = list[tuple[float, int]]


def worst_window(passed: Passed) -> int:
    """The most bytes in any half-open window of 5 s; it suffices to let one begin at each piece."""
    most = held = start = 0
    for moment, size in passed:
        held += size
        while passed[start][0] <= moment - WINDOW_S:
            held -= passed[start][1]
            start += 1
        most = max(most, held)
    return most


def least_window(passed: Passed, begin: float, end: float) -> int:
    """The fewest bytes in any window of 5 s between ``begin`` and ``end``, sampled 20 times a second."""
    starts = [begin + step / 20 for step in range(max(1, int((end - WINDOW_S - begin) * 20)))]
    return min(sum(size for moment, size in passed if s <= moment < s + WINDOW_S) for s in starts)


@settings(max_examples=60, deadline=None)
@given(
    rate=st.sampled_from([MIN_RATE, 125_000, 1_250_000, 12_500_000, 125_000_000]),
    begin=st.floats(0, 1e6),
    gaps=st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.3, 2.0, 6.0]), min_size=1, max_size=400),
    seed=st.integers(0, 2**16),
)
def test_no_window_of_five_seconds_is_over_the_cap_whatever_the_demand(
    rate: int, begin: float, gaps: list[float], seed: int
) -> None:
    """R12."""
    rng = random.Random(seed)
    bucket, now = Bucket(rate), begin
    passed: Passed = []
    for gap in gaps:
        now += gap if rng.random() < 0.1 else 0.0
        size = rng.randint(1, bucket.piece)
        now += bucket.delay(size, now)
        assert bucket.delay(size, now) == 0.0  # one wait is enough, for all rounding
        bucket.spend(size, now)
        passed.append((now, size))
    assert worst_window(passed) <= 1.1 * rate * WINDOW_S


@pytest.mark.parametrize("waiters", [1, 7, 40])
@pytest.mark.parametrize("rate", [MIN_RATE, 125_000, 5_000_000])
async def test_waiters_use_the_whole_cap_and_share_it_evenly(
    rate: int, waiters: int, autojump_clock: trio.testing.MockClock
) -> None:
    pacer = Pacer(rate)
    passed: Passed = []
    shares = [0] * waiters

    async def transfer(number: int) -> None:
        while True:
            await pacer.take(pacer.piece)
            passed.append((trio.current_time(), pacer.piece))
            shares[number] += pacer.piece

    begin = trio.current_time()
    with trio.move_on_after(16):
        async with trio.open_nursery() as nursery:
            for number in range(waiters):
                nursery.start_soon(transfer, number)
    assert worst_window(passed) <= 1.1 * rate * WINDOW_S
    assert least_window(passed, begin, begin + 16) >= 0.9 * rate * WINDOW_S
    assert max(shares) - min(shares) <= 2 * pacer.piece
    assert pacer.total == sum(shares)


@settings(max_examples=15, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from([MIN_RATE, 100_000, 400_000]), st.floats(0.01, 8.0)), min_size=1, max_size=5
    )
)
def test_a_changed_cap_is_obeyed_at_once_by_those_who_wait(changes: list[tuple[int, float]]) -> None:
    passed: Passed = []
    moments: list[tuple[float, int]] = []  # when which cap began

    async def main() -> None:
        pacer = Pacer(MIN_RATE)
        moments.append((trio.current_time(), MIN_RATE))

        async def transfer() -> None:
            while True:
                size = pacer.piece
                await pacer.take(size)
                passed.append((trio.current_time(), size))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(transfer)
            for rate, seconds in changes:
                await trio.sleep(seconds)
                pacer.set_rate(rate)
                moments.append((trio.current_time(), rate))
            await trio.sleep(10)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

    def allowed(begin: float, end: float) -> float:
        ends = [moment for moment, _ in moments[1:]] + [end]
        parts = zip(moments, ends, strict=True)
        return sum(rate * max(0.0, min(stop, end) - max(start, begin)) for (start, rate), stop in parts)

    last = passed[-1][0]
    for number in range(0, len(passed), 50):
        begin = passed[number][0]
        if begin + WINDOW_S > last:
            break
        used = sum(size for moment, size in passed if begin <= moment < begin + WINDOW_S)
        cap = allowed(begin, begin + WINDOW_S)
        # a piece that began to wait under another cap may be of that cap's size
        assert 0.9 * cap - 8_000 <= used <= 1.1 * cap + 3 * 8_000


async def test_a_cap_that_is_lifted_frees_everybody_who_waits(autojump_clock: trio.testing.MockClock) -> None:
    pacer = Pacer(MIN_RATE)
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(pacer.take, 10**9)
        await trio.sleep(1)
        pacer.set_rate(None)
    assert trio.current_time() == begin + 1


async def test_urgent_bytes_overtake_bulk(autojump_clock: trio.testing.MockClock) -> None:
    pacer = Pacer(100_000)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(pacer.take, 10**7)
        await trio.sleep(3)
        begin = trio.current_time()
        await pacer.take(500, urgent=True)
        assert trio.current_time() - begin < 0.05
        nursery.cancel_scope.cancel()


async def test_a_waiter_that_gives_up_blocks_nobody(autojump_clock: trio.testing.MockClock) -> None:
    pacer = Pacer(100_000)
    await pacer.take(20_000)
    async with trio.open_nursery() as nursery:
        for seconds in (0.001, 0.002, 0.5):
            scope = trio.CancelScope(deadline=trio.current_time() + seconds)

            async def doomed(scope: trio.CancelScope = scope) -> None:
                with scope:
                    await pacer.take(10**9)

            nursery.start_soon(doomed)
        begin = trio.current_time()
        await pacer.take(50_000)
    assert trio.current_time() - begin < 1.3  # half a second, and what the third one took


def test_caps_too_low_to_look_alive_are_refused() -> None:
    assert checked_rate(None) is None
    assert checked_rate(MIN_RATE) == MIN_RATE
    for bad in (0, -1, MIN_RATE - 1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Mbit/s"):
            checked_rate(bad)


async def flow(
    up: float | None, down: float | None, streams: int, seconds: float, during: Callable[[Pacer], None]
) -> tuple[Passed, Passed]:
    """Bulk over ``streams`` streams from one capped host to another: what was sent and received, when."""
    sent: Passed = []
    received: Passed = []
    swarm = MemorySwarm(latency_s=0.02)
    async with swarm.network("a") as a, swarm.network("b") as b, trio.open_nursery() as nursery:
        sender = PacedNetwork(a, Pacer(up), Pacer())
        receiver = PacedNetwork(b, Pacer(), Pacer(down))

        async def serve(stream: Stream) -> None:
            while True:
                before = a.bytes_out
                await stream.write(bytes(64 * 1024))
                sent.append((trio.current_time(), a.bytes_out - before))

        async def fetch() -> None:
            stream = await receiver.open_stream("a", SHARD_PROTOCOL)
            while data := await stream.read(256 * 1024):
                received.append((trio.current_time(), len(data)))

        sender.set_handler(SHARD_PROTOCOL, serve)
        await receiver.connect(sender.addresses[0])
        for _ in range(streams):
            nursery.start_soon(fetch)
        await trio.sleep(seconds / 2)
        during(sender.up)
        await trio.sleep(seconds / 2)
        nursery.cancel_scope.cancel()
    return sent, received


@pytest.mark.parametrize("streams", [1, 9])
async def test_receiving_keeps_to_its_cap_and_uses_it(
    streams: int, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12: within 10 % over any 5 s."""
    monkeypatch.setattr(memory_pipe, "WINDOW", 256 * 1024 // streams)
    monkeypatch.setattr(memory_pipe, "PIECE", 16 * 1024)
    begin = trio.current_time()
    _, received = await flow(None, 250_000, streams, 12, lambda up: None)
    assert worst_window(received) <= 1.1 * 250_000 * WINDOW_S
    assert least_window(received, begin + 1.2, begin + 12) >= 0.9 * 250_000 * WINDOW_S


async def test_sending_keeps_to_its_cap_which_may_change_meanwhile(
    autojump_clock: trio.testing.MockClock,
) -> None:
    begin = trio.current_time()
    _, received = await flow(250_000, None, 3, 20, lambda up: up.set_rate(1_000_000))
    first = [(moment, size) for moment, size in received if moment < begin + 10]
    then = [(moment, size) for moment, size in received if moment >= begin + 10]
    for passed, rate, start in ((first, 250_000, begin + 0.5), (then, 1_000_000, begin + 10.1)):
        assert worst_window(passed) <= 1.1 * rate * WINDOW_S
        assert least_window(passed, start, start + 9.4) >= 0.9 * rate * WINDOW_S


async def test_a_cancelled_read_loses_nothing_and_a_cancelled_write_leaves_no_half_message(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Wire:
        peer_id = "peer"

        def __init__(self) -> None:
            self.written = b""
            self.was_reset = False

        async def read(self, limit: int) -> bytes:
            return b"x" * min(limit, 400)

        async def write(self, data: bytes) -> None:
            self.written += data

        async def close(self) -> None: ...

        async def reset(self) -> None:
            self.was_reset = True

    wire, pacer = Wire(), Pacer(MIN_RATE)
    stream = PacedStream(wire, pacer, pacer, urgent=False)
    await pacer.take(6400)  # the bucket is empty
    with trio.move_on_after(0.001):
        await stream.read(400)
    assert await stream.read(100) + await stream.read(300) == b"x" * 400
    with trio.move_on_after(0.001):
        await stream.write(b"y" * 2000)
    assert not wire.was_reset
    assert wire.written == b""
    with trio.move_on_after(0.1):
        await stream.write(b"y" * 200_000)
    assert wire.was_reset


async def test_a_heartbeat_beside_bulk_is_not_delayed_by_the_cap(
    autojump_clock: trio.testing.MockClock,
) -> None:
    swarm = MemorySwarm(latency_s=0.02)
    async with swarm.network("a") as a, swarm.network("b") as b, trio.open_nursery() as nursery:
        capped: Network = PacedNetwork(a, Pacer(125_000), Pacer(125_000))

        async def echo(stream: Stream) -> None:
            while data := await stream.read(1000):
                await stream.write(data)

        async def swallow(stream: Stream) -> None:
            while await stream.read(1 << 20):
                pass

        b.set_handler(SESSION_PROTOCOL, echo)
        b.set_handler(SHARD_PROTOCOL, swallow)
        await capped.connect(b.addresses[0])
        for _ in range(10):
            bulk = await capped.open_stream("b", SHARD_PROTOCOL)
            nursery.start_soon(bulk.write, bytes(10**7))
        session = await capped.open_stream("b", SESSION_PROTOCOL)
        await trio.sleep(2)
        begin = trio.current_time()
        await session.write(b"hello")
        assert await session.read(100) == b"hello"
        assert trio.current_time() - begin < 0.15
        nursery.cancel_scope.cancel()


class Burst:
    """A network on which a sender's whole first window has arrived before anybody reads."""

    bytes_in = 0


async def test_a_window_that_arrives_at_once_is_made_up_for_unless_the_cap_goes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Full:
        peer_id = "peer"

        async def read(self, limit: int) -> bytes:
            return bytes(limit)

        async def write(self, data: bytes) -> None: ...
        async def close(self) -> None: ...
        async def reset(self) -> None: ...

    waits = []
    for size, lifted in ((256 * 1024, False), (10**8, False), (256 * 1024, True)):
        burst = Burst()
        network = PacedNetwork(burst, Pacer(), Pacer(125_000))  # type: ignore[arg-type]
        bulk, session = (network._paced(Full(), p) for p in (SHARD_PROTOCOL, SESSION_PROTOCOL))
        await bulk.read(100)
        burst.bytes_in = size
        begin = trio.current_time()
        await session.read(100)
        assert trio.current_time() == begin  # small messages never wait for it
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk.read, 100)
            await trio.sleep(0.5)
            if lifted:
                network.down.set_rate(None)
        waits.append(trio.current_time() - begin)
    assert waits[0] == pytest.approx(256 * 1024 / 125_000 - 0.2, abs=0.05)
    assert waits[1] == pytest.approx(2.0, abs=0.05)  # never so long that a sender takes us for dead
    assert waits[2] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kib", [16, 48, 64, 72, 80])
async def test_lumps_that_are_asked_for_as_early_as_may_be_are_within_a_tenth_of_the_cap(
    kib: int, autojump_clock: trio.testing.MockClock
) -> None:
    cap, lump, arrived, asked = 200_000, kib * 1024, 0, []
    pacer = Pacer(cap)
    pacer.watch(lambda: arrived)
    await trio.sleep(5)  # saved up what may be
    while trio.current_time() < 30:
        if pacer.debt(lump) <= 0:
            asked.append(trio.current_time())
            arrived += lump
        await trio.sleep(0.01)
    for start in asked:
        within = sum(start <= moment <= start + 5 for moment in asked) * lump
        assert within <= 1.1 * 5 * cap
    assert len(asked) * lump >= 0.97 * 25 * cap
