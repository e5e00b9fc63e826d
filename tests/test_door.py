"""New keys from one address, as nodes meet it: over the wire, in virtual time, and once over real TCP."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import daemon_support
import pytest
import trio
import trio.testing
from coordinator_support import Coordinator, FakeLearner, FakeVerifier, coordinating, make_run, node, opened

from barnraise.coordinator import newcomers
from barnraise.coordinator.admission import admitted, allow, make_invite
from barnraise.coordinator.door import TIDY_EVERY_S
from barnraise.coordinator.newcomer_book import NewcomerBook
from barnraise.coordinator.newcomers import NewcomerLimits
from barnraise.coordinator.server import run_coordinator, wall_clock_ms
from barnraise.node.config import NodeConfig
from barnraise.node.daemon import run_node
from barnraise.node.handle import NodeHandle
from barnraise.protocol.errors import RefusedError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.invites import read_invite
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import SESSION_PROTOCOL, Acknowledged, InviteRequest, JoinRequest
from barnraise.protocol.wire import frame

Clock = trio.testing.MockClock

HOME, ELSEWHERE = "/ip4/203.0.113.9", "/ip4/198.51.100.1"
WINDOW_S = 7200


@pytest.fixture(autouse=True)
def two_hours_are_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual day is many heartbeats."""
    monkeypatch.setattr(newcomers, "WINDOW_MS", WINDOW_S * 1000)


@asynccontextmanager
async def run_with(
    folder: Path, per_day: int, swarm: MemorySwarm | None = None, private: bool = False
) -> AsyncIterator[tuple[MemorySwarm, Coordinator, Any]]:
    swarm = swarm or MemorySwarm(latency_s=0.01)
    limits = NewcomerLimits(per_day, private)
    async with coordinating(swarm, folder, newcomers=limits) as coordinator:
        yield swarm, coordinator, coordinator.state.args[0]


async def refused(swarm: MemorySwarm, coordinator: Coordinator, seed: bytes, outside: str) -> RefusedError:
    async with node(swarm, coordinator, seed, join=False, outside=outside) as stranger:
        with pytest.raises(RefusedError) as caught:
            await stranger.join()
        return caught.value


async def test_one_address_brings_so_many_new_keys_and_others_are_told_when_and_how(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with run_with(make_run(tmp_path), 2) as (swarm, coordinator, core):
        async with (
            node(swarm, coordinator, b"a", outside=HOME) as ann,
            node(swarm, coordinator, b"b", outside=HOME),
        ):
            began = trio.current_time()
            told = await refused(swarm, coordinator, b"c", HOME)
            assert told.code == "newcomers"
            assert WINDOW_S - 10 <= told.retry_after_s <= WINDOW_S
            text = str(told)
            assert len(text) < 500
            for words in ("2 keys a day", "the next may in 2 h 0 min", "--invite", "always gets in"):
                assert words in text
            assert HOME not in text
            await ann.join(instance=b"j" * 16)  # who is known comes and goes
            async with node(swarm, coordinator, b"d", outside=ELSEWHERE):  # who is elsewhere is not concerned
                assert len(core.state.nodes) == 3
            await trio.sleep(began + 3600 - trio.current_time())
            told = await refused(swarm, coordinator, b"c", HOME)
            assert WINDOW_S - 3610 <= told.retry_after_s <= WINDOW_S - 3590
            await trio.sleep(told.retry_after_s)
            async with node(swarm, coordinator, b"c", outside=HOME):
                assert len(core.state.nodes) == 4
        fields = coordinator.state()["newcomers"]
        assert fields == {"per_day": 2, "let_in": 4, "refused": 2, "turned_away_1h": 0}


async def test_no_limit_is_no_limit_and_private_addresses_have_none_unless_asked_for(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    for name, per_day, private, outside, most in (
        ("none", 0, False, HOME, 5),
        ("demo", 1, False, "/ip4/127.0.0.1", 5),
        ("private", 1, True, "/ip4/127.0.0.1", 1),
        ("unknown", 1, False, "/dns/nowhere", 1),
    ):
        async with run_with(make_run(tmp_path / name), per_day, private=private) as (
            swarm,
            coordinator,
            core,
        ):
            async with AsyncExitStack() as stack:
                for number in range(5):
                    seed = bytes([number + 1])
                    if len(core.state.nodes) < most:
                        await stack.enter_async_context(node(swarm, coordinator, seed, outside=outside))
                    else:
                        await refused(swarm, coordinator, seed, outside)
                assert len(core.state.nodes) == most, name


async def test_a_restart_is_no_way_around_and_nothing_says_where_anybody_is(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder, swarm = make_run(tmp_path), MemorySwarm(latency_s=0.01)
    for _ in range(2):
        async with run_with(folder, 1, swarm) as (_, coordinator, core):
            if not core.state.nodes:
                async with node(swarm, coordinator, b"a", outside=HOME):
                    pass
            await refused(swarm, coordinator, b"b", HOME)
            assert "203.0.113" not in repr(coordinator.state())
    for path in folder.rglob("*"):
        assert path.is_dir() or b"203.0.113" not in path.read_bytes(), path
    await trio.sleep(WINDOW_S)
    async with run_with(folder, 1, swarm) as (_, coordinator, core):
        async with node(swarm, coordinator, b"b", outside=HOME):
            assert len(core.state.nodes) == 2


@pytest.mark.parametrize("apart_s", [600, 3600])
async def test_however_often_somebody_comes_nobody_stays_on_the_disk_for_much_longer_than_the_window(
    tmp_path: Path, autojump_clock: Clock, apart_s: int
) -> None:
    folder = make_run(tmp_path)
    async with run_with(folder, 1000) as (swarm, coordinator, core):
        for number in range(2 * WINDOW_S // apart_s):
            async with node(swarm, coordinator, bytes([number + 1]), outside=HOME):
                await trio.sleep(apart_s)
        kept = NewcomerBook(folder, Identity.from_private_bytes(b"o" * 32)).kept
        assert len(kept) > 1
        assert min(kept).at_ms >= core.now_ms() - (WINDOW_S + TIDY_EVERY_S + 60) * 1000


async def test_in_an_open_run_an_invite_counts_for_whom_the_limit_turns_away_and_a_list_does_too(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with run_with(make_run(tmp_path), 1) as (swarm, coordinator, core):
        made = await make_invite(core, {"uses": 1, "seconds": 3600})
        signed = read_invite(made["invite"])[1]

        async def present(scripted: Any) -> None:
            key = scripted.identity.public_key
            await scripted.ask(lambda n: InviteRequest(id=n, public_key=key, invite=signed), Acknowledged)

        async with node(swarm, coordinator, b"a", join=False, outside=HOME) as ann:
            await present(ann)  # which is not needed, and costs no use of it
            await ann.join()
            assert [item["left"] for item in (await admitted(core, {}))["invites"]] == [1]
        async with node(swarm, coordinator, b"b", join=False, outside=HOME) as bob:
            with pytest.raises(RefusedError, match="ask the operator for an invite"):
                await bob.join()
            await present(bob)
            await bob.join()
        async with node(swarm, coordinator, b"c", join=False, outside=HOME) as cat:
            with pytest.raises(RefusedError, match="used up"):
                await present(cat)
            await allow(core, {"nodes": [cat.identity.peer_id]})
            await cat.join()
        assert len(core.state.nodes) == 3


async def test_a_join_that_could_not_be_kept_is_not_counted(tmp_path: Path, autojump_clock: Clock) -> None:
    async with run_with(make_run(tmp_path), 1) as (swarm, coordinator, core):
        record = core.record

        async def full(*args: Any, **kwargs: Any) -> None:
            await trio.sleep(0)
            raise StorageError("no room")

        core.record = full
        for _ in range(3):
            assert (await refused(swarm, coordinator, b"a", HOME)).code == "storage-full"
        core.record = record
        async with node(swarm, coordinator, b"a", outside=HOME):
            assert len(core.state.nodes) == 1
        assert coordinator.state()["newcomers"]["let_in"] == 1


async def test_who_hangs_up_while_its_key_is_being_kept_has_been_counted(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    """What is durable is not taken back, and so the count of it must not be."""
    folder, swarm = make_run(tmp_path), MemorySwarm(latency_s=0.01)
    async with run_with(folder, 1, swarm) as (_, coordinator, core):
        for number in range(5):
            identity = Identity.from_private_bytes(bytes([number + 1]) * 32)
            async with swarm.network(identity.peer_id, outside=HOME) as network:
                peer = await network.connect(coordinator.address)
                stream = await network.open_stream(peer, SESSION_PROTOCOL)
                request = JoinRequest(
                    id=1,
                    public_key=identity.public_key,
                    instance=b"i" * 16,
                    name="ann",
                    engine="test",
                    addresses=(),
                )
                await stream.write(frame(request))
                await stream.close()
                await trio.sleep(1)
        assert len(core.state.nodes) == 1
        await refused(swarm, coordinator, b"b", HOME)
    async with run_with(folder, 1, swarm) as (_, coordinator, core):
        assert len(core.state.nodes) == 1
        await refused(swarm, coordinator, b"b", HOME)


async def test_a_node_that_is_turned_away_shows_why_and_until_when_and_comes_in_by_itself(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with run_with(make_run(tmp_path), 1) as (swarm, coordinator, core):
        async with node(swarm, coordinator, b"a", outside=HOME):
            pass
        began = trio.current_time()
        async with daemon_support.node(swarm, tmp_path, coordinator.address, outside=HOME) as volunteer:
            tree = await volunteer.until(lambda tree: "1 keys a day" in tree["reason"])
            assert (tree["state"], tree["then"]) == ("connecting", "tries again")
            assert 1800 <= tree["until_ms"] / 1000 - daemon_support.EPOCH_MS / 1000 - began < 2000
            assert "--invite" in tree["reason"]
            await trio.sleep(5_000)  # and not every minute
            assert coordinator.state()["newcomers"]["refused"] == 3
            await allow(core, {"nodes": [volunteer.identity.peer_id]})
            await volunteer.until(lambda tree: tree["connected"], 2000)


async def test_a_day_later_the_first_place_is_free_and_whoever_waits_has_it_soon(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with run_with(make_run(tmp_path), 1) as (swarm, coordinator, _):
        async with node(swarm, coordinator, b"a", outside=HOME):
            pass
        async with daemon_support.node(swarm, tmp_path, coordinator.address, outside=HOME) as volunteer:
            await volunteer.until(lambda tree: tree["connected"], WINDOW_S + 2000)
            assert WINDOW_S <= trio.current_time() < WINDOW_S + 2000


async def test_an_invite_opens_the_door_by_itself_and_one_that_does_not_count_ends_no_node(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with run_with(make_run(tmp_path), 1) as (swarm, coordinator, core):
        made = await make_invite(core, {"uses": 1, "seconds": 36_000})
        async with node(swarm, coordinator, b"a", outside=HOME):
            pass
        start = partial(daemon_support.node, swarm, address=coordinator.address, outside=HOME)
        async with start(tmp_path=tmp_path / "b", invite=made["invite"]) as bob:
            await bob.until(lambda tree: tree["connected"], 60)
        async with start(tmp_path=tmp_path / "c", invite=made["invite"]) as cat:
            tree = await cat.until(lambda tree: "used up" in tree["reason"])
            assert "1 keys a day" in tree["reason"]
            await trio.sleep(3 * 3600)
            assert cat.exit_codes == []


async def test_the_operator_hears_of_a_flood_while_it_lasts(tmp_path: Path, autojump_clock: Clock) -> None:
    async with run_with(make_run(tmp_path), 1) as (swarm, coordinator, core):
        async with node(swarm, coordinator, b"a", outside=HOME):
            for number in range(21):
                await refused(swarm, coordinator, bytes([number + 1]), HOME)
            await trio.sleep(120)
            (alarm,) = coordinator.state()["alarms"]
            assert (alarm["kind"], alarm["value"]) == ("newcomer-flood", 21)
            assert "203.0.113" not in alarm["text"]
            assert core.state.operations.paused is None
            await trio.sleep(3600)
            assert "newcomer-flood" not in {alarm["kind"] for alarm in coordinator.state()["alarms"]}


@asynccontextmanager
async def over_tcp(folder: Path, name: str, address: str) -> AsyncIterator[NodeHandle]:
    """A node's daemon on a real libp2p host of loopback."""
    identity = Identity.from_private_bytes(name.encode() * 32)
    config = NodeConfig(address=address, data=folder / name, key=folder / name / "key", name=name)
    engine = daemon_support.ScriptedEngine(seconds=0.1)
    async with open_libp2p(identity, ("/ip4/127.0.0.1/tcp/0",), circuits=True) as host:
        async with trio.open_nursery() as nursery:
            yield await nursery.start(
                partial(run_node, config, host, engine, identity, wall_clock_ms, random.Random(name))
            )
            nursery.cancel_scope.cancel()


async def until(handle: NodeHandle, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    seen = -1
    with trio.fail_after(60):
        while not reached(handle.get_state()):
            seen = await handle.changed.wait(seen)
    return handle.get_state()


@pytest.mark.e2e
async def test_two_hosts_of_one_address_over_tcp(tmp_path: Path) -> None:
    """Real libp2p on loopback, which is counted here: the second key waits until its operator lets it in."""
    with opened(make_run(tmp_path)) as run:
        async with open_libp2p(run.identity, ("/ip4/127.0.0.1/tcp/0",)) as network:
            async with trio.open_nursery() as nursery:
                workers = FakeVerifier(), FakeLearner(run.path, delay_s=0.1)
                limits = NewcomerLimits(1, private=True)
                serve = partial(run_coordinator, run, network, *workers, control=False, newcomers=limits)
                state = await nursery.start(serve)
                address = network.addresses[0]
                async with over_tcp(tmp_path, "a", address) as ann:
                    await until(ann, lambda tree: tree["connected"])
                    async with over_tcp(tmp_path, "b", address) as bob:
                        tree = await until(bob, lambda tree: "1 keys a day" in tree["reason"])
                        assert (tree["connected"], tree["then"]) == (False, "tries again")
                        assert ann.get_state()["connected"]
                    assert state()["nodes_known"] == 1
                    assert state()["newcomers"]["turned_away_1h"] == 1
                await allow(state.args[0], {"nodes": [Identity.from_private_bytes(b"b" * 32).peer_id]})
                async with over_tcp(tmp_path, "b", address) as bob:
                    await until(bob, lambda tree: tree["connected"])
                async with over_tcp(tmp_path, "a", address) as ann:
                    await until(ann, lambda tree: tree["connected"])
                nursery.cancel_scope.cancel()
