"""The coordinator as nodes meet it, on the in-memory network in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from barnraise.coordinator.journal import Journal
from barnraise.coordinator.ledger_log import export_ledger
from barnraise.coordinator.workers import checkpoint_folder
from barnraise.protocol.envelope import content_id, open_signed, sign
from barnraise.protocol.errors import PeerError, RefusedError, RunFolderError
from barnraise.protocol.hello import say_hello
from barnraise.protocol.identity import Identity
from barnraise.protocol.ledger_file import verify_ledger_file
from barnraise.protocol.manifest import check_manifest, manifest_shards
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import (
    HELLO_PROTOCOL,
    SESSION_PROTOCOL,
    Acknowledged,
    HeadPush,
    HeartbeatReply,
    HeartbeatRequest,
    LeaseReturn,
    Message,
    NoticePush,
    PeerReport,
    Receipt,
    ReceiptPush,
    ReceiptsReply,
    ReceiptsRequest,
    RolloutLease,
    Signed,
)
from barnraise.protocol.network import Stream
from barnraise.protocol.shards import ShardClient
from tests.coordinator_support import (
    Coordinator,
    FakeLearner,
    FakeVerifier,
    ScriptedNode,
    attached,
    coordinating,
    make_run,
    node,
)

Clock = trio.testing.MockClock


@asynccontextmanager
async def stage(
    tmp_path: Path, verifier: FakeVerifier | None = None, **rollout: Any
) -> AsyncIterator[tuple[MemorySwarm, Coordinator, ScriptedNode]]:
    """A coordinator with version 0 published, and one joined node."""
    folder = make_run(tmp_path, **rollout)
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder, verifier) as coordinator:
        async with node(swarm, coordinator) as ann:
            await head_is(coordinator, 0)
            yield swarm, coordinator, ann


async def head_is(coordinator: Coordinator, version: int) -> None:
    with trio.fail_after(600):
        while coordinator.state()["policy_version"] < version:
            await trio.sleep(0.1)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(600):
        while not condition():
            await trio.sleep(0.1)


async def volunteer(scripted: ScriptedNode, coordinator: Coordinator) -> None:
    """Work as a real node would, until the run is complete."""
    while not coordinator.state()["complete"]:
        scripted.version = max(0, coordinator.state()["policy_version"])
        with trio.move_on_after(30):
            lease = await scripted.lease()
            await trio.sleep(1)
            await scripted.submit(scripted.signed_work(lease))


async def ended(stream: Stream) -> bool:
    """Read until the other side closes or resets."""
    try:
        while await stream.read(100):
            pass
    except PeerError:
        pass
    return True


def audited(tmp_path: Path, coordinator: Coordinator, folder: Path) -> Any:
    journal, run = Journal(folder / "state.sqlite"), coordinator.run
    export_ledger(journal, run.signed_spec, 1, run.identity, 9_000_000, tmp_path / "ledger.bin")
    journal.close()
    return verify_ledger_file(tmp_path / "ledger.bin")


# --- the whole way


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


# --- what bad input gets


Spoil = Callable[[ScriptedNode, RolloutLease], Signed]


def _flipped(scripted: ScriptedNode, lease: RolloutLease) -> Signed:
    good = scripted.signed_work(lease)
    return msgspec.structs.replace(good, payload=good.payload[:-1] + bytes([good.payload[-1] ^ 1]))


def _nameless(scripted: ScriptedNode, lease: RolloutLease) -> Signed:
    """Properly signed, but not a submission: its engine has no name."""
    return scripted.signed_work(lease, engine="")


BAD: dict[str, Spoil] = {
    "bad-signature": _flipped,
    "malformed": _nameless,
    "wrong-signer": lambda node, lease: sign(node.work(lease), Identity.from_private_bytes(b"z" * 32)),
    "wrong-run": lambda node, lease: node.signed_work(lease, run_id=b"x" * 32),
    "unknown-lease": lambda node, lease: node.signed_work(lease, lease_id=b"x" * 16),
    "wrong-version": lambda node, lease: node.signed_work(lease, policy_version=1),
}


@pytest.mark.parametrize("code", sorted(BAD))
async def test_a_bad_submission_is_refused_by_name_and_the_lease_stays_good(
    code: str, tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        lease = await ann.lease()
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(BAD[code](ann, lease))
        assert refusal.value.code == code
        assert coordinator.state()["queue"] == 0
        assert not (await ann.submit(ann.signed_work(lease))).duplicate


async def test_another_nodes_lease_is_of_no_use(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        async with node(swarm, coordinator, b"b") as bob:
            lease = await ann.lease()
            with pytest.raises(RefusedError) as refusal:
                await bob.submit(bob.signed_work(lease))
            assert refusal.value.code == "not-your-lease"
            with pytest.raises(RefusedError) as refusal:
                await bob.ask(
                    lambda number: LeaseReturn(id=number, lease_id=lease.lease_id, reason=""), Acknowledged
                )
            assert refusal.value.code == "not-your-lease"


async def test_the_same_content_is_acknowledged_again_and_counted_once(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (_, coordinator, ann):
        lease = await ann.lease()
        work = ann.signed_work(lease)
        answers = []

        async def send() -> None:
            answers.append((await ann.submit(work)).duplicate)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(send)
        await until(lambda: coordinator.state()["accepted"] == 1)
        assert sorted(answers) == [False, True, True, True, True]
        assert (await ann.submit(work)).duplicate
        await trio.sleep(5)
        assert coordinator.state()["accepted"] == 1
        assert len(ann.received(ReceiptPush)) == 1


async def test_a_lease_is_answered_once(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (_, _, ann):
        lease = await ann.lease()
        await ann.submit(ann.signed_work(lease))
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(ann.signed_work(lease, generate_ms=6))
        assert refusal.value.code == "used-lease"


async def test_after_the_timeout_work_is_still_welcome_and_after_the_deadline_it_is_not(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    async with stage(tmp_path) as (swarm, coordinator, ann):
        slow, late = await ann.lease(), None
        await trio.sleep(61)
        assert coordinator.state()["leases_open"] == 0
        async with node(swarm, coordinator, b"b") as bob:
            assert (await bob.lease()).unit_id == slow.unit_id  # reissued
        await ann.submit(ann.signed_work(slow))
        await until(lambda: coordinator.state()["accepted"] == 1)
        late = await ann.lease()
        await trio.sleep(121)
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(ann.signed_work(late))
        assert refusal.value.code == "expired-lease"


async def test_a_returned_lease_is_over(tmp_path: Path, autojump_clock: Clock) -> None:
    async with stage(tmp_path) as (_, _, ann):
        lease = await ann.lease()
        give: Callable[[int], Message] = lambda number: LeaseReturn(  # noqa: E731
            id=number, lease_id=lease.lease_id, reason="out of memory"
        )
        assert not (await ann.ask(give, Acknowledged)).duplicate
        assert (await ann.ask(give, Acknowledged)).duplicate
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(ann.signed_work(lease))
        assert refusal.value.code == "returned-lease"
        assert (await ann.lease()).unit_id == lease.unit_id


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


# --- verdicts


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


# --- who is who


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
            assert [push.code for push in twin.received(NoticePush)] == ["duplicate-key"]
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


# --- restart


async def test_a_restart_keeps_leases_verdicts_and_the_batch_under_way(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    folder = make_run(tmp_path, versions=2)
    swarm = MemorySwarm()
    async with coordinating(swarm, folder, FakeVerifier(), FakeLearner(folder)) as coordinator:
        await head_is(coordinator, 0)
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            for worker in (ann, bob):
                await worker.submit(worker.signed_work(await worker.lease()))
            await until(lambda: coordinator.state()["state"] == "training")
            held = await ann.lease()
            stored = ann.signed_work(held)
            await ann.submit(stored)  # durable, not judged
            open_lease = await bob.lease()
            before = coordinator.state()
    learner = FakeLearner(folder)
    async with coordinating(swarm, folder, learner=learner, seed=1) as coordinator:
        assert coordinator.state()["policy_version"] == 0
        assert coordinator.state()["accepted"] == before["accepted"]
        assert coordinator.state()["queue"] == 1
        async with node(swarm, coordinator, b"a") as ann, node(swarm, coordinator, b"b") as bob:
            assert (await ann.submit(stored)).duplicate
            await until(lambda: coordinator.state()["accepted"] == before["accepted"] + 1)
            assert not (await bob.submit(bob.signed_work(open_lease))).duplicate
            await head_is(coordinator, 1)
            assert learner.jobs[0].version == 1
            assert len(learner.jobs[0].parts) == 2
            await volunteer(ann, coordinator)
        report = audited(tmp_path, coordinator, folder)
    assert report.ok, report.problems


async def test_after_a_restart_the_head_is_served_again(tmp_path: Path, autojump_clock: Clock) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
    async with coordinating(swarm, folder) as coordinator, node(swarm, coordinator) as ann:
        head = (await ann.join()).head
        assert head is not None
        manifest = check_manifest(head, coordinator.run.spec, coordinator.run.run_id)
        client = ShardClient(swarm._hosts[ann.identity.peer_id], coordinator.network.peer_id)
        for digest, size in manifest_shards(manifest):
            assert await client.fetch(digest, size) is not None
        await client.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "removed"])
async def test_a_restart_with_a_damaged_head_says_so_instead_of_standing_still(
    tmp_path: Path, autojump_clock: Clock, damage: str
) -> None:
    folder = make_run(tmp_path)
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await head_is(coordinator, 0)
    path = checkpoint_folder(folder, 0) / "model.safetensors"
    data = path.read_bytes()
    match damage:
        case "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "truncated":
            path.write_bytes(data[:100])
        case "removed":
            (path.parent / "tokenizer.json").unlink()
    with pytest.RaisesGroup(
        pytest.RaisesExc(RunFolderError, match="of the newest version.*any node"),
        flatten_subgroups=True,
        allow_unwrapped=True,
    ):
        async with coordinating(swarm, folder):
            pass


async def test_an_altered_asset_is_never_published(tmp_path: Path, autojump_clock: Clock) -> None:
    folder = make_run(tmp_path)
    (checkpoint_folder(folder, 0) / "tokenizer.json").write_text('{"other": 1}')
    swarm = MemorySwarm()
    async with coordinating(swarm, folder) as coordinator:
        await trio.sleep(10)
        assert coordinator.state()["policy_version"] == -1
        assert "not the file that the run spec names" in coordinator.state()["reason"]


async def test_a_full_disk_is_said_to_the_node_and_its_work_is_taken_later(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = {"pages": 1_000_000}
    commit = Journal.commit

    def limited(self: Journal, writes: Any) -> None:
        self._db.execute(f"PRAGMA max_page_count = {limit['pages']}")
        commit(self, writes)

    monkeypatch.setattr(Journal, "commit", limited)
    async with stage(tmp_path) as (_, coordinator, ann):
        lease = await ann.lease()
        work = ann.signed_work(lease, engine="good")
        limit["pages"] = 1
        big = ann.signed_work(lease)
        rollouts = tuple(
            msgspec.structs.replace(rollout, tokens=b"\1\0\0\0" * 5000)
            for rollout in ann.work(lease).rollouts
        )
        big = ann.signed_work(lease, rollouts=rollouts)
        with pytest.raises(RefusedError) as refusal:
            await ann.submit(big)
        assert refusal.value.code == "storage-full"
        assert str(tmp_path) not in str(refusal.value)
        assert "free some disk space" in coordinator.state()["reason"]
        limit["pages"] = 1_000_000
        assert not (await ann.submit(work)).duplicate
        await until(lambda: coordinator.state()["accepted"] == 1)
        assert "free some disk space" not in coordinator.state()["reason"]
