"""Sessions and names: who may speak, how much, and what others are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from coordinator_support import (
    attached,
    node,
)
from server_support import Clock, ended, stage

from barnraise.protocol.errors import PeerError, RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.messages import (
    SESSION_PROTOCOL,
    Acknowledged,
    HeartbeatReply,
    HeartbeatRequest,
    Message,
    NoticePush,
    PeerReport,
)


async def test_joining_comes_first_and_with_ones_own_key(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (swarm, coordinator, _):
        async with swarm.network(Identity.from_private_bytes(b"q" * 32).peer_id) as network:
            stranger = Identity.from_private_bytes(b"q" * 32)
            async with attached(network, coordinator, stranger, join=False) as guest:
                with pytest.raises(RefusedError) as refusal:
                    await guest.lease_reply()
                assert refusal.value.code == "join-first"
                guest.identity = Identity.from_private_bytes(b"p" * 32)
                with pytest.raises(RefusedError) as refusal:
                    await guest.join()
                assert refusal.value.code == "wrong-key"


async def test_a_session_that_never_joins_is_ended(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (swarm, coordinator, _):
        async with swarm.network("guest") as network:
            peer = await network.connect(coordinator.address)
            stream = await network.open_stream(peer, SESSION_PROTOCOL)
            with trio.fail_after(20):
                assert await ended(stream)


async def test_rubbish_costs_its_sender_alone(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        async with swarm.network("guest") as network:
            peer = await network.connect(coordinator.address)
            for rubbish in (b"\xff" * 100, b"\x14\xff\xff\xff\xff", b"\x0b\0\0\0\x02\xc1\xc1"):
                stream = await network.open_stream(peer, SESSION_PROTOCOL)
                await stream.write(rubbish)
                assert await ended(stream)
        await ann.submit(ann.signed_work(await ann.lease()))


async def test_reports_of_other_peers_are_shown_and_bounded(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):

        async def report() -> Acknowledged:
            return await ann.ask(
                lambda number: PeerReport(id=number, peer_id="eve", code="corrupt", message="\x1b[2Jbad"),
                Acknowledged,
            )

        for _ in range(16):
            await report()
        with pytest.raises(RefusedError, match="enough"):
            await report()
        shown = coordinator.state()["peer_reports"]
        assert len(shown) == 16
        assert (shown[0]["by"], shown[0]["peer"], shown[0]["code"]) == ("ann", "eve", "corrupt")
        assert "\x1b" not in shown[0]["text"]


async def test_one_peer_cannot_open_sessions_without_end(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        async with swarm.network("guest") as network:
            peer = await network.connect(coordinator.address)
            streams = [await network.open_stream(peer, SESSION_PROTOCOL) for _ in range(10)]
            await trio.sleep(1)
            with pytest.raises(PeerError):
                await streams[-1].read(1)
        await ann.lease()


async def test_two_live_nodes_with_one_key_are_both_told_and_the_newer_one_stays(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        twin_network = swarm._hosts[ann.identity.peer_id]
        async with attached(twin_network, coordinator, ann.identity, join=False) as twin:
            await twin.join(instance=b"j" * 16)
            with trio.fail_after(10):
                reason = await ann.session.wait_ended()
            assert [push.code for push in ann.received(NoticePush)] == ["duplicate-key"]
            assert [push.code for push in twin.received(NoticePush)] == ["duplicate-key-kept"]
            assert reason
            await twin.submit(twin.signed_work(await twin.lease()))


async def test_the_same_process_comes_back_without_a_word_and_keeps_its_lease(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        lease = await ann.lease()
        network = swarm._hosts[ann.identity.peer_id]
        async with attached(network, coordinator, ann.identity) as again:
            await trio.sleep(3)
            assert again.received(NoticePush) == []
            assert (await again.lease()).lease_id == lease.lease_id
            await again.submit(again.signed_work(lease))


async def test_nodes_hear_of_each_other(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        async with node(swarm, coordinator, b"b") as bob:
            beat: Callable[[int], Message] = lambda number: HeartbeatRequest(  # noqa: E731
                id=number, have_version=0, state="generating"
            )
            assert (await ann.ask(beat, HeartbeatReply)).peers == ()
            peers = (await bob.ask(beat, HeartbeatReply)).peers
            assert [peer.peer_id for peer in peers] == [ann.identity.peer_id]
            assert peers[0].have_version == 0
        await trio.sleep(1)
        assert (await ann.ask(beat, HeartbeatReply)).peers == ()
        assert [row["state"] for row in coordinator.state()["nodes"]] == ["generating", "away"]


async def test_a_name_with_control_characters_reaches_no_terminal(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        await ann.join(name="evil\x1b[2Jname")
        assert "\x1b" not in coordinator.state()["nodes"][0]["name"]


async def test_a_node_cannot_fill_the_ledger_by_renaming_itself(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        size = coordinator.state()["ledger_size"]
        for number in range(50):
            await ann.join(name=f"ann {number}")
        assert coordinator.state()["ledger_size"] == size
        await trio.sleep(601)
        await ann.join(name="ann again")
        assert coordinator.state()["ledger_size"] == size + 1
        assert coordinator.state()["nodes"][0]["name"] == "ann again"


async def test_who_comes_back_without_a_name_keeps_the_one_it_had(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        await ann.join(name="ann")
        before = coordinator.state()["nodes"][0]["name"]
        await trio.sleep(601)
        await ann.join(name=f"node-{ann.identity.peer_id[-6:]}")
        assert coordinator.state()["nodes"][0]["name"] == before
