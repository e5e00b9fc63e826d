from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from barnraise.protocol.errors import MalformedError, PeerError, RefusedError
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import (
    SESSION_PROTOCOL,
    Acknowledged,
    AmendmentsPush,
    InviteRequest,
    LeaseReply,
    LeaseRequest,
    ManifestReply,
    ManifestRequest,
    Message,
    NoticePush,
    Signed,
    SubmitRequest,
)
from barnraise.protocol.network import Stream
from barnraise.protocol.server_session import MAX_IN_FLIGHT, Intake, ServerSession
from barnraise.protocol.session import Session
from barnraise.protocol.wire import frame

Handle = Callable[[Message], Awaitable[Message]]


@asynccontextmanager
async def raw_pair(serve: Callable[[Stream], Awaitable[None]], **link: float) -> AsyncIterator[Stream]:
    """A stream from "node" to "coordinator", whose end ``serve`` runs."""
    swarm = MemorySwarm(**link)  # type: ignore[arg-type]
    async with swarm.network("coordinator") as server, swarm.network("node") as client:
        server.set_handler(SESSION_PROTOCOL, serve)
        await client.connect(server.addresses[0])
        yield await client.open_stream("coordinator", SESSION_PROTOCOL)


@asynccontextmanager
async def pair(handle: Handle) -> AsyncIterator[tuple[Session, list[ServerSession]]]:
    servers: list[ServerSession] = []

    async def serve(stream: Stream) -> None:
        servers.append(ServerSession(stream, handle))
        await servers[-1].run()

    async with raw_pair(serve) as stream, trio.open_nursery() as nursery:
        session = Session(stream)
        nursery.start_soon(session.run)
        yield session, servers
        nursery.cancel_scope.cancel()


async def no_lease(message: Message) -> Message:
    assert isinstance(message, LeaseRequest)
    return LeaseReply(id=message.id, lease=None, reason="paused", retry_after_ms=1000)


def lease_request(version: int = 1) -> Callable[[int], Message]:
    return lambda id: LeaseRequest(id=id, policy_version=version)


async def test_a_request_gets_its_reply(autojump_clock: trio.testing.MockClock) -> None:
    async with pair(no_lease) as (session, _):
        reply = await session.request(lease_request(), LeaseReply)
        assert reply.reason == "paused"


async def test_what_a_minor_brought_is_sent_to_nobody_who_speaks_an_older_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    signed = Signed(payload=b"", signer=bytes(32), signature=bytes(64))
    servers: list[ServerSession] = []

    async def serve(stream: Stream) -> None:
        servers.append(ServerSession(stream, no_lease, minor=0))
        await servers[-1].run()

    async with raw_pair(serve) as stream, trio.open_nursery() as nursery:
        session = Session(stream, minor=0)
        nursery.start_soon(session.run)
        await session.request(lease_request(), LeaseReply)
        assert servers[0].push(AmendmentsPush(amendments=(signed,)))
        assert servers[0].push(NoticePush(code="hello", message="later"))
        assert isinstance(await session.pushes.receive(), NoticePush)
        with pytest.raises(RefusedError, match=r"before 1\.1: update that side"):
            await session.request(
                lambda id: InviteRequest(id=id, public_key=bytes(32), invite=signed), Acknowledged
            )
        assert not servers[0].reason
        nursery.cancel_scope.cancel()


async def test_replies_may_come_in_any_order(autojump_clock: trio.testing.MockClock) -> None:
    async def handle(message: Message) -> Message:
        assert isinstance(message, LeaseRequest)
        await trio.sleep(10 - message.policy_version)
        return LeaseReply(id=message.id, lease=None, reason=str(message.policy_version), retry_after_ms=0)

    done: list[str] = []
    async with pair(handle) as (session, _):

        async def ask(version: int) -> None:
            reply = await session.request(lease_request(version), LeaseReply)
            assert reply.reason == str(version)
            done.append(reply.reason)

        async with trio.open_nursery() as nursery:
            for version in range(1, 6):
                nursery.start_soon(ask, version)
    assert done == ["5", "4", "3", "2", "1"]


async def test_a_refusal_carries_its_code(autojump_clock: trio.testing.MockClock) -> None:
    async def handle(message: Message) -> Message:
        raise RefusedError("unknown-lease", "that lease was never issued")

    async with pair(handle) as (session, _):
        with pytest.raises(RefusedError, match="never issued") as caught:
            await session.request(lease_request(), LeaseReply)
        assert caught.value.code == "unknown-lease"


@pytest.mark.parametrize(
    ("code", "seconds", "told"),
    [
        *(("newcomers", 12_600, ("newcomers", 12_600)), ("busy", 0, ("busy", 0)), ("", 7, ("refused", 7))),
        *(("n;retry=1000000000", 0, ("n", 0)), ("n;retry=999999999", 0, ("n", 86_400))),
        ("x" * 99, 5, ("x" * 56, 5)),
    ],
)
async def test_a_refusal_says_when_to_come_again(
    autojump_clock: trio.testing.MockClock, code: str, seconds: int, told: tuple[str, int]
) -> None:
    async def refuse(message: Message) -> Message:
        error = RefusedError("", "later", seconds)
        error.code = code  # also what only somebody else's coordinator would say
        raise error

    async with pair(refuse) as (session, _):
        with pytest.raises(RefusedError, match="later") as caught:
            await session.request(lambda number: LeaseRequest(id=number, policy_version=0), LeaseReply)
        assert (caught.value.code, caught.value.retry_after_s) == told


@pytest.mark.parametrize("end", ["", "x", "-1", "1.5", "\u0663", "0x10", " 5", "1e3"])
def test_a_code_that_does_not_say_when_is_a_code_all_the_same(end: str) -> None:
    error = RefusedError(f"newcomers;retry={end}", "later")
    assert (error.code, error.retry_after_s) == ("newcomers", 0)


async def test_a_failing_handler_refuses_and_the_session_goes_on(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    async def handle(message: Message) -> Message:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return await no_lease(message)

    async with pair(handle) as (session, _):
        with pytest.raises(RefusedError) as caught:
            await session.request(lease_request(), LeaseReply)
        assert caught.value.code == "internal-error"
        assert "ZeroDivisionError" in caplog.text
        await session.request(lease_request(), LeaseReply)


async def test_an_unanswered_request_times_out_and_its_late_reply_is_ignored(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def handle(message: Message) -> Message:
        if isinstance(message, ManifestRequest):
            return ManifestReply(id=message.id, head=None)
        await trio.sleep(40)
        return await no_lease(message)

    async with pair(handle) as (session, _):
        began = trio.current_time()
        with pytest.raises(PeerError, match="did not answer LeaseRequest within 30 s"):
            await session.request(lease_request(), LeaseReply)
        assert trio.current_time() - began == pytest.approx(30)
        await trio.sleep(15)
        await session.request(lambda id: ManifestRequest(id=id), ManifestReply)


async def test_the_reply_clock_starts_when_a_large_request_has_left(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def serve(stream: Stream) -> None:
        async def handle(message: Message) -> Message:
            assert isinstance(message, SubmitRequest)
            return Acknowledged(id=message.id, duplicate=False)

        await ServerSession(stream, handle).run()

    body = Signed(payload=bytes(8 * 1024 * 1024), signer=bytes(32), signature=bytes(64))
    async with raw_pair(serve, bandwidth=50_000.0) as stream, trio.open_nursery() as nursery:
        session = Session(stream)
        nursery.start_soon(session.run)
        began = trio.current_time()
        await session.request(lambda id: SubmitRequest(id=id, submission=body), Acknowledged)
        assert 160 < trio.current_time() - began < 180
        nursery.cancel_scope.cancel()


async def test_losing_the_peer_fails_what_waits(autojump_clock: trio.testing.MockClock) -> None:
    async def serve(stream: Stream) -> None:
        await stream.read(100)
        await stream.reset()

    async with raw_pair(serve) as stream, trio.open_nursery() as nursery:
        session = Session(stream)
        nursery.start_soon(session.run)
        with pytest.raises(PeerError, match="waiting for the answer to LeaseRequest"):
            await session.request(lease_request(), LeaseReply)
        assert [push async for push in session.pushes] == []
        with pytest.raises(PeerError, match="no session"):
            await session.request(lease_request(), LeaseReply)
        assert session.reason


async def test_a_cancelled_request_leaves_the_session_whole(autojump_clock: trio.testing.MockClock) -> None:
    async def handle(message: Message) -> Message:
        await trio.sleep(5)
        return await no_lease(message)

    async with pair(handle) as (session, _):
        with trio.move_on_after(1):
            await session.request(lease_request(), LeaseReply)
        await session.request(lease_request(), LeaseReply)


async def test_pushes_arrive_beside_replies(autojump_clock: trio.testing.MockClock) -> None:
    async with pair(no_lease) as (session, servers):
        await session.request(lease_request(), LeaseReply)
        assert servers[0].push(NoticePush(code="note", message="hello"))
        assert await session.pushes.receive() == NoticePush(code="note", message="hello")


async def test_a_malformed_frame_ends_one_session_with_a_logged_reason(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async def serve(stream: Stream) -> None:
        server = ServerSession(stream, no_lease)
        await server.run()
        ended.append(server.reason)

    async with raw_pair(serve) as stream:
        await stream.write(b"\xff\xff\xff\xff\xff garbage")
        with pytest.raises(PeerError):
            await stream.read(100)
    assert "unknown message code" in ended[0]
    assert "unknown message code" in caplog.text


async def test_a_reply_is_no_request(autojump_clock: trio.testing.MockClock) -> None:
    ended: list[str] = []

    async def serve(stream: Stream) -> None:
        server = ServerSession(stream, no_lease)
        await server.run()
        ended.append(server.reason)

    async with raw_pair(serve) as stream:
        await stream.write(frame(Acknowledged(id=1, duplicate=False)))
        with pytest.raises(PeerError):
            await stream.read(100)
    assert "not expected" in ended[0]


@pytest.mark.parametrize(
    "answer",
    [
        Acknowledged(id=1, duplicate=False),  # of another type
        Acknowledged(id=77, duplicate=False),  # to nothing that was asked
    ],
)
async def test_a_wrong_answer_ends_the_session(
    autojump_clock: trio.testing.MockClock, answer: Acknowledged
) -> None:
    async def serve(stream: Stream) -> None:
        await stream.read(100)
        await stream.write(frame(answer))
        await trio.sleep(100)

    async with raw_pair(serve) as stream, trio.open_nursery() as nursery:
        session = Session(stream)
        nursery.start_soon(session.run)
        with pytest.raises(PeerError):
            await session.request(lease_request(), LeaseReply)
        await session.wait_ended()


async def test_a_silent_node_is_let_go_after_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    ended: list[tuple[float, str]] = []

    async def serve(stream: Stream) -> None:
        server = ServerSession(stream, no_lease)
        await server.run()
        ended.append((trio.current_time(), server.reason))

    async with raw_pair(serve) as stream:
        began = trio.current_time()
        with pytest.raises(PeerError):
            await stream.read(1)
        await trio.sleep(0.1)
        assert ended[0][0] - began == pytest.approx(60)
        assert "nothing for 60 s" in ended[0][1]


async def test_a_node_that_does_not_read_is_cut_off_and_others_are_served(
    autojump_clock: trio.testing.MockClock,
) -> None:
    servers: list[ServerSession] = []

    async def serve(stream: Stream) -> None:
        servers.append(ServerSession(stream, no_lease, outbox=8))
        await servers[-1].run()

    swarm = MemorySwarm()
    async with (
        swarm.network("coordinator") as server,
        swarm.network("deaf") as deaf,
        swarm.network("good") as good,
        trio.open_nursery() as nursery,
    ):
        server.set_handler(SESSION_PROTOCOL, serve)
        for node in (deaf, good):
            await node.connect(server.addresses[0])
        await deaf.open_stream("coordinator", SESSION_PROTOCOL)
        await trio.testing.wait_all_tasks_blocked()
        session = Session(await good.open_stream("coordinator", SESSION_PROTOCOL))
        nursery.start_soon(session.run)
        await session.request(lease_request(), LeaseReply)
        note = NoticePush(code="note", message="x" * 500)
        pushed = 0
        while servers[0].push(note):
            pushed += 1
            assert pushed < 10_000
            await trio.sleep(0)
        await session.request(lease_request(), LeaseReply)
        assert "does not read" in servers[0].reason
        nursery.cancel_scope.cancel()


async def test_too_many_requests_at_once_are_refused_as_busy(autojump_clock: trio.testing.MockClock) -> None:
    async def handle(message: Message) -> Message:
        await trio.sleep(5)
        return await no_lease(message)

    outcomes: list[str] = []
    async with pair(handle) as (session, _):

        async def ask() -> None:
            try:
                await session.request(lease_request(), LeaseReply)
                outcomes.append("ok")
            except RefusedError as error:
                outcomes.append(error.code)

        async with trio.open_nursery() as nursery:
            for _i in range(MAX_IN_FLIGHT + 3):
                nursery.start_soon(ask)
    assert outcomes.count("ok") == MAX_IN_FLIGHT
    assert outcomes.count("busy") == 3


async def test_an_oversized_request_of_our_own_is_named_and_costs_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with pair(no_lease) as (session, _):
        huge = Signed(payload=bytes(17 * 1024 * 1024), signer=bytes(32), signature=bytes(64))
        with pytest.raises(MalformedError, match="our own SubmitRequest"):
            await session.request(lambda id: SubmitRequest(id=id, submission=huge), Acknowledged)
        await session.request(lease_request(), LeaseReply)


async def test_closing_by_the_client_ends_both_sides(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with pair(no_lease) as (session, servers):
        await session.request(lease_request(), LeaseReply)
        await session.close()
        await trio.sleep(1)
        assert servers[0].reason == "closed by the node"
        assert session.reason == "the session was closed"


def submission(size: int) -> SubmitRequest:
    return SubmitRequest(id=1, submission=Signed(payload=bytes(size), signer=bytes(32), signature=bytes(64)))


async def test_slow_senders_of_large_messages_make_room_for_a_quick_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    intake = Intake(3_000_000)
    servers: list[ServerSession] = []

    async def serve(stream: Stream) -> None:
        servers.append(ServerSession(stream, acknowledge, intake=intake))
        await servers[-1].run()

    async def acknowledge(message: Message) -> Message:
        assert isinstance(message, SubmitRequest)
        return Acknowledged(id=message.id, duplicate=False)

    async with raw_pair(serve) as first, raw_pair(serve) as second, raw_pair(serve) as idle:
        await idle.write(frame(submission(1000))[:500])
        for slow in (first, second):
            await slow.write(frame(submission(2_000_000))[:1_200_000])
            await trio.sleep(1)
        assert intake.held == 2_400_500
        async with raw_pair(serve) as quick:
            await quick.write(frame(submission(1_500_000)))
            assert await quick.read(1000)
        await trio.sleep(1)
        assert ["slowly" in server.reason for server in servers] == [True, False, False, False]
        assert intake.held == 1_200_500
    await trio.sleep(1)
    assert intake.held == 0


async def test_what_is_being_answered_counts_until_it_is(autojump_clock: trio.testing.MockClock) -> None:
    intake = Intake()

    async def slowly(message: Message) -> Message:
        await trio.sleep(10)
        return await no_lease(message)

    async def serve(stream: Stream) -> None:
        await ServerSession(stream, slowly, intake=intake).run()

    async with raw_pair(serve) as stream:
        data = frame(lease_request()(1))
        await stream.write(data)
        await trio.sleep(5)
        assert intake.held == len(data)
        await trio.sleep(10)
        assert intake.held == 0
