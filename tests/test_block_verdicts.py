"""Who is paid for a unit of pretraining, who is not, and how it is made good."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from block_stage_support import lie_unit, make_pretrain_run, setup_of
from block_swarm_support import (
    Clock,
    appealing,
    events_of,
    folded,
    running,
    stage,
    until,
    volunteer,
)

from barnraise.coordinator.block_workers import BlockResult, BlockVerifyJob
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.verifier import LocalVerifier
from barnraise.protocol.errors import ChildError, RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import (
    Acknowledged,
)


@pytest.mark.parametrize(
    ("lie", "check"),
    [
        ("nothing done", "block-replay"),
        ("scaled difference", "block-delta"),
        ("backdoor in the states", "block-bound"),
        ("not a number", "block-format"),
    ],
)
async def test_a_liar_is_rejected_paid_nothing_and_its_place_is_open_again(
    tmp_path: Path, autojump_clock: Clock, lie: str, check: str
) -> None:
    async with stage(tmp_path, 2, {"blocks": 1, "scaffold_layers": 2}) as (coordinator, (ann, bob)):
        ann.make = lambda setup, lease: lie_unit(setup, lease, lie)
        lease = await ann.one()
        verdict = await ann.verdict()
        assert (verdict.accepted, verdict.check) == (False, check)
        assert ann.receipts()[0].credit == 0
        shown = next(node for node in coordinator.state()["nodes"] if node["rejected"])
        assert shown["strikes"] == 1
        assert not (coordinator.run.path / "units" / ann.receipts()[0].submission_id.hex()).exists()
        again = await bob.one()
        assert again.slot == lease.slot
        assert (await bob.verdict()).accepted


async def test_a_quorum_is_enough_when_time_is_up_and_late_work_is_paid(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    pretrain = {"rounds": 2, "contributors": 2, "quorum": 1, "round_s": 30.0}
    async with stage(tmp_path, 3, pretrain) as (coordinator, (ann, bob, eve)):
        slow = await eve.lease()
        for person in (ann, bob):
            await person.one()
            assert (await person.verdict()).accepted
        filled = coordinator.state()["pretrain"]["blocks"]
        missing = [item["block"] for item in filled if not item["accepted"]]
        if missing:
            await ann.one()
        assert coordinator.state()["policy_version"] == 0
        await until(lambda: coordinator.state()["policy_version"] == 1)
        await eve.submit(eve.train(slow))
        assert (await eve.verdict()).accepted
        assert eve.receipts()[0].credit > 0
        judged = events_of(coordinator.run.path, "RoundFormed")
        assert eve.receipts()[0].submission_id not in judged[0].submissions


class BrokenVerifier(LocalVerifier):
    """Dies of everything."""

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        await trio.sleep(1)
        raise ChildError("the verifier died: out of memory")


async def test_our_own_broken_verifier_costs_a_node_nothing(
    tmp_path: Path, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm = MemorySwarm(latency_s=0.01)
    with caplog.at_level(logging.CRITICAL):
        async with running(swarm, folder, verifier=BrokenVerifier(setup_of(folder))) as coordinator:
            await until(lambda: coordinator.state()["policy_version"] == 0)
            async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
                await ann.one()
                await until(lambda: "out of memory" in coordinator.state()["reason"])
                verdict = await ann.verdict()
                assert verdict.check == "unverifiable"
                assert coordinator.state()["nodes"][0]["strikes"] == 0


class Careless(LocalVerifier):
    """Rejects what it should accept, for a while: a broken device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.broken = True

    async def verify_block(self, job: BlockVerifyJob) -> BlockResult:
        result = await super().verify_block(job)
        if not self.broken:
            return result
        verdict = msgspec.structs.replace(result.verdict, accepted=False, check="block-replay")
        return msgspec.structs.replace(result, verdict=verdict, tokens=0)


async def test_a_rejected_unit_is_judged_again_on_appeal_and_everything_is_made_good(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_pretrain_run(tmp_path, rounds=1, contributors=1)
    swarm, verifier = MemorySwarm(latency_s=0.01), Careless(setup_of(folder))
    async with running(swarm, folder, verifier=verifier) as coordinator:
        await until(lambda: coordinator.state()["policy_version"] == 0)
        async with volunteer(swarm, coordinator, tmp_path, b"A") as ann:
            await ann.one()
            assert (await ann.verdict()).check == "block-replay"
            assert folded(folder).nodes[ann.scripted.identity.public_key].offences == 1
            verifier.broken = False
            await ann.scripted.ask(appealing(ann), Acknowledged)
            with pytest.raises(RefusedError) as refused:
                await ann.scripted.ask(appealing(ann), Acknowledged)
            assert refused.value.code == "appealed-before"
            await until(lambda: len(ann.receipts()) == 2)
            first, second = ann.receipts()
            assert second.submission_id == first.submission_id
            assert second.verdict.accepted
            assert second.credit > 0 == first.credit
            state = folded(folder)
            node = state.nodes[ann.scripted.identity.public_key]
            assert (node.offences, node.strikes, node.accepted, node.rejected) == (0, 0, 1, 0)
            assert node.credit == second.credit
            assert state.blocks.work[first.submission_id].status == "accepted"
            assert (folder / "units" / first.submission_id.hex() / "delta.safetensors").is_file()
    target = tmp_path / "ledger.bin"
    journal = Journal(folder / "state.sqlite")
    export_ledger(journal, read_spec(folder)[1], 2, Identity.from_private_bytes(b"o" * 32), 9_000_000, target)
    journal.close()
    report = verify_ledger_file(target)
    assert report.ok, report.problems
    assert report.accepted == 1


async def test_an_appeal_of_a_lie_looks_at_the_same_segments_again(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    """A second draw would be a second chance to hide."""
    async with stage(tmp_path) as (coordinator, (ann,)):
        ann.make = lambda setup, lease: lie_unit(setup, lease, "nothing done")
        await ann.one()
        first = await ann.verdict()
        await ann.scripted.ask(appealing(ann), Acknowledged)
        await until(lambda: len(ann.receipts()) == 2)
        second = ann.receipts()[1].verdict
        assert (second.accepted, second.check, second.position) == (False, first.check, first.position)
        assert folded(coordinator.run.path).nodes[ann.scripted.identity.public_key].offences == 1
        with pytest.raises(RefusedError) as refused:
            await ann.scripted.ask(appealing(ann), Acknowledged)
        assert refused.value.code == "appealed-before"


async def test_five_lies_are_a_ban_and_being_away_is_none(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (coordinator, (ann,)):
        ann.make = lambda setup, lease: lie_unit(setup, lease, "scaled difference")
        for number in range(5):
            await ann.one()
            await until(lambda number=number: len(ann.receipts()) > number)  # type: ignore[misc]
        banned = events_of(coordinator.run.path, "NodeBanned")
        assert [event.reason for event in banned] == ["5 submissions failed, the last by check block-delta"]
        assert "no work until" in (await ann.scripted.lease_reply(0)).reason
