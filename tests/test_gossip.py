"""Treecast's shell: real streams, stores and hashes on the in-memory network, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from gossip_support import CONFIG, KIB, OPERATOR, Host, make_version, meadow, opened

from barnraise.protocol import memory_pipe
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import PeerError, StorageError
from barnraise.protocol.gossip_bulk import Sending
from barnraise.protocol.identity import Identity
from barnraise.protocol.libp2p_network import open_libp2p
from barnraise.protocol.messages import PatchEntry
from barnraise.protocol.network import Stream
from barnraise.protocol.store import DiskStore
from barnraise.protocol.transfer_state import TransferConfig
from barnraise.protocol.tree_index import lists_of
from barnraise.protocol.tree_messages import BULK_PROTOCOL, TREE_PROTOCOL, Piece
from barnraise.protocol.wire import frame

Clock = trio.testing.MockClock


async def test_twelve_nodes_get_a_version_and_the_origin_uploads_far_less_than_twelve_copies(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=1000 * KIB)
        for number in range(12):
            await field.add(f"n{number}", up=1000 * KIB, down=4000 * KIB)
            await trio.sleep(0.3)
        await trio.sleep(20)
        signed = origin.publish(1, 1024 * KIB)
        assert await field.until_done(1) < 4  # 12 copies one after the other would take 12 s
        assert all(host.whole(signed) for name, host in field.hosts.items() if name != "o")
        assert origin.uploaded(1) < 5 * 1024 * KIB
        assert origin.asked == 0


async def test_a_node_that_crashes_mid_broadcast_holds_nobody_up(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=500 * KIB)
        for number in range(6):
            await field.add(f"n{number}", up=500 * KIB)
        await trio.sleep(20)
        signed = origin.publish(1)
        await trio.sleep(1.0)
        assert 1 not in field.hosts["n2"].done
        field.crash("n2")
        await field.until_done(1, limit=60)
        assert all(host.whole(signed) for name, host in field.hosts.items() if name != "o")


async def test_late_joiners_and_those_who_missed_versions_catch_up(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=1000 * KIB)
        for number in range(4):
            await field.add(f"n{number}", up=1000 * KIB)
        await trio.sleep(10)
        origin.publish(1)
        await trio.sleep(0.7)
        await field.add("late", up=1000 * KIB)  # in the middle of the broadcast
        await field.until_done(1, limit=60)
        await field.leave("n3")
        for version in (2, 3, 4):
            signed = origin.publish(version)
            await field.until_done(version, limit=60)
        await field.add("n3", up=1000 * KIB)
        assert await field.until_done(4, "n3", limit=60) < 20
        assert field.hosts["n3"].whole(signed)
        assert origin.asked == 0


async def test_two_versions_in_flight_both_arrive(tmp_path: Path, autojump_clock: Clock) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=500 * KIB)
        for number in range(4):
            await field.add(f"n{number}", up=500 * KIB)
        await trio.sleep(10)
        first = origin.publish(1)
        await trio.sleep(1)
        second = origin.publish(2)
        await field.until_done(2, limit=120)
        await field.until_done(1, limit=120)
        assert all(h.whole(first) and h.whole(second) for name, h in field.hosts.items() if name != "o")


async def test_a_flipped_bit_bans_its_sender_and_costs_nobody_the_version(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=300 * KIB)
        evil = await field.add("evil", up=3000 * KIB)
        real = evil.store.get

        def flipped(digest: bytes) -> bytes | None:
            data = real(digest)
            return None if data is None else bytes([data[0] ^ 1]) + data[1:]

        for number in range(4):
            await field.add(f"n{number}", up=300 * KIB)
        await trio.sleep(10)
        evil.gossiper.store.get = flipped  # type: ignore[method-assign]
        signed = origin.publish(1)
        honest = [f"n{number}" for number in range(4)]
        await field.until_done(1, *honest, limit=120)
        assert all(field.hosts[name].whole(signed) for name in honest)
        caught = [name for name in ("o", *honest) if "evil" in field.hosts[name].gossiper.banned]
        assert caught
        for name in caught:
            assert ("corrupt", "evil") in [report[:2] for report in field.hosts[name].reports]
            assert "evil" not in field.hosts[name].gossiper.links
        assert all(not host.gossiper.banned for host in (origin,))


async def test_a_forged_head_bans_its_sender_and_goes_no_further(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        await field.add("o")
        evil = await field.add("evil", fetches=False)
        for number in range(3):
            await field.add(f"n{number}")
        await trio.sleep(10)
        real = make_version(evil.store, evil.folder, 7)
        forged = msgspec.structs.replace(real, signature=bytes(64))
        evil.gossiper.publish(forged, opened(real))
        await trio.sleep(5)
        assert all(7 not in host.heads for host in field.hosts.values())
        assert any("evil" in host.gossiper.banned for host in field.hosts.values())


async def test_a_bitmap_that_lies_delays_nobody_for_long(tmp_path: Path, autojump_clock: Clock) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=300 * KIB)
        liar = await field.add("liar", fetches=False)
        for number in range(3):
            await field.add(f"n{number}", up=300 * KIB)
        await trio.sleep(10)
        signed = make_version(origin.store, origin.folder, 1)
        shards = lists_of(opened(signed))[2]
        everything = (1 << len(shards)) - 1
        liar.gossiper.lists.shards[2] = shards
        liar.gossiper.do(
            liar.gossiper.core.want(2, [n for _, n in shards], trio.current_time(), have=everything)
        )
        origin.gossiper.lists.hold(opened(signed))
        origin.gossiper.publish(signed, opened(signed))
        await field.until_done(1, "n0", "n1", "n2", limit=60)
        assert origin.asked == 0


@pytest.mark.parametrize("rubbish", [False, True], ids=["alone", "behind-rubbish"])
async def test_one_that_trickles_is_struck_and_its_shard_comes_from_another(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, rubbish: bool
) -> None:
    """It sends a byte a second of a shard, and pieces of no known version at full speed beside them."""
    real = Sending.run

    async def trickle(sending: Sending, stream: Stream, data: bytes, moved: Callable[[int], None]) -> bool:
        if not any(stream is one for one in evil_streams):
            return await real(sending, stream, data, moved)
        for offset in range(len(data)):
            if sending.stopped:
                return False
            header = Piece(
                version=sending.number, index=sending.index, offset=offset, size=1, total=len(data)
            )
            await stream.write(frame(header) + data[offset : offset + 1])
            if rubbish:
                other = Piece(version=4000, index=0, offset=0, size=64 * KIB, total=128 * KIB)
                await stream.write(frame(other) + bytes(64 * KIB))
            await trio.sleep(1)
        return True

    evil_streams: list[Stream] = []
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=50 * KIB)
        evil = await field.add("evil", up=1000 * KIB)
        await trio.sleep(5)
        signed = origin.publish(1, 512 * KIB)
        await field.until_done(1, "evil", limit=60)
        opening = evil.gossiper.network.open_stream

        async def open_stream(peer: str, protocol: str) -> Any:
            stream = await opening(peer, protocol)
            if protocol == BULK_PROTOCOL:
                evil_streams.append(stream)
            return stream

        monkeypatch.setattr(evil.gossiper.network, "open_stream", open_stream)
        monkeypatch.setattr(Sending, "run", trickle)
        late = await field.add("late", down=4000 * KIB)
        await trio.sleep(2)
        origin.gossiper.publish(signed, opened(signed))
        assert await field.until_done(1, "late", limit=60) < 25
        assert evil_streams
        codes = {code for code, peer, _ in late.reports if peer == "evil"}
        assert codes <= {"trickle", "timeout", "unasked", "starved"}
        assert codes & {"trickle", "timeout"}
        assert all(not host.gossiper.banned for host in field.hosts.values())


async def test_one_that_only_takes_gets_the_version_and_the_others_do_too(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=500 * KIB)
        leech = await field.add("leech", transfer=TransferConfig(versions=8, slots=0, max_slots=0))
        for number in range(4):
            await field.add(f"n{number}", up=500 * KIB)
        await trio.sleep(10)
        origin.publish(1)
        await field.until_done(1, limit=60)
        assert leech.uploaded(1) == 0


async def test_after_a_partition_the_other_half_gets_what_it_missed(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=1000 * KIB)
        for number in range(6):
            await field.add(f"n{number}", up=1000 * KIB)
        await trio.sleep(10)
        here, there = ["o", "n0", "n1", "n2"], ["n3", "n4", "n5"]
        for a in here:
            for b in there:
                field.space.partition(a, b)
        signed = origin.publish(1)
        await field.until_done(1, "n0", "n1", "n2", limit=60)
        await trio.sleep(100)
        assert all(1 not in field.hosts[name].heads for name in there)
        for a in here:
            for b in there:
                field.space.heal(a, b)
        await field.until_done(1, limit=120)
        assert all(field.hosts[name].whole(signed) for name in there)


async def test_rubbish_costs_its_sender_the_link_and_nobody_anything_else(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o")
        await field.add("n0")
        await trio.sleep(5)
        async with field.space.network("stranger") as network:
            await network.connect(origin.network.addresses[0])
            for protocol, data in (
                (TREE_PROTOCOL, b"\xff" * 100),
                (TREE_PROTOCOL, frame(Piece(version=2, index=0, offset=0, size=1, total=1))),
                (BULK_PROTOCOL, b"\x00" * 100),
            ):
                stream = await network.open_stream("o", protocol)
                assert await _ended(stream, data)
        origin.publish(1)
        await field.until_done(1, limit=30)
        assert "stranger" not in origin.gossiper.links


async def test_a_stranger_who_says_nothing_does_not_stay(tmp_path: Path, autojump_clock: Clock) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o")
        async with field.space.network("stranger") as network:
            await network.connect(origin.network.addresses[0])
            await network.open_stream("o", TREE_PROTOCOL)
            await trio.sleep(5)
            assert "stranger" in origin.gossiper.links
            await trio.sleep(60)
            assert "stranger" not in origin.gossiper.links


async def test_a_full_disk_fails_the_download_with_its_reason(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o")
        full = await field.add("full", beside=False)
        await field.add("n1")
        await trio.sleep(5)

        def put(digest: bytes, data: bytes, *, checked: bool = False) -> None:
            raise StorageError("the disk is full")

        full.store.put = put  # type: ignore[method-assign]
        origin.publish(1)
        await field.until_done(1, "n1", limit=30)
        await trio.sleep(5)
        assert full.errors == ["the disk is full"]
        assert not full.gossiper.lists.shards


async def test_without_a_tree_the_shards_come_from_the_origin_directly(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o")
        origin.network.set_handler(TREE_PROTOCOL, _refuse)
        node = await field.add("n0")
        signed = make_version(origin.store, origin.folder, 1)
        await node.get(signed)
        assert node.whole(signed)
        assert origin.asked >= 1024 * KIB


async def test_patches_travel_as_a_list_of_their_own(tmp_path: Path, autojump_clock: Clock) -> None:
    manifest = opened(make_version(DiskStore(tmp_path / "s"), tmp_path, 3))
    patch = PatchEntry(
        path="model.safetensors",
        base_version=1,
        size=20 * KIB,
        sha256=bytes(32),
        shards=(b"a" * 32, b"b" * 32),
    )
    newer = msgspec.structs.replace(patch, base_version=2, size=10, shards=(b"c" * 32,))
    lists = lists_of(msgspec.structs.replace(manifest, patches=(patch, newer)))
    assert set(lists) == {6, 7}
    assert lists[7] == ((b"c" * 32, 10),)
    assert sum(size for _, size in lists[6]) == 1024 * KIB + len(CONFIG)


async def _refuse(stream: Stream) -> None:
    await stream.reset()


async def _ended(stream: Stream, data: bytes) -> bool:
    """Whether the other side ends the stream because of what is sent."""
    with trio.move_on_after(5):
        try:
            await stream.write(data)
            while await stream.read(1000):
                pass
        except PeerError:
            pass
        return True
    return False


async def test_the_same_over_libp2p(tmp_path: Path) -> None:
    """Five hosts, real sockets, real time: a version of 24 MB in shards of 1 MiB."""
    hosts: list[Host] = []

    async def live(number: int, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        identity = Identity.from_private_bytes(bytes([number + 1]) * 32)
        async with open_libp2p(identity, ["/ip4/127.0.0.1/tcp/0"]) as network:
            hosts.append(Host(network, tmp_path / str(number), hosts[0] if hosts else None, up=20e6))
            task_status.started()
            await hosts[number].run()

    async with trio.open_nursery() as nursery:
        for number in range(5):
            await nursery.start(live, number)
        origin, nodes = hosts[0], hosts[1:]
        with trio.fail_after(60):
            while not all(host.gossiper.links for host in nodes):
                await trio.sleep(0.05)
            signed = origin.publish(1, 24 * 1024 * KIB, 1024 * KIB)
            while not all(1 in host.done for host in nodes):
                await trio.sleep(0.05)
        assert all(host.whole(signed) for host in nodes)
        assert all(host.gossiper.defects == 0 and not host.gossiper.banned for host in hosts)
        assert origin.uploaded(1) < 3 * 24 * 1024 * KIB
        assert origin.asked == 0
        nursery.cancel_scope.cancel()


async def test_a_capped_origin_sends_one_copy_and_a_half_and_the_nodes_do_the_rest(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    capped = TransferConfig(slots=8, max_slots=8, copies=1.5, versions=8)
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=5000 * KIB, transfer=capped)
        for number in range(6):
            await field.add(f"n{number}", up=1000 * KIB)
        await trio.sleep(20)
        origin.publish(1, 2048 * KIB, 64 * KIB)
        await field.until_done(1, limit=60)
        assert origin.uploaded(1) < 1.7 * 2048 * KIB
        assert origin.asked == 0


async def test_a_version_of_one_shard_leaves_a_capped_origin_twice_and_spreads_from_there(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    capped = TransferConfig(slots=8, max_slots=8, copies=1.5, versions=8)
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=5000 * KIB, transfer=capped)
        for number in range(8):
            await field.add(f"n{number}", up=1000 * KIB)
        await trio.sleep(20)
        origin.publish(1, 200 * KIB, 256 * KIB)
        assert await field.until_done(1, limit=60) < 5
        assert origin.uploaded(1) < 2.2 * 200 * KIB
        assert origin.asked == 0


async def test_hosts_that_come_crash_and_leave_throughout_cost_the_rest_nothing(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=400 * KIB)
        for number in range(9):
            await field.add(f"n{number}", up=400 * KIB)
        await trio.sleep(15)
        signed = origin.publish(1)
        await trio.sleep(0.8)
        field.crash("n1")
        await field.add("m0", up=400 * KIB)
        await trio.sleep(0.5)
        field.crash("n4")
        await field.leave("n7")
        await field.add("m1", up=400 * KIB)
        await field.until_done(1, limit=120)
        assert all(host.whole(signed) for name, host in field.hosts.items() if name != "o")
        assert all(not host.gossiper.banned for host in field.hosts.values())


async def test_a_host_under_a_tight_cap_is_slow_and_loses_nobody(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=4000 * KIB)
        for number in range(5):
            await field.add(f"n{number}", up=4000 * KIB)
        slow = await field.add("slow", up=40 * KIB, down=40 * KIB)
        await trio.sleep(15)
        signed = origin.publish(1, 1024 * KIB, 256 * KIB)
        names = [f"n{number}" for number in range(5)]
        assert await field.until_done(1, *names, limit=30) < 10
        took = await field.until_done(1, "slow", limit=120)
        assert took < 40  # 26 s at its cap
        assert slow.whole(signed)
        assert all("slow" not in host.gossiper.banned for host in field.hosts.values())


class Mirror:
    """A mirror's donor: ``rate`` bytes/s of what ``store`` has; None: it breaks off."""

    def __init__(self, store: DiskStore, rate: float | None) -> None:
        self.store, self.rate = store, rate
        self.failures = self.received = self.asked = 0

    async def fetch(self, digest: bytes, size: int) -> bytes | None:
        self.asked += 1
        if self.rate is None:
            self.failures += 1
            await trio.sleep(5)
            raise PeerError("it went silent")
        await trio.sleep(size / self.rate)
        self.received += size
        return self.store.get(digest)

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


async def mirrored(folder: Path, rate: float | None) -> tuple[float, list[Mirror], Host]:
    """Seconds that five nodes need for 1 MiB behind a slow origin, and what they had of a mirror."""
    made: list[Mirror] = []
    async with meadow(folder) as field:
        origin = await field.add("o", up=500 * KIB)
        for number in range(5):
            host = await field.add(f"n{number}", up=500 * KIB)
            made.append(Mirror(origin.store, rate))
            host.fetcher.beside.mirror = lambda url, mirror=made[-1]: mirror  # type: ignore[misc]
        await trio.sleep(15)
        signed = make_version(origin.store, folder, 1, 1024 * KIB, 32 * KIB)
        manifest = msgspec.structs.replace(opened(signed), mirrors=("https://mirror/run",))
        signed = sign(manifest, OPERATOR)
        origin.gossiper.lists.hold(manifest)
        origin.gossiper.publish(signed, manifest)
        took = await field.until_done(1, limit=60)
        nodes = [host for name, host in field.hosts.items() if name != "o"]
        assert all(host.whole(signed) for host in nodes)
        for mirror, host in zip(made, nodes, strict=True):
            assert host.fetcher.came_from["https://mirror/run"] <= mirror.received
            assert sum(host.fetcher.came_from.values()) >= 1024 * KIB
        return took, made, origin


async def test_mirrors_send_beside_the_tree_and_the_tree_goes_on(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    alone, _, _ = await mirrored(tmp_path / "without", None)
    helped, mirrors, origin = await mirrored(tmp_path / "with", 500 * KIB)
    assert helped < 0.8 * alone
    drawn = sum(mirror.received for mirror in mirrors)
    assert 0.2 < drawn / (5 * 1024 * KIB) < 0.7  # it is as fast as one of the others
    assert origin.uploaded(1) > 128 * KIB


async def test_a_mirror_that_is_down_or_slow_costs_nobody_the_version(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    dead, _, _ = await mirrored(tmp_path / "dead", None)
    slow, mirrors, _ = await mirrored(tmp_path / "slow", 1 * KIB)  # half a minute for one shard
    assert dead < 20
    assert slow < 20
    assert all(mirror.asked <= 2 for mirror in mirrors)


@pytest.mark.parametrize("up", [8000, 350], ids=["fast", "three-fill-it"])
async def test_a_download_cap_holds_over_any_five_seconds_and_is_used_however_many_send(
    tmp_path: Path, autojump_clock: Clock, up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven neighbours have the version when the capped node comes."""
    monkeypatch.setattr(memory_pipe, "PIECE", 16 * KIB)
    cap, arrived = 1000 * KIB, [0]
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=8000 * KIB)
        for number in range(6):
            await field.add(f"n{number}", up=up * KIB)
        await trio.sleep(15)
        signed = origin.publish(1, 8 * 1024 * KIB, 256 * KIB)
        await field.until_done(1, limit=100)
        capped = await field.add("capped", down=cap, beside=False)
        origin.gossiper.publish(signed, opened(signed))
        while 1 not in capped.done:
            await trio.sleep(0.25)
            arrived.append(capped.network.bytes_in)
            assert len(arrived) < 400
        assert capped.whole(signed)
    begin = next(index for index, size in enumerate(arrived) if size > 64 * KIB) - 1
    del arrived[arrived.index(arrived[-1]) + 1 :]  # what has arrived is read and joined later: nobody sends
    windows = [(b - a) / 5 / cap for a, b in zip(arrived[begin:], arrived[begin + 20 :], strict=False)]
    assert len(windows) > 5
    assert max(windows) < 1.125  # a window of credit and one shard's last piece; 1.105 was seen
    assert min(windows) > (0.8 if up == 8000 else 0.7)  # three that just fill it leave gaps: 0.73 was seen


async def test_links_outlast_an_hour_without_a_version(tmp_path: Path, autojump_clock: Clock) -> None:
    async with meadow(tmp_path) as field:
        origin = await field.add("o", up=1000 * KIB)
        for number in range(2):
            await field.add(f"n{number}", up=1000 * KIB)
        await trio.sleep(5)
        origin.publish(1)
        await field.until_done(1, limit=30)
        before = dict(origin.gossiper.links)
        await trio.sleep(3600)
        origin.publish(2)
        assert await field.until_done(2, limit=30) < 10
        assert origin.gossiper.links == before
