"""Standing as nodes meet it: spared work under a backlog, bans, appeals; over the wire, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from coordinator_support import (
    Coordinator,
    FakeVerifier,
    ScriptedNode,
    attached,
    coordinating,
    make_run,
    node,
)

from barnraise.coordinator.audit import BAN_AFTER, Pressure
from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.workers import Judged, VerifyJob
from barnraise.protocol.envelope import content_id, open_signed, sign
from barnraise.protocol.errors import RefusedError
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger import LedgerReport
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import (
    Acknowledged,
    AppealRequest,
    NoticePush,
    Receipt,
    ReceiptPush,
    Signed,
    StandingPush,
)

Clock = trio.testing.MockClock


@dataclass
class Wrong(FakeVerifier):
    """Rejects honest work the first time that it sees it, and not the second time."""

    seen: frozenset[bytes] = frozenset()
    fail_always: bytes = b""

    def _judge(self, job: VerifyJob) -> Judged:
        result = super()._judge(job)
        again, self.seen = job.submission_id in self.seen, self.seen | {job.submission_id}
        if again or not result.verdict.accepted:
            return result
        verdict = msgspec.structs.replace(result.verdict, accepted=False, check="toploc", value=99.0)
        return msgspec.structs.replace(result, verdict=verdict, rewards=(), tokens=0)


@asynccontextmanager
async def stage(
    tmp_path: Path, verifier: FakeVerifier | None = None, pressure: Pressure | None = None, **rollout: Any
) -> AsyncIterator[tuple[MemorySwarm, Coordinator, ScriptedNode]]:
    folder = make_run(tmp_path, **rollout)
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder, verifier, pressure=pressure) as coordinator:
        async with node(swarm, coordinator) as ann:
            with trio.fail_after(600):
                while coordinator.state()["policy_version"] < 0:
                    await trio.sleep(0.1)
            yield swarm, coordinator, ann


async def verdict_on(ann: ScriptedNode, work: Signed, after: int = -1) -> tuple[Receipt, Signed]:
    """The receipt for ``work`` whose ledger index is above ``after``."""
    wanted = content_id(work)
    with trio.fail_after(600):
        while True:
            for push in ann.received(ReceiptPush):
                receipt = open_signed(push.receipt, Receipt, ann.operator)
                if receipt.submission_id == wanted and receipt.ledger_index > after:
                    return receipt, push.receipt
            await trio.sleep(0.1)


async def submit(ann: ScriptedNode, coordinator: Coordinator, engine: str = "good") -> Signed:
    ann.version = max(0, coordinator.state()["policy_version"])
    work = ann.signed_work(await ann.lease(), engine)
    await ann.submit(work)
    return work


async def ask(ann: ScriptedNode, receipt: Signed, work: Signed | None = None) -> Acknowledged:
    return await ann.ask(lambda n: AppealRequest(id=n, receipt=receipt, submission=work), Acknowledged)


def verified(tmp_path: Path, coordinator: Coordinator, receipts: tuple[Signed, ...] = ()) -> LedgerReport:
    run = coordinator.run
    journal = Journal(run.path / "state.sqlite")
    lag = run.spec.rollout.max_lag
    export_ledger(journal, run.signed_spec, lag, run.identity, 9_000_000, tmp_path / "ledger.bin")
    journal.close()
    return verify_ledger_file(tmp_path / "ledger.bin", receipts)


async def test_an_overturned_verdict_pays_and_the_ledger_tells_all_of_it(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path, Wrong()) as (_, coordinator, ann):
        work = await submit(ann, coordinator)
        rejected, signed = await verdict_on(ann, work)
        assert not rejected.verdict.accepted
        assert not (await ask(ann, signed)).duplicate
        final, outcome = await verdict_on(ann, work, rejected.ledger_index)
        assert final.verdict.accepted
        assert final.credit > 0
        shown = coordinator.state()["nodes"][0]
        assert (shown["credit"], shown["strikes"], shown["rejected"]) == (final.credit, 0, 0)
        with pytest.raises(RefusedError, match="one appeal"):
            await ask(ann, signed)
        report = verified(tmp_path, coordinator, (signed, outcome))
        assert report.ok, report.problems
        assert report.balances[ann.identity.public_key] == final.credit


async def test_an_upheld_verdict_says_its_numbers_again_and_the_next_appeal_has_to_wait(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        work = await submit(ann, coordinator, "bad")
        rejected, signed = await verdict_on(ann, work)
        await ask(ann, signed, work)
        final, outcome = await verdict_on(ann, work, rejected.ledger_index)
        assert final.verdict == rejected.verdict
        assert (final.verdict.check, final.verdict.threshold, final.verdict.value) == ("toploc", 10.0, 99.0)
        other = await submit(ann, coordinator, "bad")
        _, second = await verdict_on(ann, other)
        with pytest.raises(RefusedError, match="ten minutes"):
            await ask(ann, second)
        await trio.sleep(601)
        await ask(ann, second)
        assert verified(tmp_path, coordinator, (signed, outcome)).ok


async def test_only_ones_own_rejection_can_be_appealed_with_the_very_work(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        bad = await submit(ann, coordinator, "bad")
        rejected, signed = await verdict_on(ann, bad)
        fine = await submit(ann, coordinator)
        _, accepted = await verdict_on(ann, fine)
        with pytest.raises(RefusedError, match="not rejected"):
            await ask(ann, accepted)
        with pytest.raises(RefusedError, match="not what the receipt"):
            await ask(ann, signed, fine)
        forged = sign(msgspec.structs.replace(rejected, ledger_index=1), Identity.generate())
        with pytest.raises(RefusedError, match="never signed"):
            await ask(ann, forged)
        async with node(swarm, coordinator, b"m") as ben:
            with pytest.raises(RefusedError, match="another node"):
                await ask(ben, signed)
        await ask(ann, signed, bad)


async def test_an_appeal_filed_before_a_crash_is_heard_after_it(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm(latency_s=0.01)
    wrong = Wrong()
    async with coordinating(swarm, folder, wrong) as coordinator:
        async with node(swarm, coordinator) as ann:
            await trio.sleep(5)
            work = await submit(ann, coordinator)
            rejected, signed = await verdict_on(ann, work)
            wrong.delay_s = 1e6  # nothing is verified before the crash
            await ask(ann, signed)
    wrong.delay_s = 0.5
    async with coordinating(swarm, folder, wrong) as coordinator:
        async with node(swarm, coordinator) as ann:
            final, _ = await verdict_on_or_ask(ann, work, rejected.ledger_index)
            assert final.verdict.accepted


async def verdict_on_or_ask(ann: ScriptedNode, work: Signed, after: int) -> tuple[Receipt, Signed]:
    from barnraise.protocol.messages import ReceiptsReply, ReceiptsRequest

    with trio.fail_after(600):
        while True:
            reply = await ann.ask(lambda n: ReceiptsRequest(id=n, from_index=after + 1), ReceiptsReply)
            for signed in reply.receipts:
                receipt = open_signed(signed, Receipt, ann.operator)
                if receipt.submission_id == content_id(work):
                    return receipt, signed
            await trio.sleep(0.5)


async def test_a_banned_node_is_told_reason_and_end_at_once_and_when_it_joins_again(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        for _ in range(BAN_AFTER):
            await verdict_on(ann, await submit(ann, coordinator, "bad"))
        await trio.sleep(1)
        told = ann.received(StandingPush)[-1]
        assert told.banned_until > 0
        assert told.reason == "5 submissions failed, the last by check toploc"
        reply = await ann.lease_reply()
        assert reply.lease is None
        assert "UTC: 5 submissions failed" in reply.reason
        assert 0 < reply.retry_after_ms <= 600_000
        async with attached_again(swarm, coordinator, ann.identity) as again:
            await trio.sleep(1)
            (notice,) = [push for push in again.received(NoticePush) if push.code == "banned"]
            assert "5 submissions failed" in notice.message
            assert "barnraise appeal" in notice.message
            await trio.sleep(3700)
            lease = await again.lease()  # it ends by itself
            work = again.signed_work(lease)
            await again.submit(work)
            receipt, _ = await verdict_on(again, work)
            assert receipt.verdict.accepted
        assert verified(tmp_path, coordinator).ok


@asynccontextmanager
async def attached_again(
    swarm: MemorySwarm, coordinator: Coordinator, identity: Identity
) -> AsyncIterator[ScriptedNode]:
    async with attached(swarm._hosts[identity.peer_id], coordinator, identity) as scripted:
        yield scripted


async def test_work_of_a_banned_node_is_refused_and_a_ban_survives_a_restart(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder) as coordinator, node(swarm, coordinator) as ann:
        await trio.sleep(5)
        for _ in range(BAN_AFTER):
            lease = await ann.lease()
            stranger = sign(ann.work(lease), Identity.generate())
            with pytest.raises(RefusedError, match="submit your own work"):
                await ann.submit(stranger)
            held = lease
            await trio.sleep(70)
    async with coordinating(swarm, folder) as coordinator, node(swarm, coordinator) as ann:
        await trio.sleep(1)
        assert coordinator.state()["nodes"][0]["banned"].startswith("5 submissions failed")
        with pytest.raises(RefusedError, match="no work until"):
            await ann.submit(ann.signed_work(held))
        assert ann.received(StandingPush)[-1].banned_until > 0


async def test_under_a_backlog_proven_work_is_spared_and_the_ledger_proves_the_choice(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    slow = FakeVerifier(delay_s=2.0)
    pressure = Pressure(submissions=1, age_ms=1)  # one that waits is a backlog
    async with stage(tmp_path, slow, pressure, versions=12, max_lag=4) as (_, coordinator, ann):
        with trio.fail_after(6_000):
            while not coordinator.state()["complete"]:
                await trio.sleep(0.01)
                with trio.move_on_after(20):
                    await submit(ann, coordinator)
        await trio.sleep(5)
        assert coordinator.state()["spared"] > 5
        receipts = tuple(push.receipt for push in ann.received(ReceiptPush))
        report = verified(tmp_path, coordinator, receipts)
        assert report.ok, report.problems
        assert report.spared == coordinator.state()["spared"]
        assert report.sealed == 0  # every seed is published at the end


async def test_a_cheat_under_a_backlog_loses_what_it_was_spared(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    slow = FakeVerifier(delay_s=2.0)
    pressure = Pressure(submissions=1, age_ms=1)
    async with stage(tmp_path, slow, pressure, versions=60, max_lag=4) as (_, coordinator, ann):
        with trio.fail_after(900):
            while not coordinator.state()["nodes"][0]["unaudited"]:
                await trio.sleep(0.01)
                with trio.move_on_after(20):
                    await submit(ann, coordinator)
            while not coordinator.state()["clawed_back"]:
                await trio.sleep(0.01)
                with trio.move_on_after(20):
                    await submit(ann, coordinator, "bad")
        await trio.sleep(5)
        receipts = [push.receipt for push in ann.received(ReceiptPush)]
        opened = [open_signed(signed, Receipt, ann.operator) for signed in receipts]
        back = [receipt for receipt in opened if receipt.verdict.check == "clawed-back"]
        assert back
        assert all(receipt.credit == 0 and not receipt.verdict.accepted for receipt in back)
        report = verified(tmp_path, coordinator, tuple(receipts))
        assert report.ok, report.problems
        assert report.clawed_back == coordinator.state()["clawed_back"]
        assert report.balances[ann.identity.public_key] == coordinator.state()["nodes"][0]["credit"]
