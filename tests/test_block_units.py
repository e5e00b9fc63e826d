"""Block units and corpus shards on a volunteer's disk: served, found again, and gone in time."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from block_support import OPERATOR, block_run, corpus_shards, shared_corpus, unit_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.coordinator.corpus_files import open_corpus
from barnraise.node import corpus as node_corpus
from barnraise.node.actions import unit_of
from barnraise.node.link import Run, open_lease
from barnraise.node.pending import PendingWork
from barnraise.node.train import needed_bytes
from barnraise.node.units import GRACE_MS, Units, file_entry
from barnraise.node.weights import Source, SwarmFetcher
from barnraise.protocol import wire
from barnraise.protocol.corpus import shard_bytes
from barnraise.protocol.envelope import content_id, sign
from barnraise.protocol.errors import MalformedError, PeerError, SignatureError
from barnraise.protocol.identity import Identity
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import MAX_SHARD, SHARD_PROTOCOL, RolloutLease, Signed
from barnraise.protocol.pretrain import BlockLease, BlockSubmission
from barnraise.protocol.shards import BadShardError, ShardClient, serve_shards
from barnraise.protocol.spec import RunSpec
from barnraise.protocol.store import DiskStore

ME = Identity.from_private_bytes(b"m" * 32)
RUN_ID = b"r" * 32


def lease(number: int = 1, **changes: object) -> BlockLease:
    made = BlockLease(
        run_id=RUN_ID,
        lease_id=number.to_bytes(16, "big"),
        unit_id=number,
        node=ME.public_key,
        policy_version=0,
        block=1,
        slot=0,
        issued_at=0,
        timeout_at=1_000,
        deadline_at=2_000,
    )
    return msgspec.structs.replace(made, **changes)


def finished(units: Units, terms: BlockLease) -> tuple[Signed, BlockSubmission]:
    """A unit's files, large enough for several shards, and its signed submission."""
    folder = units.begin(sign(terms, OPERATOR), terms.lease_id)
    (folder / "shards").mkdir()
    sizes = {"state-0001.safetensors": MAX_SHARD + 10, "delta.safetensors": 500}
    for name, size in sizes.items():
        (folder / name).write_bytes(random.Random(terms.unit_id).randbytes(size))
    submission = BlockSubmission(
        run_id=RUN_ID,
        lease_id=terms.lease_id,
        policy_version=0,
        engine="test",
        train_ms=1,
        losses=(1.5,),
        states=(file_entry(folder / "state-0001.safetensors"),),
        delta=file_entry(folder / "delta.safetensors"),
    )
    signed = sign(submission, ME)
    units.finish(terms, signed, submission)
    return signed, submission


def opened(tmp_path: Path) -> tuple[Units, DiskStore]:
    store = DiskStore(tmp_path / "store")
    return Units(tmp_path / "run", store, OPERATOR.public_key, ME.public_key), store


def digests(submission: BlockSubmission) -> list[bytes]:
    return [*submission.states[0].shards, *submission.delta.shards]


def test_a_finished_units_files_are_served_and_again_after_a_restart(tmp_path: Path) -> None:
    units, _ = opened(tmp_path)
    signed, submission = finished(units, lease())
    assert submission.states[0].size == MAX_SHARD + 10
    assert len(submission.states[0].shards) == 2
    again, store = opened(tmp_path)
    found = [store.get(digest) for digest in digests(submission)]
    assert all(found)
    assert b"".join(found[:2]) == (again.folder(lease().lease_id) / "state-0001.safetensors").read_bytes()  # type: ignore[arg-type]
    assert again.kept[lease().lease_id].submission_id == content_id(signed)
    assert store.used_bytes == 0, "they lie on the disk once"
    assert not (again.folder(lease().lease_id) / "shards").exists()
    assert again.used_bytes(besides=b"") == again.used_bytes(besides=bytes(16)) == MAX_SHARD + 510
    assert again.used_bytes(besides=lease().lease_id) == 0


def test_a_dropped_unit_is_served_no_more_and_leaves_nothing(tmp_path: Path) -> None:
    units, store = opened(tmp_path)
    _, gone = finished(units, lease(1))
    _, stays = finished(units, lease(2))
    units.drop(lease(1).lease_id)
    units.drop(lease(9).lease_id)
    assert [store.get(digest) for digest in digests(gone)] == [None] * 3
    assert all(store.get(digest) for digest in digests(stays))
    assert units.dropped_bytes() == MAX_SHARD + 510
    units.empty()
    assert [path.name for path in (tmp_path / "run" / "units").iterdir()] == [lease(2).lease_id.hex()]


def test_units_that_share_a_shard_do_not_take_it_from_each_other(tmp_path: Path) -> None:
    units, store = opened(tmp_path)
    _, first = finished(units, lease(1, unit_id=7))
    _, second = finished(units, lease(2, unit_id=7))
    assert digests(first) == digests(second)
    units.drop(lease(1).lease_id)
    assert all(store.get(digest) for digest in digests(second))


def test_units_are_kept_for_the_verdict_but_not_for_ever(tmp_path: Path) -> None:
    units, _ = opened(tmp_path)
    for number in (1, 2, 3, 4):
        finished(units, lease(number))
    units.begin(sign(lease(5), OPERATOR), lease(5).lease_id)
    units.begin(sign(lease(6), OPERATOR), lease(6).lease_id)
    at_work, pending, judged = lease(5).lease_id, lease(1).lease_id, lease(2).lease_id
    late = 2_000 + GRACE_MS + 10**6

    def left() -> list[int]:
        return sorted(int(folder.name, 16) for folder in units._folders())

    units.judged({judged: [True]})
    units.tidy({at_work, pending}, None)
    assert left() == [1, 3, 4, 5], "nobody works at 6 any more, 2 has its verdict"
    units.tidy({at_work, pending}, 2_000 + GRACE_MS)
    assert left() == [1, 3, 4, 5]
    units.tidy({at_work, pending}, late)
    assert left() == [1, 5]


def test_a_rejected_unit_is_kept_for_an_appeal_and_is_the_first_to_go(tmp_path: Path) -> None:
    units, store = opened(tmp_path)
    submissions = {number: finished(units, lease(number))[1] for number in (1, 2, 3, 4)}
    leases = {number: lease(number).lease_id for number in submissions}
    units.judged({leases[1]: [False], leases[2]: [False, False], leases[3]: [False, True]})
    assert sorted(units.kept) == [leases[1], leases[4]]
    assert units.rejected == {leases[1]}
    assert all(store.get(digest) for digest in digests(submissions[1]))
    assert units.drop_rejected()
    assert not units.drop_rejected()
    assert sorted(units.kept) == [leases[4]]


@pytest.mark.parametrize("damage", ["lease", "submission", "stranger", "name"])
def test_what_is_no_unit_of_ours_is_not_served(tmp_path: Path, damage: str) -> None:
    units, _ = opened(tmp_path)
    _, submission = finished(units, lease())
    folder = units.folder(lease().lease_id)
    if damage == "lease":
        (folder / "lease.bin").write_bytes(b"\x80")
    elif damage == "submission":
        (folder / "submission.bin").write_bytes(b"nothing")
    elif damage == "stranger":
        (folder / "submission.bin").write_bytes(wire.encode(sign(submission, Identity.generate())))
    else:
        folder.rename(folder.with_name("f" * 32))
    again, store = opened(tmp_path)
    assert not again.kept
    assert not store.has(submission.delta.shards[0])
    again.tidy((), None)
    again.empty()
    assert not list((tmp_path / "run" / "units").iterdir())


def test_a_submission_of_a_block_waits_on_the_disk_like_any_other(tmp_path: Path) -> None:
    units, _ = opened(tmp_path)
    work = PendingWork(tmp_path / "pending", RUN_ID, ME.public_key)
    work.keep_lease(sign(lease(), OPERATOR))
    assert work.left_lease() == lease().lease_id
    signed, _ = finished(units, lease())
    number = work.add(signed, lease().lease_id)
    assert work.left_lease() is None
    again = PendingWork(tmp_path / "pending", RUN_ID, ME.public_key)
    assert again.ids == (number,)
    assert again.lease_of(number) == lease().lease_id
    assert again.get(number) == signed


# --- leases


def run_of(tmp_path: Path) -> Run:
    spec = block_run(tmp_path / "v0", shared_corpus())
    return Run(msgspec.structs.replace(spec, operator=OPERATOR.public_key), RUN_ID)


def rollout_lease(version: int) -> RolloutLease:
    return RolloutLease(
        run_id=RUN_ID,
        lease_id=bytes(16),
        unit_id=1,
        node=ME.public_key,
        policy_version=version,
        prompts=2,
        group_size=4,
        issued_at=0,
        timeout_at=1_000,
        deadline_at=2_000,
    )


def test_the_stage_decides_what_a_lease_may_be(tmp_path: Path) -> None:
    run, me = run_of(tmp_path), ME.public_key
    assert open_lease(sign(lease(), OPERATOR), run, me, 0, 10) == lease()
    assert open_lease(sign(rollout_lease(3), OPERATOR), run, me, 3, 10) == rollout_lease(3)
    with pytest.raises(SignatureError):
        open_lease(sign(rollout_lease(0), OPERATOR), run, me, 0, 10)
    with pytest.raises(SignatureError):
        open_lease(sign(lease(policy_version=3), OPERATOR), run, me, 3, 10)
    with pytest.raises(MalformedError, match="block 2"):
        open_lease(sign(lease(block=2), OPERATOR), run, me, 0, 10)
    with pytest.raises(MalformedError, match="expired"):
        open_lease(sign(lease(), OPERATOR), run, me, 0, 3_000)
    unit = unit_of(lease(), run.spec.pretrain, 5.0)
    assert (unit.is_block, unit.block, unit.steps) == (True, 1, 6)
    assert not unit_of(rollout_lease(3), run.spec.pretrain, 5.0).is_block


def test_the_room_that_a_unit_needs_follows_from_its_block(tmp_path: Path) -> None:
    spec = run_of(tmp_path).spec.pretrain
    assert spec is not None
    exact = needed_bytes(spec, 10**9)
    assert 10.0e9 < exact < 10.001e9  # three states of three, and a difference
    assert needed_bytes(msgspec.structs.replace(spec, delta="bfloat16"), 10**9) < exact


# --- the corpus


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 3), st.integers(0, 3), st.integers(1, 40), st.integers(1, 5), st.sampled_from([9, 16, 64])
)
def test_the_shards_of_a_unit_are_those_that_its_sequences_lie_in(
    version: int, slot: int, steps: int, batch: int, length: int
) -> None:
    from spec_support import pretrain_spec

    spec = pretrain_spec(steps=steps, sequence=length, contributors=4, rounds=4)
    spec = msgspec.structs.replace(spec, recipe=msgspec.structs.replace(spec.recipe, batch=batch))
    corpus = open_corpus(shared_corpus())
    terms = lease(policy_version=version, slot=slot)
    found = node_corpus.unit_shards(spec, corpus, terms)
    assert set(found) == unit_shards(spec, corpus, RUN_ID, version, 1, slot)
    assert len(set(found)) == len(found)


def spec_of(tmp_path: Path) -> RunSpec:
    return block_run(tmp_path / "v0", shared_corpus())


async def test_description_and_shards_come_from_whoever_has_them_and_stay(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    spec = spec_of(tmp_path).pretrain
    assert spec is not None
    everything = corpus_shards(shared_corpus())
    swarm = MemorySwarm(latency_s=0.01)
    store, theirs = DiskStore(tmp_path / "mine"), DiskStore(tmp_path / "theirs")
    for digest, data in everything.items():
        theirs.put(digest, data)
    async with swarm.network("me") as me, swarm.network("empty") as empty, swarm.network("origin") as origin:
        empty.set_handler(SHARD_PROTOCOL, serve_shards(DiskStore(tmp_path / "none")))
        origin.set_handler(SHARD_PROTOCOL, serve_shards(theirs))
        sources = [Source("empty", empty.addresses), Source("origin", origin.addresses, origin=True)]
        with pytest.raises(PeerError, match="empty: does not have it"):
            await node_corpus.fetch_description(me, store, spec.corpus, sources[:1])
        data = await node_corpus.fetch_description(me, store, spec.corpus, sources)
        assert sha256(data).digest() == spec.corpus
        assert data == await node_corpus.fetch_description(me, store, spec.corpus, [])
        corpus = open_corpus(shared_corpus())
        wanted = node_corpus.unit_shards(spec, corpus, lease())
        folder = tmp_path / "unit" / "shards"
        missing = node_corpus.missing_shards(store, folder, wanted, shard_bytes(corpus))
        assert set(missing) == set(wanted)
        got: list[int] = []
        fetcher = SwarmFetcher(me, store, lambda version: sources, rng=random.Random(1))
        await fetcher.fetch_shards("the corpus", missing, got.append)
        assert sum(got) == sum(missing.values())
        node_corpus.lay_out(store, folder, wanted)
        store = DiskStore(tmp_path / "mine")  # a restart
        node_corpus.spare_corpus(store, spec.corpus)
        store.sweep()
        assert all(store.get(digest) == everything[digest] for digest in wanted)
        for digest in wanted:
            store.delete(digest)
        assert not node_corpus.missing_shards(store, folder, wanted, shard_bytes(corpus)), "the unit has them"
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            digest.hex(): everything[digest] for digest in wanted
        }
        nobody = SwarmFetcher(me, store, lambda version: [])
        with pytest.raises(PeerError, match="the corpus: no source is left"):
            await nobody.fetch_shards("the corpus", missing, got.append)


async def test_a_shard_of_unknown_size_is_bounded_before_it_is_read(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    swarm, theirs = MemorySwarm(), DiskStore(tmp_path / "theirs")
    data = random.Random(0).randbytes(5_000)
    digest = sha256(data).digest()
    theirs.put(digest, data)
    async with swarm.network("me") as me, swarm.network("them") as them:
        them.set_handler(SHARD_PROTOCOL, serve_shards(theirs))
        client = ShardClient(me, "them", them.addresses)
        assert await client.fetch(digest, 6_000, exact=False) == data
        with pytest.raises(BadShardError, match="5000 bytes for a shard of 4000"):
            await client.fetch(digest, 4_000, exact=False)
        with pytest.raises(BadShardError):
            await client.fetch(digest, 6_000)


def test_what_is_spared_goes_last_and_only_for_room(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3_000)
    pieces = [random.Random(n).randbytes(1_000) for n in range(5)]
    names = [sha256(piece).digest() for piece in pieces]
    for piece, name in zip(pieces[:3], names, strict=False):
        store.put(name, piece)
    store.spare(names[:2])
    store.spare(names[:1])  # the least recently used now: 2, then 1, then 0
    store.put(names[3], pieces[3])
    assert [store.has(name) for name in names[:4]] == [True, True, False, True]
    store.sweep()
    assert [store.has(name) for name in names[:4]] == [True, True, False, False]
    store.ensure_room(2_000)
    assert [store.has(name) for name in names[:2]] == [True, False]


def test_without_hard_links_the_shards_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError("no links on this file system")

    store = DiskStore(tmp_path / "store")
    data = b"x" * 100
    digest = sha256(data).digest()
    store.put(digest, data)
    monkeypatch.setattr("os.link", refuse)
    node_corpus.lay_out(store, tmp_path / "unit", [digest])
    assert (tmp_path / "unit" / digest.hex()).read_bytes() == data
