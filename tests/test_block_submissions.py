"""Block leases and submissions: what is taken, what is refused, and whose place is whose."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from block_stage_support import lease_for, make_pretrain_run, setup_of, train_unit
from block_swarm_support import (
    Clock,
    events_of,
    stage,
)

from barnraise.coordinator.block_shapes import check_files, delta_range, read_shape, state_range
from barnraise.coordinator.block_stage import BlockStages
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.envelope import sign
from barnraise.protocol.errors import RefusedError, RunFolderError
from barnraise.protocol.ledger import credit_for_block
from barnraise.protocol.messages import (
    MAX_SHARD,
    Acknowledged,
    FileEntry,
    LeaseReturn,
)
from barnraise.protocol.pretrain import part_name


async def test_a_unit_is_paid_once_however_often_it_is_sent(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (coordinator, (ann,)):
        lease = await ann.lease()
        assert (await ann.lease()) == lease  # the same process asks again
        submission = ann.train(lease)
        assert not (await ann.submit(submission)).duplicate
        assert (await ann.submit(submission)).duplicate
        verdict = await ann.verdict()
        assert verdict.accepted
        assert verdict.position.startswith("segment ")
        judged = events_of(coordinator.run.path, "BlockJudged")
        assert len(judged) == 1
        assert judged[0].credit == ann.receipts()[0].credit >= credit_for_block(1000, judged[0].tokens)
        assert (await ann.submit(submission)).duplicate
        changed = msgspec.structs.replace(submission, train_ms=6)
        with pytest.raises(RefusedError) as refused:
            await ann.submit(changed)
        assert refused.value.code == "used-lease"


async def test_a_block_lease_can_be_given_back(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path, 2, {"blocks": 1, "scaffold_layers": 2}) as (_, (ann, bob)):
        lease = await ann.lease()

        def giving(number: int) -> LeaseReturn:
            return LeaseReturn(id=number, lease_id=lease.lease_id, reason="leaving")

        with pytest.raises(RefusedError) as refused:
            await bob.scripted.ask(giving, Acknowledged)
        assert refused.value.code == "not-your-lease"
        assert not (await ann.scripted.ask(giving, Acknowledged)).duplicate
        assert (await ann.scripted.ask(giving, Acknowledged)).duplicate
        assert (await bob.lease()).slot == lease.slot
        with pytest.raises(RefusedError) as refused:
            await ann.submit(ann.train(lease))
        assert refused.value.code == "returned-lease"


def _entry(size: int, shards: int | None = None) -> FileEntry:
    count = -(-size // MAX_SHARD) if shards is None else shards
    digests = tuple(sha256(bytes([number])).digest() for number in range(count))
    return FileEntry(path="x", size=size, sha256=bytes(32), shards=digests)


@pytest.mark.parametrize(
    "case", ["few states", "huge", "tiny", "shards", "delta", "losses", "no loss", "odd loss"]
)
async def test_files_that_cannot_be_a_blocks_are_refused_before_anything_is_fetched(
    tmp_path: Path, autojump_clock: Clock, case: str
) -> None:
    async with stage(tmp_path) as (coordinator, (ann,)):
        lease = await ann.lease()
        good = ann.train(lease)
        changes: dict[str, dict[str, Any]] = {
            "few states": {"states": good.states[:2]},
            "huge": {"states": (*good.states[:2], _entry(100 * MAX_SHARD))},
            "tiny": {"states": (*good.states[:2], _entry(100))},
            "shards": {"states": (*good.states[:2], _entry(good.states[2].size, 2))},
            "delta": {"delta": good.states[0]},
            "losses": {"losses": good.losses[:1]},
            "no loss": {"losses": (*good.losses[:2], -1.0)},
            "odd loss": {"losses": (*good.losses[:2], 1e300)},
        }
        with pytest.raises(RefusedError) as refused:
            await ann.submit(msgspec.structs.replace(good, **changes[case]))
        assert refused.value.code == "wrong-shape"
        assert not coordinator.state()["queue"]
        assert not (coordinator.run.path / "units").exists()
        await ann.submit(good)  # the lease is still good
        assert (await ann.verdict()).accepted


async def test_a_forged_signature_is_an_offence_and_another_kind_of_work_is_none(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (coordinator, (ann,)):
        lease = await ann.lease()
        signed = sign(ann.train(lease), ann.scripted.identity)
        with pytest.raises(RefusedError) as refused:
            await ann.scripted.submit(msgspec.structs.replace(signed, signature=bytes(64)))
        assert refused.value.code == "bad-signature"
        assert len(events_of(coordinator.run.path, "OffenceNoted")) == 1
        assert not (await ann.scripted.submit(signed)).duplicate


async def test_a_banned_nodes_place_goes_to_another_at_once(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path, 2, {"blocks": 1, "scaffold_layers": 2}) as (_, (ann, bob)):
        lease = await ann.lease()
        signed = sign(ann.train(lease), ann.scripted.identity)
        for number in range(5):
            with pytest.raises(RefusedError):
                await ann.scripted.submit(msgspec.structs.replace(signed, signature=bytes([number]) * 64))
        assert "no work until" in (await ann.scripted.lease_reply(0)).reason
        with pytest.raises(RefusedError) as refused:
            await ann.scripted.submit(signed)
        assert refused.value.code == "banned"
        assert (await bob.lease()).slot == lease.slot


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_files_of_honest_work_have_the_sizes_that_are_expected(tmp_path: Path, kind: str) -> None:
    folder = make_pretrain_run(tmp_path, delta=kind)
    setup = setup_of(folder)
    BlockStages(setup).initial()
    spec = setup.spec.pretrain
    assert spec is not None
    for block in (0, 1):
        shape = read_shape(checkpoint_folder(folder, 0) / part_name(spec, block + 1))
        lease = lease_for(setup, block=block)
        honest = train_unit(setup, lease).submission(lease, tmp_path / "unit")
        check_files(spec, shape, honest)
        for least, most, size in (
            (*state_range(shape), honest.states[0].size),
            (*delta_range(shape, kind), honest.delta.size),
        ):
            assert least < size <= most < 2 * size + 10_000
    (folder / "bad").write_bytes(b"\xff" * 100)
    with pytest.raises(RunFolderError, match="no readable block"):
        read_shape(folder / "bad")
