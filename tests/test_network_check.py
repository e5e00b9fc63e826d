"""``doctor --coordinator``: reached, understood, dialled back, and the clocks compared, without joining."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from coordinator_support import coordinating, make_run, virtual_ms
from trio.testing import MockClock

from barnraise.node.network_check import check_network, judge_skew
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.hello import answer_hello
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import HELLO_PROTOCOL, SESSION_PROTOCOL, Message
from barnraise.protocol.network import Stream
from barnraise.protocol.server_session import ServerSession


@pytest.mark.parametrize("ahead_ms", [0, 3_600_000, -20_000])
async def test_a_coordinator_is_checked_and_knows_nobody_more_afterwards(
    tmp_path: Path, autojump_clock: MockClock, ahead_ms: int
) -> None:
    swarm = MemorySwarm(latency_s=0.01)
    async with (
        coordinating(swarm, make_run(tmp_path)) as coordinator,
        swarm.network("volunteer") as network,
    ):
        found = {
            finding.subject: finding
            for finding in await check_network(network, coordinator.address, lambda: virtual_ms() - ahead_ms)
        }
        assert found["network"].status == "ok"
        assert coordinator.address in found["network"].text
        assert found["skew"].status == ("warning" if ahead_ms > 300_000 else "ok")
        expected = {0: "agree to", 3_600_000: "1 h behind", -20_000: "20 s ahead of"}[ahead_ms]
        assert expected in found["skew"].text
        assert found["reach"].text.startswith("direct: dialled at")
        assert coordinator.state()["nodes"] == []


async def test_a_volunteer_behind_nat_hears_why_and_what_to_do(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    swarm = MemorySwarm(latency_s=0.01)
    async with (
        coordinating(swarm, make_run(tmp_path)) as coordinator,
        swarm.network("volunteer", dialable=False) as network,
    ):
        reach = (await check_network(network, coordinator.address, virtual_ms))[-1]
        assert reach.status == "note"
        assert reach.text.startswith("outbound-only")
        assert reach.cure


async def test_an_address_where_nobody_is_is_a_problem_with_its_reason(autojump_clock: MockClock) -> None:
    swarm = MemorySwarm()
    async with swarm.network("volunteer") as network:
        (found,) = await check_network(network, "/memory/999")
    assert found.status == "problem"
    assert "/memory/999" in found.text
    assert found.cure


async def test_a_peer_that_is_no_coordinator_and_one_that_is_older_are_told_apart(
    autojump_clock: MockClock,
) -> None:
    async def refuse(message: Message) -> Message:
        raise RefusedError("join-first", "the first request of a session is JoinRequest")

    async def session(stream: Stream) -> None:
        await ServerSession(stream, refuse).run()

    swarm = MemorySwarm()
    async with swarm.network("other") as other, swarm.network("volunteer") as network:
        (found,) = await check_network(network, other.addresses[0])
        assert found.status == "problem"
        other.set_handler(HELLO_PROTOCOL, answer_hello)
        other.set_handler(SESSION_PROTOCOL, session)
        with trio.fail_after(300):
            found, skew, reach = await check_network(network, other.addresses[0])
    assert found.status == "ok"
    assert "too old to tell its time" in skew.text
    assert reach.text.startswith("unknown")


def test_r26_five_minutes_of_skew_are_a_warning_with_the_number() -> None:
    assert judge_skew(299_000, 20).status == "ok"
    assert judge_skew(301_000, 20).status == "warning"
    assert "5 min 1 s behind" in judge_skew(301_000, 20).text
    assert "ahead of" in judge_skew(-301_000, 20).text
    assert judge_skew(3000, 8000).text.startswith("this clock and the coordinator's agree")
