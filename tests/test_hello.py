import pytest
import trio

from barnraise.protocol import hello
from barnraise.protocol.errors import MalformedError, PeerError, VersionError
from barnraise.protocol.hello import (
    Compatibility,
    Floor,
    answer_as,
    answer_hello,
    compatible,
    our_hello,
    say_hello,
)
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import HELLO_PROTOCOL, Hello, HelloReply
from barnraise.protocol.network import Handler, Stream
from barnraise.protocol.wire import MessageReader, send_message


def version(major: int, minor: int = 0) -> Hello:
    return Hello(major=major, minor=minor, software=f"barnraise {major}.{minor}")


def test_equal_majors_work_together_whatever_the_minor() -> None:
    assert compatible(version(1, 0), version(1, 7)) == Compatibility(True, "", "")


def test_the_old_side_is_told_that_it_is_old_and_how_to_update() -> None:
    """R20."""
    verdict = compatible(version(1), version(2, 3))
    assert not verdict.compatible
    assert verdict.for_us == (
        "this side is too old: it speaks protocol 1.0 (barnraise 1.0), the other side protocol 2.3 "
        "(barnraise 2.3); it needs 2.x (barnraise 2.3): pip install --upgrade barnraise"
    )
    assert verdict.for_them.startswith("the other side is too old")
    assert "must be run there" in verdict.for_them


def test_the_new_side_is_told_that_the_other_is_old() -> None:
    verdict = compatible(version(2), version(1, 4))
    assert not verdict.compatible
    assert verdict.for_us.startswith("the other side is too old: it speaks protocol 1.4")
    assert verdict.for_them.startswith("your side is too old: it speaks protocol 1.4")
    assert "needs 2.x" in verdict.for_them


def test_the_texts_fit_a_reply_and_stay_printable() -> None:
    odd = Hello(major=2**31, minor=2**31, software="\x1b" * 64)
    for ours, theirs in ((version(1), odd), (odd, version(1))):
        verdict = compatible(ours, theirs)
        assert len(verdict.for_them) <= 500
        assert verdict.for_us.isprintable()


def test_below_the_floor_one_is_told_in_time_and_refused_after_it() -> None:
    """R20: whoever is too old learns it before it costs anything."""
    floor, ours = Floor(minor=2, from_ms=1_800_000_000_000), version(1, 3)
    assert floor.judge(ours, version(1, 2), 0) == (True, "")
    served, told = floor.judge(ours, version(1, 1), 1_799_999_999_999)
    assert served
    assert "from 2027-01-15 08:00 UTC on this run needs 1.2 or newer: pip install" in told
    served, told = floor.judge(ours, version(1, 1), 1_800_000_000_000)
    assert not served
    assert "this run needs 1.2 or newer: pip install" in told
    odd = Hello(major=1, minor=0, software="\x1b" * 64)
    assert len(Floor(2**31, 2**62).judge(ours, odd, 0)[1]) <= 500


@pytest.mark.parametrize("minor", [0, 1])
async def test_a_listener_holds_a_dialer_to_its_floor(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, minor: int
) -> None:
    heard: list[Hello] = []

    async def answer(stream: Stream) -> None:
        heard.append(await answer_as(stream, version(1, 1), Floor(1), 5))

    monkeypatch.setattr(hello, "our_hello", lambda: version(1, minor))
    if minor:
        assert (await greet(answer)).message == ""
    else:
        with pytest.raises(VersionError, match=r"your side is too old: it speaks protocol 1\.0"):
            await greet(answer)
    assert heard == [version(1, minor)]


async def greet(handler: Handler) -> HelloReply:
    swarm = MemorySwarm(latency_s=0.05)
    async with swarm.network("coordinator") as server, swarm.network("node") as client:
        server.set_handler(HELLO_PROTOCOL, handler)
        await client.connect(server.addresses[0])
        return await say_hello(await client.open_stream("coordinator", HELLO_PROTOCOL))


async def test_two_equal_versions_greet_each_other(autojump_clock: trio.abc.Clock) -> None:
    reply = await greet(answer_hello)
    assert reply.compatible
    assert (reply.major, reply.minor, reply.software) == (1, 1, our_hello().software)


@pytest.mark.parametrize(("ours", "says"), [(version(9), "other side"), (version(0), "this side")])
async def test_another_major_is_a_version_error_on_the_dialer(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, ours: Hello, says: str
) -> None:
    seen: list[HelloReply] = []

    async def other_version(stream: Stream) -> None:
        monkeypatch.setattr(hello, "our_hello", lambda: version(1))
        await answer_hello(stream)

    async def dial(stream: Stream) -> None:
        await send_message(stream, ours)
        reply = await MessageReader(stream, (HelloReply,)).receive()
        assert isinstance(reply, HelloReply)
        seen.append(reply)

    monkeypatch.setattr(hello, "our_hello", lambda: ours)
    with pytest.raises(VersionError, match=f"{says} is too old"):
        await greet(other_version)
    swarm = MemorySwarm()
    async with swarm.network("coordinator") as server, swarm.network("node") as client:
        server.set_handler(HELLO_PROTOCOL, other_version)
        await client.connect(server.addresses[0])
        await dial(await client.open_stream("coordinator", HELLO_PROTOCOL))
    assert not seen[0].compatible
    assert "too old" in seen[0].message


async def test_a_newer_minor_may_refuse_with_its_own_words(autojump_clock: trio.abc.Clock) -> None:
    async def refuse(stream: Stream) -> None:
        await send_message(
            stream,
            HelloReply(major=1, minor=5, software="x", compatible=False, message="1.0 lost\x1b its key"),
        )

    with pytest.raises(VersionError, match="refuses our version: 1"):
        await greet(refuse)


async def test_silence_is_a_peer_error_after_ten_seconds(autojump_clock: trio.abc.Clock) -> None:
    start = trio.current_time()
    with pytest.raises(PeerError, match="no answer to our version within 10 s"):
        await greet(lambda _: trio.sleep(100))
    assert 10 <= trio.current_time() - start < 12


async def test_a_listener_that_closes_is_a_peer_error(autojump_clock: trio.abc.Clock) -> None:
    async def close(_: Stream) -> None: ...

    with pytest.raises(PeerError):
        await greet(close)


async def test_a_listener_that_babbles_is_malformed(autojump_clock: trio.abc.Clock) -> None:
    async def babble(stream: Stream) -> None:
        await stream.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with pytest.raises(MalformedError):
        await greet(babble)


async def test_a_silent_or_babbling_dialer_does_not_hold_the_listener(
    autojump_clock: trio.abc.Clock,
) -> None:
    ended: list[str] = []

    async def watched(stream: Stream) -> None:
        try:
            await answer_hello(stream)
        except (PeerError, MalformedError) as error:
            ended.append(type(error).__name__)
            raise

    swarm = MemorySwarm()
    async with swarm.network("coordinator") as server, swarm.network("node") as client:
        server.set_handler(HELLO_PROTOCOL, watched)
        await client.connect(server.addresses[0])
        await client.open_stream("coordinator", HELLO_PROTOCOL)
        await trio.sleep(11)
        babbling = await client.open_stream("coordinator", HELLO_PROTOCOL)
        await babbling.write(b"GET / HTTP/1.1")
        await trio.sleep(1)
        closing = await client.open_stream("coordinator", HELLO_PROTOCOL)
        await closing.close()
        await trio.sleep(1)
    assert ended == ["PeerError", "MalformedError", "MalformedError"]
