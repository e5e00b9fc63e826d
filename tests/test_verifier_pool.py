"""Several verifiers: they work side by side, and one's trouble is nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing
from coordinator_support import Coordinator, FakeVerifier, ScriptedNode, coordinating, make_run, node

from barnraise.coordinator.patience import WorkerAwayError
from barnraise.coordinator.submissions import GRACE_MS, TurnedAway
from barnraise.coordinator.verifier_pool import VerifierPool, automatic_verifiers, visible_accelerators
from barnraise.coordinator.workers import Judged, VerifyJob
from barnraise.protocol.errors import ChildError, RefusedError
from barnraise.protocol.memory_network import MemorySwarm
from barnraise.protocol.messages import Signed
from tests.test_server import head_is, until

Clock = trio.testing.MockClock


@dataclass
class SlowOnSome(FakeVerifier):
    """Takes an hour where it meets ``slow``; else as usual."""

    slow: bytes = b"good-slow"

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        if any(self.slow in job.payload for job in jobs):
            await trio.sleep(3600)
        return await super().verify(jobs)


@asynccontextmanager
async def stage(
    tmp_path: Path, verifier: VerifierPool, nodes: int
) -> AsyncIterator[tuple[Coordinator, list[ScriptedNode]]]:
    """A coordinator with version 0 published, and nodes that have joined."""
    folder = make_run(tmp_path, groups_per_version=200, max_groups_per_version=400)
    swarm = MemorySwarm(latency_s=0.01)
    async with coordinating(swarm, folder, verifier) as coordinator, AsyncExitStack() as stack:
        await head_is(coordinator, 0)
        yield (
            coordinator,
            [
                await stack.enter_async_context(node(swarm, coordinator, bytes([97 + number])))
                for number in range(nodes)
            ],
        )


async def test_batches_are_judged_side_by_side(tmp_path: Path, autojump_clock: Clock) -> None:
    members = [FakeVerifier(delay_s=60.0) for _ in range(3)]
    async with stage(tmp_path, VerifierPool(members), nodes=3) as (coordinator, nodes):
        assert coordinator.state()["verifiers"] == 3
        for each in nodes:
            await each.submit(each.signed_work(await each.lease()))
        with trio.fail_after(70):
            await until(lambda: coordinator.state()["accepted"] == 3)
    assert [member.batches for member in members] == [[1], [1], [1]]


async def test_a_submission_that_takes_an_hour_delays_nobody_elses_verdict(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    pool = VerifierPool([SlowOnSome(), SlowOnSome()])
    async with stage(tmp_path, pool, nodes=2) as (coordinator, (ann, bob)):
        await ann.submit(ann.signed_work(await ann.lease(), engine="good-slow"))
        for count in range(1, 4):
            await bob.submit(bob.signed_work(await bob.lease()))
            with trio.fail_after(10):
                await until(lambda count=count: coordinator.state()["accepted"] == count)  # type: ignore[misc]
        state = coordinator.state()
        assert (state["queue"], state["verifying"], state["verifiers_busy"]) == (1, 1, 1)


async def test_a_verifier_that_always_dies_costs_nobody_a_verdict(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    broken = FakeVerifier(fail_times=10**9)
    async with stage(tmp_path, VerifierPool([broken, FakeVerifier()]), nodes=4) as (coordinator, nodes):
        for _ in range(3):
            for each in nodes:
                await each.submit(each.signed_work(await each.lease()))
            await until(lambda: coordinator.state()["queue"] == 0)
        assert coordinator.state()["accepted"] == 12
        assert coordinator.state()["rejected"] == 0
    assert broken.batches, "it was tried"


async def test_those_who_were_in_a_bad_ones_batch_do_not_wait_behind_a_long_queue(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    verifier = FakeVerifier(delay_s=5.0, poison=b"good-poison")
    async with stage(tmp_path, VerifierPool([verifier]), nodes=12) as (coordinator, nodes):
        first = nodes[0]
        await first.submit(first.signed_work(await first.lease()))  # keeps the verifier busy
        bad, *others = nodes[1:6]
        leases = [await each.lease() for each in nodes[1:6]]
        await bad.submit(bad.signed_work(leases[0], engine="good-poison"))
        for each, lease in zip(others, leases[1:], strict=True):
            await each.submit(each.signed_work(lease))

        async def keep_busy(each: ScriptedNode) -> None:
            while True:
                await each.submit(each.signed_work(await each.lease()))
                await trio.sleep(5)

        async with trio.open_nursery() as nursery:
            for each in nodes[6:]:
                nursery.start_soon(keep_busy, each)
            victims = {each.identity.public_key.hex() for each in others}
            with trio.fail_after(120):
                await until(
                    lambda: all(
                        row["accepted"] == 1 for row in coordinator.state()["nodes"] if row["node"] in victims
                    )
                )
            nursery.cancel_scope.cancel()


async def test_the_backlog_can_be_seen(tmp_path: Path, autojump_clock: Clock) -> None:
    pool = VerifierPool([FakeVerifier(delay_s=3600.0)])
    async with stage(tmp_path, pool, nodes=3) as (coordinator, nodes):
        assert coordinator.state()["queue_oldest_s"] == 0
        for each in nodes:
            await each.submit(each.signed_work(await each.lease()))
            await trio.sleep(10)
        state = coordinator.state()
        assert state["queue"] == 3
        assert 30 <= state["queue_oldest_s"] <= 32
        assert state["queue_tokens"] == round(state["queue_bytes"] / (8 + 258 / 32))
        assert (state["verifiers"], state["verifiers_busy"]) == (1, 1)


async def test_a_pool_closes_all_of_its_members(autojump_clock: Clock) -> None:
    closed: list[int] = []

    class Member(FakeVerifier):
        async def close(self) -> None:
            await trio.sleep(1)
            closed.append(id(self))

    members = [Member(), Member()]
    started = trio.current_time()
    await VerifierPool(members).close()
    assert sorted(closed) == sorted(map(id, members))
    assert trio.current_time() - started < 1.5


async def test_one_that_failed_is_the_last_choice(autojump_clock: Clock) -> None:
    sound, broken = FakeVerifier(), FakeVerifier(fail_times=1)
    pool = VerifierPool([broken, sound])
    with pytest.raises(ChildError):
        await pool.verify(())
    for _ in range(3):
        await pool.verify(())
    assert (len(broken.batches), len(sound.batches)) == (1, 3)
    assert pool.busy == 0


@pytest.mark.parametrize(
    ("threads", "cores", "accelerators", "wanted"),
    [(1, 2, 0, 1), (1, 16, 0, 15), (4, 16, 0, 3), (64, 16, 0, 1), (1, 1, 0, 1), (1, 16, 8, 8)],
)
def test_the_automatic_number_follows_the_machine(
    threads: int, cores: int, accelerators: int, wanted: int
) -> None:
    assert automatic_verifiers(threads, cores, accelerators) == wanted


def test_accelerators_are_found_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_accelerators(tmp_path) == ("0", "2", "10")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert visible_accelerators(tmp_path) == ("3", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_accelerators(tmp_path) == ()


async def test_who_is_turned_away_for_lack_of_room_loses_nothing_even_beyond_the_deadline(
    tmp_path: Path, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("barnraise.coordinator.submissions.MAX_WAITING", 1)
    pool = VerifierPool([FakeVerifier(delay_s=250.0)])
    async with stage(tmp_path, pool, nodes=2) as (coordinator, (ann, bob)):
        for _ in range(2):  # ann fills the queue twice over; a lease is honoured for 120 s
            lease = await bob.lease()
            await ann.submit(ann.signed_work(await ann.lease()))
            work = bob.signed_work(lease)
            refusals: list[RefusedError] = []
            while not await _taken(bob, work, refusals):
                await trio.sleep(20)
            assert {refused.code for refused in refusals} == {"busy"}
            assert "its lease is kept" in str(refusals[0])
            assert len(refusals) * 20 > 120
            await until(lambda: coordinator.state()["queue"] == 0)
        rows = {row["node"]: row for row in coordinator.state()["nodes"]}
        assert rows[bob.identity.public_key.hex()]["accepted"] == 2
        assert rows[bob.identity.public_key.hex()]["strikes"] == 0


async def _taken(node: ScriptedNode, work: Signed, refusals: list[RefusedError]) -> bool:
    try:
        await node.submit(work)
    except RefusedError as refused:
        refusals.append(refused)
        return False
    return True


def test_a_lease_that_was_turned_away_is_honoured_for_a_while_and_then_forgotten() -> None:
    turned = TurnedAway()
    assert not turned.waits(b"a", 0)
    turned.note(b"a", 1_000)
    assert turned.waits(b"a", 1_000 + GRACE_MS - 1)
    assert not turned.waits(b"a", 1_000 + GRACE_MS)
    turned.forget_all_but({b"b"})
    assert not turned.waits(b"a", 1_001)


@dataclass
class Away(FakeVerifier):
    """On another machine, which cannot be reached until ``back_at``."""

    back_at: float = 0.0
    asked: int = 0

    async def verify(self, jobs: tuple[VerifyJob, ...]) -> tuple[Judged, ...]:
        self.asked += 1
        if trio.current_time() < self.back_at:
            raise WorkerAwayError("gpu-box does not answer")
        return await super().verify(jobs)


async def test_a_machine_that_is_away_for_an_hour_costs_nobody_a_verdict(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    gone = Away(back_at=3600.0)
    async with stage(tmp_path, VerifierPool([FakeVerifier(delay_s=30.0), gone]), nodes=4) as (
        coordinator,
        nodes,
    ):
        for _ in range(4):
            for each in nodes:
                await each.submit(each.signed_work(await each.lease()))
        with trio.fail_after(600):
            await until(lambda: coordinator.state()["accepted"] == 16)
    assert 1 < gone.asked < 20  # tried again, and not at every batch


async def test_where_all_are_away_work_waits_and_is_judged_when_one_is_back(
    tmp_path: Path, autojump_clock: Clock
) -> None:
    gone = Away(back_at=500.0)
    async with stage(tmp_path, VerifierPool([gone]), nodes=3) as (coordinator, nodes):
        for each in nodes:
            await each.submit(each.signed_work(await each.lease()))
        await until(lambda: coordinator.state()["accepted"] == 3)
    assert gone.asked < 200
