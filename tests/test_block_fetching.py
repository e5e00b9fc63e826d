"""A unit's files come from its maker: what happens when they are late, other, corrupt or never come."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from block_stage_support import entry_of, make_pretrain_run
from block_swarm_support import (
    Clock,
    folded,
    running,
    stage,
    until,
    volunteer,
)

from barnraise.coordinator import block_belt
from barnraise.coordinator.block_files import fetch_unit, state_name
from barnraise.coordinator.core import in_place
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import (
    MAX_SHARD,
    SHARD_PROTOCOL,
)
from barnraise.protocol.shards import ShardClient, serve_shards
from barnraise.protocol.store import DiskStore


async def test_whoever_does_not_serve_its_files_is_rejected_after_the_deadline(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path, 2) as (coordinator, (ann, bob)):
        ann.serves = False
        lease = await ann.one()
        await bob.one()
        assert (await bob.verdict()).accepted  # nobody waits for the one who withholds
        before = trio.current_time()
        verdict = await ann.verdict()
        assert (verdict.accepted, verdict.check) == (False, "block-withheld")
        assert verdict.value == 0 < verdict.threshold
        waited = (lease.deadline_at - lease.issued_at) / 1000
        assert trio.current_time() - before > waited
        assert coordinator.state()["rejections"] == {"block-withheld": 1}


async def test_a_node_that_goes_offline_and_returns_before_the_deadline_is_paid(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm = MemorySwarm(latency_s=0.01)
    async with running(swarm, folder) as coordinator:
        await until(lambda: coordinator.state()["policy_version"] == 0)
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            ann.serves = False
            lease = await ann.one()
        await trio.sleep(60)
        assert coordinator.state()["queue"] == 1
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            ann.train(lease)  # the same bits again, served now
            assert (await ann.verdict()).accepted


async def test_a_restart_while_files_are_missing_goes_on_from_the_journal(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm = MemorySwarm(latency_s=0.01)
    async with running(swarm, folder) as coordinator:
        await until(lambda: coordinator.state()["policy_version"] == 0)
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            ann.serves = False
            lease = await ann.one()
    await trio.sleep(10_000)  # far beyond the deadline: our own absence is nobody's fault
    async with running(swarm, folder, seed=1) as coordinator:
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            await trio.sleep(30)
            ann.train(lease)
            assert (await ann.verdict()).accepted


async def test_a_file_with_another_hash_than_was_signed_is_refused(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, (ann,)):
        lease = await ann.lease()
        work = ann.train(lease)
        wrong = msgspec.structs.replace(work, delta=msgspec.structs.replace(work.delta, sha256=bytes(32)))
        await ann.submit(wrong)
        verdict = await ann.verdict()
        assert verdict.check == "block-files"
        assert "delta" in verdict.position


class Corrupt:
    """Serves bytes that are not what was asked for."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store

    def size(self, digest: bytes) -> int | None:
        return self.store.size(digest)

    def get(self, digest: bytes) -> bytes | None:
        data = self.store.get(digest)
        return None if data is None else data[:-1] + bytes([data[-1] ^ 1])


async def test_corrupt_shards_are_asked_for_a_few_times_and_then_refused(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, (ann,)):
        ann.network.set_handler(SHARD_PROTOCOL, serve_shards(Corrupt(ann.store)))
        await ann.one()
        assert (await ann.verdict()).check == "block-files"


class Choosy:
    """Serves some of what it has."""

    def __init__(self, store: DiskStore, shown: set[bytes]) -> None:
        self.store, self.shown = store, shown

    def size(self, digest: bytes) -> int | None:
        return self.store.size(digest) if digest in self.shown else None

    def get(self, digest: bytes) -> bytes | None:
        return self.store.get(digest) if digest in self.shown else None


async def test_whoever_hides_the_drawn_segments_has_failed_and_whoever_was_just_away_has_not(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    """Else a cheat would go away each time that the wrong segment is asked for, and come back unharmed."""
    async with stage(tmp_path, 2) as (coordinator, (ann, bob)):
        lease = await ann.lease()
        work = ann.train(lease)
        shown = {*work.delta.shards, *work.states[-1].shards}
        ann.network.set_handler(SHARD_PROTOCOL, serve_shards(Choosy(ann.store, shown)))
        await ann.submit(work)
        bob.serves = False
        await bob.one()
        hidden, away = await ann.verdict(), await bob.verdict()
        assert (hidden.check, away.check) == ("block-hidden", "block-withheld")
        assert hidden.value == work.delta.size + work.states[-1].size
        nodes = folded(coordinator.run.path).nodes
        assert nodes[ann.scripted.identity.public_key].offences == 1
        assert nodes[bob.scripted.identity.public_key].offences == 0


async def test_a_place_is_not_kept_for_files_that_do_not_come(tmp_path: Path, autojump_clock: Clock) -> None:
    """A submission costs a liar nothing: it must not stop a round for longer than a lease can."""
    async with stage(tmp_path, 2, {"blocks": 1, "scaffold_layers": 2}) as (_, (ann, bob)):
        ann.serves = False
        lease = await ann.one()
        again = await bob.one()
        assert again.slot == lease.slot
        assert lease.timeout_at <= again.issued_at < lease.deadline_at
        assert (await bob.verdict()).accepted


async def test_units_without_room_wait_for_it(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_belt.BlockBelt, "most_bytes", 1)
    async with stage(tmp_path, 2) as (_, (ann, bob)):
        ann.serves = False
        await ann.one()
        await bob.one()
        assert (await bob.verdict()).accepted  # who does not serve makes room


async def test_half_a_file_is_gone_on_with(tmp_path: Path, autojump_clock: Clock) -> None:
    swarm = MemorySwarm(latency_s=0.01)
    data = bytes(range(256)) * 40_000  # 2.5 shards
    path = tmp_path / "state"
    path.write_bytes(data)
    entry = entry_of(path)
    store = DiskStore(tmp_path / "store")
    store.adopt(
        path,
        [(d, n * MAX_SHARD, min(MAX_SHARD, entry.size - n * MAX_SHARD)) for n, d in enumerate(entry.shards)],
    )
    folder = tmp_path / "unit"
    folder.mkdir()
    (folder / f"{state_name(0)}.part").write_bytes(data[: MAX_SHARD + 100])
    async with swarm.network("server") as server, swarm.network("client") as client:
        server.set_handler(SHARD_PROTOCOL, serve_shards(store))
        await client.connect(server.addresses[0])
        asked = ShardClient(client, "server")
        with pytest.raises(TimeoutError):
            await fetch_unit(asked, {state_name(0): entry}, folder, in_place, 0.0)
        await fetch_unit(asked, {state_name(0): entry}, folder, in_place, 1e9)
        assert asked.received < entry.size - MAX_SHARD + 1000
        await asked.close()
    assert (folder / state_name(0)).read_bytes() == data
