"""Fetching a version from a swarm, on virtual time; and once over real libp2p."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import spec_support
import trio

from barnraise.node.versions import FRESH_S, Versions
from barnraise.node.weights import Source, SwarmFetcher
from barnraise.protocol import memory_pipe
from barnraise.protocol import store as store_module
from barnraise.protocol.bandwidth import Pacer
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import PeerError, SignatureError, StorageError
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import build_manifest, manifest_bytes
from barnraise.protocol.memory_network import MemoryNetwork, MemorySwarm
from barnraise.protocol.messages import SHARD_PROTOCOL, Manifest, ShardReply, ShardRequest, Signed
from barnraise.protocol.network import Network, Stream
from barnraise.protocol.paced_network import PacedNetwork
from barnraise.protocol.shards import serve_shards
from barnraise.protocol.store import DiskStore
from barnraise.protocol.version_folder import folder_matches
from barnraise.protocol.wire import MessageReader, frame

OPERATOR = Identity.generate()
RUN = b"r" * 32
CONFIG = b'{"hidden_size": 64}'
KIB = 1024

SPEC = spec_support.run_spec(
    operator=OPERATOR.public_key,
    model__parameters=10_000_000,
    model__assets={"config.json": sha256(CONFIG).digest()},
)


def publish(
    store: DiskStore, folder: Path, version: int = 1, size: int = 640 * KIB, shard: int = 16 * KIB
) -> Signed:
    """A version of random weights, cut into the store; its manifest signed by the operator."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "model.safetensors").write_bytes(random.Random(version).randbytes(size))
    files = {name: folder / name for name in ("config.json", "model.safetensors")}
    return sign(build_manifest(RUN, version, files, shard, 0, store.put), OPERATOR)


def manifest_of(signed: Signed) -> Manifest:
    return msgspec.msgpack.decode(signed.payload, type=Manifest)


class Party:
    """One host with its store and versions, serving shards and able to fetch."""

    def __init__(self, network: Network, folder: Path, cap: int | None = None) -> None:
        down = Pacer(cap)
        network = PacedNetwork(network, Pacer(), down)
        self.network = network
        self.folder = folder
        self.store = DiskStore(folder / "store")
        self.versions = Versions(folder / "versions", self.store, SPEC, RUN)
        self.uploaded = 0
        self.sources: list[Source] = []
        self.banned: list[tuple[str, str]] = []
        network.set_handler(SHARD_PROTOCOL, serve_shards(self.store, sent=self._sent))
        self.fetcher = SwarmFetcher(
            network,
            self.store,
            lambda version: self.sources,
            report=lambda peer_id, reason: self.banned.append((peer_id, reason)),
            down=down,
            rng=random.Random(network.peer_id),
        )

    def _sent(self, peer_id: str, size: int) -> None:
        self.uploaded += size

    def source(self, *, origin: bool = False, complete: bool = True) -> Source:
        return Source(self.network.peer_id, self.network.addresses, origin=origin, complete=complete)

    def knows(self, *sources: Source) -> None:
        self.sources = list(sources)

    async def ensure(self, signed: Signed, progress: Callable[[int, int], None] = lambda a, b: None) -> Path:
        return await self.versions.ensure(signed, self.fetcher, progress)


class Swarm:
    """An in-memory swarm with a coordinator that has published version 1."""

    def __init__(self, space: MemorySwarm, folder: Path, stack: AsyncExitStack) -> None:
        self.space = space
        self.folder = folder
        self.stack = stack

    async def party(self, name: str, bandwidth: float | None = None, cap: int | None = None) -> Party:
        network: MemoryNetwork = await self.stack.enter_async_context(
            self.space.network(name, bandwidth=bandwidth)
        )
        return Party(network, self.folder / name, cap)


@asynccontextmanager
async def swarm(folder: Path, latency_s: float = 0.02) -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(MemorySwarm(latency_s=latency_s), folder, stack)


async def test_a_version_comes_from_the_coordinator_when_nobody_else_has_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin"), await s.party("node")
        signed = publish(origin.store, tmp_path / "made")
        node.knows(origin.source(origin=True))
        seen: list[tuple[int, int]] = []
        path = await node.ensure(signed, lambda done, total: seen.append((done, total)))
        assert path.name == "v000001"
        assert folder_matches(manifest_of(signed), path)
        total = manifest_bytes(manifest_of(signed))
        assert seen[0] == (0, total)
        assert seen[-1] == (total, total)
        assert seen == sorted(seen)
        assert origin.uploaded == total
        assert node.store.used_bytes == 0  # the version folder alone holds the bytes
        assert node.versions.is_ready(1)


async def test_peers_serve_each_other_and_spare_the_coordinator(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin = await s.party("origin")
        signed = publish(origin.store, tmp_path / "made")
        size = manifest_bytes(manifest_of(signed))
        nodes = [await s.party(f"node{number}") for number in range(4)]
        nodes[0].knows(origin.source(origin=True))
        await nodes[0].ensure(signed)
        assert origin.uploaded == size
        for node in nodes[1:]:
            node.knows(origin.source(origin=True), nodes[0].source())
            await node.ensure(signed)
        assert origin.uploaded == size
        assert nodes[0].uploaded == 3 * size


async def test_nodes_that_fetch_together_swap_what_they_have(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin = await s.party("origin", bandwidth=100 * KIB)
        signed = publish(origin.store, tmp_path / "made")
        size = manifest_bytes(manifest_of(signed))
        nodes = [await s.party(f"node{number}") for number in range(4)]
        async with trio.open_nursery() as nursery:
            for node in nodes:
                others = [other.source(complete=False) for other in nodes if other is not node]
                node.knows(origin.source(origin=True), *others)
                nursery.start_soon(node.ensure, signed)
        for node in nodes:
            assert folder_matches(manifest_of(signed), node.versions.path(1))
        assert origin.uploaded < 2.5 * size  # 4 without swapping


async def test_a_slow_peer_is_helped_by_the_coordinator(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, slow, node = (
            await s.party("origin"),
            await s.party("slow", bandwidth=8 * KIB),
            await s.party("node"),
        )
        signed = publish(origin.store, tmp_path / "made")
        slow.knows(origin.source(origin=True))
        publish(slow.store, tmp_path / "made")
        node.knows(origin.source(origin=True), slow.source())
        start = trio.current_time()
        await node.ensure(signed)
        assert trio.current_time() - start < 20  # 80 s from the slow one alone
        assert slow.uploaded > 0


async def test_a_flipped_bit_costs_its_sender_and_not_the_receiver(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, bad, good, node = [await s.party(name) for name in ("origin", "bad", "good", "node")]
        signed = publish(origin.store, tmp_path / "made")
        publish(good.store, tmp_path / "made")

        class Flipping:
            def size(self, digest: bytes) -> int | None:
                return origin.store.size(digest)

            def get(self, digest: bytes) -> bytes | None:
                data = origin.store.get(digest)
                return data and bytes([data[0] ^ 1]) + data[1:]

        bad.network.set_handler(SHARD_PROTOCOL, serve_shards(Flipping()))
        node.knows(origin.source(origin=True), bad.source(), good.source())
        path = await node.ensure(signed)
        assert folder_matches(manifest_of(signed), path)
        assert [peer_id for peer_id, _ in node.banned] == ["bad"]
        assert "corrupt shard" in node.banned[0][1]
        assert origin.uploaded == 0
        # and it is not asked again in this run
        again = publish(good.store, tmp_path / "made2", version=2)
        node.knows(bad.source(), good.source())
        await node.ensure(again)
        assert len(node.banned) == 1


async def test_a_stalling_peer_is_left_after_five_seconds(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R22."""
    async with swarm(tmp_path) as s:
        origin, stuck, node = [await s.party(name) for name in ("origin", "stuck", "node")]
        signed = publish(origin.store, tmp_path / "made")

        async def stall(stream: Stream) -> None:
            await MessageReader(stream, frozenset({ShardRequest})).receive()
            await stream.write(frame(ShardReply(found=True, size=16 * KIB)) + b"z" * 100)
            await trio.sleep_forever()

        stuck.network.set_handler(SHARD_PROTOCOL, stall)
        node.knows(origin.source(origin=True), stuck.source())
        start = trio.current_time()
        await node.ensure(signed)
        assert trio.current_time() - start < 9
        assert not node.banned  # slow is not hostile


async def test_with_no_source_left_the_error_names_each_and_why(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R2, R22."""
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin"), await s.party("node")
        signed = publish(origin.store, tmp_path / "made")
        with pytest.raises(PeerError, match="nobody offers it"):
            await node.ensure(signed)
        node.knows(origin.source(origin=True), Source("ghost", ("/memory/99/p2p/ghost",)))
        s.space.crash("origin")
        with pytest.raises(PeerError, match=r"no source is left for 41 shards .*origin: .*ghost: "):
            await node.ensure(signed)


async def test_a_new_source_that_appears_during_the_fetch_is_used(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, late, node = (
            await s.party("origin", bandwidth=8 * KIB),
            await s.party("late"),
            await s.party("node"),
        )
        signed = publish(origin.store, tmp_path / "made")
        publish(late.store, tmp_path / "made")
        node.knows(origin.source(origin=True))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.ensure, signed)
            await trio.sleep(3)
            node.knows(origin.source(origin=True), late.source())
            await trio.sleep(5)
            assert node.versions.is_ready(1)


async def test_a_fetch_that_was_cut_off_resumes_with_what_is_on_disk(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R23."""
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin", bandwidth=64 * KIB), await s.party("node")
        signed = publish(origin.store, tmp_path / "made")
        size = manifest_bytes(manifest_of(signed))
        node.knows(origin.source(origin=True))
        with trio.move_on_after(6):
            await node.ensure(signed)
        s.space.crash("node")
        kept = node.store.used_bytes
        assert size / 4 < kept < size
        # one of the shards is damaged while the node is down
        victim = next(path for path in (tmp_path / "node" / "store").glob("*/*"))
        lost = victim.stat().st_size
        victim.write_bytes(b"\0" * lost)
        again = await s.party("node")
        again.knows(origin.source(origin=True))
        before = origin.uploaded
        seen: list[int] = []
        path = await again.ensure(signed, lambda done, total: seen.append(done))
        assert folder_matches(manifest_of(signed), path)
        assert seen[0] == kept - lost
        assert origin.uploaded - before <= size - kept + lost + 2 * 16 * KIB


async def test_a_newer_head_abandons_the_older_fetch_and_its_leftovers_go(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin", bandwidth=64 * KIB), await s.party("node")
        first = publish(origin.store, tmp_path / "made")
        second = publish(origin.store, tmp_path / "made2", version=2)
        node.knows(origin.source(origin=True))
        with trio.move_on_after(3):
            await node.ensure(first)
        assert node.store.used_bytes > 0
        await node.ensure(second)
        assert node.versions.on_disk() == [2]
        assert node.store.used_bytes == 0


async def test_only_changed_files_are_fetched_for_the_next_version(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin"), await s.party("node")
        node.knows(origin.source(origin=True))
        await node.ensure(publish(origin.store, tmp_path / "made"))
        before = origin.uploaded
        second = publish(origin.store, tmp_path / "made2", version=2)
        await node.ensure(second)
        assert origin.uploaded - before == manifest_bytes(manifest_of(second)) - len(CONFIG)


async def test_a_file_that_stays_the_same_lies_on_the_disk_once_and_damage_to_it_is_mended(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin"), await s.party("node")
        node.knows(origin.source(origin=True))
        first = await node.ensure(publish(origin.store, tmp_path / "made"))
        signed = publish(origin.store, tmp_path / "made2", version=2)
        second = await node.ensure(signed)
        assert (first / "config.json").samefile(second / "config.json")
        (second / "config.json").write_bytes(b"x" * len(CONFIG))
        await trio.sleep(FRESH_S + 1)
        assert not await node.versions.intact(2)
        await node.ensure(signed)
        assert (second / "config.json").read_bytes() == CONFIG
        assert not node.versions.is_ready(1)  # it shared the damaged file: hashed again before use


async def test_the_newest_three_versions_stay_and_one_in_use_is_never_deleted(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R23."""
    async with swarm(tmp_path) as s:
        origin, node, other = [await s.party(name) for name in ("origin", "node", "other")]
        node.knows(origin.source(origin=True))
        signed = {}
        for version in range(1, 5):
            signed[version] = publish(origin.store, tmp_path / f"made{version}", version)
        await node.ensure(signed[1])
        with node.versions.hold(1) as path:
            for version in (2, 3, 4):
                await node.ensure(signed[version])
            assert node.versions.on_disk() == [1, 2, 3, 4]
            assert folder_matches(manifest_of(signed[1]), path)
        await node.ensure(publish(origin.store, tmp_path / "made5", 5))
        assert node.versions.on_disk() == [3, 4, 5]
        assert sorted(p.name for p in (tmp_path / "node" / "versions").glob("*.manifest")) == [
            "v000003.manifest",
            "v000004.manifest",
            "v000005.manifest",
        ]
        # what is kept is still served
        other.knows(node.source())
        await other.ensure(signed[4])
        with pytest.raises(PeerError):
            await other.ensure(signed[1])


async def test_after_a_restart_a_node_serves_and_uses_what_it_has_once_rehashed(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R23."""
    async with swarm(tmp_path) as s:
        origin, node, other = [await s.party(name) for name in ("origin", "node", "other")]
        signed = publish(origin.store, tmp_path / "made")
        node.knows(origin.source(origin=True))
        await node.ensure(signed)
        s.space.crash("node")
        again = await s.party("node")
        assert not again.versions.is_ready(1)
        await again.ensure(signed)  # knows no source, needs none
        other.knows(again.source())
        await other.ensure(signed)
        assert again.uploaded == manifest_bytes(manifest_of(signed))


async def test_a_version_folder_damaged_on_disk_is_mended_by_fetching_only_that_part(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin"), await s.party("node")
        signed = publish(origin.store, tmp_path / "made")
        node.knows(origin.source(origin=True))
        path = await node.ensure(signed)
        s.space.crash("node")
        with (path / "model.safetensors").open("r+b") as file:
            file.seek(100_000)
            file.write(b"damage")
        again = await s.party("node")
        again.knows(origin.source(origin=True))
        before = origin.uploaded
        assert folder_matches(manifest_of(signed), await again.ensure(signed))
        assert origin.uploaded - before == 16 * KIB


async def test_a_manifest_by_another_key_fetches_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin"), await s.party("node")
        signed = publish(origin.store, tmp_path / "made")
        node.knows(origin.source(origin=True))
        with pytest.raises(SignatureError):
            await node.ensure(sign(manifest_of(signed), Identity.generate()))
        assert origin.uploaded == 0


async def test_a_full_disk_stops_the_fetch_says_so_and_costs_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin"), await s.party("node")
        signed = publish(origin.store, tmp_path / "made")
        node.knows(origin.source(origin=True))
        real, writes = store_module._write, 0

        def fills_up(path: Path, data: bytes, sync: bool) -> tuple[int, int]:
            nonlocal writes
            writes += 1
            if writes > 10:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(path, data, sync)

        with monkeypatch.context() as patch:
            patch.setattr(store_module, "_write", fills_up)
            with pytest.raises(StorageError, match="the disk is full"):
                await node.ensure(signed)
        seen: list[int] = []
        await node.ensure(signed, lambda done, total: seen.append(done))
        assert seen[0] >= 9 * 16 * KIB


async def test_too_little_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """R25."""
    async with swarm(tmp_path) as s:
        origin, node = await s.party("origin"), await s.party("node")
        signed = publish(origin.store, tmp_path / "made")
        node.knows(origin.source(origin=True))
        node.store._free_bytes = lambda folder: 1_000_000
        with pytest.raises(StorageError, match="not enough disk"):
            await node.ensure(signed)
        assert origin.uploaded == 0


@pytest.mark.parametrize("shard", [16 * KIB, 256 * KIB])
async def test_a_download_cap_is_kept_and_used_and_spares_the_coordinator_all_the_same(
    shard: int, tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pipe, "PIECE", 8 * KIB)  # slow lines bring no more at once
    async with swarm(tmp_path) as s:
        origin = await s.party("origin")
        signed = publish(origin.store, tmp_path / "made", size=2048 * KIB, shard=shard)
        peers = [await s.party(f"peer{number}") for number in range(3)]
        for peer in peers:
            publish(peer.store, tmp_path / "made", size=2048 * KIB, shard=shard)
        node = await s.party("node", cap=100 * KIB)
        node.knows(origin.source(origin=True), *(peer.source() for peer in peers))
        begin = trio.current_time()
        await node.ensure(signed)
        assert 20.48 * 0.95 < trio.current_time() - begin < 20.48 * 1.1
        assert origin.uploaded == 0
        assert node.network.bytes_in < 1.05 * 2048 * KIB  # nothing was fetched twice


async def test_a_cap_is_used_up_by_many_slow_peers_together(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pipe, "PIECE", 8 * KIB)  # slow lines bring no more at once
    async with swarm(tmp_path) as s:
        peers = [await s.party(f"peer{number}", bandwidth=30 * KIB) for number in range(8)]
        for peer in peers:
            signed = publish(peer.store, tmp_path / "made", size=4096 * KIB, shard=128 * KIB)
        node = await s.party("node", cap=100 * KIB)
        node.knows(*(peer.source() for peer in peers))
        begin = trio.current_time()
        await node.ensure(signed)
        assert trio.current_time() - begin < 40.96 * 1.4


@pytest.mark.parametrize("seed", range(3))
async def test_twenty_nodes_with_faults_all_get_the_version(
    seed: int, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    rng = random.Random(seed)
    async with swarm(tmp_path) as s:
        origin = await s.party("origin", bandwidth=64 * KIB)
        signed = publish(origin.store, tmp_path / "made", size=320 * KIB)
        nodes = [await s.party(f"node{n}", bandwidth=rng.choice((64, 256, 1024)) * KIB) for n in range(20)]

        async def get(node: Party) -> None:
            while not node.versions.is_ready(1):
                try:
                    await node.ensure(signed)
                except PeerError:
                    await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            for node in nodes:
                others = rng.sample([other for other in nodes if other is not node], 5)
                node.knows(origin.source(origin=True), *(o.source(complete=False) for o in others))
                nursery.start_soon(get, node)
            for _ in range(10):
                await trio.sleep(0.5)
                pair = rng.sample(nodes, 2)
                s.space.partition(pair[0].network.peer_id, pair[1].network.peer_id)
        assert all(folder_matches(manifest_of(signed), node.versions.path(1)) for node in nodes)
        assert not any(node.banned for node in nodes)
        assert origin.uploaded < 10 * manifest_bytes(manifest_of(signed))  # 20 without swapping


async def _over_libp2p(folder: Path, names: Sequence[str], stack: AsyncExitStack) -> list[Party]:
    libp2p = pytest.importorskip("barnraise.protocol.libp2p_network")
    parties = []
    for name in names:
        network = await stack.enter_async_context(
            libp2p.open_libp2p(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"])
        )
        parties.append(Party(network, folder / name))
    return parties


async def test_twenty_megabytes_come_from_two_peers_over_libp2p(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, node = await _over_libp2p(tmp_path, ("first", "second", "node"), stack)
        signed = publish(first.store, tmp_path / "made", size=20 * KIB * KIB, shard=KIB * KIB)
        publish(second.store, tmp_path / "made", size=20 * KIB * KIB, shard=KIB * KIB)
        node.knows(first.source(), second.source())
        with trio.fail_after(60):
            path = await node.ensure(signed)
        assert folder_matches(manifest_of(signed), path)
        assert first.uploaded > 0
        assert second.uploaded > 0
        assert first.uploaded + second.uploaded >= manifest_bytes(manifest_of(signed))
