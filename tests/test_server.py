"""The coordinator as nodes meet it, on the in-memory network in virtual time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import trio
import trio.testing
from coordinator_support import (
    FakeLearner,
    FakeVerifier,
    coordinating,
    make_run,
    node,
)
from server_support import Clock, audited, head_is, stage, until, volunteer

from barnraise.coordinator.journal import Journal
from barnraise.protocol.envelope import content_id, open_signed
from barnraise.protocol.hello import say_hello
from barnraise.protocol.identity import Identity
from barnraise.protocol.manifest import check_manifest, manifest_shards
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import (
    HELLO_PROTOCOL,
    HeadPush,
    NoticePush,
    Receipt,
    ReceiptPush,
    ReceiptsReply,
    ReceiptsRequest,
)
from barnraise.protocol.shards import ShardClient


async def test_a_run_goes_from_version_0_to_the_last_and_its_ledger_verifies(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm(latency_s=0.02)
    async with coordinating(swarm, folder) as coordinator:
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volunteer, ann, coordinator)
                nursery.start_soon(volunteer, bob, coordinator)
            await trio.sleep(5)
            assert len(ann.received(HeadPush)) >= 3
            assert [notice.code for notice in ann.received(NoticePush)] == ["run-complete"]
            receipts = [
                open_signed(push.receipt, Receipt, ann.operator) for push in ann.received(ReceiptPush)
            ]
            assert receipts
            assert all(receipt.verdict.accepted and receipt.credit == 4 for receipt in receipts)
            refused = await ann.lease_reply(3)
            assert refused.lease is None
            assert "complete" in refused.reason
        state = coordinator.state()
        assert state["state"] == "complete"
        assert [version for version, _ in state["rewards"]] == [1, 2, 3]
        assert [version for version, _ in state["accuracy"]] == [0, 1, 2, 3]
        assert [line.split(" published")[0] for line in coordinator.lines] == [
            f"version {version}" for version in range(4)
        ]
        report = audited(tmp_path, coordinator, folder)
    assert report.ok, report.problems
    assert report.accepted == state["accepted"] >= 6
    assert sum(report.balances.values()) == 4 * state["accepted"]


async def test_a_published_version_can_be_fetched_shard_by_shard(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        head = (await ann.join()).head
        assert head is not None
        manifest = check_manifest(head, coordinator.run.spec, coordinator.run.run_id)
        async with swarm.network(Identity.from_private_bytes(b"f" * 32).peer_id) as network:
            await network.connect(coordinator.address)
            client = ShardClient(network, coordinator.network.peer_id)
            for digest, size in manifest_shards(manifest):
                assert await client.fetch(digest, size) is not None
            await client.close()


async def test_the_version_handshake_is_answered(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (swarm, coordinator, _):
        async with swarm.network("guest") as network:
            peer = await network.connect(coordinator.address)
            reply = await say_hello(await network.open_stream(peer, HELLO_PROTOCOL))
            assert reply.compatible


async def test_old_checkpoints_and_used_payloads_go(tmp_path: Path, autojump_clock: Clock) -> None:
    folder = make_run(tmp_path, versions=6)
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator, node(swarm, coordinator) as ann:
        await volunteer(ann, coordinator)
        await trio.sleep(1)
        kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert kept == ["v000000", "v000004", "v000005", "v000006"]
        resumable = {path.parent.name for path in folder.glob("checkpoints/*/optimizer.safetensors")}
        assert resumable == {"v000005", "v000006"}
        journal = Journal(folder / "state.sqlite")
        assert journal.payload_ids(5) == []
        journal.close()


async def test_a_rejection_names_check_threshold_and_value_and_slows_the_node_down(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        lease = await ann.lease()
        await ann.submit(ann.signed_work(lease, engine="bad"))
        await until(lambda: bool(ann.received(ReceiptPush)))
        receipt = open_signed(ann.received(ReceiptPush)[0].receipt, Receipt, ann.operator)
        assert (receipt.verdict.check, receipt.verdict.threshold, receipt.verdict.value) == (
            "toploc",
            10.0,
            99.0,
        )
        assert receipt.credit == 0
        assert coordinator.state()["rejections"] == {"toploc": 1}
        reply = await ann.lease_reply()
        assert reply.lease is None
        assert reply.retry_after_ms > 1000
        assert (await ann.lease()).unit_id == lease.unit_id


async def test_receipts_wait_for_their_owner(tmp_path: Path, autojump_clock: Clock) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm()
    ann = Identity.from_private_bytes(b"n" * 32)
    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator) as first:
            work = first.signed_work(await first.lease())
            await first.submit(work)
        await until(lambda: coordinator.state()["accepted"] == 1)
        async with node(swarm, coordinator) as again:
            reply = await again.ask(lambda number: ReceiptsRequest(id=number, from_index=0), ReceiptsReply)
            (receipt,) = (open_signed(item, Receipt, again.operator) for item in reply.receipts)
            assert receipt.submission_id == content_id(work)
            assert receipt.node == ann.public_key
            after = receipt.ledger_index + 1
            rest = await again.ask(lambda number: ReceiptsRequest(id=number, from_index=after), ReceiptsReply)
            assert rest.receipts == ()


async def test_a_submission_that_kills_the_verifier_delays_nobody_elses_verdict(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    verifier = FakeVerifier(poison=b"good-poison")
    async with stage(tmp_path, verifier) as (swarm, coordinator, ann):
        async with node(swarm, coordinator, b"b") as bob:
            ours, theirs = await ann.lease(), await bob.lease()
            await ann.submit(ann.signed_work(ours, engine="good-poison"))
            await bob.submit(bob.signed_work(theirs))
            with trio.fail_after(20):
                await until(lambda: coordinator.state()["accepted"] == 1)
            for _ in range(3):  # others go on while it is tried again
                await bob.submit(bob.signed_work(await bob.lease(coordinator.state()["policy_version"])))
            await until(lambda: coordinator.state()["rejections"] == {"unverifiable": 1})
            (mine,) = (row for row in coordinator.state()["nodes"] if row["rejected"])
            assert mine["strikes"] == 0


async def test_a_dead_verifier_loses_no_work(tmp_path: Path, autojump_clock: Clock) -> None:
    verifier = FakeVerifier(fail_times=6)
    async with stage(tmp_path, verifier) as (_, coordinator, ann):
        await ann.submit(ann.signed_work(await ann.lease()))
        await trio.sleep(3)
        assert "out of memory" in coordinator.state()["reason"]
        await until(lambda: coordinator.state()["accepted"] == 1)
        assert coordinator.state()["reason"].endswith("usable groups verified")


async def test_a_failing_learner_is_tried_again_with_the_same_batch(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_run(tmp_path, versions=1)
    swarm = MemorySwarm()
    learner = FakeLearner(folder, fail_times=3)
    async with coordinating(swarm, folder, learner=learner) as coordinator:
        async with node(swarm, coordinator) as ann:
            await volunteer(ann, coordinator)
    assert len(learner.jobs) == 4
    assert len({msgspec.msgpack.encode(job) for job in learner.jobs}) == 1
